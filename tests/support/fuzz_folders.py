"""Damage of run, sweep, report and data folders, and whether any command then says something wrong.

Each mutation changes one or two files of a copy. Every command that reads them must refuse them
with a message, print the same as for the sound folders, or report the difference. As a program it
tries many: `python tests/support/fuzz_folders.py --count 500 --seed 1`. With --values it puts odd
values into JSON files and repairs their checksums: values that are not refused may then change the
output.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from battery import CASES, TINY
from mutations import make_folder

from metaseq_lm.cli import main
from metaseq_lm.core.files import checksum

SECONDS = 60  # seconds that a command may take; in a fork most take less than one
MLM = [*CASES["masked_lm"][0], *TINY, "engine.tensorboard=false", "trainer.log_interval=1"]
PAIRS = ["task=sentence_prediction", "criterion=sentence_prediction", "task.labelled=pairs"]
PAIRS += ["init_from=runs/mlm", "model=inherit", "task.batch_size=4", "engine.tensorboard=false"]
PAIRS += ["task.tokens_per_sample=34", "trainer.log_interval=1", "trainer.final_splits=[valid]"]
EVALUATE = "evaluate runs/mlm --split valid"
COMMANDS = {
    "train": "train --save-dir runs/open trainer.max_update=3",
    "train again": "train data --save-dir runs/mlm {mlm} trainer.max_update=2",
    "start": "train data --save-dir runs/new {pairs} seed=1 trainer.max_update=1",
    "evaluate": EVALUATE,
    "evaluate pairs": "evaluate runs/pairs1 --split valid",
    "score": "score runs/mlm --input text",
    "export": "export runs/mlm --out exported",
    "report": "report runs --format csv --metric valid.loss",
    "report sweep": "report sweep --metric valid.loss",
    "report archive": "report archive.jsonl --metric valid.loss",
    "archive": "report runs/pairs1 runs/pairs2 --archive archive.jsonl --metric valid.loss",
    "status": "sweep status sweep",
    "resubmit": "sweep resubmit --failed sweep",
    "cancel": "sweep cancel sweep",
    "doctor": "doctor data",
    "verify": "doctor data --verify",
}
# The commands that read the files in a folder of the workplace.
READERS = {
    "data": (
        *("evaluate", "evaluate pairs", "score", "doctor", "verify"),
        *("train", "train again", "start"),
    ),
    "runs/open": ("report", "train"),
    "runs/mlm": ("report", "evaluate", "score", "train again", "start", "export"),
    "runs/pairs1": ("evaluate pairs", "report", "archive"),
    "runs/pairs2": ("report", "archive"),
    "sweep": ("status", "report sweep", "resubmit", "cancel"),
    "archive.jsonl": ("report archive", "archive"),
}
WRITING = {"train", "train again", "start", "export", "archive", "resubmit", "cancel"}
# Stand-ins for Slurm, which record their calls.
SLURM = {
    "sbatch": "echo Submitted batch job 77",
    "squeue": "",
    "sacct": "",
    "scancel": "",
    "scontrol": "echo MaxArraySize = 1001",
    "srun": "",
}
CANARY = "canary"
CHANGING = re.compile(
    r"[\d.]+( seconds| s\b|s/it| MB| GB| MiB| GiB)|\d{4}-\d\d-\d\d[T ][\d:+]+"
    r"|(?<=seconds\": )[\d.]+"
    r"|submission_file_\w+|pid \d+|[\d.,]+ (sentences|tokens|updates)/s"
)


# ------------------------------------------------------------------------ the workplace


def make_place(place: Path) -> None:
    """Make data, runs, a sweep of Slurm jobs and an archive below `place`, and go there."""
    place.mkdir(parents=True)
    data = make_folder(place)
    for file in place.glob("*.t*"):
        file.unlink()
    os.chdir(place)
    assert data == place / "data"
    Path("text").write_text("abc def\nfgh a b\n")
    train = ["train", "data", "--save-dir"]
    assert main([*train, "runs/mlm", *MLM, "trainer.max_update=2"]) == 0
    assert main([*train, "runs/open", *MLM, "seed=3", "trainer.max_update=2"]) == 0
    for seed in (1, 2):
        words = [*PAIRS, f"seed={seed}", "trainer.max_update=2"]
        assert main([*train, f"runs/pairs{seed}", *words]) == 0
    programs = place / "bin"
    programs.mkdir()
    for name, line in SLURM.items():
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{place}/calls\n{line}\n')
        (programs / name).chmod(0o755)
    os.environ["PATH"] = f"{programs}:{os.environ['PATH']}"
    sweep = ["sweep", "data", "--out", "sweep", "--seeds", "1,2,3", "--executor", "slurm"]
    assert main([*sweep, *MLM, "trainer.max_update=2"]) == 0
    plan = json.loads(Path("sweep/sweep.json").read_text())
    for run in plan["runs"][:2]:
        assert main(["train", *run["stages"][0]["arguments"]]) == 0
    archive = ["report", "runs/pairs1", "runs/pairs2", "--archive", "archive.jsonl"]
    assert main([*archive, "--metric", "valid.loss"]) == 0
    Path("calls").unlink()


@dataclass
class Outcome:
    """Outcome of a command: exit code (a text if none), output, calls of Slurm."""

    code: int | str
    out: str
    err: str
    calls: str


def perform(command: str, place: Path) -> Outcome:
    """Run a command in a fork of this process, in the workplace."""
    words = command.replace("{mlm}", " ".join(MLM)).replace("{pairs}", " ".join(PAIRS)).split()
    report, out, err = (place.parent / name for name in ("code", "out", "err"))
    for file in (report, place / "calls"):
        file.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        for number, file in ((1, out), (2, err)):
            stream = open(file, "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
            os.dup2(stream.fileno(), number)
            setattr(sys, "stdout" if number == 1 else "stderr", stream)
        try:
            code: int | str = main(words)
        except BaseException as error:  # any exception that leaves a command is a fault
            code = f"raised {error!r}"[:300]
        sys.stdout.flush()
        sys.stderr.flush()
        report.write_text(json.dumps(code))
        os._exit(0)
    end, status = time.monotonic() + SECONDS, None
    while status is None and time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if not done:
            status = None
            time.sleep(0.01)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return Outcome("hung", "", "", "")
    if not report.exists():
        return Outcome(f"died with {os.waitstatus_to_exitcode(status)}", "", "", "")
    calls = place / "calls"
    texts = [p.read_text(errors="replace") if p.exists() else "" for p in (out, err, calls)]
    return Outcome(json.loads(report.read_text()), *(CHANGING.sub("#", text) for text in texts))


# ------------------------------------------------------------------------ mutations

Damage = Callable[[Path, random.Random], str]
HOSTILE = ["=HYPERLINK(0)", "\x1b[31mred", "@SUM(1)", "--user=root", "$(touch canary)", "../../up"]
NUMBER = re.compile(rb"(?<![\w.])-?\d+(\.\d+)?(e-?\d+)?(?![\w.])")
TEXT = re.compile(rb'(?<=: )"[^"\\]*"|(?<=: )[a-z_]+$', re.MULTILINE)


def rewrite(path: Path, content: bytes) -> None:
    """Replace a file by a new file with this content."""
    path.unlink()
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random) -> str:
    content = path.read_bytes()
    at = rng.randrange(len(content))
    rewrite(path, content[:at])
    return f"at {at}"


def flip(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    places = [rng.randrange(len(content)) for _ in range(rng.choice([1, 1, 1, 20]))]
    for at in places:
        content[at] ^= 1 << rng.randrange(8)
    rewrite(path, bytes(content))
    return f"at {places}"


def delete(path: Path, rng: random.Random) -> str:
    path.unlink()
    return ""


def swap(path: Path, rng: random.Random) -> str:
    """Exchange it with a file of the same name, else with any file in its folder."""
    root = Path.cwd()
    others = [p for p in root.rglob(path.name) if p.is_file() and not p.samefile(path)]
    others = others or [p for p in path.parent.iterdir() if p.is_file() and p != path]
    others = [p for p in sorted(others) if p.read_bytes() != path.read_bytes()]
    if not others:
        return delete(path, rng)
    other = rng.choice(others)
    content = path.read_bytes()
    rewrite(path, other.read_bytes())
    rewrite(other, content)
    return f"with {other.relative_to(root)}"


def repeat(path: Path, rng: random.Random) -> str:
    """Repeat some lines in place or at the end."""
    lines = path.read_bytes().splitlines(keepends=True)
    first = rng.randrange(len(lines))
    last = min(len(lines), first + rng.randint(1, 3))
    at = rng.choice([last, len(lines)])
    rewrite(path, b"".join([*lines[:at], *lines[first:last], *lines[at:]]))
    return f"lines {first}-{last} at {at}"


def replace_match(path: Path, rng: random.Random, pattern: re.Pattern, values: list) -> str:
    content = path.read_bytes()
    matches = list(pattern.finditer(content))
    if not matches:
        return flip(path, rng)
    match, value = rng.choice(matches), rng.choice(values)
    if callable(value):
        value = value(match.group())
    rewrite(path, content[: match.start()] + value + content[match.end() :])
    return f"{match.group()!r} at {match.start()} became {value[:40]!r}"


def number(path: Path, rng: random.Random) -> str:
    """Change a number in a text, as an edit by hand might."""
    return replace_match(path, rng, NUMBER, [lambda old: old + b"1", b"7", b"-1", b"0.25"])


def odd_number(path: Path, rng: random.Random) -> str:
    odd = [b"NaN", b"Infinity", b"1e999", b"9" * 400, b"null", b"true", b"[]", b'"x"', b"1e18"]
    return replace_match(path, rng, NUMBER, odd)


def hostile_text(path: Path, rng: random.Random) -> str:
    return replace_match(path, rng, TEXT, [json.dumps(text).encode() for text in HOSTILE])


def special(path: Path, rng: random.Random) -> str:
    """Replace it by a pipe, a link, a device or a folder."""
    kinds: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(path),
        "link to /dev/zero": lambda: path.symlink_to("/dev/zero"),
        "link to itself": lambda: path.symlink_to(path.name),
        "link to nothing": lambda: path.symlink_to("nowhere"),
        "link to /": lambda: path.symlink_to("/"),
        "link out": lambda: path.symlink_to("/etc/passwd"),
        "folder": path.mkdir,
    }
    path.unlink()
    kind = rng.choice(list(kinds))
    kinds[kind]()
    return kind


def control(path: Path, rng: random.Random) -> str:
    """Insert control characters or bytes that are not UTF-8."""
    content = path.read_bytes()
    at = rng.randrange(len(content) + 1)
    text = rng.choice([b"\0", b"\x1b[2J", b"\r", b"\xff\xfe", b"\xe2\x80\xae", b"\n", b"\n\n"])
    rewrite(path, content[:at] + text + content[at:])
    return f"{text!r} at {at}"


def encode(path: Path, rng: random.Random) -> str:
    """Write a text in another encoding, or with a byte-order mark."""
    encoding = rng.choice(["utf-16", "utf-8-sig", "utf-32", "cp037"])
    rewrite(path, path.read_bytes().decode("latin-1").encode(encoding))
    return encoding


def empty(path: Path, rng: random.Random) -> str:
    rewrite(path, b"")
    return ""


def unreadable(path: Path, rng: random.Random) -> str:
    """Remove all permissions; root can still read it."""
    path.chmod(0)
    return ""


def nested(path: Path, rng: random.Random) -> str:
    rewrite(path, b"[" * 100_000)
    return ""


VALUES: list[object] = [None, True, -1, 0, 0.5, 10**400, 1e308, "NaN", "Infinity", "x", "", [], {}]
VALUES += [
    [[1]],
    [0.5] * 1000,
    {"x": {"y": [1]}},
    "../../../x",
    "\x1b[2J\0",
    "yesterday",
    "9" * 400,
]


def value(path: Path, rng: random.Random) -> str:
    """Put another value into a JSON file or line, and repair the checksums."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        is_lines = True
    except ValueError:
        rows, is_lines = [json.loads(path.read_text())], False
    at = rng.randrange(len(rows))
    node, places = rows[at], []
    while isinstance(node, (dict, list)) and node and (not places or rng.random() < 0.7):
        keys = sorted(set(node) - {"checksum"}) if isinstance(node, dict) else [*range(len(node))]
        if not keys:
            break
        places.append((node, rng.choice(keys)))
        node = node[places[-1][1]]
    if not places:
        return "nothing"
    (parent, key), new = places[-1], rng.choice(VALUES)
    parent[key] = new
    seal(rows)
    texts = [json.dumps(row, indent=None if is_lines else 2) for row in rows]
    rewrite(path, ("\n".join(texts) + "\n").encode())
    return f"line {at + 1}: {'.'.join(str(k) for _, k in places)} became {str(new)[:40]!r}"


