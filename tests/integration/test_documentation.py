"""Every code block of the documentation works: tutorials are run at a tiny size, the rest is
composed.

Commands run in an installation of the wheel without extras, on a copy of the examples, outside of
the checkout. One that needs an extra has to say so there; then it runs in this process.

A comment before a block says what the test does with it, if not the default:

    <!-- test: run; --max-update 3000 -> --max-update 4 -->   run, with these words replaced
    <!-- test: run; needs search -->                          it needs the extra "search"
    <!-- test: file focal.py -->                              write it to this file; run it
    <!-- test: compose, because it needs Slurm -->            check the options, do not run
    <!-- test: skip, because it installs -->                  look at nothing
    <!-- test: after tutorials/text_to_model.md -->           (anywhere) run that page first

The default of bash is `compose`: bash itself expands loops, variables and braces; then each option
of each `metaseq-lm` command must exist, each configuration and sweep must compose, each named file
of the repository must be there. On the pages of STARTED each command also starts, without its
data, on others each with --config-dir. The default of python is `run`, of yaml that it is YAML.
Numbers that blocks of the results print are compared with their pages by test_printed_numbers.py.
"""

import re
import runpy
import shlex
import shutil
import sys
from argparse import SUPPRESS
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import generate
import pytest
import yaml
from bare import Bare, Ended
from markdown_blocks import ROOT, Block, blocks, calls, name, share
from sweeping import train_in_process

from metaseq_lm.cli import COMMANDS, build_parser, main, overrides
from metaseq_lm.cli.train import _overrides_of, _TrainOptions
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.loading import load_config
from metaseq_lm.core.options import read_options

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "user_dir/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
    *sorted((ROOT / "metaseq_lm" / "methods").rglob("README.md")),
]
STARTED = re.compile(r"README\.md|docs/(tutorials|how_to)/")
DOCUMENTATION = ["examples/electra/documentation.py", "text"]
AFTER = re.compile(r"<!-- test: after (\S+) -->")


ENDED: dict[tuple[str, ...], Ended] = {}  # commands of pages that repeat each other


def run_once(words: list[str], bare: Bare) -> Ended:
    """Return how a command ends without its data."""
    if (key := tuple(words)) not in ENDED:
        ENDED[key] = bare.run(words, Path.cwd())
    return ENDED[key]


def check(words: list[str], bare: Bare) -> None:
    """Raise MetaseqError or AssertionError unless a command is one that could run."""
    program, *arguments = words
    if program != "metaseq-lm":
        file = next(word for word in arguments if not word.startswith("-"))
        assert (ROOT / file).is_file(), f"there is no {file}"
        return
    command = arguments[0]
    parser = build_parser(command)
    args, rest = parser.parse_known_args(arguments)
    args.overrides = overrides(args.parser, rest)
    if command == "train":
        load_config(_overrides_of(args), *read_options(_TrainOptions, vars(args)).primary())
    if command == "sweep" and arguments[1] not in ("status", "resubmit", "cancel"):
        for word in args.words + args.overrides:
            if "=" not in word and not word.endswith(".yaml"):
                Path(word).mkdir(parents=True, exist_ok=True)  # DATA has to be a folder
        code, text = run_once([*words, "--seeds", "1", "--out", "none", "--dry-run"], bare)
        assert code == 0, text


def start(block: Block, words: list[str], bare: Bare) -> None:
    """Raise AssertionError unless a command starts without extras; its data are not there."""
    words = [word for word in words if word != "--watch"]
    is_composed = words[1] == "train" and "--config-dir" in words
    if words[1] == "train":
        words.append("--print-config")
    if words[1] == "league" and words[2] not in ("report", "predict", "--dry-run"):
        # The plan as a whole is that of "league --dry-run" alone.
        words += ["--dry-run", *([] if "--with" in words else ["--objectives", "causal"])]
    code, text = run_once(words, bare)
    assert code == 0 or (code in (1, 2) and not is_composed), text
    assert "Traceback" not in text and ("metaseq-lm[" in text) == bool(block.extra), text


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_compose(page, tmp_path, monkeypatch, bare):
    share(tmp_path, bare.copy)
    monkeypatch.chdir(tmp_path)
    problems = []
    for block in blocks(page):
        if block.test.startswith("skip"):
            assert "because" in block.test, f"{block.place}: say why"
        elif block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict), block.place
        elif block.language == "bash" and not block.test.startswith("run"):
            found = calls(block, tmp_path)
            named = re.findall(r"\b(?:scripts|examples)/[\w./-]+\.\w+|\bscripts/[\w-]+", block.text)
            problems += [f"{block.place}: no {n}" for n in named if not (ROOT / n).exists()]
            if not found and not named:
                problems.append(f"{block.place}: no command in it")
            for words in found:
                try:
                    check(words, bare)
                    wanted = STARTED.match(name(page)) or "--config-dir" in words
                    if wanted and words[0] == "metaseq-lm" and words[1] != "sweep":
                        start(block, words, bare)
                except (MetaseqError, AssertionError) as error:
                    problems.append(f"{block.place}: {shlex.join(words)}\n    {error}")
    assert not problems, "\n".join(problems)


