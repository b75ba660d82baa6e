"""A checkpoint to a folder of the transformers library."""

import re
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig
from torch import Tensor

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.tokenizers.base import DICT_FILE
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.interop.configs import model_options, read_config, write_config
from metaseq_lm.interop.folders import copy_tokenizer, new_folder, write_model
from metaseq_lm.interop.importing import EMBEDDINGS, ORIGINALS
from metaseq_lm.interop.names import ARCHITECTURES, COPIES, Architecture
from metaseq_lm.interop.parts import KEY, Part, build, tensor_names, write_part
from metaseq_lm.interop.tokenizer_files import write_tokenizer
from metaseq_lm.models.transformer.encoder import TransformerConfig
from metaseq_lm.runs.checkpoint import Checkpoint

SIZE_OF_GENERATOR = "generator.stack.layers.0.fc1.weight"


def export_checkpoint(
    stored: Checkpoint, config: DictConfig, out: Path, name: str, data: Path | None = None
) -> None:
    """Fill the new folder `out` with config.json, weights and tokenizer of part `name` of a checkpoint.

    `data` is the folder of its tokenizer; by default the run folder if it has one, else the data
    folder of its config. MetaseqError if the library has no such model.
    """
    folder = data or tokenizer_folder(stored, config)
    tokenizer = load_tokenizer(folder)
    part = export_part(stored, config, tokenizer.vocabulary, name)
    with new_folder(out) as target:
        write_model(target, part.config, write_part(part))
        originals = stored.path.parent.parent / ORIGINALS
        if not (KEY in stored.manifest and data is None and copy_tokenizer(originals, target)):
            write_tokenizer(tokenizer, target, part.foreign.model)


def tokenizer_folder(stored: Checkpoint, config: DictConfig) -> Path:
    """Return the folder with the tokenizer of a checkpoint: its run or its data."""
    run = stored.path.parent.parent
    return run if (run / DICT_FILE).is_file() else Path(config.data)


def export_part(stored: Checkpoint, config: DictConfig, vocabulary: Vocabulary, name: str) -> Part:
    """Return the net `name` of a checkpoint as a model of the transformers library.

    UsageError if there is no such net, MetaseqError if it has no counterpart.
    """
    main = name == "main"
    weights = {n: w for n, w in stored.weights.items() if n.startswith("generator.") != main}
    if not weights:
        raise UsageError(f"{stored.path}: it has no generator; leave --part away")
    main_prefix, generator_prefix = EMBEDDINGS
    if not main and not any(n.startswith(generator_prefix) for n in weights):
        shared = [n for n in stored.weights if n.startswith(main_prefix)]
        weights |= {n.replace(main_prefix, generator_prefix): stored.weights[n] for n in shared}
    table = f"{main_prefix if main else generator_prefix}tokens"
    tokens = weights.get(f"{table}.weight")
    if tokens is None:
        raise MetaseqError(f"{stored.path}: it has no {table}; not our encoder")
    if len(tokens) != len(vocabulary):
        raise MetaseqError(
            f"{stored.path}: it has {len(tokens)} symbols, but the tokenizer {len(vocabulary)}; give "
            "the folder of the tokenizer it was trained with by --data"
        )
    if stored.manifest.get(KEY) is not None:
        part = _imported_part(stored, name, weights)
    else:
        part = _trained_part(stored, config, vocabulary, main, weights)
    build(part, stored.path)
    return part


def _imported_part(stored: Checkpoint, name: str, weights: dict[str, Tensor]) -> Part:
    """Return an imported model with the names, copies and spare tensors that its folder had."""
    place = f"{stored.path / 'manifest.json'}: {KEY}"
    try:
        record, rest = stored.manifest[KEY][name], stored.state[KEY][name]
        config, names, copies = (dict(record[key]) for key in ("config", "names", "copies"))
        if not all(isinstance(text, str) for pair in (names | copies).items() for text in pair):
            raise TypeError("not a table of names")
        rest = {str(n): tensor for n, tensor in rest.items() if isinstance(tensor, Tensor)}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise MetaseqError(f"{place}: damaged ({error!r})") from error
    part = Part(read_config(config, place), config, weights, name == "main", names, copies, rest)
    written = {n for group in tensor_names(part.foreign, part.main).values() for n in group}
    if not set(copies.values()) <= written:
        raise MetaseqError(f"{place}: damaged (copies of tensors that are not stored)")
    return part


def _trained_part(
    stored: Checkpoint,
    config: DictConfig,
    vocabulary: Vocabulary,
    main: bool,
    weights: dict[str, Tensor],
) -> Part:
    """Return a model that was trained here as the matching class of the transformers library."""
    model = model_options(config, stored.path)
    if model.encoder_normalize_before:
        raise MetaseqError(
            f"{stored.path}: a pre-LN encoder, and BERT, RoBERTa and ELECTRA are post-LN; train with "
            "model.encoder_normalize_before=false (e.g. --model bert_small) to export it"
        )
    if main:
        architecture = choose(set(weights), model, vocabulary)
    else:
        architecture = ARCHITECTURES["ElectraForMaskedLM"]
        if SIZE_OF_GENERATOR not in weights:
            raise MetaseqError(f"{stored.path}: its generator is no masked language model of ours")
        model = generator_sizes(model, weights)
    tied = ("heads.lm.weight" if main else "generator.head.weight") not in weights
    values = write_config(architecture, model, vocabulary, tied)
    part = Part(read_config(values, stored.path), values, weights, main)
    names = tensor_names(part.foreign, main)
    bias = next((n for group in names.values() for n in group if n in COPIES), None)
    part.copies = {} if bias is None else {COPIES[bias]: bias}
    for message, wrong in (
        ("a {} has no place for its", weights.keys() - names.keys()),
        ("a {} has more than it, such as", names.keys() - weights.keys()),
    ):
        if wrong:
            detail = f"{message.format(architecture.name)} {', '.join(sorted(wrong)[:4])}"
            raise MetaseqError(f"{stored.path}: {detail}")
    return part


def choose(names: set[str], model: TransformerConfig, vocabulary: Vocabulary) -> Architecture:
    """Return the class of the transformers library whose parameters have these names."""
    heads = {name.split(".")[1] for name in names if name.startswith("heads.")}
    if "rtd" in heads:
        return ARCHITECTURES["ElectraForPreTraining"]
    base = "Electra" if model.token_embed_dim not in (0, model.encoder_embed_dim) else "Bert"
    if base == "Bert" and "next_sentence" in heads:
        return ARCHITECTURES["BertForPreTraining"]
    if base == "Bert" and vocabulary.layout == "roberta" and model.segments < 2:
        base = "Roberta"
    return ARCHITECTURES[base + ("ForMaskedLM" if "lm" in heads else "Model")]


def generator_sizes(model: TransformerConfig, weights: dict[str, Tensor]) -> TransformerConfig:
    """Return the sizes of ELECTRA's generator, whose heads are as wide as the main encoder's."""
    fc1 = weights[SIZE_OF_GENERATOR]
    width, embed = fc1.shape[1], weights["generator.embeddings.tokens.weight"].shape[1]
    layers = {n for n in weights if re.fullmatch(r"generator\.stack\.layers\.\d+\.fc1\.bias", n)}
    return replace(
        model,
        encoder_layers=len(layers),
        encoder_embed_dim=width,
        encoder_ffn_embed_dim=fc1.shape[0],
        encoder_attention_heads=model.heads_for(width),
        token_embed_dim=embed if embed != width else 0,
    )
