"""Names of the package are declared: what needs torch is imported when it is first used."""

import subprocess
import sys

import pytest

from metaseq_lm import plugins
from metaseq_lm.core.registry import ALL, CRITERIONS, TASKS, Entry, tasks_for

plugins.load_all()


def entries() -> list[tuple[str, Entry]]:
    return [
        (f"{kind} {name}", entry)
        for kind, registry in ALL.items()
        for name, entry in registry.entries.items()
        if entry.is_of_package
    ]


def test_what_is_declared_is_there() -> None:
    """The module has the name, and the summary that was read from its source is its own."""
    for name, entry in entries():
        declared = Entry(entry.name, entry.dataclass, f"{entry.origin}.{entry.value.__qualname__}")
        assert declared.summary == entry.summary != "", name


def test_declared_tasks_take_what_their_classes_take() -> None:
    for name, entry in CRITERIONS.entries.items():
        if entry.is_of_package:
            declared = [t for t in TASKS.names() if name in TASKS.entry(t).takes]
            taking = [t for t in tasks_for(entry.value) if TASKS.entry(t).is_of_package]
            assert declared == taking, name


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["train", "--help"],
        ["train", "data", "--task", "mlm"],
        ["train", "data", "--criterion", "electra_rtd", "criterion.weight=1"],
        ["score", "runs/x", "--suite", "blimb", "--data", "d"],
        ["report", "--help"],
    ],
    ids=" ".join,
)
def test_names_and_help_need_no_torch(words: list[str]) -> None:
    code = (
        "import sys\nfrom metaseq_lm.cli import main\n"
        f"try:\n    main({words!r})\nexcept (Exception, SystemExit):\n    pass\n"
        "assert 'metaseq_lm.core.registry' in sys.modules\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
