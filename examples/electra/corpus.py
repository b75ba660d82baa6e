"""Make one corpus of english-novels and wikitext-2 (METASEQ_LM_DATA): a sentence per line, a blank
line after each chapter or article; the last novels and wikitext's own split are held out.

usage: python corpus.py DATA_FOLDER OUT
"""

import lzma
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SENTENCE = re.compile(r"(?<=[.!?])[\"'”’]?\s+(?=[A-Z\"'“‘(])")
NEW_NOVEL = "<<<NOVEL"
HELD_OUT_NOVELS = 2
# wikitext's tokens back to text: " @-@ " joins, punctuation clings to the left, brackets inside.
REPAIRS = [
    (re.compile(r" @(.)@ "), r"\1"),
    (re.compile(r" ([,.;:!?%)\]]|'s\b|n't\b|'(?:re|ve|ll|d|m)\b)"), r"\1"),
    (re.compile(r"([(\[$]) "), r"\1"),
    (re.compile(r"\" ([^\"]*) \""), r'"\1"'),
]


def lines(folder: Path, name: str) -> Iterator[str]:
    """Yield the lines of a file that may stand there packed with xz."""
    plain = folder / name
    with (
        open(plain, encoding="utf-8")
        if plain.exists()
        else lzma.open(f"{plain}.xz", "rt", encoding="utf-8")
    ) as file:
        yield from file


def novels(folder: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the novel, paragraphs of a chapter)."""
    number, chapter = 0, []
    for line in lines(folder / "english-novels", "novels.txt"):
        text = " ".join(line.split())
        if text.startswith((NEW_NOVEL, "CHAPTER", "BOOK ")):
            if chapter:
                yield number, chapter
            chapter = []
            number += text.startswith(NEW_NOVEL)
        elif text:
            chapter.append(text)
    if chapter:
        yield number, chapter


def articles(folder: Path, split: str) -> Iterator[list[str]]:
    """Yield the paragraphs of each article of wikitext-2."""
    article: list[str] = []
    for line in lines(folder / "wikitext-2", f"wiki.{split}.tokens"):
        text = line.strip()
        if re.fullmatch(r"= [^=].*[^=] =", text) and article:
            yield article
            article = []
        elif text and not text.startswith("="):
            article.append(repaired(text))
    if article:
        yield article


def repaired(text: str) -> str:
    """Undo the spaces of a tokenised text."""
    for pattern, to in REPAIRS:
        text = pattern.sub(to, text)
    return text


def main(folder: Path, out: Path) -> None:
    """Write train.txt and valid.txt."""
    out.mkdir(parents=True, exist_ok=True)
    documents: dict[str, list[list[str]]] = {"train": [], "valid": []}
    chapters = list(novels(folder))
    last = max(number for number, _ in chapters) - HELD_OUT_NOVELS
    for number, chapter in chapters:
        documents["valid" if number > last else "train"].append(chapter)
    for split in documents:
        documents[split] += articles(folder, split)
        words = 0
        with open(out / f"{split}.txt", "w", encoding="utf-8") as file:
            for document in documents[split]:
                sentences = [s for paragraph in document for s in SENTENCE.split(paragraph)]
                file.write("\n".join(sentences) + "\n\n")
                words += sum(len(s.split()) for s in sentences)
        print(f"{split}: {len(documents[split]):,} documents, {words:,} words")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
