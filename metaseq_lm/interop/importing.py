"""Imports a folder of the transformers library as a run folder that training can start from."""

from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from metaseq_lm.core.config import as_dict
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import write_atomic
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.interop.configs import read_config, run_config
from metaseq_lm.interop.folders import (
    CONFIG_FILE,
    copy_tokenizer,
    new_folder,
    read_folder_config,
    read_weights,
)
from metaseq_lm.interop.parts import KEY, ModulePart, build, read_part
from metaseq_lm.runs import checkpoint

ORIGINALS = "transformers"  # folder of the original tokenizer files
EMBEDDINGS = ("encoder.embeddings.", "generator.embeddings.")


def import_folder(source: Path, out: Path, generator: Path | None = None) -> None:
    """Fill the new folder `out` with tokenizer, config.yaml and a checkpoint of `source`.

    `generator` is the folder of ELECTRA's generator. MetaseqError for a folder that cannot be used;
    `out` does not exist then.
    """
    read_folder_config(source)  # its error comes before the tokenizer's
    tokenizer = load_tokenizer(source)
    part = _load_part(source, tokenizer)
    parts, weights, sharing = {"main": part}, dict(part.weights), "embeddings"
    if generator is not None:
        other = _load_part(generator, tokenizer, main=False)
        _check_generator(part, other, generator)
        parts["generator"] = other
        weights, sharing = join(part, other)
    generator_config = parts["generator"].foreign if generator else None
    config = run_config(part.foreign, generator_config, sharing, str(out))
    manifest = {
        "config": as_dict(config),
        "valid": {},
        "data": {},
        "tokenizer": tokenizer.fingerprint,
        KEY: {name: one.record for name, one in parts.items()},
    }
    if "sentence" in part.foreign.architecture.heads:
        manifest["facts"] = {"pooler_activation": part.foreign.architecture.activation}
    state: dict[str, Any] = {KEY: {name: one.rest for name, one in parts.items()}}
    with new_folder(out) as folder:
        tokenizer.save(folder)
        (folder / ORIGINALS).mkdir()
        copy_tokenizer(source, folder / ORIGINALS)
        write_atomic(folder / "config.yaml", OmegaConf.to_yaml(as_dict(config)).encode())
        checkpoint.save(folder / "checkpoints", 0, weights, state, manifest)


def _load_part(folder: Path, tokenizer: Tokenizer, main: bool = True) -> ModulePart:
    """Read one model; MetaseqError if it is not supported, or has another vocabulary."""
    config = read_folder_config(folder)
    foreign = read_config(config, folder / CONFIG_FILE)
    vocabulary = tokenizer.vocabulary
    for key, value, expected in (
        ("vocab_size", foreign.vocab_size, foreign.model.rows(len(vocabulary))),
        ("pad_token_id", foreign.pad, vocabulary.pad),
    ):
        if value != expected:
            raise MetaseqError(
                f"{folder / CONFIG_FILE}: {key} is {value} but the tokenizer's is {expected}"
            )
    part = read_part(foreign, config, read_weights(folder), folder, main)
    build(part, folder)
    return part


def _check_generator(main: ModulePart, other: ModulePart, folder: Path) -> None:
    """Raise if `other` cannot be the generator of `main` (sizes: Clark et al. 2020, section 3)."""
    if main.foreign.architecture.heads != ("rtd",):
        raise UsageError(
            "--generator belongs to an ElectraForPreTraining, not to a "
            f"{main.foreign.architecture.name}"
        )
    if other.foreign.architecture.name != "ElectraForMaskedLM":
        raise MetaseqError(
            f"{folder / CONFIG_FILE}: a generator is an ElectraForMaskedLM, not a "
            f"{other.foreign.architecture.name}"
        )
    first, second = main.foreign.model, other.foreign.model
    width, main_width = second.encoder_embed_dim, first.encoder_embed_dim
    ffn_dim = round(first.encoder_ffn_embed_dim * width / main_width)
    for key, value, expected in (
        ("intermediate_size", second.encoder_ffn_embed_dim, ffn_dim),
        ("num_attention_heads", second.encoder_attention_heads, first.heads_for(width)),
        ("max_position_embeddings", second.max_positions, first.max_positions),
        ("type_vocab_size", second.segments, first.segments),
        ("layer_norm_eps", second.norm_eps, first.norm_eps),
    ):
        if value != expected:
            raise MetaseqError(
                f"{folder / CONFIG_FILE}: {key} is {value}; the generator of this discriminator, "
                f"{width} wide, has {expected}"
            )


def join(main: ModulePart, other: ModulePart) -> tuple[dict[str, torch.Tensor], str]:
    """Return the weights of both, and "embeddings" if they share embeddings, else "none"."""
    main_prefix, generator_prefix = EMBEDDINGS
    embeddings = {n: w for n, w in other.weights.items() if n.startswith(generator_prefix)}
    shared = all(
        torch.equal(weight, main.weights[name.replace(generator_prefix, main_prefix)])
        for name, weight in embeddings.items()
    )
    if not shared:
        return main.weights | other.weights, "none"
    unshared = {n: w for n, w in other.weights.items() if n not in embeddings}
    return main.weights | unshared, "embeddings"
