"""Exports a checkpoint to a folder of the transformers library."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from metaseq_lm.config.transformer import EncoderConfig, ModernConfig
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import write_atomic
from metaseq_lm.data.tokenizers.base import DICT_FILE, Tokenizer
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.data.words.subwords import bio_names, predicted_names
from metaseq_lm.interop.claims import claimed_export, with_exported_heads
from metaseq_lm.interop.configs import model_options, read_config, write_config
from metaseq_lm.interop.folders import copy_tokenizer, new_folder, write_model
from metaseq_lm.interop.heads import (
    LABEL_RANGE,
    SENTENCE,
    TOKEN,
    sets_with_heads,
    to_library_form,
    with_one_head,
)
from metaseq_lm.interop.importing import EMBEDDINGS, ORIGINALS
from metaseq_lm.interop.model_card import CARD_FILE, model_card
from metaseq_lm.interop.modern import find_unsupported
from metaseq_lm.interop.names import ARCHITECTURES, COPIES, DISTIL, FINE_TUNED, Architecture
from metaseq_lm.interop.parts import KEY, ModulePart, build, tensor_names, write_part
from metaseq_lm.interop.tokenizer_files import write_tokenizer
from metaseq_lm.runs.checkpoint import Checkpoint
from metaseq_lm.runs.facts import labels_of

_DISTIL_EPS = 1e-12
_NO_ENCODER = "its classes are encoders of subword tokens with one head, and this model is none"
_SIZE_OF_GENERATOR = "generator.stack.layers.0.fc1.weight"


def export_checkpoint(
    stored: Checkpoint,
    config: RunConfig,
    out: Path,
    name: str,
    data: Path | None = None,
    head: str = "",
) -> tuple[ModulePart, Tokenizer]:
    """Write config.json, weights, tokenizer and card of part `name` to the new folder `out`.

    `data` is the folder of its tokenizer; by default the run folder if it has one, else the data
    folder of its config. `head` is the labelled set of the head if there are several. Returns the
    part and its tokenizer. MetaseqError if the library has no such model.
    """
    if name == "main" and f"{EMBEDDINGS[0]}tokens.weight" not in stored.weights:
        raise MetaseqError(f"{stored.path}: {_NO_ENCODER}")
    folder = data or _tokenizer_folder(stored, config)
    tokenizer = load_tokenizer(folder)
    part = export_part(stored, config, tokenizer.vocabulary, name, head)
    with new_folder(out) as target:
        write_model(target, part.config, write_part(part))
        originals = stored.path.parent.parent / ORIGINALS
        longest = longest_input(part, config)
        card = model_card(stored, config, part.config, head, longest, part.pipeline)
        write_atomic(target / CARD_FILE, card.encode("utf-8"))
        if not (KEY in stored.manifest and data is None and copy_tokenizer(originals, target)):
            is_causal = part.foreign.architecture.reach == "causal"
            length = _row_length(part, config)
            write_tokenizer(tokenizer, target, part.foreign.model, length, is_causal)
    return part, tokenizer


def _row_length(part: ModulePart, config: RunConfig) -> int:
    """Return the number of tokens to which a fine-tuned model's tokenizer cuts texts, else 0."""
    if set(FINE_TUNED).isdisjoint(part.foreign.architecture.heads):
        return 0
    return int(config.task.tokens_per_sample)


def longest_input(part: ModulePart, config: RunConfig) -> str:
    """Describe the longest input, with a remark if rows in training were shorter."""
    positions = part.foreign.model.max_positions
    rows = getattr(config.task, "tokens_per_sample", positions)
    if rows == positions:
        return f"{positions} tokens"
    if _row_length(part, config):
        return f"{rows} tokens, as in its training (its encoder has {positions} positions)"
    return f"{positions} tokens (in its training rows had at most {rows})"