def seal(rows: list[Any]) -> None:
    """Renew the checksums of a file's rows, and of all rows in the head of an archive."""
    for number, row in reversed([*enumerate(rows)]):
        if not isinstance(row, dict):
            continue
        if number == 0 and isinstance(row.get("rows"), str):
            row["rows"] = checksum("".join(json.dumps(r) + "\n" for r in rows[1:]).encode())
        if "checksum" in row:
            rest = {k: v for k, v in row.items() if k != "checksum"}
            row["checksum"] = checksum(json.dumps(rest).encode())


ANY: list[Damage] = [truncate, truncate, flip, flip, flip, delete, swap, swap, special, special]
ANY += [control, empty, unreadable]
TEXTS: list[Damage] = [*ANY, repeat, repeat, number, number, number, number, odd_number]
TEXTS += [odd_number, hostile_text, encode, nested]
ENDINGS = (".json", ".jsonl", ".yaml", ".txt", "")
# Files that none of these commands read.
UNREAD = re.compile(r"bin/|code/|\.lock|tb/|jobs/|checkpoints/update_0+1/")


@dataclass
class Counts:
    """Counts of outcomes, and faults."""

    mutations: int = 0
    outcomes: Counter = field(default_factory=Counter)
    troubles: list[str] = field(default_factory=list)


