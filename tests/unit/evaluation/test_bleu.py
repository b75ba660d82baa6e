"""BLEU: known values, and what is refused."""

import importlib.util
import math

import pytest

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.evaluation import bleu


def test_known_values():
    pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
    four, five = "a b c d", "a b c d e"
    same = [five, "f g h i"]
    assert bleu.corpus_bleu(same, same) == pytest.approx(100)
    # 4 of 5 words, 3 of 4 pairs, 2 of 3, 1 of 2; equal lengths, so no brevity penalty.
    wanted = 100 * math.prod([4 / 5, 3 / 4, 2 / 3, 1 / 2]) ** 0.25
    assert bleu.corpus_bleu([five], [four + " x"]) == pytest.approx(wanted)
    # Of 5 words 4 are said, all right: the penalty alone.
    assert bleu.corpus_bleu([five], [four]) == pytest.approx(100 * math.exp(1 - 5 / 4))
    assert bleu.corpus_bleu([four], [four.replace("b c", "c b")]) == pytest.approx(0, abs=1e-6)
    assert bleu.corpus_bleu([four.capitalize()], [four]) < 100
    # Tokenised text is taken as it is; 13a would cut the full stop off.
    assert bleu.corpus_bleu([five + "."], [five + " ."]) < 100
    assert bleu.corpus_bleu([five + "."], [five + " ."], "13a") == pytest.approx(100)
    with pytest.raises(MetaseqError, match="1 references.*2 translations"):
        bleu.corpus_bleu(["a"], ["a", "b"])


def test_bleu_refuses_unknown_tokenizers_and_a_missing_package(monkeypatch):
    with pytest.raises(UsageError, match="none, 13a"):
        bleu.check_bleu("moses")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install sacrebleu"):
        bleu.check_bleu("none")
