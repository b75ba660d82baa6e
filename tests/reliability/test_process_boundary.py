"""Processes listen only to those of their run, and commands write through no link that is there."""

import contextlib
import io
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agreement
import pytest
import yaml
from league_plans import SMALL, in_process, plan_with, write_plan
from listeners import listeners_of
from sweeping import TINY, record_outcome, train_in_process

from metaseq_lm.cli import main
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.league.runner import Runner
from metaseq_lm.sweeps.definition import normalise
from metaseq_lm.sweeps.expansion import expand
from metaseq_lm.sweeps.folder import SweepFolder
from metaseq_lm.sweeps.launching import take_code
from metaseq_lm.training.loggers import LoggedRun, _TensorBoard

PROGRAM = ["-m", "metaseq_lm"]
RUN = [*TINY, "criterion=masked_lm", "trainer.max_update=1"]
LOGGED = [*RUN, "engine.tensorboard=true"]
SEARCH = ["sweep", "data", "--out", "new", "--search", "optimizer.lr=log 1e-3..1e-1", "--quiet"]
SEARCH += ["--search-prune", "none"]
SEARCH += ["--search-flops", f"{1.2 * SMALL:.0f}", *RUN, "trainer.max_update=0"]
SEARCH += [f"trainer.max_flops={SMALL:.0f}"]
CORPUS = "preprocess --overwrite --quiet --trainpref text --validpref text --destdir new".split()
LEAGUE = "league plan.yaml --out new".split()
PAIR = {"sentence_good": "a b", "sentence_bad": "b a"}
NBEST = {"u": {"ref": "a b", "hyp_1": {"score": -1.0, "text": "a b"}}}
FILES = {
    "text": "a b c\nb c d\nc d e\nd e f\n" * 4,
    "rows.tsv": "text\tlabel\na b\tx\nb c\ty\n",
    "pairs.jsonl": json.dumps(PAIR) + "\n",
    "nbest.json": json.dumps(NBEST),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, data, two runs, an exported model and the plan of a league."""
    place = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name, text in FILES.items():
            Path(name).write_text(text)
        for data in ("data", "data2"):
            assert main([*CORPUS, "--tokenizer", "word", "--destdir", data]) == 0
        for seed in ("1", "2"):
            assert main(["train", "data", "--save-dir", f"run{seed}", f"seed={seed}", *LOGGED]) == 0
        assert main(["export", "run1", "--out", "exported"]) == 0
        less: dict[str, Any] = {"controls": {"untrained": False}, "seeds": [1], "budgets": [SMALL]}
        less |= {"objectives": {"masked": {"options": ["task.mask_prob=0.15"]}}}
        less |= {"tuning__grid": {}}
        write_plan(place / "plan.yaml", Path("data"), **less)
    return place


@pytest.fixture
def place(begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, in which the test works."""
    shutil.copytree(begun, tmp_path / "place", symlinks=True)
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


# ---------------------------------------------------------------- sockets

LISTENER = """import socket, time
every, local = socket.create_server(("", 0)), socket.socket(socket.AF_UNIX)
local.bind("at"); local.listen(); datagrams = socket.socket(type=socket.SOCK_DGRAM)
datagrams.bind(("127.0.0.2", 0)); six = socket.create_server(("::1", 0), family=socket.AF_INET6)
time.sleep(0.3)"""


def test_listeners_of_a_process_are_seen(place):
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '''{LISTENER}'''], "
    seen = listeners_of(["-c", code + "start_new_session=True)"], place).seen
    assert seen == {"0.0.0.0", "::1", "127.0.0.2", "unix:at"}


STARTING: dict[str, tuple[list[str], int, set[str]]] = {  # with processes at least, and addresses
    "train": (["train", "data", "--nproc", "2", "--save-dir", "new", *RUN], 3, {"127.0.0.1"}),
    "sweep": (["sweep", "data", "--out", "new", "--seeds", "1,2", *RUN], 4, set()),
    "preprocess": ([*CORPUS, "--tokenizer", "word", "--workers", "2"], 3, set()),
    "league": (LEAGUE, 4, set()),
}


@pytest.mark.parametrize("name", STARTING)
def test_processes_of_a_command_listen_on_the_loopback_only(name, place):
    command, count, addresses = STARTING[name]
    found = listeners_of([*PROGRAM, *command], place)
    assert len(found.processes) >= count
    assert found.seen == addresses


SEARCHED = ["search", "search/account.lock", "search/all", "search/all/0000", "lr=*"]


