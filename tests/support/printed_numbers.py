"""Compares numbers in a Markdown page with the output of its commands.

A source is a bash block with commands that print numbers. Commands that read an archive of the
repository (`metaseq-lm report examples/NAME/measured.jsonl`, `python examples/NAME/SCRIPT.py
FILE.jsonl`, without `--out`) are run. A comment before a block changes that:

    <!-- test: print -->                               run all of its commands; `cat FILE` shows
                                                       a file that they wrote
    <!-- test: printed in examples/electric/toy.txt -->  run none: they train; the file has what
                                                         they printed, below "$ COMMAND"

These parts of a page have to be in the output of its sources:

* each number of a table's cells, in the output of the nearest source above it in the same section
  (##); but for the header, the first column, which names the rows, and columns whose header speaks
  of the paper, the dissertation, a claim or a setting. A ± B has to be printed as such;
* each line of a text block, as it is, in the same output;
* in sentences numbers with a decimal point, those with ± and those in points or per cent, in the
  output of a source of the section, or, if it has none, of the page. Not those in `code`, in
  brackets that begin with "paper" or "dissertation", in descriptions of pictures, and not those of
  sections, tables and versions.

`python tests/support/printed_numbers.py PAGE ...` reports missing numbers.

A printed number may be rounded to the digits of the page, in sentences to none, and a score between
0 and 1 with four or more digits may be given in per cent. A comment gives the origin of other
numbers. Directly above a table, block or paragraph it applies to that item; followed by an empty
line it applies to the rest of its section:

    <!-- numbers: of the paper -->
    <!-- numbers: settings -->              what was chosen, not measured: may not have a ±
    <!-- numbers: of this page -->          what any source of the page prints: for summaries
    <!-- numbers: not archived -->          measured, but no file holds what was printed
    <!-- numbers: of the linked pages -->   what the sources of the results pages print to which
                                            the row, the paragraph or the section links
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import os
import re
import runpy
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_blocks import ROOT, Block, blocks, calls, name, share
from registrations import forgotten

from metaseq_lm import plugins
from metaseq_lm.cli import main

ORIGIN = re.compile(
    r"<!-- numbers: (of the paper|settings|of this page|not archived|of the linked pages) -->$"
)
NUMBER = re.compile(
    r"(?<![\w.,])(?P<sign>[-+−])?(?<!\w\.)(?P<mantissa>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
    r"(?P<exponent>e[-+]?\d+)?(?!\w|[.,]\d)"
)
SPREAD = re.compile(r"\s*±\s*")
FOREIGN_COLUMN = re.compile(r"\b(?:paper|dissertation|claim|setting)", re.IGNORECASE)
PICTURE = re.compile(r"!\[.*?\]\(\S+?\)", re.DOTALL)
CAT = re.compile(r"^cat (\S+)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]*)[^)\s]*\)")
# Matches parts of a paper, versions, the usual level of significance, and "(paper: 75.1)".
NAMES = re.compile(
    r"\b(?:section|table|figure|chapter|equation|appendix|Python|torch|SQuAD)\s+(?:[A-Z]\.)?[\d.]*\d"
    r"|\b(?:sections|tables|figures|Python)\s+[\d.]*\d(?:(?:,| and| to| or)\s+[\d.]*\d)*"
    r"|\b(?:p\s*[<=>]|below|at|under)\s+0\.05\b"
    r"|\((?:the\s+)?(?:paper|dissertation)\b[^)]*\)"
)


@dataclass(frozen=True)
class Number:
    """A number in a text: its value, half a unit of its last digit, and its place."""

    text: str
    value: float
    tolerance: float
    start: int
    end: int

    @property
    def signed(self) -> bool:
        return self.text[0] in "-+"


def find_numbers(text: str) -> list[Number]:
    """Return the numbers in a text, in order."""
    numbers = []
    for match in NUMBER.finditer(text):
        sign = (match["sign"] or "").replace("−", "-")
        mantissa = match["mantissa"].replace(",", "")
        exponent = match["exponent"] or ""
        digits = len(mantissa.partition(".")[2])
        numbers.append(
            Number(
                sign + mantissa + exponent,
                float(sign + mantissa + exponent),
                0.5001 * float("1" + (exponent or "e0")) * 10**-digits,
                *match.span(),
            )
        )
    return numbers


def find_spreads(text: str) -> list[tuple[Number, Number]]:
    """Return the pairs A ± B in a text."""
    numbers = find_numbers(text)
    pairs = itertools.pairwise(numbers)
    return [(a, b) for a, b in pairs if SPREAD.fullmatch(text[a.end : b.start])]


@dataclass
class Source:
    """The output of a block's commands."""

    command: str
    text: str
    values: list[float] = field(init=False)
    spreads: list[tuple[float, float]] = field(init=False)
    lines: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.lines = {line.rstrip() for line in self.text.splitlines()}
        self.values, self.spreads = [], []
        for number in find_numbers(self.text):
            self.values += scales(number)
        for mean, spread in find_spreads(self.text):
            self.spreads += zip(scales(mean), scales(spread) * 2, strict=False)

    def has(self, number: Number) -> bool:
        return any(same(number, value) for value in self.values)

    def has_spread(self, mean: Number, spread: Number) -> bool:
        return any(same(mean, a) and same(spread, b) for a, b in self.spreads)