class Fuzz:
    """The sound workplace, the commands' output on it, and copies to damage."""

    def __init__(self, place: Path, values: bool = False) -> None:
        self.place, self.sound, self.values = place / "work", place / "sound", values
        make_place(self.place)
        shutil.copytree(self.place, self.sound, symlinks=True)
        self.expected: dict[str, Outcome] = {}
        for name, command in COMMANDS.items():
            self.restore()
            self.expected[name] = perform(command, self.place)
            assert self.expected[name].code in (0, 1), (name, self.expected[name])
            self.restore()
            again = perform(command, self.place)
            assert again == self.expected[name], (name, again, self.expected[name])

    def restore(self) -> None:
        """Restore the sound files."""
        os.chdir(self.place.parent)
        shutil.rmtree(self.place)
        shutil.copytree(self.sound, self.place, symlinks=True)
        os.chdir(self.place)

    def files(self) -> dict[str, list[Path]]:
        """Return the files that may be damaged, by folder of READERS."""
        listed = {}
        for name in READERS:
            top = self.place / name
            paths = [top] if top.is_file() else sorted(top.rglob("*"))
            listed[name] = [
                p
                for p in paths
                if p.is_file()
                and not p.is_symlink()
                and p.stat().st_size
                and not UNREAD.search(str(p.relative_to(self.place)))
                and (not self.values or p.suffix in (".json", ".jsonl"))
            ]
        return listed

    def mutate(self, rng: random.Random) -> tuple[str, list[str], str]:
        """Damage a file; return the folder of READERS, the changed files, and a description."""
        folder, paths = rng.choice([item for item in self.files().items() if item[1]])
        path = rng.choice(paths)
        damage = rng.choice(TEXTS if path.suffix in ENDINGS else ANY)
        damage = value if self.values else damage
        name = str(path.relative_to(self.place))
        done = damage(path, rng)
        damaged = [name, *([done.removeprefix("with ")] if damage is swap else [])]
        return folder, [file for file in damaged if file], f"{damage.__name__} {name} {done}"

    def judge(self, name: str, seen: Outcome) -> tuple[str, str]:
        """Return the kind of an outcome, and its fault or ""."""
        sound = self.expected[name]
        if not isinstance(seen.code, int):
            return "fault", str(seen.code)
        if "Traceback" in seen.err:
            return "fault", seen.err[-2000:]
        if (self.place / CANARY).exists() or set(verbs(seen)) - set(verbs(sound)):
            return "fault", f"executed: {seen.calls}"
        for text in (seen.out, seen.err):
            if odd := [c for c in text if not c.isprintable() and c not in "\n\t"]:
                return "fault", f"control characters: {odd[:5]}"
        # The message of a failed command or check.
        added = [line for line in lines(seen) if line not in lines(sound)]
        if seen.code != sound.code:
            if seen.code not in (1, 2, 3):
                return "fault", f"exit code {seen.code} instead of {sound.code}: {added[-3:]}"
            return ("refused", "") if added else ("fault", f"exit code {seen.code}, no message")
        if seen == sound:
            return "same", ""
        if seen.out == sound.out and seen.calls == sound.calls:
            return "same, with a note", ""
        return "different", "\n".join(added)


