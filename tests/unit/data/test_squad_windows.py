"""Windows of contexts: every token is in one, gold spans are where they should be, BERT's rules."""

import json

import numpy as np
import pytest
import squad_data

from metaseq_lm.config.tasks import SquadConfig
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.options import check_options
from metaseq_lm.data.preprocess.pipeline import Request, preprocess
from metaseq_lm.data.preprocess.squad import SquadPipeline
from metaseq_lm.data.squad.sets import SquadSet
from metaseq_lm.data.squad.windows import SquadWindows
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.loading import tokenizer_class


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Words as they stand: one token per number."""
    numbers = " ".join(map(str, range(100, 1000)))
    return tokenizer_class("word").train([f"after ? {numbers}"], 2000, 2)


@pytest.fixture(scope="module")
def data(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> SquadSet:
    """5 contexts of 40 tokens, one empty and one short; one answer that is not in its context."""
    folder = tmp_path_factory.mktemp("squad")
    content = squad_data.official("w", 5)
    answer = {"answers": [{"text": "999", "answer_start": 0}], "is_impossible": False}
    for number, context in enumerate(("", "101 102")):
        node = {"id": f"x{number}", "question": "?", **answer}
        content["data"][0]["paragraphs"].append({"context": context, "qas": [node]})
    path = squad_data.write(folder / "in.json", content)
    preprocess(SquadPipeline(Request(folder / "out", {"train": [path]}), "v2.0", tokenizer))
    return SquadSet(folder / "out", "train")


def pieces(size: int, room: int, stride: int) -> list[tuple[int, int]]:
    """(start, length) of the windows, by BERT's loop; one empty window for no tokens."""
    found, start = [], 0
    while True:
        length = min(size - start, room)
        found.append((start, length))
        if start + length == size:
            return found
        start += min(length, stride)


CUTS = [(12, 64, 3), (12, 64, 100), (10, 2, 1), (60, 64, 128), (9, 64, 5), (7, 0, 2)]


@pytest.mark.parametrize(("longest", "question", "stride"), CUTS)
@pytest.mark.parametrize("training", [False, True])
def test_rows(data, tokenizer, longest, question, stride, training):
    """Rows, masks and targets against a loop over questions and windows."""
    vocabulary = tokenizer.vocabulary
    windows = SquadWindows(data, vocabulary, training, longest, question, stride)
    batch = windows.batch(np.arange(len(windows)), width=longest)
    at = 0
    for number in range(len(data)):
        lost = data.first[number] < 0 and not data.impossible[number]
        if training and lost:
            continue
        query = data.questions[number].tolist()[:question]
        context = data.contexts[data.paragraph[number]].tolist()
        room = longest - 3 - len(query)
        covered, held = set(), 0
        for start, length in pieces(len(context), room, stride):
            inside = range(start, start + length)
            covered |= set(inside)
            row = [vocabulary.cls(0), *query, 2, *context[start : start + length], 2]
            begin = len(query) + 2
            assert batch.tokens[at].tolist() == row + [0] * (longest - len(row))
            wanted = [int(begin <= i < len(row)) for i in range(longest)]
            assert batch.segments[at].tolist() == wanted
            assert batch.answer_mask[at].tolist() == [True, *map(bool, wanted[1:])]
            if batch.padding is not None:
                assert batch.padding[at].tolist() == [i >= len(row) for i in range(longest)]
            first, last = data.first[number], data.last[number]
            target = int(batch.starts[at]), int(batch.ends[at])
            if first in inside and last in inside:
                held += 1
                assert (
                    batch.tokens[at][target[0] : target[1] + 1].tolist()
                    == (context[first : last + 1])
                )
                assert target == (first - start + begin, last - start + begin)
            else:
                assert target == (0, 0)
            assert batch.impossible[at] == data.impossible[number]
            assert windows.question[at] == number and windows.lengths[at] == len(row)
            at += 1
        assert covered == set(range(len(context)))
        assert held or data.first[number] < 0 or stride > room - 3
    assert at == len(windows) and windows.skipped == (2 if training else 0)
    assert batch.sizes == {"rows": len(windows)}


@pytest.mark.parametrize(("longest", "question", "stride"), CUTS)
def test_max_context(data, tokenizer, longest, question, stride):
    """Each token has its most context in one window: BERT's score, the first of equals."""
    windows = SquadWindows(data, tokenizer.vocabulary, False, longest, question, stride)
    for number in range(len(data)):
        own = np.flatnonzero(windows.question == number)
        for token in range(len(data.contexts[data.paragraph[number]])):
            best, wanted = -1.0, -1
            for window in own:
                start, length = int(windows.start[window]), int(windows.length[window])
                if start <= token < start + length:
                    score = min(token - start, start + length - 1 - token) + 0.01 * length
                    if score > best:
                        best, wanted = score, window
            for window in own:
                start, length = int(windows.start[window]), int(windows.length[window])
                if start <= token < start + length:
                    assert windows.max_context(window)[token - start] == (window == wanted)


def test_a_batch_is_rows_of_the_whole(data, tokenizer):
    windows = SquadWindows(data, tokenizer.vocabulary, True, 20, 64, 7)
    whole = windows.batch(np.arange(len(windows)))
    chosen = np.array([5, 0, 5])
    part = windows.batch(chosen, width=whole.tokens.shape[1])
    for name in ("tokens", "segments", "answer_mask", "starts", "ends", "impossible"):
        assert np.array_equal(getattr(part, name), getattr(whole, name)[chosen]), name


def test_windows_without_the_answer_stay(data, tokenizer):
    """They are labelled answerable and point at the first position."""
    windows = SquadWindows(data, tokenizer.vocabulary, True, 12, 64, 3)
    whole = windows.batch(np.arange(len(windows)))
    assert ((whole.starts == 0) & (whole.impossible == 0)).sum() > 20


def test_windows_refuse_unusable_questions(data, tokenizer, tmp_path):
    with pytest.raises(UsageError, match="question.* 3 tokens"):
        SquadWindows(data, tokenizer.vocabulary, False, 6, 64, 3)
    with pytest.raises(UsageError, match=r"task.doc_stride.* 1\b.* 0\b"):
        check_options(SquadConfig, SquadConfig(doc_stride=0), "task.")
    small = tokenizer_class("word").train(["after"], 10, 2)
    with pytest.raises(MetaseqError, match=r"out/train.context.bin.* 7\b"):
        SquadWindows(data, small.vocabulary, False, 12, 64, 3)
    content = squad_data.official("w", 1, 1)
    content["data"][0]["paragraphs"][0]["qas"][0]["answers"] = [{"text": "q", "answer_start": 0}]
    path = tmp_path / "in.json"
    path.write_text(json.dumps(content))
    preprocess(SquadPipeline(Request(tmp_path / "out", {"train": [path]}), "v2.0", tokenizer))
    lost = SquadSet(tmp_path / "out", "train")
    with pytest.raises(MetaseqError, match="1 questions skipped"):
        SquadWindows(lost, tokenizer.vocabulary, True, 512, 64, 128)
    assert len(SquadWindows(lost, tokenizer.vocabulary, False, 512, 64, 128)) == 1
