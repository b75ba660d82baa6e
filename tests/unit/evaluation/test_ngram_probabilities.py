"""Sentences scored by n-grams of a corpus, as suites take them."""

from pathlib import Path

import numpy as np
import pytest
from agreement import make_data

from metaseq_lm.data.labelled.files import SourceSentence
from metaseq_lm.evaluation.ngram_probabilities import _NGramProbabilities, ngrams_of

SENTENCES = [
    SourceSentence("the dogs near the cat run", ""),
    SourceSentence("the dogs near the cat runs", ""),
]


@pytest.fixture(scope="module")
def trigrams(tmp_path_factory: pytest.TempPathFactory) -> _NGramProbabilities:
    return ngrams_of(make_data(tmp_path_factory.mktemp("ngrams")))["ngram"]


def test_parts_and_changed_tokens_are_parts_of_the_sentence(trigrams: _NGramProbabilities) -> None:
    good, bad = trigrams.score(SENTENCES)
    assert len(good.tokens) == len(good.log_probs) == 6
    cut = SENTENCES[0].text.index(" near")
    (sums,) = trigrams.score_parts(SENTENCES[:1], [[(0, cut), (cut, 100)]])
    np.testing.assert_allclose(sums, [good.log_probs[:2].sum(), good.log_probs[2:].sum()])
    ((of_good, of_bad),) = trigrams.score_changed([(SENTENCES[0], SENTENCES[1])])
    assert of_good.pll == good.log_probs[-1] and of_bad.pll == bad.log_probs[-1]


def test_scores_do_not_depend_on_other_sentences(trigrams: _NGramProbabilities) -> None:
    together = trigrams.score(SENTENCES)
    for sentence, score in zip(SENTENCES, together):
        np.testing.assert_array_equal(trigrams.score([sentence])[0].log_probs, score.log_probs)


def test_a_folder_without_a_corpus_has_no_ngrams(tmp_path: Path) -> None:
    assert ngrams_of(tmp_path) == {}