def _tokenizer_folder(stored: Checkpoint, config: RunConfig) -> Path:
    """Return the folder of a checkpoint's tokenizer, of the run or the data; UsageError if gone."""
    folder = stored.path.parent.parent
    if not (folder / DICT_FILE).is_file():
        folder = Path(config.data)
    if not folder.is_dir():
        raise UsageError(
            f"{folder}: no such data folder; give one with its tokenizer by --data DIR"
        )
    return folder


def export_part(
    stored: Checkpoint, config: RunConfig, vocabulary: Vocabulary, name: str, head: str = ""
) -> ModulePart:
    """Return network `name` of a checkpoint, with one `head`, as a model of transformers.

    UsageError if there is no such network or head, MetaseqError if it has no counterpart.
    """
    main = name == "main"
    weights = {n: w for n, w in stored.weights.items() if n.startswith("generator.") != main}
    if not weights and not main:
        raise UsageError(f"{stored.path}: it has no generator; leave --part away")
    weights = with_one_head(weights, head, stored.path)
    main_prefix, generator_prefix = EMBEDDINGS
    if not main and not any(n.startswith(generator_prefix) for n in weights):
        shared = [n for n in stored.weights if n.startswith(main_prefix)]
        weights |= {n.replace(main_prefix, generator_prefix): stored.weights[n] for n in shared}
    prefix = main_prefix if main else generator_prefix
    tokens = weights.get(f"{prefix}tokens.weight")
    if tokens is None:
        raise MetaseqError(f"{stored.path}: {_NO_ENCODER}")
    rows = len(vocabulary)
    if isinstance(config.model, EncoderConfig):
        rows = config.model.rows(rows)
    if len(tokens) != rows:
        raise MetaseqError(
            f"{stored.path}: it has {len(tokens)} symbols, but the tokenizer {len(vocabulary)}; "
            "give the folder of the tokenizer it was trained with by --data"
        )
    if stored.manifest.get(KEY) is not None:
        part = _imported_part(stored, name, weights)
    else:
        part = _trained_part(weights, config, vocabulary, stored.path, main)
        part.config |= _label_options(
            part, config, stored, head or getattr(config.task, "labelled", None)
        )
    build(part, stored.path)
    return part


def _imported_part(stored: Checkpoint, name: str, weights: dict[str, Tensor]) -> ModulePart:
    """Return an imported model with the names, copies and spare tensors that its folder had."""
    source = f"{stored.path / 'manifest.json'}: {KEY}"
    try:
        record, rest = stored.manifest[KEY][name], stored.state[KEY][name]
        config, names, copies = (dict(record[key]) for key in ("config", "names", "copies"))
        texts = itertools.chain(*(names | copies).items())
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("not a table of names")
        rest = {str(n): tensor for n, tensor in rest.items() if isinstance(tensor, Tensor)}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise MetaseqError(f"{source}: damaged ({error!r})") from error
    part = ModulePart(
        read_config(config, source), config, weights, name == "main", names, copies, rest
    )
    written = itertools.chain(*tensor_names(part.foreign, part.main).values())
    if not set(copies.values()).issubset(written):
        raise MetaseqError(f"{source}: damaged (copies of tensors that are not stored)")
    return part


