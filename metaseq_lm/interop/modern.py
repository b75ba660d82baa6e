"""Options of ModernBERT and its decoder in the `config.json` of the transformers library."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from metaseq_lm.config.transformer import (
    ACTIVATED,
    LAYER,
    NO_GATE,
    ROTARY,
    ModernConfig,
)
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

# Key in config.json for values that the keys of transformers cannot express.
OUR_KEY = "metaseq_lm"
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
SIZES = {
    "num_hidden_layers": "encoder_layers",
    "hidden_size": "encoder_embed_dim",
    "intermediate_size": "encoder_ffn_embed_dim",
    "num_attention_heads": "encoder_attention_heads",
    "max_position_embeddings": "max_positions",
    "local_attention": "local_window",
}
# The library has defaults for these.
_RATES = {
    "embedding_dropout": ("dropout", 0.0),
    "attention_dropout": ("attention_dropout", 0.0),
    "mlp_dropout": ("activation_dropout", 0.0),
    "norm_eps": ("norm_eps", 1e-5),
}
# Values that options must have if they are given, because our encoder supports no others.
FIXED = {
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "decoder_bias": True,
    "classifier_bias": False,
    "classifier_activation": "gelu",
    "is_encoder_decoder": False,
}
_THETAS = {
    _GLOBAL: ("global_theta", "global_rope_theta", 160_000.0),
    _LOCAL: ("local_theta", "local_rope_theta", 10_000.0),
}
Number = Callable[..., Any]  # reads a number of config.json: key, type, default


def read_modern(config: dict[str, Any], number: Number, source: object) -> ModernConfig:
    """Return the options of a `config.json`; MetaseqError naming `source` for unsupported ones."""
    options: dict[str, Any] = {option: number(key, int) for key, option in SIZES.items()}
    options |= {option: number(key, float, default) for key, (option, default) in _RATES.items()}
    for key, (option, old_key, default) in _THETAS.items():
        options[option] = _theta_of(config, key, config.get(old_key, default), source)
    gate = config.get("hidden_activation", "gelu")
    if gate not in ACTIVATED:
        raise MetaseqError(
            f"{source}: hidden_activation is {str(gate)[:40]!r}; supported are "
            f"{', '.join(ACTIVATED)}"
        )
    rows = number("vocab_size", int)
    extra = config.get(OUR_KEY)
    multiple = None
    if isinstance(extra, dict):
        multiple = extra.get("vocab_multiple")
    if not isinstance(multiple, int) or multiple < 1:
        multiple = rows & -rows  # the largest power of two; any gives the same rows
    return ModernConfig(
        gate=gate,
        global_every=global_every(config, options["encoder_layers"], source),
        vocab_multiple=multiple or 1,
        **options,
    )


def _theta_of(config: dict[str, Any], key: str, default: Any, source: object) -> float:
    """Return the base of the rotary positions of a kind of layer; MetaseqError if not supported."""
    rope = config.get("rope_parameters") or {}
    if isinstance(rope, dict):
        rope = rope.get(key) or {}
    if isinstance(rope, dict):
        theta = rope.get("rope_theta", default)
        is_finite = isinstance(theta, (int, float)) and 0 < theta < math.inf
        if is_finite and rope.get("rope_type", "default") == "default":
            return float(theta)
    raise MetaseqError(
        f"{source}: rope_parameters has {str(rope)[:60]} for {key}; supported are a number as "
        "rope_theta and 'default' as rope_type"
    )


def global_every(config: dict[str, Any], layers: int, source: object) -> int:
    """Return the distance between global layers; MetaseqError for another pattern."""
    kinds = config.get("layer_types")
    if kinds is None:
        every = config.get("global_attn_every_n_layers", 3)
        if isinstance(every, int) and every > 0:
            return every
    elif isinstance(kinds, list) and len(kinds) == layers:
        every = next((n for n in range(1, layers) if kinds[n] == _GLOBAL), layers)
        if kinds == [_LOCAL if n % every else _GLOBAL for n in range(layers)]:
            return every
    raise MetaseqError(
        f"{source}: layer_types is {str(kinds)[:60]}; supported is one {_GLOBAL} for each of "
        f"{layers} layers, or at the start and after equal numbers of {_LOCAL}"
    )


def modern_values(model: ModernConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the content of `config.json`, except the class and tied weights."""
    first = vocabulary.cls() if vocabulary.task_tokens else vocabulary.sep
    values: dict[str, Any] = {key: getattr(model, option) for key, option in SIZES.items()}
    values |= {key: getattr(model, option) for key, (option, _) in _RATES.items()}
    values |= FIXED | {
        "vocab_size": model.rows(len(vocabulary)),
        "hidden_activation": model.gate,
        "layer_types": [
            _LOCAL if model.scope(n).window else _GLOBAL for n in range(model.encoder_layers)
        ],
        "rope_parameters": {
            key: {"rope_type": "default", "rope_theta": getattr(model, option)}
            for key, (option, _, _) in _THETAS.items()
        },
        "pad_token_id": vocabulary.pad,
        "bos_token_id": first,
        "cls_token_id": first,
        "eos_token_id": vocabulary.sep,
        "sep_token_id": vocabulary.sep,
    }
    if model.vocab_multiple > 1:
        values[OUR_KEY] = {"vocab_multiple": model.vocab_multiple}
    return values


def find_unsupported(model: ModernConfig, heads: set[str]) -> str:
    """Name an option or head that no ModernBERT of the library supports; "" if there is none."""
    wrong = {
        "model.qk_norm=true": model.qk_norm,
        f"model.norm={model.norm}": model.norm != LAYER,
        f"model.gate={NO_GATE}": model.gate == NO_GATE,
        f"model.positions={model.positions}": model.positions != ROTARY,
        "model.segments": model.segments > 0,
        "model.token_embed_dim": model.embed_dim != model.encoder_embed_dim,
        **{f"the head {head}": head != "lm" for head in sorted(heads)},
    }
    return ", ".join(name for name, is_wrong in wrong.items() if is_wrong)
