"""Fine-tuning on extractive question answering: SQuAD 1.1 and 2.0, and sets of their form (MRQA).

Windows, head and decoding follow the code of ELECTRA (Clark et al. 2020). Shapes: B rows, S length,
D width, K beam.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from metaseq_lm.config.tasks import SquadConfig
from metaseq_lm.core.batch import Logs, Terms
from metaseq_lm.core.config import RunConfig
from metaseq_lm.criterions.labelled import SquadCriterion
from metaseq_lm.data.squad.sets import SquadSet, squad_manifest
from metaseq_lm.data.squad.windows import AnswerBatch, SquadWindows
from metaseq_lm.data.storage.manifest import require_tokenizer
from metaseq_lm.data.streams import Shuffled, Stream, sorted_pass
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.engine.engine import Engine
from metaseq_lm.evaluation.predictions import mean_answers
from metaseq_lm.evaluation.squad import (
    Answers,
    PredictedAnswers,
    WindowAnswers,
    best_text,
    merge_answers,
    squad_results,
    window_texts,
)
from metaseq_lm.evaluation.suites import OVERALL
from metaseq_lm.models.transformer.span_head import SpanModel
from metaseq_lm.tasks import Passes, Scored
from metaseq_lm.tasks.finetuning import (
    LabelledSetTask,
    encoder_sizes,
    evaluate_predictions,
    labelled_folder,
)


class SquadTask(LabelledSetTask):
    """A pre-trained encoder and heads that point at the answer."""

    exported = True
    criterion: SquadCriterion
    criterions = (SquadCriterion,)

    def __init__(self, config: SquadConfig, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        squad_manifest(labelled_folder(run_config))
        # Every evaluation, and the files of predictions, use the same split.
        self.windows = lru_cache(maxsize=4)(lambda split: _windows_of(run_config, split))

    @classmethod
    def n_examples(cls, config: RunConfig) -> int:
        return len(_windows_of(config, "train"))

    # ---------------------------------------------------------------- data and model

    def build_streams(self, split: str) -> dict[str, Stream]:
        seed, size = self.run_config.seed, self.config.batch_size
        windows = self.windows(split)
        if split == "train":
            order = Shuffled(len(windows), size, seed, "train")
            return {split: Stream(split, order, windows.batch, seed, windows.lengths)}
        numbers = np.arange(len(windows))
        return {split: sorted_pass(split, numbers, windows.lengths, windows.batch, size, seed)}

    def cut_rows(self, split: str) -> dict[str, np.ndarray]:
        """Return which questions are cut; contexts are not cut, but split into windows."""
        return {"": self.windows(split).data.questions.sizes > self.config.max_query_length}

    def build_model(self) -> nn.Module:
        sizes, vocabulary = encoder_sizes(self.run_config), self.vocabulary
        flags = (self.config.joint, self.config.answerability)
        return SpanModel(sizes, len(vocabulary), vocabulary.pad, *flags)

    # ---------------------------------------------------------------- scores

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return official scores, the mean loss of a window and its parts, and question rows."""
        ((split, batches),) = passes.items()

        def judge(batch: AnswerBatch) -> tuple[Terms, list[WindowAnswers]]:
            x = model(batch.tokens, batch.layout, batch.segments)
            return self.criterion.terms(model, x, batch), self._decode(split, model, x, batch)

        logs, windows = evaluate_predictions(engine, batches, judge)
        # Results from other replicas are tuples.
        window_answers = itertools.starmap(WindowAnswers, windows)
        answers = merge_answers(self.windows(split), window_answers, self.config.n_best)
        ids = [row["id"] for row in self.windows(split).data.texts[1]]
        texts = {ids[question]: best.best for question, best in answers.items()}
        odds = {ids[question]: self._odds(best) for question, best in answers.items()}

        def rows() -> list[dict[str, Any]]:
            return [self._row(split, question, best) for question, best in sorted(answers.items())]

        return Scored(self._official(split, texts, odds) | logs, rows)

    def ensemble(
        self, split: str, members: Sequence[Sequence[dict[str, Any]]]
    ) -> tuple[Logs, Sequence[dict[str, Any]]]:
        """Return official scores and rows of the runs' mean probabilities, see `mean_answers`."""
        rows = mean_answers(members, self.config.n_best)
        rows = [row | {"predicted": self._predicted(split, row)} for row in rows]
        texts = {row["id"]: best_text(row) for row in rows}
        odds = {row["id"]: row["null_odds"] for row in rows}
        return self._official(split, texts, odds), rows

    def submissions(self, split: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Return the files of the leaderboard by id: texts, odds of no answer, and n-best lists."""
        files = {
            "predictions": {row["id"]: row["predicted"] for row in rows},
            "null_odds": {row["id"]: row["null_odds"] for row in rows},
            "nbest": {row["id"]: row["nbest"] for row in rows},
        }
        if self.windows(split).data.answerable_only:
            del files["null_odds"]
        return {
            f"{name}.{split}.json": json.dumps(content, ensure_ascii=False) + "\n"
            for name, content in files.items()
        }

    def _decode(
        self, split: str, model: nn.Module, x: Tensor, batch: AnswerBatch
    ) -> list[WindowAnswers]:
        """Return the outputs of each window of a batch, given its states x (B, S, D)."""
        assert isinstance(model, SpanModel) and batch.samples is not None
        options, windows = self.config, self.windows(split)
        beam = model.best_spans(x, batch.answer_mask, options.beam)
        scores = beam.start_scores.double().unsqueeze(-1) + beam.end_scores.double()
        arrays = [t.cpu().numpy() for t in (beam.starts, beam.ends, scores)]
        answers = []
        for row, (window, null) in enumerate(zip(batch.samples.tolist(), beam.null.tolist())):
            starts, ends, values = (array[row] for array in arrays)
            limits = options.n_best, options.max_answer_length
            best = window_texts(windows, window, (starts, ends, values), *limits)
            answers.append(WindowAnswers(window, null, best))
        return answers

    def _odds(self, answers: Answers) -> float:
        """Return the no-answer odds: its logit, or (BERT) its score minus the best span's."""
        if self.config.answerability:
            return answers.null
        return answers.null - answers.best_score

    def _official(self, split: str, texts: dict[str, str], odds: dict[str, float]) -> Logs:
        """Return the official scores of the best texts and the odds of no answer, by question."""
        answers = PredictedAnswers(texts, odds)
        data = self.windows(split).data
        scores = squad_results(data, answers, self.config.null_threshold)[OVERALL].metrics
        return {"score": scores["f1"], **scores}

    def _row(self, split: str, question: int, answers: Answers) -> dict[str, Any]:
        """Return id, question, gold texts, predicted text ("" for no answer), odds, n-best list."""
        texts = self.windows(split).data.texts[1][question]
        scored = zip(answers.texts, answers.probabilities)
        row = {
            "index": question,
            "id": texts["id"],
            "question": texts["question"],
            "gold": texts["answers"],
            "predicted": "",
            "null_odds": self._odds(answers),
            "nbest": [{"text": t, "score": s, "probability": p} for (s, t), p in scored],
        }
        return row | {"predicted": self._predicted(split, row)}

    def _predicted(self, split: str, row: dict[str, Any]) -> str:
        """Return the best text of a row; "" if its no-answer odds are above the threshold."""
        answerable = self.windows(split).data.answerable_only
        if not answerable and row["null_odds"] > self.config.null_threshold:
            return ""
        return best_text(row)


def _windows_of(config: RunConfig, split: str) -> SquadWindows:
    options = config.task
    vocabulary = Vocabulary.load(Path(config.data) / "dict.txt")
    data = SquadSet(labelled_folder(config), split)
    require_tokenizer(data.folder, data.tokenizer_hash)
    lengths = options.tokens_per_sample, options.max_query_length, options.doc_stride
    return SquadWindows(data, vocabulary, split == "train", *lengths)
