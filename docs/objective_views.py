"""What the pictures of docs/objectives show: masks and targets of a run's first batch.

The task makes the batch, the criterion reads it with a small model, and the masks are those that
the model's attention gets.

Shapes: B rows, Q queries, K keys.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from objective_catalogue import (
    DECODER,
    DOCUMENTS,
    ENCODER,
    TEXT,
    TOWERS,
    Objective,
    Panel,
    Picture,
)
from torch import Tensor, nn

from metaseq_lm.cli import main as command
from metaseq_lm.core.batch import SequenceBatch, TokenBatch
from metaseq_lm.core.loading import load_config
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.language_modeling import CausalLM, next_tokens
from metaseq_lm.data.corpus.predictions import PredictionBatch, source_of
from metaseq_lm.data.streams import Shard
from metaseq_lm.data.tokenizers.vocabulary import special_symbols
from metaseq_lm.data.tokenizers.wordpiece import WordPiece, wordpiece_library
from metaseq_lm.forward.passes import ForwardContext, Noise, use_context
from metaseq_lm.methods.electra.criterion import AllTokensMLM, Electric, ReplacedTokenDetection
from metaseq_lm.methods.electra.data import ElectraBatch
from metaseq_lm.methods.span_corruption.criterion import CorruptedBatch
from metaseq_lm.models.transformer.attention import (
    CrossAttention,
    SelfAttention,
    Visibility,
)
from metaseq_lm.models.transformer.encoder import Embeddings
from metaseq_lm.tasks import TextTask
from metaseq_lm.tasks.mixture import MixtureTask
from metaseq_lm.training.parts import build_model, build_task, prepare_config

LINES = {
    TEXT: ["the keeper feeds the elephants"] * 3,
    DOCUMENTS: ["the keeper feeds", "elephants feed"],
}
PIECES = "the keep ##er feed ##s elephant bird see ##ing a".split()
TASK_TOKENS = 6  # of UL2: [CLS0] and three modes; sentinels
LONGEST = {TEXT: 10, DOCUMENTS: 12}  # tokens of a row
SMALL = (
    *("model.encoder_layers=2", "model.encoder_embed_dim=16", "model.encoder_ffn_embed_dim=16"),
    *("model.encoder_attention_heads=2", "model.global_every=1", "model.max_positions=40"),
)
LABELS = {ReplacedTokenDetection: ("real", "fake"), Electric: ("data", "noise")}


@dataclass(frozen=True)
class Reading:
    """What a net reads: `tokens` (B, Q), and which of the tokens (B, K) its queries see (B, Q, K).

    `keys` are `tokens`, or those of an encoder and `tokens`.
    """

    tokens: Tensor
    keys: Tensor
    seen: Tensor


@dataclass(frozen=True)
class View:
    """What a panel shows.

    Attributes:
        title: What it is.
        queries: The tokens of the queries.
        keys: The tokens of the keys.
        seen: Which keys each query sees, boolean (Q, K).
        marked: Which keys are masks, sentinels or samples of a noise model, boolean (K,).
        targets: What queries predict, by their number.
    """

    title: str
    queries: list[str]
    keys: list[str]
    seen: Tensor
    marked: Tensor
    targets: dict[int, str]


@dataclass(frozen=True)
class Run:
    """The first batch of a run, or that of one objective of a mixture, and what reads it."""

    task: TextTask
    model: nn.Module
    criterion: Criterion
    batch: SequenceBatch


# ------------------------------------------------------------------------------- runs


def make_data(folder: Path) -> dict[str, Path]:
    """Return data folders by corpus, which are made in `folder`."""
    specials = special_symbols(TASK_TOKENS, unk=True)
    ids = {symbol: number for number, symbol in enumerate([*specials, *PIECES])}
    library = wordpiece_library(ids, longest=20, cased=False)
    library.add_special_tokens(specials)
    WordPiece(library).save(folder)
    made = {}
    for name, lines in LINES.items():
        file, made[name] = folder / f"{name}.txt", folder / name
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        words = ["preprocess", "--trainpref", str(file), "--tokenizer-from", str(folder)]
        command([*words, "--destdir", str(made[name]), "--quiet"])
    return made


def open_runs(objective: Objective, picture: Picture, data: Path, *options: str) -> list[Run]:
    """Return the run of a picture on a data folder, with `options` besides its own.

    Of a mixture these are runs of its objectives, with one model and rows of the same batch.
    """
    length = f"task.tokens_per_sample={LONGEST[picture.corpus]}"
    rows = len({(panel.part, panel.row) for panel in picture.panels})
    usual = ("task.sample_break_mode=eos", f"task.batch_size={rows}", f"seed={picture.seed}")
    config = load_config(
        [f"data={data}", length, *usual, *objective.options, *SMALL, *picture.options, *options]
    )
    config = prepare_config(config)
    task = build_task(config)
    model = build_model(task, config, "cpu")
    batches = task.build_streams("train")["train"].micro_batches(0, Shard())
    if isinstance(task, MixtureTask):
        parts = [(task.tasks[batch.objective], batch.batch) for batch in batches]
    else:
        parts = [(task, batch) for batch in batches]
    return [Run(part, model, part.criterion, batch) for part, batch in parts]


def read(run: Run) -> tuple[dict[str, Reading], Any]:
    """Return what each net of a run reads, and the terms of the criterion."""
    noise = Noise(run.task.run_config.seed, run.batch.rows)
    with recorded(run.model) as readings, use_context(ForwardContext(noise)):
        terms = run.criterion(run.model, run.batch)
    if DECODER in readings:
        own, memory = readings[DECODER], readings[f"{DECODER} memory"]
        readings[DECODER] = Reading(
            own.tokens,
            torch.cat([readings[ENCODER].tokens, own.tokens], 1),
            torch.cat([memory.seen, own.seen], 2),
        )
    if f"{TOWERS}.left" in readings:
        left, right = readings[f"{TOWERS}.left"], readings[f"{TOWERS}.right"]
        seen = torch.zeros_like(left.seen)
        seen[:, 1:] |= left.seen[:, :-1]  # a token is predicted by the states beside it
        seen[:, :-1] |= right.seen[:, 1:]
        readings[TOWERS] = Reading(left.tokens, left.tokens, seen)
    return readings, terms


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, Reading]]:
    """Record inside the block what the nets of a model read, by the name of the net."""
    readings: dict[str, Reading] = {}
    tokens: list[Tensor] = []

    def embed(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        tokens.append(args[0])

    def attend(name: str, visibility: Visibility, keys: int) -> None:
        ids = tokens[-1]
        scores = torch.zeros(len(ids), 1, ids.shape[1], keys)
        readings[name] = Reading(ids, ids, visibility.hide(scores).isfinite()[:, 0])

    handles = []
    for path, module in model.named_modules():
        net = path.partition(".layers.0.")[0]
        if isinstance(module, Embeddings):
            handles.append(module.register_forward_pre_hook(embed))
        elif isinstance(module, SelfAttention) and ".layers.0." in path:
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, args, net=net: attend(net, args[1], args[0].shape[-2])
                )
            )
        elif isinstance(module, CrossAttention) and ".layers.0." in path:
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, args, net=net: attend(f"{net} memory", args[2], args[1].shape[-2])
                )
            )
    try:
        yield readings
    finally:
        for handle in handles:
            handle.remove()


# ------------------------------------------------------------------------------- targets


def predictions(run: Run, net: str, reading: Reading) -> tuple[Tensor, Tensor]:
    """Return flat positions (N,) of a net's rows, and what is predicted there (N,), -1 for nothing.

    These are ids of tokens, or of LABELS.
    """
    batch, criterion = run.batch, run.criterion
    everywhere = torch.arange(reading.tokens.numel())
    if isinstance(batch, PredictionBatch):
        return batch.sources, batch.targets
    if isinstance(batch, CorruptedBatch):
        if net == DECODER or batch.decoder_tokens is None:
            return source_of(batch.positions), batch.targets
        return everywhere[:0], everywhere[:0]
    if isinstance(criterion, CausalLM):
        return everywhere, next_tokens(batch).flatten()
    if isinstance(batch, ElectraBatch):
        if net == TOWERS or (net == ENCODER and isinstance(criterion, AllTokensMLM)):
            return everywhere, batch.tokens.where(batch.candidates, -1).flatten()
        if net == ENCODER and type(criterion) in LABELS:
            labels, counted = chosen(batch), batch.candidates
            if isinstance(criterion, ReplacedTokenDetection):
                labels = labels & (reading.tokens != batch.tokens)
                counted = ~batch.layout.padding_of(batch.tokens)
            return everywhere, labels.long().where(counted, -1).flatten()
    first = torch.arange(len(batch.tokens))[:, None] * reading.tokens.shape[1]
    return (first + batch.positions).flatten(), batch.targets.flatten()


def chosen(batch: TokenBatch) -> Tensor:
    """Return which tokens of masked rows are chosen, boolean (B, S)."""
    assert batch.positions is not None and batch.targets is not None
    used = torch.zeros_like(batch.tokens)
    return used.scatter_add(1, batch.positions, (batch.targets >= 0).long()) > 0


def view(run: Run, panel: Panel, readings: dict[str, Reading]) -> View:
    """Return what a panel shows of what the nets of a run read; padding is left out."""
    reading, batch, vocabulary = readings[panel.net], run.batch, run.task.vocabulary
    names, names_of_targets = symbol_names(run), target_names(run, panel.net)
    marked = torch.isin(reading.keys, torch.tensor([vocabulary.mask, *sentinels_of(run)]))
    if isinstance(batch, TokenBatch) and batch.positions is not None and panel.net != TOWERS:
        marked = marked | chosen(batch)
    places, targets = predictions(run, panel.net, reading)
    length = reading.tokens.shape[1]
    of_row = (targets >= 0) & (places // length == panel.row)
    predicted = [names_of_targets[target] for target in targets[of_row]]
    weights = getattr(batch, "weights", None)
    used = [] if weights is None else weights[of_row].tolist()
    queries, keys = reading.tokens[panel.row], reading.keys[panel.row]
    is_query, is_key = queries != vocabulary.pad, keys != vocabulary.pad
    return View(
        panel.title.format(weight=f"{used[0]:.1f}" if used else ""),
        [names[token] for token in queries[is_query]],
        [names[token] for token in keys[is_key]],
        reading.seen[panel.row][is_query][:, is_key],
        marked[panel.row][is_key],
        dict(zip((places[of_row] % length).tolist(), predicted)),
    )


def sentinels_of(run: Run) -> list[int]:
    """Return the ids of the sentinels in the order of the spans of a text, if there are any."""
    corruption = getattr(run.task, "corruption", None)
    return [] if corruption is None else corruption.sentinels.tolist()


def symbol_names(run: Run) -> list[str]:
    """Return how pictures write the symbols of a run's vocabulary (V,)."""
    names = ["[CLS]" if name == "[CLS0]" else name for name in run.task.vocabulary.symbols]
    for number, sentinel in enumerate(sentinels_of(run)):
        names[sentinel] = f"<{number}>"
    return names


def target_names(run: Run, net: str) -> Sequence[str]:
    """Return the names of what a net predicts: symbols (V,), or two labels."""
    labels = LABELS.get(type(run.criterion))
    return labels if labels and net == ENCODER else symbol_names(run)


def views(runs: Sequence[Run], picture: Picture) -> list[View]:
    """Return what the panels of a picture show of runs."""
    readings = [read(run)[0] for run in runs]
    return [view(runs[panel.part], panel, readings[panel.part]) for panel in picture.panels]
