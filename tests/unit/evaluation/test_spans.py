"""Decoding against loops over every span of every window; merging in any order."""

import random

import numpy as np
import pytest
import squad_data

from metaseq_lm.data.preprocess.pipeline import Request, preprocess
from metaseq_lm.data.preprocess.squad import SquadPipeline
from metaseq_lm.data.squad.sets import SquadSet
from metaseq_lm.data.squad.windows import SquadWindows
from metaseq_lm.data.tokenizers.loading import tokenizer_class
from metaseq_lm.evaluation.squad import Answers, WindowAnswers, merge_answers, window_texts


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> SquadWindows:
    """Windows of contexts in which words come again and again."""
    folder = tmp_path_factory.mktemp("squad")
    tokenizer = tokenizer_class("word").train(["a b c d ? who"], 100, 2)
    content = squad_data.official("d", 0)
    draw = random.Random(0)
    for number, size in enumerate((0, 1, 5, 17, 30)):
        context = " ".join(draw.choice("abcd") for _ in range(size))
        nodes = [
            {"id": f"{number}{n}", "question": "who ?"[n:], "answers": [], "is_impossible": True}
            for n in range(2)
        ]
        content["data"][0]["paragraphs"].append({"context": context, "qas": nodes})
    path = squad_data.write(folder / "in.json", content)
    preprocess(SquadPipeline(Request(folder / "out", {"valid": [path]}), "v2.0", tokenizer))
    data = SquadSet(folder / "out", "valid")
    return SquadWindows(data, tokenizer.vocabulary, False, 13, 64, 3)


@pytest.mark.parametrize(("beam", "n_best", "longest"), [(13, 1000, 1000), (13, 4, 3), (4, 3, 2)])
def test_against_brute_force(windows: SquadWindows, beam: int, n_best: int, longest: int) -> None:
    """Random scores of starts and of ends given each start; a beam of 13 is all of a row."""
    draw = np.random.default_rng(1)
    batch = windows.batch(np.arange(len(windows)), width=13)
    found, wanted = [], {}
    for window in range(len(windows)):
        starts = np.round(draw.normal(size=13), 1)  # rounded, so that some are equal
        ends = np.round(draw.normal(size=(13, 13)), 1)
        null = float(draw.normal())
        chosen = np.argsort(-starts, kind="stable")[:beam]
        ordered = np.argsort(-ends[chosen], axis=1, kind="stable")[:, :beam]
        scores = starts[chosen][:, None] + np.take_along_axis(ends[chosen], ordered, 1)
        spans = (chosen, ordered, scores)
        found.append(
            WindowAnswers(window, null, window_texts(windows, window, spans, n_best, longest))
        )
        question = int(windows.question[window])
        nulls, texts = wanted.setdefault(question, ([], []))
        nulls.append(null)
        best = windows.max_context(window)
        words = windows.data.texts[0][windows.data.paragraph[question]].split()
        begin = int(windows.context_at(np.array([window]))[0])
        shift, length = int(windows.start[window]), int(windows.length[window])
        for i, start in enumerate(chosen.tolist()):
            for j, end in enumerate(ordered[i].tolist()):
                first, last = start - begin, end - begin
                if not (0 <= first <= last < length and last - first + 1 <= longest):
                    continue
                assert batch.segments[window, start] and batch.segments[window, end]
                if best[first]:
                    text = " ".join(words[shift + first : shift + last + 1])
                    texts.append((float(scores[i, j]), window, i, j, text))
    random.Random(1).shuffle(found)  # replicas hand them over in any order
    answers = merge_answers(windows, found, n_best)
    assert answers.keys() == set(range(10)) == wanted.keys()
    for question, (nulls, texts) in wanted.items():
        assert answers[question].null == min(nulls)
        unique: dict[str, float] = {}
        for score, _, _, _, text in sorted(texts, key=lambda t: (-t[0], *t[1:4])):
            unique.setdefault(text, score)
        expected = [(score, text) for text, score in unique.items()][:n_best]
        assert answers[question].texts == expected
        assert answers[question].best == (expected[0][1] if expected else "")
    assert len(answers[9].texts) == min(n_best, len(answers[9].texts)) > 0


def test_probabilities() -> None:
    answers = Answers(0.0, [(2.0, "a"), (1.0, "b"), (-1000.0, "c")])
    assert sum(answers.probabilities) == pytest.approx(1)
    assert answers.probabilities[0] / answers.probabilities[1] == pytest.approx(np.e)
    assert (Answers().best, Answers().best_score, Answers().probabilities) == ("", 0.0, [])