RUN = [page for page in PAGES if any(b.test.startswith("run") for b in blocks(page))]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of the pages that were run, by name."""
    return {}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, bare: Bare) -> Path:
    """What the program of DOCUMENTATION writes, of the tables every tenth row, of the text a
    tenth.
    """
    folder = tmp_path_factory.mktemp("documentation") / "text"
    words = ["python", str(bare.copy / DOCUMENTATION[0]), str(folder)]
    assert bare.run(words, folder.parent).code == 0
    for file in folder.iterdir():
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        part = lines[: len(lines) // 10] if file.suffix == ".txt" else lines[::10]
        file.write_text("".join(part), encoding="utf-8")
    return folder


def play(page: Path, folder: Path, text: Path, bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks of a page in a folder."""
    monkeypatch.chdir(folder)
    namespace: dict[str, Any] = {"__name__": "tutorial"}
    for block in blocks(page):
        if block.test.startswith("file "):
            Path(block.test.split()[1]).write_text(block.text, encoding="utf-8")
        if not block.test.startswith("run"):
            continue
        if block.language == "python" and block.extra:
            exec(compile(block.replaced, block.place, "exec"), namespace)
            continue
        if block.language == "python":
            Path("block.py").write_text(block.replaced, encoding="utf-8")
            commands = [["python", "block.py"]]
        else:
            lines = block.replaced.replace("\\\n", " ").splitlines()
            commands = [words for line in lines if (words := shlex.split(line, comments=True))]
        outcomes = [perform(block, words, text, bare) for words in commands]
        assert any(outcomes) == bool(block.extra), f"{block.place}: nothing needs an extra"


def perform(block: Block, words: list[str], text: Path, bare: Bare) -> int:
    """Run a command without extras; where it says that it needs that of its block, here.

    Returns its exit code without extras.
    """
    if words == ["python", *DOCUMENTATION]:
        shutil.copytree(text, "text")
        return 0
    code, said = bare.run(words, Path.cwd())
    place = f"{block.place}: {shlex.join(words)}\n{said}"
    assert "Traceback" not in said, place
    if code and block.extra:
        assert code in (1, 2) and f"metaseq-lm[{block.extra}]" in said, place
        done = main(words[1:]) if words[0] == "metaseq-lm" else run_program(words[1:])
        assert not done, place
    else:
        assert code == 0, place
    return code


def run_program(words: list[str]) -> None:
    """Run a program of the examples in this process, which has imported torch already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            assert not end.code, words


@pytest.mark.parametrize("page", RUN, ids=name)
def test_tutorials_run(page, played, text, bare, tmp_path_factory, monkeypatch):
    """A tutorial's commands, one after the other, at a tiny size."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    train_in_process(monkeypatch)
    source = page.read_text(encoding="utf-8")
    chain = [ROOT / "docs" / other for other in AFTER.findall(source)] + [page]
    for before, this in zip([None, *chain], chain):
        if name(this) in played:
            continue
        folder = tmp_path_factory.mktemp("page") / "session"
        if before is None:
            folder.mkdir()
            share(folder, bare.copy)
        else:
            shutil.copytree(played[name(before)], folder, symlinks=True)
        play(this, folder, text, bare, monkeypatch)
        played[name(this)] = folder


def test_named_modules_exist():
    """Python files that pages name with a folder are there."""
    missing = []
    for page in PAGES:
        places = [ROOT, ROOT / "metaseq_lm", ROOT / "tests", page.parent]
        for file in re.findall(r"`([\w/]+/\w+\.py)`", page.read_text(encoding="utf-8")):
            if not any((place / file).is_file() for place in places):
                missing.append(f"{name(page)}: {file}")
    assert not missing, "\n".join(missing)


def test_reference_pages_have_each_option_once():
    """With a link to it, and with the text of the parser's help, filled in."""
    pages = dict(generate.command_pages())
    for command in COMMANDS:
        page = pages[f"reference/commands/{command}.md"]
        (parser,) = build_parser(command)._subparsers._group_actions[0].choices.values()
        shown = [a for a in parser._actions if a.option_strings and a.help != SUPPRESS]
        missing = [a for a in shown if page.count(f"{{ #{a.option_strings[-1]} }}") != 1]
        assert not missing and "%(" not in page and "SUPPRESS" not in page, command
    for page, text in [*pages.items(), *generate.option_pages()]:
        anchors = re.findall(r"\{ #(\S+) \}|^## (.+)$", text, re.MULTILINE)
        assert len(set(anchors)) == len(anchors), page


def test_generated_pages_are_in_the_navigation():
    """A reader finds them without a search."""
    written = {page for page, _ in [*generate.command_pages(), *generate.option_pages()]}
    written |= {page for page, _ in [*generate.api_pages(), *generate.method_pages()]}
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"(?:: |- )(\S+\.md)$", navigation, re.MULTILINE))
    assert sorted(written - listed) == []


def test_named_extras_exist():
    """Those that pages and messages tell to install are extras of the package."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    sources = [*PAGES, *(ROOT / "metaseq_lm").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    named = re.compile(r"(?:metaseq-lm|-e '?\"?\.)\[([a-z,]+)\]")
    extras = {e for s in sources for m in named.findall(s.read_text("utf-8")) for e in m.split(",")}
    assert (
        {"transformers", "arrow", "zstd", "hub"} <= extras <= set(setup["options.extras_require"])
    )


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pictures_are_described(page):
    """What a picture shows is in its text, for those who do not see it."""
    for text, file in re.findall(r"!\[(.*?)\]\((\S+?)\)", page.read_text(encoding="utf-8")):
        assert len(text) > 60, file
        assert (page.parent / file).is_file(), file
        has_values = len(re.findall(r"\d+", text)) > 2 or page.name == "README.md"  # sentences
        assert file.endswith(".svg") or has_values, f"{file}: no values"


def test_documentation_has_code_blocks():
    """The pattern finds them, and no comment stands alone."""
    found = [block for page in PAGES for block in blocks(page)]
    assert len(found) > 100 and len(RUN) > 4
    for page in PAGES:
        source = page.read_text(encoding="utf-8")
        comments = [c for c in re.findall(r"<!-- test: (\w+)", source) if c != "after"]
        assert len(comments) == len(re.findall(r"<!-- test: .*? -->\n```", source)), name(page)
