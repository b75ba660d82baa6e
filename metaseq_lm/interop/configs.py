"""Conversion between a `config.json` of the transformers library and our model options."""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from metaseq_lm.config.transformer import EncoderConfig, ModernConfig, TransformerConfig
from metaseq_lm.core.config import RunConfig, untyped_section
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.loading import load_config
from metaseq_lm.core.registry import TASKS
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.interop.modern import FIXED as MODERN_FIXED
from metaseq_lm.interop.modern import OUR_KEY, modern_values, read_modern
from metaseq_lm.interop.names import ARCHITECTURES, DISTIL, MEGATRON, Architecture

SIZES = {
    "num_hidden_layers": "encoder_layers",
    "hidden_size": "encoder_embed_dim",
    "intermediate_size": "encoder_ffn_embed_dim",
    "num_attention_heads": "encoder_attention_heads",
}
_RATES = {
    "hidden_dropout_prob": ("dropout", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", 0.1),
    "layer_norm_eps": ("norm_eps", 1e-12),
}
# DistilBERT's names of these keys.
_DISTIL_KEYS = {
    "num_hidden_layers": "n_layers",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_attention_heads": "n_heads",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "hidden_act": "activation",
}
_MAX_SIZE = 1000  # limit of the numbers of layers and of segment types
# Values that options must have if they are given, because our encoder supports no others.
FIXED = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
}


@dataclass(frozen=True)
class ExternalModel:
    """A model described by a `config.json`."""

    architecture: Architecture
    model: EncoderConfig
    vocab_size: int
    pad: int
    tied: bool
    segments: bool  # False: our model has no segment embedding

    @property
    def offset(self) -> int:
        """Number of rows of the position embedding before the first position."""
        return self.architecture.offset(self.pad)


def read_config(config: dict[str, Any], source: object) -> ExternalModel:
    """Parse the content of a `config.json`; MetaseqError naming `source` if it cannot be used."""

    def number(key: str, kind: type, default: Any = None) -> Any:
        value = config.get(key, default)
        fits = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if not fits or not 0 <= value < 1 << 31:
            raise MetaseqError(
                f"{source}: {key} is {str(value)[:40]!r}, not a number in the supported range"
            )
        return kind(value)

    architecture = _architecture_of(config, source)
    fixed = MODERN_FIXED if architecture.is_modern else FIXED
    if architecture.base == DISTIL:
        renamed = {key: config[name] for key, name in _DISTIL_KEYS.items() if name in config}
        config = {**config, **renamed, OUR_KEY: {"segments": 0}}
    for key, default in fixed.items():
        value = default
        if key == "is_decoder":
            value = architecture.reach == "causal"
        if config.get(key, default) != value:
            raise MetaseqError(
                f"{source}: {key} is {str(config.get(key, default))[:40]!r}; only models with "
                f"{value!r} are supported"
            )
    tied = config.get("tie_word_embeddings", True) is not False
    if architecture.is_modern:
        modern = read_modern(config, number, source)
        _check_sizes(modern, modern.encoder_layers, source)
        rows, pad = number("vocab_size", int), number("pad_token_id", int)
        return ExternalModel(architecture, modern, rows, pad, tied, segments=False)
    pad = number("pad_token_id", int, 1 if architecture.base == "roberta" else 0)
    options: dict[str, Any] = {option: number(key, int) for key, option in SIZES.items()}
    options |= {option: number(key, float, default) for key, (option, default) in _RATES.items()}
    extra = config.get(OUR_KEY)
    segments = not (isinstance(extra, dict) and extra.get("segments") == 0)
    segment_types = number("type_vocab_size", int, 2)
    options["segments"] = segment_types if segments else 0
    options["max_positions"] = number("max_position_embeddings", int) - architecture.offset(pad)
    if architecture.base == "electra":
        embed = number("embedding_size", int, 128)
        if embed != options["encoder_embed_dim"]:
            options["token_embed_dim"] = embed
    model = TransformerConfig(
        encoder_normalize_before=architecture.base == MEGATRON, init="truncated_normal", **options
    )
    _check_sizes(model, max(model.encoder_layers, segment_types), source)
    return ExternalModel(architecture, model, number("vocab_size", int), pad, tied, segments)


def _check_sizes(model: EncoderConfig, largest: int, source: object) -> None:
    """Raise MetaseqError, naming `source`, for implausible sizes."""
    options = {option: getattr(model, option) for option in (*SIZES.values(), "max_positions")}
    # A small malicious file must not request thousands of layers.
    is_small = min(options.values()) < 1
    if is_small or largest > _MAX_SIZE or model.encoder_embed_dim % model.encoder_attention_heads:
        raise MetaseqError(f"{source}: there is no model with {options}")


