"""Write Python's own documentation as a corpus and an end task: `documentation.py OUT`.

OUT/{train,valid}.txt: pydoc's topics and the docstrings of the standard library, a sentence per
line, a blank line after each document; every tenth document is held out.
OUT/{train,dev,test}.tsv: which of the eight packages with the most text a sentence is from.
OUT/pairs.jsonl: held-out sentences and what they become when two of their words are swapped.
"""

import argparse
import ast
import json
import pydoc_data.topics
import random
import re
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z\"'(`])")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LEFT_OUT = ("site-packages", "test", "tests", "idlelib", "pydoc_data")
HELD_OUT = 10
PACKAGES, PAIRS = 8, 500
REPORTED = 200  # files between two lines of progress


def documents() -> Iterator[tuple[str, str]]:
    """Yield (package, text): the topics, then the docstrings of each module of the library."""
    for name in sorted(pydoc_data.topics.topics):
        yield "topics", pydoc_data.topics.topics[name]
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = {f: f.relative_to(library).with_suffix("").parts for f in sorted(library.rglob("*.py"))}
    paths = {file: parts for file, parts in paths.items() if not set(parts) & set(LEFT_OUT)}
    for number, (file, parts) in enumerate(paths.items()):
        if number % REPORTED == 0:
            print(f"{number:,} of {len(paths):,} files of Python are read", file=sys.stderr)
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # a few files are bad on purpose
        found = [ast.get_docstring(n) for n in ast.walk(tree) if isinstance(n, DOCUMENTED)]
        yield parts[0], "\n\n".join(text for text in found if text)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text of wrapped paragraphs, without drawings and code."""
    for paragraph in re.split(r"\n\s*\n", text):
        joined = " ".join(paragraph.split())
        letters = sum(c.isalpha() or c == " " for c in joined)
        if len(joined) > 20 and letters > 0.8 * len(joined) and ">>>" not in joined:
            yield from (s for s in SENTENCE.split(joined) if len(s) > 10)


def swapped(sentence: str, draw: random.Random) -> str:
    """Return a sentence with two different words exchanged."""
    words = sentence.split()
    while True:
        i, j = draw.sample(range(len(words) - 1), 2)  # the last has the full stop
        if words[i].lower() != words[j].lower():
            words[i], words[j] = words[j], words[i]
            return " ".join(words)


def write_task(folder: Path, by_package: dict[str, list[str]], draw: random.Random) -> None:
    """Write the labelled sets: equally many sentences of each package."""
    largest = sorted(by_package, key=lambda name: (-len(by_package[name]), name))[:PACKAGES]
    each = min(len(by_package[name]) for name in largest)
    rows = [(name, s) for name in largest for s in draw.sample(by_package[name], each)]
    draw.shuffle(rows)
    cuts = {"train": (0, 0.6), "dev": (0.6, 0.8), "test": (0.8, 1.0)}
    for split, (start, end) in cuts.items():
        with open(folder / f"{split}.tsv", "w", encoding="utf-8") as file:
            file.write("label\ttext\n")
            for name, sentence in rows[int(start * len(rows)) : int(end * len(rows))]:
                file.write(f"{name}\t{sentence}\n")
    print(f"end task: {len(rows):,} sentences of {', '.join(largest)}")


def main(folder: Path) -> None:
    """Write everything into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    lines: dict[str, list[str]] = {"train": [], "valid": []}
    by_package: dict[str, list[str]] = defaultdict(list)
    print("reading the documentation of the standard library, up to a minute", flush=True)
    for number, (package, text) in enumerate(documents()):
        found = list(sentences(text))
        if found:
            lines["valid" if number % HELD_OUT == 0 else "train"] += [*found, ""]
            by_package[package] += [s for s in dict.fromkeys(found) if len(s.split()) > 4]
    for split, texts in lines.items():
        (folder / f"{split}.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
        print(f"{split}: {sum(len(line.split()) for line in texts):,} words")
    write_task(folder, by_package, draw)
    long = [s for s in dict.fromkeys(lines["valid"]) if 6 <= len(s.split()) <= 30]
    with open(folder / "pairs.jsonl", "w", encoding="utf-8") as file:
        for sentence in draw.sample(long, PAIRS):
            pair = {"sentence_good": sentence, "sentence_bad": swapped(sentence, draw)}
            file.write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="folder that gets the files")
    main(parser.parse_args().out)