def test_search_listens_on_nothing_and_follows_no_link(place, tmp_path):
    found = listeners_of([*PROGRAM, *SEARCH], place)
    assert len(found.processes) >= 4 and not found.seen
    shutil.copytree("new", tmp_path / "new", symlinks=True)
    for name in SEARCHED:
        shutil.rmtree("new")
        shutil.copytree(tmp_path / "new", "new", symlinks=True)
        link = next(Path("new").glob(name), Path("new", name))
        plant({link}, "folder", tmp_path / "victims")
        kept = contents(tmp_path / "victims")
        code, (message,) = run(SEARCH)
        assert code in (1, 2) and str(link) in message
        assert contents(tmp_path / "victims") == kept


# ---------------------------------------------------------------- links

WRITERS = {
    "corpus": [*CORPUS, "--tokenizer", "char"],
    "labelled": "preprocess --labelled set --trainpref rows.tsv --validpref rows.tsv --overwrite"
    " --quiet --destdir data",
    "words": [*CORPUS, "--words"],
    "world": "preprocess --world quad --world-documents 60 --world-held-out 20 --world-labelled 9"
    " --world-pairs 9 --overwrite --quiet --destdir new",
    "merge": "merge data data2 --destdir new --quiet --overwrite",
    "train": ["train", "data", "--save-dir", "new", *LOGGED],
    "resume": ["train", "data", "--save-dir", "run1", *LOGGED, "trainer.max_update=2"],
    "branch": "train --branch-from run1 --save-dir new trainer.max_update=2",
    "sweep": ["sweep", "data", "--out", "new", *RUN],
    "league": LEAGUE,
    "report": "report run1 run2 --metric valid.loss --out new --curve valid.loss",
    "archive": "report run1 run2 --metric valid.loss --archive new/a.jsonl.gz",
    "evaluate": "evaluate run1 --split valid --out new",
    "score": "score run1 --input text --out new/scores",
    "suite": "score run1 --suite pairs --data pairs.jsonl",
    "rerank": "rerank --dev nbest.json --test nbest.json run1 --out new",
    "export": "export run1 --out new",
    "import": "import exported --out new",
    "examples": "examples new",
}
# Left alone: what other writers write, too, and what is below a folder that is copied whole.
ALONE = {
    "world": (".bin", ".idx", "new/t", "new/s"),
    "sweep": ("seed=1/", "/metaseq_lm"),
    "league": ("masked/.", "sweep.json", "seed=1/.", "seed=1/c", "/log", "results", "code/"),
    "examples": ("docs/", "examples/", "scripts/", "user_dir/"),
}
NEVER_AGAIN = {"tb", "0001"}  # a second run has another folder, or other names in it
MORE = {"train": ("new/wandb",), "labelled": ("data/set/.preprocess",)}  # folders
NEW_ONLY = ("export", "import")  # refuse a folder that is there
PRECIOUS = "precious"


