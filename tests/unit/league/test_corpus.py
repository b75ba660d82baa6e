"""What is known of a corpus: the cross-entropy of its word frequencies, and that of a world."""

from pathlib import Path

import numpy as np
import pytest

from metaseq_lm.cli import main
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary, special_symbols
from metaseq_lm.league.corpus import read_corpus


def test_the_cross_entropy_of_counts_with_one_added(tmp_path: Path) -> None:
    """Symbols x, y, z: 3, 1 and 0 in train; x, z, [SEP] in valid, of which [SEP] is no target."""
    vocabulary = Vocabulary([*special_symbols(1), "x", "y", "z"])
    vocabulary.save(tmp_path / "dict.txt")
    x = len(special_symbols(1))
    for split, tokens in (("train", [x, x, x, x + 1]), ("valid", [x, x + 2, vocabulary.sep])):
        with IndexedWriter(tmp_path / split, np.uint16) as writer:
            writer.add(np.array(tokens, np.uint16))
    known = read_corpus(tmp_path)
    assert known.vocabulary == x + 3
    assert known.unigram == pytest.approx(-(np.log(4 / 7) + np.log(1 / 7)) / 2, abs=1e-12)
    # Of Witten and Bell: x after the beginning, and z after that and x; both contexts occur once.
    base = 1 / known.vocabulary
    first = (1 + (1 + (3 + 2 * base) / 6) / 2) / 2
    second = (2 * (2 * base / 6) / 5) / 2
    assert known.trigram == pytest.approx(-(np.log(first) + np.log(second)) / 2, abs=1e-12)


def test_the_unigram_of_a_world(tmp_path: Path) -> None:
    sizes = ["--world-documents", "2000", "--world-held-out", "300", "--world-labelled", "20"]
    words = ["preprocess", "--world", "quad", *sizes, "--world-pairs", "10"]
    assert main([*words, "--destdir", str(tmp_path / "quad")]) == 0
    estimate = Manifest.load(tmp_path / "quad").details["world"]["constants"]["losses"]["unigram"]
    known = read_corpus(tmp_path / "quad")
    # That of the manifest has the counts of the split itself, so it is a little less.
    assert 0 < known.unigram - estimate["mean"] < 0.03
    # The same trigrams, but for the symbols that are no words, which share 1/V.
    losses = Manifest.load(tmp_path / "quad").details["world"]["constants"]["losses"]
    assert known.trigram == pytest.approx(losses["ngram"]["mean"], abs=1e-3)
