"""Comparison of a model and its tokenizer with the transformers library: logits and tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import Layout
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.interop.heads import LABEL_RANGE
from metaseq_lm.interop.parts import ModulePart, build
from metaseq_lm.models.transformer.encoder import Embeddings, TransformerLM
from metaseq_lm.models.transformer.span_head import SpanHead

LIMIT = 1e-5  # largest difference of logits, in fp32
ROWS, LONGEST = 4, 64
TEXT = (
    "The quick brown fox, aged 12, jumps over the lazy dog's back.",
    "She said: \"It's 3.50 (or more)!\" - and left; wasn't that naïve, Zoë?",
    "Straße, crème brûlée, Łódź, Ελλάδα, Россия, 東京 and 서울",
    "  two  spaces\tand a tab, e\u0301 and x\u00a0y",
    "http://example.org/a_b?c=d&e=f #tag @name 100% \u20ac5 \U0001f600",
    "",
)


def check(part: ModulePart, tokenizer: Tokenizer, folder: Path) -> str:
    """Return a line with the largest difference; MetaseqError above LIMIT or if ids differ."""
    transformers = import_transformers()
    kind = getattr(transformers, part.foreign.architecture.name)
    model, loading = kind.from_pretrained(folder, output_loading_info=True)
    # The library adds a pooler to models that were trained without one.
    absent = [n for n in sorted(loading["missing_keys"]) if ".pooler." not in f".{n}"]
    if absent:
        raise MetaseqError(f"{folder}: transformers finds no {', '.join(absent[:4])} in it")
    net = build(part, folder)
    difference = largest_difference(part, net, model.float().eval(), tokenizer.vocabulary)
    if not difference <= LIMIT:
        raise MetaseqError(
            f"{folder}: logits differ by up to {difference:.2e} from those of transformers "
            f"({LIMIT:.0e} allowed)"
        )
    foreign_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for line, ids in zip(TEXT, tokenizer.encode_batch(TEXT)):
        if foreign_tokenizer(line, add_special_tokens=False)["input_ids"] != ids:
            raise MetaseqError(f"{folder}: transformers cuts {line!r} into other tokens")
    return (
        f"{folder}: logits differ by at most {difference:.2e}, tokens of {len(TEXT)} lines are "
        "equal"
    )


def import_transformers(user: str = "--check") -> Any:
    """Return the transformers module, quiet; MetaseqError naming `user` if not installed."""
    try:
        import transformers
    except ImportError as error:
        raise MetaseqError(
            f"{user} needs transformers: pip install 'metaseq-lm[transformers]'"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@torch.no_grad()
def largest_difference(
    part: ModulePart, net: nn.Module, other: nn.Module, vocabulary: Vocabulary
) -> float:
    """Return the largest difference of all outputs on random rows, with and without padding.

    For real values it is relative to their range.
    """
    largest = 0.0
    label_range = part.original.get(LABEL_RANGE)
    scale = 1.0
    if label_range is not None:
        scale = max(scale, float(label_range.abs().max()))
    for padded in (False, True):
        rows, layout, segments = _random_rows(part, vocabulary, padded)
        outputs = _native_outputs(net, rows, layout, segments)
        if label_range is not None:
            outputs["sentence"] = outputs["sentence"] * label_range[1] + label_range[0]
        library_outputs = foreign_outputs(other, rows, layout, segments)
        for name, output in outputs.items():
            difference = (output - library_outputs[name]).abs() / scale
            if name not in ("next_sentence", "sentence"):
                difference = difference[~layout.padding_of(rows)]
            largest = max(largest, float(difference.max().nan_to_num(torch.inf)))
    return largest


def _random_rows(
    part: ModulePart, vocabulary: Vocabulary, padded: bool
) -> tuple[Tensor, Layout, Tensor | None]:
    """Return ids (B, S), their layout, and segments (B, S) if there are any."""
    # Long enough for several windows of local layers.
    windows = [3 * part.foreign.model.scope(n).window // 2 for n in range(3)]
    length = min(max(LONGEST, *windows), part.foreign.model.max_positions)
    random = np.random.default_rng(1)
    usual = np.setdiff1d(np.arange(len(vocabulary)), vocabulary.specials)
    rows = torch.tensor(random.choice(usual, (ROWS, length)))
    if vocabulary.task_tokens:
        rows[:, 0] = vocabulary.cls()
    padding = segments = None
    if padded:
        sizes = torch.tensor(random.integers(1, length, ROWS))
        padding = torch.arange(length) >= sizes[:, None]
        rows[padding] = vocabulary.pad
    kinds = part.foreign.model.segments
    if kinds:
        segments = torch.tensor(random.integers(0, kinds, (ROWS, length)))
    return rows, Layout(padding, reach=part.foreign.architecture.reach), segments


def _native_outputs(
    net: nn.Module, rows: Tensor, layout: Layout, segments: Tensor | None
) -> dict[str, Tensor]:
    """Return the outputs of a network by head, "hidden" if it has no heads."""
    if not isinstance(net, TransformerLM):
        assert isinstance(net, nn.ModuleDict)
        parts = net["generator"]
        assert isinstance(parts, nn.ModuleDict)
        embeddings = parts["embeddings"]
        assert isinstance(embeddings, Embeddings)
        states = parts["stack"](embeddings(rows, layout, segments), layout)
        return {"lm": parts["head"](states, embeddings.tokens.weight)}
    states = net.encoder(rows, layout, segments)
    outputs = {}
    for name, head in net.heads.items():
        if isinstance(head, SpanHead):
            everywhere = torch.ones_like(rows, dtype=torch.bool)
            outputs["start"], outputs["end"] = head(states, everywhere, rows)
        elif name != "lm":
            outputs[name] = head(states)
    if "lm" in net.heads:
        outputs["lm"] = net.predict(states, head="lm")
    return outputs or {"hidden": states}


def foreign_outputs(
    model: nn.Module, rows: Tensor, layout: Layout, segments: Tensor | None
) -> dict[str, Tensor]:
    """Return the outputs of a model of the transformers library by our names of the heads."""
    inputs = {"input_ids": rows, "attention_mask": (~layout.padding_of(rows)).long()}
    if segments is not None:
        inputs["token_type_ids"] = segments
    if type(model).__name__.endswith("ForMultipleChoice"):
        inputs = {name: values.unsqueeze(1) for name, values in inputs.items()}
    outputs = model(**inputs)
    names = {
        "lm": "logits",
        "rtd": "logits",
        "sentence": "logits",
        "token": "logits",
        "start": "start_logits",
        "end": "end_logits",
        "next_sentence": "seq_relationship_logits",
        "hidden": "last_hidden_state",
    }
    if "prediction_logits" in outputs:
        names["lm"] = "prediction_logits"
    return {head: outputs[name] for head, name in names.items() if name in outputs}