def run(words: list[str] | str) -> tuple[int, list[str]]:
    """Run a command; return its code and its messages."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(words.split() if isinstance(words, str) else words)
    lines = said.getvalue().splitlines()
    return code, [line for line in lines if line.startswith("metaseq-lm: ")]


def contents(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return mode, time, and bytes or names, of everything below a folder and of itself."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        inside = sorted(os.listdir(path)) if path.is_dir() else path.read_bytes()
        found[str(path)] = (status.st_mode, status.st_mtime_ns, inside)
    return found


def entries() -> dict[Path, tuple[int, int]]:
    """Return inode and time of everything below the working folder; links are not followed."""
    found = {}
    for at, folders, files in os.walk("."):
        for path in (Path(at, name) for name in (*folders, *files)):
            found[path] = (path.lstat().st_ino, path.lstat().st_mtime_ns)
    return found


def plant(links: set[Path], kind: str, victims: Path) -> None:
    """Replace paths of the working folder by links to a file, a folder, or nothing at all."""
    shutil.rmtree(victims, ignore_errors=True)
    victims.mkdir()
    for number, link in enumerate(sorted(links)):
        victim = victims / str(number)
        if kind == "file":
            victim.write_text(PRECIOUS)
            victim.chmod(0o640)
        if kind == "folder":
            cache = victim / "metaseq_lm" / "__pycache__"  # which snapshots of code are rid of
            cache.mkdir(parents=True)
            (cache / PRECIOUS).write_text(PRECIOUS)
        if link.is_symlink() or link.is_file():
            link.unlink()
        shutil.rmtree(link, ignore_errors=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(victim)


def topmost(paths: set[Path]) -> set[Path]:
    """Return the paths that are not below another one."""
    return {path for path in paths if not paths & set(path.parents)}


def temporary(path: Path) -> set[Path]:
    """Return names that a program which does not draw them may use while it writes a file."""
    name, pid = path.name, os.getpid()
    names = (f"{name}.tmp", f".{name}.tmp", f".tmp-{name}", f".{name}.{pid}.tmp")
    return {path.with_name(each) for each in names}


@pytest.mark.parametrize("name", WRITERS)
def test_command_writes_through_no_link(name, place, tmp_path, begun, monkeypatch):
    """Links wherever a first run wrote: they are replaced, or refused by name one after the other.

    A link that was refused is taken away, so that the command meets the next.
    """
    in_process(monkeypatch)
    train_in_process(monkeypatch)
    before, victims, command = entries(), tmp_path / "victims", WRITERS[name]
    assert run(command)[0] == 0
    new = {path for path, state in entries().items() if before.get(path) != state}
    new = {p for p in new if not any(part in str(p) for part in ALONE.get(name, ()))}
    folders = {p for p in new - before.keys() if p.is_dir() and not p.is_symlink()} - {Path("new")}
    folders |= set(map(Path, MORE.get(name, ())))
    files = {p for p in new if p.is_symlink() or p.is_file()}
    assert new
    guessed = set().union(*map(temporary, files | folders))
    for kind in ("file", "nothing", "folder", "no folder"):
        links = folders if "folder" in kind else files | guessed
        while True:
            os.chdir(tmp_path)
            shutil.rmtree(place)
            shutil.copytree(begun, place, symlinks=True)
            os.chdir(place)
            planted = topmost(links)
            plant(planted, kind, victims)
            kept = contents(victims)
            code, messages = run(command)
            assert contents(victims) == kept, (kind, messages)
            if code == 0:
                break
            assert code in (1, 2) and len(messages) == 1, (kind, messages)
            lengths = {p: longest_named(p, messages[0], name in NEW_ONLY) for p in planted}
            named = {link for link in planted if lengths[link] == max(lengths.values()) > 0}
            assert named, (kind, messages)
            links = links - named
        again = {path for path in planted & new if not NEVER_AGAIN & set(path.parts)}
        assert not [p for p in again if p.is_symlink() and os.readlink(p).startswith(str(victims))]


def longest_named(link: Path, message: str, with_top: bool) -> int:
    """Return the length of the longest of a link and the folders above it that a message names."""
    paths = (link, *link.parents[: -1 if with_top else -2])
    return max([len(str(path)) for path in paths if str(path) in message], default=0)


def test_data_of_a_league_and_runs_of_a_suite_are_made_in_no_link(place, tmp_path):
    Path("world.yaml").write_text(yaml.safe_dump(plan_with()))
    for split in ("train", "valid"):
        agreement.write_labelled_pairs(Path(f"mrpc.{split}.jsonl"), 8, 5, (1, 0))
    made = ["preprocess", "--benchmark", "babylm/MRPC", "--source", ".", "--destdir", "data"]
    assert run(made)[0] == 0
    for name, command in (
        ("new/data", "league world.yaml --out new"),
        ("run1/suites/finetune/training", "score run1 --suite finetune --data data epochs=1"),
    ):
        plant({Path(name)}, "folder", tmp_path / "victims")
        kept = contents(tmp_path / "victims")
        code, (message,) = run(command)
        assert code == 1 and name in message
        assert contents(tmp_path / "victims") == kept


def test_copied_code_is_written_through_no_link(place, tmp_path):
    """A sweep of a league begins with the snapshot of another one."""
    league, definition = place / "L", normalise({"data": "data", "overrides": RUN})
    sweeps = [SweepFolder(league / "final" / name) for name in ("a", "b")]
    for sweep in sweeps:
        sweep.path.mkdir(parents=True)
        sweep.adopt(definition, expand(definition, sweep.path), {})
    snapshot = take_code(sweeps[0]).folder
    record_outcome(sweeps[0].path, "seed=1", "finished", source=snapshot.name)
    link = sweeps[1].path / "code" / snapshot.name / "metaseq_lm" / "__init__.py"
    plant({link}, "file", tmp_path / "victims")
    kept = contents(tmp_path / "victims")
    with pytest.raises(MetaseqError, match="changed"):
        Runner.code(SimpleNamespace(out=league), sweeps[1])
    assert contents(tmp_path / "victims") == kept


def test_event_files_have_names_that_nobody_can_guess(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1.8e9)
    _TensorBoard(LoggedRun(tmp_path / "a", RunConfig())).close(False)
    (name,) = (path.name for path in (tmp_path / "a" / "tb").iterdir())
    link = tmp_path / "b" / "tb" / name.replace(".0000", ".0001")
    plant({link}, "file", tmp_path / "victims")
    _TensorBoard(LoggedRun(tmp_path / "b", RunConfig())).close(False)
    assert (tmp_path / "victims" / "0").read_text() == PRECIOUS