def verbs(outcome: Outcome) -> list[str]:
    """Return the names of the called programs of Slurm."""
    return [line.split()[0] for line in outcome.calls.splitlines() if line.strip()]


def lines(outcome: Outcome) -> list[str]:
    return f"{outcome.out}\n{outcome.err}".splitlines()


SAID = re.compile(
    r"changed after|were written by|left out|Left out|not in the table|is damaged|is incomplete|"
    r"not found here|no lines|no log\.jsonl|no results\.json|not readable|cannot be used|"
    r"not finished|without config\.yaml|is not searched|; changed "
)
ROW = re.compile(r"\S {2,}\S|(,[^ ]*){3}")  # a row of a table, as text or csv


def is_said(damaged: Sequence[str], added: Sequence[str]) -> bool:
    """Return whether a new line outside of tables reports the damage of one of the files.

    It must name the file or its folder; a row of `sweep status` must belong to the run and name the
    file.
    """
    for name in damaged:
        path = Path(name)
        places = [str(place) for place in (path, *path.parents)[:-1] if place.name != "runs"]
        names = re.compile(rf"(?<![\w=])({'|'.join(map(re.escape, places))})(?![\w.=-])")
        state = re.compile(rf"{re.escape(path.parent.name)} {{2}}.* {re.escape(path.name)}\b")
        for line in added:
            is_note = names.search(line) and not ROW.search(line)
            if SAID.search(line) and (is_note or state.match(line)):
                return True
    return False


