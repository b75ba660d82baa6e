"""Frozen states of pairs of texts and of spans, as probes read them: means over their tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_runs import configure
from sentence_sets import learnable, write_corpus

from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.labelled.sentence_rows import SentenceRows
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.evaluation.suites import OVERALL, build_suite
from metaseq_lm.training.parts import Parts, build_parts, prepare_config
from metaseq_lm.training.states import EncoderStates


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    write_corpus(folder)
    for form in ("pair", "spans", "single", "regression", "choices"):
        learnable(folder / form, form, rows=160)
    return folder


def opened(data: Path, form: str) -> Parts:
    options = [f"task.labelled={form}", "engine.precision=fp64"]
    return build_parts(prepare_config(configure(data, data / "none", *options)), dry_run=True)


@pytest.mark.parametrize("form", ["pair", "spans"])
def test_states_are_means_over_texts_or_spans(data: Path, form: str) -> None:
    parts = opened(data, form)
    rows = SentenceRows(LabelledSet(data / form, "train"), parts.task.vocabulary, 32)
    states = EncoderStates(parts, batch_tokens=64)
    samples = np.array([7, 2, 11])
    means = states.means_of_parts(rows, samples)
    assert len(means) == 2 and means[-1].shape == (3, 2, 32)
    for place, sample in enumerate(samples):
        batch = rows.batch(np.array([sample]), np.zeros(1, np.uint64))
        assert batch.segments is not None
        with torch.no_grad():
            final = parts.model.eval().encoder(batch.tokens, batch.layout, batch.segments)[0]
        texts = [column[sample] for column in rows.data.inputs]
        starts = [1, 2 + len(texts[0])]  # behind [CLS], and behind the first [SEP]
        if form == "pair":
            borders = [(start, start + len(text)) for start, text in zip(starts, texts)]
        else:
            assert rows.data.spans is not None
            borders = [(1 + a, 1 + b) for _, a, b in rows.data.spans[sample].tolist()]
        for part, (start, stop) in enumerate(borders):
            expected = final[start:stop].mean(0).numpy()
            assert means[-1][place, part] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("form", ["single", "pair", "spans", "regression"])
def test_an_easy_rule_is_read_from_random_states(data: Path, form: str) -> None:
    suite = build_suite("probe")
    items = suite.read(data / form)
    results = suite.score(items, EncoderStates(opened(data, form)))
    metrics = results[OVERALL].metrics
    main = next(iter(metrics))
    assert main == ("pearson_spearman" if form == "regression" else "accuracy")
    assert metrics[main] > 0.8 and metrics[f"valid_{main}"] > 0.8
    references = suite.references(items, data / form)
    if form == "regression":
        assert references == {}
    else:
        assert references[OVERALL]["accuracy"].keys() == {"chance", "majority", "bag_of_words"}


def test_sets_of_candidates_are_refused(data: Path) -> None:
    with pytest.raises(UsageError, match="choices.*'choices'.*sentences"):
        build_suite("probe").check(data / "choices")
