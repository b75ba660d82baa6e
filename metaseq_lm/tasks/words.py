"""Tasks on labelled words: tags (chunks, entities, parts of speech, supertags) and dependencies.

Also official scores, files of predictions, and a frozen language model as further input. Details
follow Clark et al. 2018. Shapes: B rows, S positions, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from metaseq_lm.config.models import BiLSTMConfig
from metaseq_lm.core.batch import Logs, Terms, WordBatch
from metaseq_lm.core.config import RunConfig, options_of
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.criterions.tagging import Parsing, Tagging, WordLabels
from metaseq_lm.data.storage.manifest import Manifest, labels_in, tokenizer_hash
from metaseq_lm.data.streams import Stream, sorted_pass
from metaseq_lm.data.words.buckets import Bucketed
from metaseq_lm.data.words.collate import word_rows
from metaseq_lm.data.words.columns import conllu_text
from metaseq_lm.data.words.sets import TAGS, TREES, WordSet
from metaseq_lm.data.words.tags import bio_tags
from metaseq_lm.data.words.vocabulary import PAD, WordVocabulary
from metaseq_lm.engine.engine import Engine
from metaseq_lm.evaluation.chunks import conlleval_report, conlleval_spans
from metaseq_lm.evaluation.words import score_tags, score_trees, tag_names
from metaseq_lm.models.bilstm import BiLSTM
from metaseq_lm.models.layers import RAW_PREFIX, ScalarMix
from metaseq_lm.models.words.word_model import (
    PRIMARY,
    ParsingModule,
    TaggingModule,
    ViewsEncoder,
    WordModel,
    WordNet,
    heads_of,
)
from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.runs.lineage_cost import Costs, cost_of_ancestors
from metaseq_lm.tasks import Batches, Passes, Scored, Task, model_class
from metaseq_lm.tasks.finetuning import ENCODER, different_sets, evaluate_predictions
from metaseq_lm.tasks.masked_lm import scored_rows

_AVERAGE = "average.net."
AT = ":"  # between the names of a set and a split
_LANGUAGE_MODEL = "bilstm_lm"
# A sentence number, and the predictions for its words: classes, or relations and heads.
_Predicted = tuple[int, list[list[int]]]


class WordTask(Task):
    """One or several labelled sets, each with a stream and heads of the same name.

    From another run it takes the encoder, the averaged one if there is one; heads are fresh.
    """

    criterion: WordLabels
    criterions = (WordLabels,)
    fresh = ("heads.", "mixes.", f"{_AVERAGE}heads.", f"{_AVERAGE}mixes.", "language_model.")

    def __init__(self, config: Any, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        self.vocabulary = WordVocabulary.load(self.data)
        # Every evaluation, and the files of predictions, use the same split.
        self.labelled = lru_cache(maxsize=None)(self._labelled)
        for name in different_sets(self.names):
            if hasattr(nn.ModuleDict(), name):
                raise UsageError(
                    f"a set called '{name}' cannot have heads; make it under another name"
                )

    @classmethod
    def prepare(cls, config: RunConfig) -> RunConfig:
        # Not in __init__: evaluation of such a run has its own weights and no init_from.
        if config.task.freeze_encoder and not config.init_from:
            raise UsageError("task.freeze_encoder needs init_from, the run whose encoder it is")
        return _with_sizes(config)

    @property
    def names(self) -> list[str]:
        """The labelled sets, folders in DATA."""
        raise NotImplementedError(f"task '{self.run_config.task._name}' must define names")

    def _labelled(self, name: str, split: str) -> WordSet:
        data = WordSet(self.data / name, split, self.vocabulary)
        if data.labels is None:
            raise MetaseqError(f"{data.folder}: text without labels")
        return data

    def chosen(self, name: str) -> np.ndarray:
        """Return the training sentences of a set that are used: a seeded share."""
        seed = self.config.fraction_seed
        if seed is None:
            seed = self.run_config.seed
        return self.labelled(name, "train").fraction(self.config.label_fraction, seed)

    # ---------------------------------------------------------------- data and model

    def build_streams(self, split: str) -> dict[str, Stream]:
        if split != "train":
            return self.single_pass(split)
        return {name: self.training_stream(name) for name in self.names}

    def training_stream(self, name: str) -> Stream:
        """Return the training batches of a set: buckets of sentences of similar lengths."""
        options, seed = self.config, self.run_config.seed
        data, samples = self.labelled(name, "train"), self.chosen(name)
        size, buckets = options.batch_size, options.buckets
        order = Bucketed(data.lengths, size, seed, name, samples=samples, buckets=buckets)
        return Stream(name, order, partial(word_batch, data, name), seed, data.lengths)

    def single_pass(self, split: str) -> dict[str, Stream]:
        """Return one pass over a split of each set; for "train" over the sentences in use."""
        size, seed = self.config.batch_size, self.run_config.seed
        passes = {}
        for name in self.names:
            data, train = self.labelled(name, split), split == "train"
            samples = self.chosen(name) if train else np.arange(len(data))
            samples = samples[: scored_rows(self, split, len(samples))]
            collate = partial(word_batch, data, name)
            one_pass = sorted_pass(name, samples, data.lengths, collate, size, seed)
            passes[f"{name}{AT}{split}"] = one_pass
        return passes

    def build_model(self) -> nn.Module:
        options = self.config
        encoder = self.build_encoder()
        encoder.requires_grad_(not options.freeze_encoder)
        heads = {name: self.build_heads(name, encoder) for name in self.names}
        if not options.elmo_sizes:
            return WordModel(encoder, heads, options.average_decay)
        mixes = {name: self.scalar_mix() for name in self.names}
        words, layers, width, cells = options.elmo_sizes
        ids = torch.zeros(len(self.vocabulary), dtype=torch.long)
        frozen = BiLSTM(BiLSTMConfig(layers, width, cells, 0.0), words, PAD, ids)
        return WordModel(encoder, heads, options.average_decay, mixes, frozen)

    def scalar_mix(self) -> ScalarMix:
        """Return a mix of the layers of the language model."""
        _, layers, width, _ = self.config.elmo_sizes
        return ScalarMix(layers + 1, 2 * width, self.config.elmo_dropout)

    def build_encoder(self) -> ViewsEncoder:
        """Return the configured encoder of words; UsageError for a model of another kind."""
        model, vocabulary = self.run_config.model, self.vocabulary
        mix = self.scalar_mix() if self.config.elmo_sizes else None
        encoder: ViewsEncoder = model_class(self.run_config, ViewsEncoder)(
            model,
            len(vocabulary),
            len(vocabulary.characters),
            vocabulary.vectors if getattr(model, "word_vectors", False) else None,
            mix,
        )
        if mix is not None:
            encoder.extra_width = mix.width
        if getattr(model, "normalize_words", False) and sum(vocabulary.counts):
            counts = torch.tensor(vocabulary.counts, dtype=torch.float64)
            encoder.embedding.frequencies.copy_(counts / counts.sum())
        return encoder

    def load_frozen(self, model: nn.Module) -> None:
        """Fill in the language model of task.elmo."""
        assert isinstance(model, WordModel)
        if model.language_model is not None:
            stored = checkpoint.load(manifests.resolve(self.config.elmo, prefer="best"))
            encoder = {n: w for n, w in stored.weights.items() if n.startswith(ENCODER)}
            weights = {name.removeprefix(ENCODER): weight for name, weight in encoder.items()}
            checkpoint.load_into(model.language_model, weights, stored.path)

    def facts(self) -> dict[str, Any]:
        """Return the classes of each set, and the hash of the weights of task.elmo."""
        facts: dict[str, Any] = {"labels": labels_in(self.data, options_of(self.config))}
        if self.config.elmo:
            manifest = manifests.read_manifest(manifests.resolve(self.config.elmo, prefer="best"))
            facts["language_model"] = manifests.hash_of_weights(manifest)
        return facts

    def further_costs(self) -> Costs:
        """Return the cost of the language model of task.elmo."""
        if not self.config.elmo:
            return {}
        return cost_of_ancestors(self.config.elmo, prefer="best")

    def build_heads(self, name: str, encoder: ViewsEncoder) -> nn.ModuleDict:
        """Return the modules of a set, the primary one first; methods add others."""
        return nn.ModuleDict({PRIMARY: self.build_module(self.some_split(name), encoder)})

    def build_module(self, data: WordSet, encoder: ViewsEncoder, **view: Any) -> nn.Module:
        """Return a module for the classes of a set; `view` has its options, such as its input."""
        options, classes = self.config, len(data.label_names)
        if data.form != TREES:
            return TaggingModule(encoder, classes, options.hidden_dim, **view)
        sizes = (options.hidden_dim, options.parser_dim, options.root)
        return ParsingModule(encoder, classes, encoder.dropout, *sizes, **view)

    def some_split(self, name: str) -> WordSet:
        """Return any split of a set; a folder without a training split can be evaluated."""
        return self.labelled(name, sorted(Manifest.load(self.data / name).splits)[0])

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Load the encoder of a run of words, the averaged one if it has one."""
        averaged = _AVERAGE + ENCODER
        prefix = averaged if any(name.startswith(averaged) for name in weights) else ENCODER
        chosen = {}
        for name, weight in weights.items():
            if name.startswith(prefix):
                suffix = name.removeprefix(prefix)
                chosen[ENCODER + suffix] = weight
                if self.config.average_decay:
                    chosen[averaged + suffix] = weight
        return chosen

    # ---------------------------------------------------------------- updates and scores

    def needs(self, update: int) -> dict[str, int]:
        return dict.fromkeys(self.names, 1)

    def update(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        """Do one step; averaged weights move before the gradient is applied, as in their code."""
        assert isinstance(model, WordModel)
        if model.average is not None:
            model.average.update_parameters(model)
        return super().update(engine, model, batches)

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return "score" (the mean main score of the sets), all scores, loss and predictions.

        With several sets, names begin with the set's. Names that begin with "raw_" are for the
        weights themselves, all others for the averaged ones.
        """
        assert isinstance(model, WordModel)
        nets: dict[str, WordNet] = {"": model.averaged}
        if self.config.score_raw and model.average is not None:
            nets[RAW_PREFIX] = model
        logs: Logs = {}
        main_scores: dict[str, list[float]] = {f"{prefix}score": [] for prefix in nets}
        losses: list[float] = []
        makers: list[Callable[[], list[dict[str, Any]]]] = []
        for key, batches in passes.items():
            name, _, split = key.partition(AT)
            data = self.labelled(name, split)
            terms, predicted = self._predicted(engine, model, nets, data, name, batches)
            losses.append(terms.pop("loss"))
            logs |= terms
            for prefix in nets:
                scores = set_scores(data, predicted[prefix])
                main_scores[f"{prefix}score"].append(next(iter(scores.values())))
                logs |= {prefix + model.label(name, key): v for key, v in scores.items()}
            makers.append(partial(prediction_rows, name, data, predicted[""]))
        means = {name: float(np.mean(values)) for name, values in main_scores.items()}
        metrics = {**means, **logs, "loss": float(np.mean(losses))}
        return Scored(metrics, lambda: list(chain.from_iterable(make() for make in makers)))

    def _predicted(
        self,
        engine: Engine,
        model: WordModel,
        nets: dict[str, WordNet],
        data: WordSet,
        name: str,
        batches: Iterable[list[Any]],
    ) -> tuple[Logs, dict[str, list[_Predicted]]]:
        """Return the terms of the first of `nets` on a set, and predictions of each by prefix."""

        def judge(batch: WordBatch) -> tuple[Terms, list[tuple[str, _Predicted]]]:
            predicted: list[tuple[str, _Predicted]] = []
            terms: Terms = {}
            batch = model.read(batch)
            for prefix, net in nets.items():
                scores = net.scores(net.views(batch), batch.scored, name, PRIMARY)
                terms = terms or self.criterion.terms(net, scores, batch)
                predicted += [(prefix, row) for row in _predictions_of(data, scores, batch)]
            return terms, predicted

        logs, predictions = evaluate_predictions(engine, batches, judge)
        by_net: dict[str, list[_Predicted]] = {net: [] for net in nets}
        for prefix, row in predictions:
            by_net[prefix].append(row)
        # The official accuracy replaces the term.
        return {k: v for k, v in logs.items() if not k.endswith("accuracy")}, by_net

    def submissions(self, split: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Return NAME.SPLIT.conll (word, gold, predicted; spans in BIO) or .conllu of each set."""
        files: dict[str, str] = {}
        for name in self.names:
            files |= prediction_files(name, self.labelled(name, split), rows)
        return files


class _OneWordSetTask(WordTask):
    """A word encoder and one labelled set of a `form`; UsageError for a set of another form."""

    form = ""

    @property
    def names(self) -> list[str]:
        return [self.config.labelled]

    def _labelled(self, name: str, split: str) -> WordSet:
        data = super()._labelled(name, split)
        if data.form != self.form:
            raise UsageError(
                f"{data.folder} is a set of {data.form}, task '{self.run_config.task._name}' is "
                f"for {self.form}; tagged sets are for task tagging, treebanks for parsing"
            )
        return data


class TaggingTask(_OneWordSetTask):
    """An encoder of words and one tagged set; scores are F1 of spans, or accuracy."""

    criterions = (Tagging,)
    form = TAGS


class ParsingTask(_OneWordSetTask):
    """An encoder of words and one treebank; scores are LAS and UAS without punctuation."""

    criterions = (Parsing,)
    form = TREES


def word_batch(
    data: WordSet, name: str, samples: np.ndarray, keys: np.ndarray, width: int = 0
) -> WordBatch:
    """Return sentences of a set as rows of `word_rows`, with the size "pairs".

    It counts the pairs of neighbouring words.
    """
    batch = word_rows(data, samples, width)
    pairs = int((batch.lengths - 1).clamp(min=0).sum())
    return batch.replace(set_name=name, sizes={**batch.sizes, "pairs": pairs})


def _with_sizes(config: RunConfig) -> RunConfig:
    """Return `config` with task.elmo_sizes set from the run of task.elmo.

    A checkpoint, which has the weights, then no longer needs that run. Raises UsageError if the run
    has another model, or another vocabulary than the data folder, CheckpointError if there is none.
    """
    if not config.task.elmo:
        return replace(config, task=replace(config.task, elmo_sizes=[]))
    source_path = manifests.resolve(config.task.elmo, prefer="best")
    source = checkpoint.load(source_path)
    model = (source.manifest.get("config") or {}).get("model") or {}
    if model.get("_name") != _LANGUAGE_MODEL:
        raise UsageError(
            f"task.elmo: {source_path} has model {model.get('_name')}; give a run of --task "
            f"word_language_modeling --criterion language_modeling --model {_LANGUAGE_MODEL}"
        )
    then, now = source.manifest.get("tokenizer"), tokenizer_hash(config.data)
    if then != now or f"{ENCODER}ids" not in source.weights:
        raise UsageError(
            f"task.elmo: {source_path} was trained on another vocabulary than {config.data} has "
            f"({then} and {now}); train it on this folder, or make the folder with its vocabulary: "
            "preprocess --words --tokenizer-from FOLDER"
        )
    words = len(source.weights[f"{ENCODER}tokens.weight"])
    sizes = ("encoder_layers", "encoder_embed_dim", "encoder_hidden_dim")
    elmo_sizes = [words, *(model[name] for name in sizes)]
    return replace(config, task=replace(config.task, elmo_sizes=elmo_sizes))


def _predictions_of(data: WordSet, scores: Tensor, batch: WordBatch) -> list[_Predicted]:
    """Return the best classes of the words of a batch, or relations and heads, as plain numbers.

    `scores` are (B, S, C). The class for tags that do not occur in training is never predicted.
    """
    if data.unseen is not None and data.form != TREES:
        scores = scores.clone()
        scores[..., data.unseen] = -float("inf")
    best = scores.argmax(-1)
    parts = [best]
    if data.form == TREES:
        heads, relations = heads_of(best, len(data.label_names))
        parts = [relations, heads]
    columns = [part.tolist() for part in parts]
    lengths = batch.lengths.tolist()
    assert batch.samples is not None
    rows = []
    for row, sample in enumerate(batch.samples.tolist()):
        end = lengths[row] + 1
        rows.append((sample, [column[row][1:end] for column in columns]))
    return rows


def set_scores(data: WordSet, predictions: Sequence[_Predicted]) -> Logs:
    """Return the scores of a split from all its predictions, the main one first.

    The main score is "f1" for spans, "accuracy" for other tags, "las" for trees; all are in [0, 1].
    """
    ordered = sorted(predictions)
    samples = [sample for sample, _ in ordered]
    columns = [sentence for _, sentence in ordered]
    parts = [list(part) for part in zip(*columns, strict=True)]
    if data.form == TREES:
        scores, main = score_trees(data, samples, parts[1], parts[0]), "las"
    else:
        scores, main = score_tags(data, samples, parts[0]), "f1" if data.spans else "accuracy"
    return {main: scores[main], **scores}


def prediction_rows(
    name: str, data: WordSet, predictions: Sequence[_Predicted]
) -> list[dict[str, Any]]:
    """Return "index", "set", "words", "gold" and "predicted" label names of each sentence.

    Trees also have "gold_heads" and "predicted_heads": positions of words, from 1, or 0 for the
    root.
    """
    rows = []
    assert data.labels is not None
    for sample, columns in predictions:
        gold = data.labels[sample].tolist()
        row: dict[str, Any] = {
            "index": sample,
            "set": name,
            "words": data.surface(np.array([sample]))[0],
            "gold": tag_names(data, [gold])[0],
            "predicted": tag_names(data, columns[:1])[0],
        }
        if data.heads is not None:
            row |= {"gold_heads": data.heads[sample].tolist(), "predicted_heads": columns[1]}
        rows.append(row)
    return rows


def prediction_files(name: str, data: WordSet, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the predictions of a split as one file: CoNLL (word, gold, predicted) or CoNLL-U."""
    sentences = sorted((row for row in rows if row["set"] == name), key=lambda row: row["index"])
    if data.form == TREES:
        trees = (conllu_text(r["words"], r["predicted_heads"], r["predicted"]) for r in sentences)
        return {f"{name}.{data.split}.conllu": "".join(trees)}
    lines: list[str] = []
    gold_tags, predicted_tags = [], []
    for row in sentences:
        # CoNLL-U allows blanks in words.
        words = ["_".join(word.split()) for word in row["words"]]
        tags = [row["gold"], row["predicted"]]
        if data.spans:
            # Every version of conlleval reads BIO.
            tags = [bio_tags(conlleval_spans(column), len(column)) for column in tags]
        lines += ["\t".join(part) for part in zip(words, *tags)]
        lines.append("")
        gold_tags.append(tags[0])
        predicted_tags.append(tags[1])
    files = {f"{name}.{data.split}.conll": "".join(line + "\n" for line in lines)}
    if data.spans:
        report = conlleval_report(gold_tags, predicted_tags)
        files[f"{name}.{data.split}.conlleval.txt"] = report
    return files
