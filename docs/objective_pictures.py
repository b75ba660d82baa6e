"""Draw the pictures of docs/objectives: who sees whom, and what is predicted.

usage: python docs/objective_pictures.py

Each picture is of the first batch of a run: the task makes it, the criterion reads it with a small
model, and the masks are those that the model's attention gets. The pictures go to
docs/objectives/pictures, and their texts into the pages. The weights of the model are 0, so that
nothing depends on the processor; samples of a noise model are then uniform.

Shapes: B rows, Q queries, K keys.
"""

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch
from objective_catalogue import (
    CATALOGUE,
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

from metaseq_lm import plugins
from metaseq_lm.cli import main as command
from metaseq_lm.core.batch import SequenceBatch, TokenBatch
from metaseq_lm.core.loading import load_config
from metaseq_lm.criterions.language_modeling import next_tokens
from metaseq_lm.data.corpus.predictions import PredictionBatch, source_of
from metaseq_lm.data.streams import Shard
from metaseq_lm.data.tokenizers.vocabulary import special_symbols
from metaseq_lm.data.tokenizers.wordpiece import WordPiece, wordpiece_library
from metaseq_lm.forward.context import ForwardContext, Noise, use_context
from metaseq_lm.methods.electra.data import ElectraBatch
from metaseq_lm.methods.span_corruption.criterion import CorruptedBatch
from metaseq_lm.models.transformer.attention import (
    CrossAttention,
    SelfAttention,
    Visibility,
)
from metaseq_lm.models.transformer.encoder import Embeddings
from metaseq_lm.tasks import TextTask
from metaseq_lm.training.parts import build_model, build_task, prepare_config

HERE = Path(__file__).resolve().parent
PAGES = HERE / "objectives"
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
LABELS = {"electra_rtd": ("real", "fake"), "electric_nce": ("data", "noise")}


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
    """The task, the model and the first batch of a picture's run."""

    task: TextTask
    model: nn.Module
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


def open_run(objective: Objective, picture: Picture, data: Path, *options: str) -> Run:
    """Return the run of a picture on a data folder, with `options` besides its own."""
    length = f"task.tokens_per_sample={LONGEST[picture.corpus]}"
    rows = 1 + max(panel.row for panel in picture.panels)
    usual = ("task.sample_break_mode=eos", f"task.batch_size={rows}", f"seed={picture.seed}")
    config = load_config(
        [f"data={data}", length, *usual, *objective.options, *SMALL, *picture.options, *options]
    )
    config = prepare_config(config)
    task = build_task(config)
    model = build_model(task, config, "cpu")
    (batch,) = task.build_streams("train")["train"].micro_batches(0, Shard())
    return Run(task, model, batch)


def read(run: Run) -> tuple[dict[str, Reading], Any]:
    """Return what each net of a run reads, and the terms of the criterion."""
    noise = Noise(run.task.run_config.seed, run.batch.rows)
    with recorded(run.model) as readings, use_context(ForwardContext(noise)):
        terms = run.task.criterion(run.model, run.batch)
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
    batch, criterion = run.batch, run.task.run_config.criterion._name
    everywhere = torch.arange(reading.tokens.numel())
    if isinstance(batch, PredictionBatch):
        return batch.sources, batch.targets
    if isinstance(batch, CorruptedBatch):
        if net == DECODER or batch.decoder_tokens is None:
            return source_of(batch.positions), batch.targets
        return everywhere[:0], everywhere[:0]
    if criterion == "causal_lm":
        return everywhere, next_tokens(batch).flatten()
    if isinstance(batch, ElectraBatch):
        if net == TOWERS or (net == ENCODER and criterion == "all_tokens_mlm"):
            return everywhere, batch.tokens.where(batch.candidates, -1).flatten()
        if net == ENCODER and criterion in LABELS:
            labels, counted = chosen(batch), batch.candidates
            if criterion == "electra_rtd":
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
    names, targets_names, sentinels = (
        symbol_names(run),
        target_names(run, panel.net),
        sentinels_of(run),
    )
    marked = torch.isin(reading.keys, torch.tensor([vocabulary.mask, *sentinels]))
    if isinstance(batch, TokenBatch) and batch.positions is not None and panel.net != TOWERS:
        marked = marked | chosen(batch)
    places, targets = predictions(run, panel.net, reading)
    length = reading.tokens.shape[1]
    of_row = (targets >= 0) & (places // length == panel.row)
    predicted = [targets_names[target] for target in targets[of_row]]
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
    labels = LABELS.get(run.task.run_config.criterion._name)
    return labels if labels and net == ENCODER else symbol_names(run)


def views(run: Run, picture: Picture) -> list[View]:
    """Return what the panels of a picture show of a run."""
    readings, _ = read(run)
    return [view(run, panel, readings) for panel in picture.panels]


# ------------------------------------------------------------------------------- drawing

WIDTH, LEFT, RIGHT = 400, 80, 84
GAP = 6  # between the keys of an encoder and those of a decoder
WIDE = "#<>M"  # letters
STYLE = """
      .card { fill: #ffffff }
      .seen { fill: #b3bce8 } .used { fill: #5c6bc0 } .hidden { fill: #eceff4 }
      .mark { fill: #ffe0a3 }
      text { font-size: 13px; fill: #263238 }
      .title { font-weight: bold; fill: #283593 } .side { fill: #607d8b; font-size: 12px }
      .target { font-weight: bold; fill: #00695c }
      @media (prefers-color-scheme: dark) {
        .card { fill: #1e2129 }
        .seen { fill: #4a5596 } .used { fill: #9fa8da } .hidden { fill: #2b303b }
        .mark { fill: #7a5200 }
        text { fill: #e0e3f0 }
        .title { fill: #c5cae9 } .side { fill: #a7b4bd }
        .target { fill: #80cbc4 }
      }
"""


def draw(shown: list[View], options: tuple[str, ...]) -> str:
    """Return the SVG of some views, and of the options that made them."""
    parts, top = [], 8.0
    for item in shown:
        drawn, top = draw_view(item, top)
        parts += drawn
    drawn, top = legend(top + 4, has_marks=any(item.marked.any() for item in shown))
    parts += drawn
    for line in lines_of(options):
        parts.append(text(8, top + 8, line, "side", anchor=None, size=11))
        top += 16
    top += 4
    body = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" width="480" '
        'font-family="Helvetica, Arial, sans-serif" role="img" aria-labelledby="title">\n'
        f'  <title id="title">{escape(described(shown))}</title>\n'
        f"  <style>{STYLE}  </style>\n"
        f'  <rect class="card" width="{WIDTH}" height="{top:.0f}" rx="8"/>\n  {body}\n</svg>\n'
    )


def draw_view(item: View, top: float) -> tuple[list[str], float]:
    """Return the elements of a panel that begins at `top`, and where it ends."""
    first = len(item.keys) - len(item.queries)  # of the keys that are queries, too
    gap = GAP * (first > 0)
    cell = min(24.0, (WIDTH - LEFT - RIGHT - gap) / len(item.keys))
    columns = [LEFT + cell * at + gap * (at >= first) for at in range(len(item.keys))]
    grid = top + 34 + max(map(width_of, item.keys))
    right = columns[-1] + cell + 8
    parts = [
        text(8, top + 18, item.title, "title", anchor=None),
        text(LEFT - 8, grid - 22, "key →", "side"),
        text(LEFT - 8, grid - 7, "query ↓", "side"),
        text(right, grid - 7, "predicts", "side", anchor=None),
    ]
    for left, key, is_marked in zip(columns, item.keys, item.marked.tolist()):
        middle, length = left + cell / 2, width_of(key) + 4
        if is_marked:
            parts.append(box("mark", middle - 8, grid - length - 4, 16, length))
        parts.append(text(middle + 4.5, grid - 6, key, anchor=None, turned=True))
    for number, query in enumerate(item.queries):
        y = grid + cell * number
        baseline, length = y + cell / 2 + 4.5, width_of(query) + 4
        if item.marked[first + number]:
            parts.append(box("mark", LEFT - 6 - length, y + cell / 2 - 8, length, 16))
        parts.append(text(LEFT - 8, baseline, query))
        kind = "used" if number in item.targets else "seen"
        for left, is_seen in zip(columns, item.seen[number].tolist()):
            style = kind if is_seen else "hidden"
            parts.append(box(style, left + 0.5, y + 0.5, cell - 1, cell - 1, 2))
        if number in item.targets:
            parts.append(text(right, baseline, item.targets[number], "target", anchor=None))
    return parts, grid + cell * len(item.queries) + 10


def width_of(word: str) -> float:
    """Return the width of a word, at most, in a usual font."""
    return sum(11.0 if letter in WIDE else 7.4 for letter in word)


def legend(top: float, has_marks: bool) -> tuple[list[str], float]:
    """Return the elements that explain the colours, and where they end."""
    entries = [
        ("used", LEFT, "seen, for a prediction"),
        ("seen", LEFT + 152, "seen"),
        ("hidden", LEFT + 212, "not seen"),
    ]
    if has_marks:
        entries.append(("mark", LEFT, "masked, replaced, or a sentinel"))
    parts = []
    for number, (style, x, words) in enumerate(entries):
        y = top + 19 * (number == 3)
        parts.append(box(style, x, y + 1, 12, 12, 2))
        parts.append(text(x + 17, y + 11, words, "side", anchor=None))
    return parts, top + 22 + 19 * has_marks


def lines_of(options: tuple[str, ...], longest: int = 54) -> list[str]:
    """Return options as lines of at most `longest` letters, if each fits."""
    lines: list[str] = []
    for option in options:
        if lines and len(lines[-1]) + len(option) < longest:
            lines[-1] += f" {option}"
        else:
            lines.append(option)
    return lines


def box(style: str, x: float, y: float, width: float, height: float, radius: float = 3) -> str:
    """Return a rectangle."""
    return (
        f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="{radius:g}"/>'
    )


def text(
    x: float,
    y: float,
    words: str,
    style: str = "",
    anchor: str | None = "end",
    turned: bool = False,
    size: int = 0,
) -> str:
    """Return words whose baseline ends at (x, y), or begins there without an anchor."""
    attributes = {
        "class": style,
        "x": f"{x:.1f}",
        "y": f"{y:.1f}",
        "text-anchor": anchor or "",
        "transform": f"rotate(-90 {x:.1f} {y:.1f})" if turned else "",
        "style": f"font-size: {size}px" if size else "",
    }
    written = " ".join(f'{key}="{value}"' for key, value in attributes.items() if value)
    return f"<text {written}>{escape(words)}</text>"


def described(shown: list[View]) -> str:
    """Return in words what views show: for those who do not see the picture."""
    parts = []
    for item in shown:
        words = " ".join(item.queries)
        counts = sorted({int(count) for count in item.seen.sum(1)})
        seen = f"each sees {counts[0]}" if len(counts) == 1 else f"they see {listed(counts)}"
        aims = [f"{item.queries[n]} → {target}" for n, target in sorted(item.targets.items())]
        predicted = f"; predictions: {', '.join(aims)}" if aims else ""
        parts.append(
            f"{item.title}: {len(item.queries)} queries, {words}; {seen} of "
            f"{len(item.keys)} keys{predicted}"
        )
    return ". ".join(parts).replace("[", "").replace("]", "")


def listed(counts: list[int]) -> str:
    """Return numbers as a range if there are no gaps, else one by one."""
    if counts == list(range(counts[0], counts[-1] + 1)) and len(counts) > 2:
        return f"{counts[0]} to {counts[-1]}"
    return " or ".join(map(str, counts))


# ------------------------------------------------------------------------------- files


def drawn_pictures(folder: Path) -> Iterator[tuple[Objective, Picture, str, str]]:
    """Yield each picture of the catalogue, its SVG and its text; `folder` is for data."""
    data = make_data(folder)
    for objective in CATALOGUE:
        for picture in objective.pictures:
            run = open_run(objective, picture, data[picture.corpus])
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter.zero_()
                shown = views(run, picture)
            yield objective, picture, draw(shown, picture.options), described(shown)


def with_text(page: str, picture: str, words: str) -> str:
    """Return a page in which the text of a picture is `words`."""
    image = re.compile(rf"!\[[^\]\n]*\]\(pictures/{picture}\.svg\)")
    return image.sub(lambda _: f"![{words}](pictures/{picture}.svg)", page)


def main() -> None:
    """Write all pictures, and their texts into the pages."""
    plugins.load_all(str(HERE.parent / "user_dir"))
    (PAGES / "pictures").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for objective, picture, svg, words in drawn_pictures(Path(folder)):
            (PAGES / "pictures" / f"{picture.name}.svg").write_text(svg, encoding="utf-8")
            page = PAGES / f"{objective.name}.md"
            if page.exists():
                changed = with_text(page.read_text(encoding="utf-8"), picture.name, words)
                page.write_text(changed, encoding="utf-8")
            print(f"{picture.name}: {words}")


if __name__ == "__main__":
    main()