def fuzz(place: Path, count: int, seed: int, verbose: bool = False, values: bool = False) -> Counts:
    """Try `count` mutations in folders made below `place`."""
    counts, start = Counts(), Path.cwd()
    try:
        tried = Fuzz(place, values)
        for at in range(count):
            rng = random.Random(f"{seed} {at}")
            tried.restore()
            folder, damaged, damage = tried.mutate(rng)
            counts.mutations += 1
            for number, name in enumerate(READERS[folder]):
                if number and READERS[folder][number - 1] in WRITING:
                    tried.restore()
                    tried.mutate(random.Random(f"{seed} {at}"))
                kind, detail = tried.judge(name, perform(COMMANDS[name], tried.place))
                if kind == "different":
                    is_told = values or is_said(damaged, detail.splitlines())
                    kind = ("changed" if values else "said") if is_told else "silent"
                counts.outcomes[kind] += 1
                if kind in ("fault", "silent"):
                    counts.troubles.append(f"{at} [{damage}] {name}: {kind}: {detail}")
                if verbose:
                    print(f"{at} [{damage}] {name}: {kind}: {detail[:600]}", flush=True)
    finally:
        os.chdir(start)
    return counts


def summary(counts: Counts) -> str:
    """Return the last line of output."""
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.outcomes.items()))
    total = sum(counts.outcomes.values())
    return (
        f"{counts.mutations} mutations, {total} commands: {kinds}; {len(counts.troubles)} troubles"
    )


def program() -> int:
    """Parse the command line, try, print the troubles and the summary."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--values", action="store_true", help="odd values with sound checksums")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        counts = fuzz(Path(folder) / "fuzz", args.count, args.seed, args.verbose, args.values)
    print(*counts.troubles, summary(counts), sep="\n")
    return int(bool(counts.troubles))


if __name__ == "__main__":
    sys.exit(program())
