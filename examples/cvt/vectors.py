"""Train word vectors (skip-gram, gensim) on unlabelled text, in GloVe's format (`--word-vectors`).

usage: python vectors.py TEXT OUT [--width 100] [--epochs 3] [--least 3] [--seed 1]

TEXT is cut into sentences of words and the words are normalised as `preprocess --words --split-text
raw --documents blank` does. The same command writes the same file. Vectors are scaled to a mean
square of SPREAD squared, the spread of GloVe's.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from metaseq_lm.core.errors import MetaseqError, run_script
from metaseq_lm.core.files import write_atomic
from metaseq_lm.data.records.text_files import TextFile, check_text_file
from metaseq_lm.data.words.running_text import TextReader
from metaseq_lm.data.words.vocabulary import normalise
from metaseq_lm.models.words.word_embedding import SPREAD


def sentences_in(path: Path) -> list[list[str]]:
    """Return the sentences of a text, their words normalised."""
    reader = TextReader(TextFile(path), splitting="raw", paragraphs=True)
    return [[sys.intern(normalise(word)) for word in words] for words in reader]


def train(path: Path, width: int, epochs: int, least: int, seed: int) -> dict[str, np.ndarray]:
    """Return the vectors (width,) of the words that occur `least` times, the frequent ones first.

    Raises MetaseqError without gensim.
    """
    try:
        from gensim.models import Word2Vec
    except ImportError as error:
        raise MetaseqError(f"{error}. Install it: pip install gensim") from error

    # One thread: with several the order of the updates would differ from run to run.
    model = Word2Vec(
        sentences_in(path),
        vector_size=width,
        window=5,
        sg=1,
        epochs=epochs,
        min_count=least,
        workers=1,
        seed=seed,
    )
    table = model.wv.vectors
    return dict(zip(model.wv.index_to_key, table * (SPREAD / np.sqrt(np.mean(table**2)))))


def main() -> None:
    """Write OUT whole or not at all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    for name, default in (("width", 100), ("epochs", 3), ("least", 3), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    args = parser.parse_args()
    check_text_file(args.text)
    found = train(args.text, args.width, args.epochs, args.least, args.seed)
    rows = (f"{word} {' '.join(f'{v:.4f}' for v in vector)}\n" for word, vector in found.items())
    write_atomic(args.out, "".join(rows).encode("utf-8"))
    print(f"{args.out}: {len(found):,} words, {args.width} numbers each")


if __name__ == "__main__":
    run_script(main)