def _trained_part(
    weights: dict[str, Tensor],
    config: RunConfig,
    vocabulary: Vocabulary,
    source: object,
    main: bool = True,
) -> ModulePart:
    """Convert a model that was trained here to the matching class of the transformers library.

    MetaseqError, which begins with `source`, if there is no such class.
    """
    claim = claimed_export(config, source)
    omitted: list[str] = []
    if main:
        weights, omitted = with_exported_heads(weights, claim)
    elif not claim.generator:
        raise MetaseqError(
            f"{source}: its noise model is not trained as a masked language model by criterion "
            f"{config.criterion._name}, and no other class of transformers fits it"
        )
    if LABEL_RANGE in weights and not claim.real_values:
        raise MetaseqError(
            f"{source}: its real values go through a sigmoid, which no class of transformers has; "
            "train without it to export them"
        )
    model = model_options(config, source)
    if not model.has_usual_parts:
        raise MetaseqError(
            f"{source}: no class of the transformers library has model.attention="
            f"{model.attention} and model.feed_forward={model.feed_forward}"
        )
    if isinstance(model, ModernConfig):
        heads = {"of ELECTRA's generator"}
        if main:
            heads = {name.split(".")[1] for name in weights if name.startswith("heads.")}
        lacking = find_unsupported(model, heads)
        if lacking:
            raise MetaseqError(
                f"{source}: ModernBERT of the transformers library has nothing like {lacking}"
            )
    separate = model.token_embed_dim not in (0, model.encoder_embed_dim)
    is_classic = not isinstance(model, ModernConfig)
    has_electras = separate or "heads.rtd.out.bias" in weights or not main
    if is_classic and model.style.pre_norm and has_electras:
        raise MetaseqError(
            f"{source}: a pre-LN encoder with ELECTRA's head or embeddings, and ELECTRA is "
            "post-LN; train with model.encoder_normalize_before=false (e.g. --model "
            "electra_small) to export it"
        )
    activation = getattr(config.task, "pooler_activation", "tanh")
    if main:
        architecture = choose(weights, model, vocabulary, activation, claim.reach, source)
        output = "heads.lm.weight"
    else:
        architecture = ARCHITECTURES["ElectraForMaskedLM"]
        output = "generator.head.weight"
        if _SIZE_OF_GENERATOR not in weights:
            raise MetaseqError(f"{source}: its generator is no masked language model of ours")
        model = _generator_sizes(model, weights)
    values = write_config(architecture, model, vocabulary, tied=output not in weights)
    original, weights = weights, to_library_form(weights, architecture, activation, source)
    part = ModulePart(read_config(values, source), values, weights, main, original=original)
    part.omitted, part.pipeline = omitted, claim.pipeline or not main
    names = tensor_names(part.foreign, main)
    part.copies = {COPIES[n]: n for n in itertools.chain(*names.values()) if n in COPIES}
    for message, wrong in (
        ("{} has no place for its", weights.keys() - names.keys()),
        ("{} has more than it, such as", names.keys() - weights.keys()),
    ):
        if wrong:
            # For a head, its name is enough.
            parts = {re.sub(r"^(heads\.\w+)\..*", r"\1", name) for name in wrong}
            detail = f"{message.format(architecture.name)} {', '.join(sorted(parts)[:4])}"
            if parts & {"heads.span", "heads.answerability"}:
                detail += "; train with task.joint=false task.answerability=false to export it"
            raise MetaseqError(f"{source}: {detail}")
    return part


def choose(
    weights: dict[str, Tensor],
    model: EncoderConfig,
    vocabulary: Vocabulary,
    activation: str,
    reach: str,
    source: object,
) -> Architecture:
    """Return the class of the transformers library for the encoder and heads of `weights`.

    `activation` is the activation in a head for sentences, which distinguishes ELECTRA's from
    DistilBERT's; `reach` is what a token sees. MetaseqError if the library has the head only for
    other encoders.
    """
    heads = {name.split(".")[1] for name in weights if name.startswith("heads.")}
    if "rtd" in heads:
        return ARCHITECTURES["ElectraForPreTraining"]
    base = "MegatronBert" if model.style.pre_norm else "Bert"
    layer = ""
    if base == "Bert" and f"{SENTENCE}pooler.weight" in weights:
        layer = activation
    if layer == "gelu" or model.token_embed_dim not in (0, model.encoder_embed_dim):
        base = "Electra"
    elif layer == "relu":
        # DistilBERT has no segments, and a fixed constant in its layer norms.
        if not model.segments and model.norm_eps == _DISTIL_EPS:
            base = "DistilBert"
    elif base == "Bert" and vocabulary.layout == "roberta" and model.segments < 2:
        base = "Roberta"
    if isinstance(model, ModernConfig):
        base = "ModernBertDecoder" if reach == "causal" else "ModernBert"
    kind = "ForMaskedLM" if "lm" in heads else "Model"
    if "next_sentence" in heads and base in ("Bert", "MegatronBert"):
        kind = "ForPreTraining"
    elif "span" in heads:
        kind = "ForQuestionAnswering"
    elif "token" in heads:
        kind = "ForTokenClassification"
    elif "sentence" in heads:
        scores = weights[f"{SENTENCE}out.bias"]
        choices = len(scores) == 1 and LABEL_RANGE not in weights
        kind = "ForMultipleChoice" if choices else "ForSequenceClassification"
    if reach == "causal":
        kind = "LMHeadModel" if base == "Bert" else "ForCausalLM"
    architecture = ARCHITECTURES.get(base + kind)
    if architecture is None:
        raise MetaseqError(f"{source}: a {base}{kind} has other layers than its head")
    if architecture.reach != reach:
        raise MetaseqError(
            f"{source}: {base}{kind} sees {architecture.reach}, the objective {reach}"
        )
    return architecture


