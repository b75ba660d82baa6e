"""Changes places of package files, one at a time, and prints the changes that no unit test notices.

  scripts/mutate FILE ... [--count 40] [--seed 1] [--again] [--out runs/mutate]

cosmic-ray makes the mutants and keeps the results, in a copy of the checkout. Each file has a
session, OUT/ROOM.FILE-HASH.sqlite, which later runs continue; --again tests survivors anew. In each
file, `--count` places are drawn with the seed, with one mutant each.
"""

import argparse
import ast
import hashlib
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkItem, WorkResult

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("metaseq_lm", "tests", "docs", "examples", "scripts", "user_dir")
CACHES = shutil.ignore_patterns("__pycache__")
# Further tests of a module, in addition to the tests of its room that name it.
MORE = {
    "metaseq_lm/data/corpus/masking.py": ["tests/unit/data/test_units.py"],
    "metaseq_lm/distributed/reduction.py": ["tests/reliability/test_reduction.py"],
    "metaseq_lm/runs/checkpoint.py": ["tests/reliability/test_damaged_checkpoints.py"],
}


def tests_of(file: str) -> list[str]:
    """Return test files; files named after the module come first."""
    path = Path(file)
    module = path.parent if path.stem == "__init__" else path.with_suffix("")
    names = {".".join(module.parts), f"from {'.'.join(module.parent.parts)} import"}
    folder = ROOT / "tests" / "unit" / path.parts[1]
    texts = {p: p.read_text() for p in sorted(folder.rglob("test_*.py"))}
    found = [p for p, t in texts.items() if module.name in t and any(n in t for n in names)]
    found.sort(key=lambda p: module.name not in p.stem)
    return [*dict.fromkeys([*(str(p.relative_to(ROOT)) for p in found), *MORE.get(file, [])])]


def annotated(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return start and end of annotations, since no test can notice a change there."""
    nodes = [
        getattr(node, field, None)
        for node in ast.walk(ast.parse(source))
        for field in ("annotation", "returns")
    ]
    return [
        ((n.lineno, n.col_offset), (n.end_lineno or n.lineno, n.end_col_offset or 0))
        for n in nodes
        if n is not None
    ]


def draw(file: str, count: int, seed: int) -> list[WorkItem]:
    """Return one mutant for each of `count` places."""
    spans = annotated(Path(file).read_text())
    places: dict[tuple[int, int], list[WorkItem]] = {}
    for item in _all_work_items([Path(file)], {}):
        start = item.mutations[0].start_pos
        if not any(first <= start < last for first, last in spans):
            places.setdefault(start, []).append(item)
    chance = random.Random(seed)
    chosen = sorted(chance.sample(sorted(places), min(count, len(places))))
    return [chance.choice(places[place]) for place in chosen]


def shown(item: WorkItem, result: WorkResult) -> str:
    """Return file:line: before -> after."""
    lines = [x for x in (result.diff or "").splitlines() if x[:3] not in ("---", "+++")]
    parts = [" ".join(x[1:].strip() for x in lines if x[:1] == sign) for sign in "-+"]
    mutation = item.mutations[0]
    return f"{mutation.module_path}:{mutation.start_pos[0]}: {parts[0]} -> {parts[1]}"


def try_mutants(file: str, db: WorkDB, again: bool) -> None:
    """Test mutants without a result, or also survivors if `again`; print survivors."""
    pending = {item.job_id: item for item in db.pending_work_items}
    for item, result in db.completed_work_items:
        if result.test_outcome is TestOutcome.SURVIVED and again:
            pending[item.job_id] = item
        elif result.test_outcome is TestOutcome.SURVIVED:
            print(shown(item, result))
    if not pending:
        return
    tests = tests_of(file)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    if not tests or done.returncode:
        sys.exit(f"{file}: its tests fail as it is: {' '.join(tests)}\n{done.stdout[-2000:]}")
    limit = 3 * (time.monotonic() - began) + 10
    print(f"{file}: {len(pending)} mutants, {' '.join(tests)}, {limit:.0f} s each", flush=True)
    # Mutants write no bytecode, and must not read the original's.
    for compiled in (Path(file).parent / "__pycache__").glob(f"{Path(file).stem}.*"):
        compiled.unlink()
    for item in sorted(pending.values(), key=lambda item: item.mutations[0].start_pos):
        result = mutate_and_test(item.mutations, shlex.join(command), limit)
        db.set_result(item.job_id, result)
        if result.test_outcome is TestOutcome.SURVIVED:
            print(shown(item, result), flush=True)


def summary(file: str, db: WorkDB) -> str:
    """Return the number of mutants by outcome."""
    results = [result for _, result in db.results]
    counts = Counter(str(r.test_outcome and r.test_outcome.value) for r in results)
    late = sum(r.output == "timeout" for r in results)
    parts = ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
    return f"{file}: {parts} ({late} by time)"


def main() -> None:
    """Parse the command line, mutate, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="files of the package")
    parser.add_argument("--count", type=int, default=40, help="places of each file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="test survivors once more")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutate")
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    files = [str(path.resolve().relative_to(ROOT)) for path in args.files]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        for part in COPIED:
            shutil.copytree(ROOT / part, copy / part, ignore=CACHES)
        for path in ROOT.glob("*.*"):
            if path.is_file():
                shutil.copy(path, copy)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")])
        for file in files:
            mark = hashlib.sha256(Path(file).read_bytes() + bytes([args.count, args.seed]))
            name = ".".join(Path(file).with_suffix("").parts[1:])
            session = out / f"{name}-{mark.hexdigest()[:8]}.sqlite"
            with use_db(str(session), WorkDB.Mode.create) as db:
                if not db.num_work_items:
                    db.add_work_items(draw(file, args.count, args.seed))
                try_mutants(file, db, args.again)
                print(summary(file, db), flush=True)


if __name__ == "__main__":
    main()