def scales(number: Number) -> list[float]:
    """Return the value of a printed number, and its per cent if it is a score between 0 and 1."""
    fraction = abs(number.value) <= 1 and number.tolerance < 1e-4
    return [number.value, number.value * 100] if fraction else [number.value]


def same(number: Number, printed: float) -> bool:
    """Return whether a page's number equals a printed one, up to rounding and a missing sign."""
    value = printed if number.signed else abs(printed)
    return abs(number.value - value) <= number.tolerance


@dataclass(frozen=True)
class Item:
    """A table, block or paragraph of a page: first line, text, section and origin."""

    kind: str
    line: int
    text: str
    section: int
    origin: str


def parse(page: Path) -> Iterator[Item]:
    """Yield the items of a page; sections are of second level, by the line of their heading."""
    lines = page.read_text(encoding="utf-8").splitlines()
    section, number = 0, 0
    origins: dict[int, str] = {}  # by the level of the heading above a comment
    level, pending = 0, ""
    while number < len(lines):
        line = lines[number]
        heading = re.match(r"(#+) ", line)
        if heading:
            level = len(heading[1])
            section = number + 1 if level <= 2 else section
            origins = {key: origin for key, origin in origins.items() if key < level}
            number += 1
        elif match := ORIGIN.match(line):
            number += 1
            if number == len(lines) or not lines[number].strip():
                origins[level] = match[1]
            else:
                pending = match[1]
        elif line.startswith("<!-- numbers:"):
            raise AssertionError(f"{page}:{number + 1}: no such origin: {line}")
        elif not line.strip() or line.startswith("<!--"):
            number += 1
        else:
            kind, end = ("fence" if line.startswith("```") else "prose"), number + 1
            if kind == "fence":
                while lines[end] != "```":
                    end += 1
                end += 1
            else:
                kind = "table" if line.startswith("|") else kind
                while end < len(lines) and lines[end].strip() and not lines[end].startswith("```"):
                    if lines[end].startswith("|") != (kind == "table"):
                        break
                    end += 1
            origin = pending or (origins[max(origins)] if origins else "")
            yield Item(kind, number + 1, "\n".join(lines[number:end]), section, origin)
            number, pending = end, ""


def reads_archives(words: list[str]) -> bool:
    """Return whether a command only reads files of results in the repository."""
    if any(word.split("=")[0] in ("--out", "--archive", "--check") for word in words):
        return False
    files = [word for word in words if re.fullmatch(r"examples/[\w./-]+\.jsonl?(\.gz)?", word)]
    reader = words[:2] == ["metaseq-lm", "report"] or words[0] == "python"
    return reader and bool(files) and all((ROOT / file).is_file() for file in files)


