"""Make the labelled sets SST-5 and SST-2 from the trees of sst-trees (METASEQ_LM_DATA): whole
sentences with five labels, and with two, without the neutral ones.

usage: python sentiment.py DATA_FOLDER OUT
"""

import lzma
import re
import sys
from collections.abc import Iterator
from pathlib import Path

LEAF = re.compile(r"\((\d) ([^()]+)\)")
FIVE = ("very negative", "negative", "neutral", "positive", "very positive")
BRACKETS = {"-LRB-": "(", "-RRB-": ")"}


def sentences(file: Path) -> Iterator[tuple[str, int]]:
    """Yield text and label, 0 to 4, of each tree of a file that may stand there packed with xz."""
    with (
        open(file, encoding="utf-8")
        if file.exists()
        else lzma.open(f"{file}.xz", "rt", encoding="utf-8")
    ) as trees:
        for tree in trees:
            if tree.strip():
                words = [BRACKETS.get(word, word) for _, word in LEAF.findall(tree)]
                yield " ".join(words), int(tree.strip()[1])


def main(folder: Path, out: Path) -> None:
    """Write OUT/SST-5/SPLIT.tsv and OUT/SST-2/SPLIT.tsv for train, dev and test."""
    for name in ("SST-5", "SST-2"):
        (out / name).mkdir(parents=True, exist_ok=True)
    for split in ("train", "dev", "test"):
        rows = list(sentences(folder / "sst-trees" / f"{split}.txt"))
        five = [f"{text}\t{FIVE[label]}" for text, label in rows]
        two = [
            f"{text}\t{'positive' if label > 2 else 'negative'}"
            for text, label in rows
            if label != 2
        ]
        for name, lines in (("SST-5", five), ("SST-2", two)):
            content = "\n".join(["text\tlabel", *lines]) + "\n"
            (out / name / f"{split}.tsv").write_text(content, encoding="utf-8")
            print(f"{name} {split}: {len(lines):,} sentences")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