def _architecture_of(config: dict[str, Any], source: object) -> Architecture:
    """Return the architecture that a `config.json` names; MetaseqError if unknown."""
    names = config.get("architectures")
    name = None
    if isinstance(names, list) and names:
        name = names[0]
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise MetaseqError(
            f"{source}: architectures is {str(names)[:60]}; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    architecture = ARCHITECTURES[name]
    if config.get("model_type", architecture.base) != architecture.base:
        raise MetaseqError(
            f"{source}: model_type is {config['model_type']!r} but the architecture is {name}"
        )
    return architecture


def write_config(
    architecture: Architecture, model: EncoderConfig, vocabulary: Vocabulary, tied: bool
) -> dict[str, Any]:
    """Return the `config.json` of a model."""
    base, pad = architecture.base, vocabulary.pad
    values: dict[str, Any] = {"architectures": [architecture.name], "model_type": base}
    if isinstance(model, ModernConfig):
        return {**values, **modern_values(model, vocabulary), "tie_word_embeddings": tied}
    values |= {key: getattr(model, option) for key, option in SIZES.items()}
    values |= {key: getattr(model, option) for key, (option, _) in _RATES.items()}
    if base == "electra":
        values["embedding_size"] = model.embed_dim
    segments = 1 if base == "roberta" else 2
    values |= {
        "vocab_size": len(vocabulary),
        "max_position_embeddings": model.max_positions + architecture.offset(pad),
        "type_vocab_size": model.segments or segments,
        "hidden_act": "gelu",
        "pad_token_id": pad,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": tied,
    }
    is_causal = architecture.reach == "causal"
    if is_causal:
        values["is_decoder"] = True
    if is_causal or base == "roberta":
        values |= {"bos_token_id": vocabulary.cls(), "eos_token_id": vocabulary.sep}
    if not model.segments:
        values[OUR_KEY] = {"segments": 0}
    if base == DISTIL:
        for key in ("type_vocab_size", "layer_norm_eps", OUR_KEY):
            del values[key]
        values = {_DISTIL_KEYS.get(key, key): value for key, value in values.items()}
    return values


def model_options(config: RunConfig, source: object) -> EncoderConfig:
    """Return the encoder options of a run; MetaseqError if its model is not an encoder."""
    values = vars(config.model) if config.model is not None else {}
    kind = ModernConfig if isinstance(config.model, ModernConfig) else TransformerConfig
    defaults = vars(kind())
    options = {name: values[name] for name in defaults if name in values}
    wrong = {*SIZES.values(), "max_positions"} - options.keys()
    for name, value in options.items():
        kinds = (int, float) if isinstance(defaults[name], float) else type(defaults[name])
        if not isinstance(value, kinds):
            wrong.add(name)
    if wrong:
        raise MetaseqError(
            f"{source}: model {values.get('_name')!r} is not a supported encoder "
            f"({', '.join(sorted(wrong))})"
        )
    return kind(**options)


def run_config(
    external: ExternalModel, generator: ExternalModel | None, sharing: str, folder: str
) -> RunConfig:
    """Return the configuration of a run that continues an imported model.

    The task is electra for ELECTRA's discriminator, sentence_pairs for BERT with next-sentence
    prediction, causal_lm for a causal model and masked_lm for all others.
    """
    model = {item.name: getattr(external.model, item.name) for item in fields(external.model)}
    name = "modern" if external.architecture.is_modern else "transformer"
    config = load_config(["task=masked_lm", "criterion=masked_lm", f"model={name}"])
    heads = external.architecture.heads
    if "rtd" in heads:
        width = external.model.encoder_embed_dim
        model |= {"generator_size": 0.25, "sharing": sharing}
        if generator:
            model["generator_size"] = generator.model.encoder_embed_dim / width
            layer_ratio = generator.model.encoder_layers / external.model.encoder_layers
            if layer_ratio != 1:
                model["generator_layers"] = layer_ratio
            if sharing == "none":
                model["generator_embed_dim"] = generator.model.token_embed_dim
        groups = {"task": "electra", "criterion": "electra_rtd", "model": "electra"}
        config = _with_groups(config, groups)
    elif "next_sentence" in heads:
        config = _with_groups(config, {"task": "sentence_pairs", "criterion": "bert_pretraining"})
    elif external.architecture.reach == "causal":
        groups = {"task": "causal_lm", "criterion": "causal_lm", "model": name}
        config = _with_groups(config, groups)
    return replace(
        config,
        data=folder,
        save_dir=folder,
        label=external.architecture.name,
        task=_section_with(config.task, {"tokens_per_sample": external.model.max_positions}),
        model=_section_with(config.model, model),
    )


def _section_with(section: Any, values: dict[str, Any]) -> Any:
    """Return a config section with `values` replaced; an untyped section may also get new keys."""
    if is_dataclass(section):
        return replace(section, **values)  # type: ignore[type-var]
    return untyped_section({**vars(section), **values})


def _with_groups(config: RunConfig, names: dict[str, str]) -> RunConfig:
    """Return `config` with the groups in `names`, without options if they are not registered."""
    if names["task"] in TASKS.entries:
        return load_config([f"{group}={name}" for group, name in names.items()])
    unregistered = {group: untyped_section({"_name": name}) for group, name in names.items()}
    unregistered["task"] = untyped_section({**vars(config.task), "_name": names["task"]})
    return replace(config, **unregistered)