def run(words: list[str]) -> str:
    """Run a command in this process and return its output."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        if words[0] == "metaseq-lm":
            code: object = main(words[1:])
        else:
            code = run_script(words[1:])
    assert not code, f"{shlex.join(words)}\n{printed.getvalue()}"
    return printed.getvalue()


def run_script(words: list[str]) -> object:
    """Run a script of the examples, which may import its neighbours; return its exit code."""
    modules, path, arguments = set(sys.modules), list(sys.path), sys.argv
    sys.path.insert(0, str(Path(words[0]).parent))
    sys.argv = words
    try:
        with forgotten():
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ending:
        return ending.code
    finally:
        sys.path[:], sys.argv = path, arguments
        for module in set(sys.modules) - modules:
            if "examples" in str(getattr(sys.modules[module], "__file__", "")):
                del sys.modules[module]
    return None


def printed_by(block: Block, folder: Path, run_once: Callable[[list[str]], str]) -> Source | None:
    """Return the output of a block, or None if it has nothing to run."""
    commands = calls(block, folder)
    if block.test.startswith("printed in "):
        file = block.test.removeprefix("printed in ").strip()
        text = (ROOT / file).read_text(encoding="utf-8")
        stated = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
        assert stated, f"{file}: name the command that printed this: $ COMMAND"
        known = [shlex.join(words) for words in commands]
        for command in stated:
            assert command in known, f"{block.place}: '{command}' printed {file}; it is not there"
        return Source(file, text)
    wanted = [words for words in commands if block.test == "print" or reads_archives(words)]
    if not wanted:
        return None
    shown = CAT.findall(block.text) if block.test == "print" else []
    # Commands of another page have written their files there.
    printed = [(run if shown else run_once)(words) for words in wanted]
    printed += [(folder / file).read_text(encoding="utf-8") for file in shown]
    return Source(" && ".join(map(shlex.join, wanted)), "\n".join(printed))


@dataclass(frozen=True)
class Problem:
    """Numbers or texts in a line of a page that its sources do not print."""

    place: str
    text: str
    sources: tuple[str, ...] = ("no command beside it prints numbers",)


def describe(problems: list[Problem]) -> str:
    """Return problems as lines: page and line, numbers, commands that do not print them."""
    lines = []
    for place, group in itertools.groupby(
        problems, lambda problem: (problem.place, problem.sources)
    ):
        lines.append(f"{place[0]}: " + ", ".join(problem.text for problem in group))
        lines += [f"    {source}" for source in place[1]]
    return "\n".join(lines)


class Page:
    """A page with its items and sources."""

    def __init__(self, path: Path, folder: Path, run: Callable[[list[str]], str]) -> None:
        self.path = path
        self.name = name(path)
        self.folder, self.run = folder, run
        self.items = list(parse(path))
        by_line = {int(block.place.rpartition(":")[2]): block for block in blocks(path)}
        self.sources: dict[int, Source] = {}
        self.sections: dict[int, int] = {}
        for item in self.items:
            block = by_line.get(item.line)
            if item.kind == "fence" and block is not None and block.language == "bash":
                source = printed_by(block, folder, run)
                if source is not None:
                    self.sources[item.line] = source
                    self.sections[item.line] = item.section

    def problems(self) -> list[Problem]:
        """Return the problems of the page: contents that its sources do not print."""
        problems = []
        for item in self.items:
            if item.origin == "of the paper":
                continue
            if item.origin == "not archived":
                if not any("not archived" in other.text for other in self.items):
                    text = "not archived, which the page does not say"
                    problems.append(Problem(self.place(item.line), text))
                continue
            if item.origin == "settings":
                for mean, _ in find_spreads(without_code(item.text)):
                    line = item.line + item.text[: mean.start].count("\n")
                    problems.append(Problem(self.place(line), f"{mean.text} ± is no setting"))
                continue
            problems += getattr(self, f"{item.kind}_problems")(item)
        return problems

    def sources_of(self, item: Item, text: str) -> list[Source]:
        """Return the sources of an item; part of its text may link to other pages."""
        everything = list(self.sources.values())
        if item.origin == "of the linked pages":
            return self.linked(item, text)
        if item.origin == "of this page":
            return everything
        lines = [line for line, section in self.sections.items() if section == item.section]
        if item.kind == "prose":
            return [self.sources[line] for line in lines] or everything
        return [self.sources[line] for line in lines if line < item.line][-1:]

    def linked(self, item: Item, text: str) -> list[Source]:
        """Return the sources of the results pages linked in a text, or else in its section."""
        links = LINK.findall(text)
        if not any("results/" in str(self.target(link)) for link in links):
            texts = [other.text for other in self.items if other.section == item.section]
            links = LINK.findall("\n".join(texts))
        targets = {self.target(link) for link in links} - {self.path.resolve()}
        pages = [p for p in sorted(targets) if p.suffix == ".md" and p.parent.name == "results"]
        return [s for p in pages for s in Page(p, self.folder, self.run).sources.values()]

    def place(self, line: int) -> str:
        return f"{self.name}:{line}"

    def target(self, link: str) -> Path:
        return (self.path.parent / link).resolve()

    def fence_problems(self, item: Item) -> list[Problem]:
        first, *lines = item.text.splitlines()
        if first != "```text":
            return []
        sources = self.sources_of(item, item.text)
        return [
            Problem(self.place(item.line + number), repr(line), *commands(sources))
            for number, line in enumerate(lines[:-1], 1)
            if line.strip() and not any(line.rstrip() in source.lines for source in sources)
        ]

    def table_problems(self, item: Item) -> list[Problem]:
        lines, problems = item.text.splitlines(), []
        for number, line in enumerate(lines[2:], 2):
            sources = self.sources_of(item, line)
            for title, cell in list(zip(cells(lines[0]), cells(line), strict=False))[1:]:
                if not FOREIGN_COLUMN.search(title):
                    problems += self.missing(cell, sources, item.line + number, every=True)
        return problems

    def prose_problems(self, item: Item) -> list[Problem]:
        return self.missing(item.text, self.sources_of(item, item.text), item.line)

    def missing(
        self, text: str, sources: list[Source], line: int, every: bool = False
    ) -> list[Problem]:
        """Return the numbers in a text that none of the sources prints."""
        text = without_code(text)
        spreads = find_spreads(text)
        wrong = [a for a, b in spreads if not any(s.has_spread(a, b) for s in sources)]
        paired = {number.start for pair in spreads for number in pair}
        for number in find_numbers(text):
            if every and re.fullmatch(r"[-+]?\d+", number.text):
                number = dataclasses.replace(number, tolerance=0.0)
            unit = re.match(r"\s*(?:points?\b|%)", text[number.end :])
            stated = every or "." in number.text or unit
            if number.start not in paired and stated and not any(s.has(number) for s in sources):
                wrong.append(number)
        places = {number: self.place(line + text[: number.start].count("\n")) for number in wrong}
        return [
            Problem(places[number], shown(text, number, spreads), *commands(sources))
            for number in sorted(wrong, key=lambda number: number.start)
        ]


def commands(sources: list[Source]) -> list[tuple[str, ...]]:
    """Return the commands of sources as the last argument of a problem, or ()."""
    return [tuple(dict.fromkeys(source.command for source in sources))] if sources else []


def shown(text: str, number: Number, spreads: list[tuple[Number, Number]]) -> str:
    """Return a number in the form of the page, with its spread."""
    end = next((spread.end for mean, spread in spreads if mean == number), number.end)
    return repr(re.sub(r"\s+", " ", text[number.start : end]))


def cells(line: str) -> list[str]:
    """Return the cells of a line of a table."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def without_code(text: str) -> str:
    """Return a text of the same length without code, pictures, link targets and numeric names."""
    for pattern in (re.compile(r"`[^`]*`"), PICTURE, LINK, NAMES):
        text = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    return text.replace("*", " ")


if __name__ == "__main__":
    plugins.load_all()  # what a command registers is forgotten after it
    with tempfile.TemporaryDirectory() as temporary:
        pages = [Path(word).resolve() for word in sys.argv[1:]]
        share(Path(temporary))
        os.chdir(temporary)
        once = functools.cache(lambda *words: run(list(words)))
        for path in pages:
            print(describe(Page(path, Path(temporary), lambda words: once(*words)).problems()))