def _label_options(
    part: ModulePart, config: RunConfig, stored: Checkpoint, labelled: Any
) -> dict[str, Any]:
    """Return the options of `config.json` that name a classifier's outputs by a set's labels."""
    if not isinstance(labelled, (str, type(None))):
        labelled = labelled[0]  # the only set
    bias = part.weights.get(f"{SENTENCE}out.bias", part.weights.get(f"{TOKEN}out.bias"))
    if bias is None or part.foreign.architecture.name.endswith("ForMultipleChoice"):
        return {}
    key = "classifier_dropout"
    if part.foreign.architecture.base == DISTIL:
        key = "seq_classif_dropout"
    options = {key: getattr(config.task, "head_dropout", 0.0)}
    if LABEL_RANGE in part.original:
        names, kind = ["value"], "regression"
    else:
        facts = stored.manifest.get("facts") or {"labels": {}}
        names = labels_of(facts, stored.path).get(labelled, [])
        number = "multi" if facts.get("multi_label") else "single"
        kind = f"{number}_label_classification"
        if f"{TOKEN}out.bias" in part.weights and len(names) != len(bias):
            fitting = predicted_names(names)
            if len(fitting) != len(bias):
                fitting = bio_names(names)
            names = fitting
        if len(names) != len(bias):
            names = [f"LABEL_{i}" for i in range(len(bias))]
    if f"{TOKEN}out.bias" not in part.weights:
        options["problem_type"] = kind
    ids = {name: i for i, name in enumerate(names)}
    labels = {str(i): name for name, i in ids.items()}
    return {**options, "label2id": ids, "id2label": labels}


def why_not_exportable(weights: dict[str, Tensor], config: RunConfig, vocabulary: object) -> str:
    """Return why a model with these weights cannot be exported; "" if it can."""
    source = "model"
    try:
        if not isinstance(vocabulary, Vocabulary) or f"{EMBEDDINGS[0]}tokens.weight" not in weights:
            raise MetaseqError(f"{source}: {_NO_ENCODER}")
        main = {name: w for name, w in weights.items() if not name.startswith("generator.")}
        _trained_part(
            with_one_head(main, next(iter(sets_with_heads(main)), ""), source),
            config,
            vocabulary,
            source,
        )
    except MetaseqError as error:
        return str(error).removeprefix(f"{source}: ")
    return ""


def _generator_sizes(model: EncoderConfig, weights: dict[str, Tensor]) -> EncoderConfig:
    """Return the sizes of ELECTRA's generator, which has heads as wide as the main encoder's."""
    fc1 = weights[_SIZE_OF_GENERATOR]
    width, embed = fc1.shape[1], weights["generator.embeddings.tokens.weight"].shape[1]
    if embed == width:
        embed = 0
    layers = {n for n in weights if re.fullmatch(r"generator\.stack\.layers\.\d+\.fc1\.bias", n)}
    return replace(
        model,
        encoder_layers=len(layers),
        encoder_embed_dim=width,
        encoder_ffn_embed_dim=fc1.shape[0],
        encoder_attention_heads=model.heads_for(width),
        token_embed_dim=embed,
    )
