"""Models as named tensors, converted between the transformers library's names and ours."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from metaseq_lm.config.transformer import EncoderConfig
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.interop.configs import ExternalModel
from metaseq_lm.interop.heads import LABEL_RANGE, add_fine_tuned_heads
from metaseq_lm.interop.names import (
    CONSTANTS,
    COPIES,
    HEADS,
    TWINS,
    Mapping,
    canonical_name,
    optional_names,
)
from metaseq_lm.models.transformer.encoder import (
    BinaryHead,
    Embeddings,
    LMHead,
    SentenceHead,
    Stack,
    TransformerLM,
)
from metaseq_lm.runs import checkpoint

# Key in manifest.json and state.pt of an imported checkpoint for data to export it again.
KEY = "transformers"


@dataclass
class ModulePart:
    """A model's parameters under our names, and the remaining content of its folder.

    `main` is False for ELECTRA's generator. `names` maps current names of tensors to different ones
    in the folder, `copies` maps tensors to equal ones, `rest` has tensors without a place in our
    model. `original` has our weights if `weights` are in the form of the library's head. `omitted`
    are heads that the criterion does not export, and `pipeline` says whether the class's pipeline
    performs the trained task.
    """

    foreign: ExternalModel
    config: dict[str, Any]
    weights: dict[str, Tensor]
    main: bool = True
    names: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    rest: dict[str, Tensor] = field(default_factory=dict)
    original: dict[str, Tensor] = field(default_factory=dict)
    omitted: list[str] = field(default_factory=list)
    pipeline: bool = True

    @property
    def record(self) -> dict[str, Any]:
        """The manifest's entries, with which the model can be exported unchanged."""
        return {"config": self.config, "names": self.names, "copies": self.copies}


def tensor_names(foreign: ExternalModel, main: bool) -> Mapping:
    """Return the library's tensors for each of our parameters; of the generator if not `main`."""
    architecture, prefix = foreign.architecture, foreign.architecture.prefix
    backbone, heads = ("encoder", "heads.") if main else ("generator", "generator.")
    names: Mapping = {}
    is_modern = architecture.is_modern
    modules: Mapping = {f"{backbone}.embeddings.norm": (f"{prefix}.embeddings.LayerNorm",)}
    if is_modern:
        modules = {f"{backbone}.embeddings.norm": (f"{prefix}.embeddings.norm",)}
        modules |= {f"{backbone}.stack.norm": (f"{prefix}.final_norm",)}
    elif foreign.model.style.pre_norm:
        modules = {f"{backbone}.stack.norm": (f"{prefix}.encoder.ln",)}
    if foreign.model.token_embed_dim:
        modules[f"{backbone}.stack.project"] = (f"{prefix}.embeddings_project",)
    for n in range(foreign.model.encoder_layers):
        for ours, theirs in architecture.layer.items():
            layer = f"{architecture.layers}.{n}"
            modules[f"{backbone}.stack.layers.{n}.{ours}"] = tuple(f"{layer}.{t}" for t in theirs)
    if is_modern:
        del modules[f"{backbone}.stack.layers.0.attention_norm"]
    for head in architecture.heads:
        ours = heads + head
        if head == "lm" and not main:
            ours = "generator.head"
        for part, name in HEADS[architecture.base][head].items():
            if not part.startswith("."):
                modules[f"{ours}.{part}"] = (name,)
            elif not foreign.tied:
                names[ours + part] = (TWINS.get(name, name),)
            elif part != ".weight":
                names[ours + part] = (name,)
    kinds = {"tokens": "word", "positions": "position", "segments": "token_type"}
    if is_modern:
        kinds = {"tokens": "word"}
    for ours, kind in kinds.items():
        if ours != "segments" or foreign.segments:
            names[f"{backbone}.embeddings.{ours}.weight"] = (_embedding_table_name(foreign, kind),)
    for ours, theirs in modules.items():
        names[f"{ours}.weight"] = tuple(f"{name}.weight" for name in theirs)
        if not is_modern:
            names[f"{ours}.bias"] = tuple(f"{name}.bias" for name in theirs)
    return names


def _embedding_table_name(foreign: ExternalModel, kind: str) -> str:
    """Return the name of the embedding table of "word", "position" or "token_type"."""
    if foreign.architecture.is_modern and kind == "word":
        kind = "tok"
    return f"{foreign.architecture.prefix}.embeddings.{kind}_embeddings.weight"


def read_part(
    foreign: ExternalModel,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    source: object,
    main: bool,
) -> ModulePart:
    """Read the tensors of a folder into a Part; MetaseqError naming missing or unknown ones."""
    stored = {canonical_name(name, foreign.architecture.prefix): name for name in tensors}
    if len(stored) < len(tensors):
        raise MetaseqError(f"{source}: a tensor is there under an old and under its present name")
    names = tensor_names(foreign, main)
    required = list(itertools.chain(*names.values()))
    for name in required:
        if name not in stored and TWINS.get(name) in stored:
            stored[name] = stored.pop(TWINS[name])
    by_name = {name: tensors[stored_name] for name, stored_name in stored.items()}
    missing = [name for name in required if name not in by_name]
    if missing:
        raise MetaseqError(
            f"{source}: it lacks {', '.join(missing[:4])}, which a {foreign.architecture.name} has"
        )
    part = ModulePart(foreign, config, {}, main)
    part.names = {name: stored[name] for name in required if stored[name] != name}
    _sort_rest(part, by_name.keys() - required, stored, by_name, source)
    position = _embedding_table_name(foreign, "position")
    if foreign.offset:
        part.rest[stored[position]] = by_name[position][: foreign.offset].clone()
        by_name[position] = by_name[position][foreign.offset :].clone()
    try:
        for parameter, pieces in names.items():
            part.weights[parameter] = by_name[pieces[0]]
            if len(pieces) > 1:
                part.weights[parameter] = torch.cat([by_name[name] for name in pieces])
    except RuntimeError as error:
        raise MetaseqError(f"{source}: its tensors do not fit together ({error})") from error
    return part


def _sort_rest(
    part: ModulePart,
    others: set[str],
    stored: dict[str, str],
    by_name: dict[str, Tensor],
    source: object,
) -> None:
    """Sort `others` into copies and tensors to keep; MetaseqError for an unknown one."""
    base, tied = part.foreign.architecture.base, part.foreign.tied
    output = HEADS[base]["lm"][".weight"]
    copies = {**COPIES, output: _embedding_table_name(part.foreign, "word")}
    spare = optional_names(base) | (
        {_embedding_table_name(part.foreign, "token_type")} - set(part.weights)
    )
    for name in sorted(others):
        tensor = by_name[name]
        original = by_name.get(copies.get(name, ""))
        if original is not None and torch.equal(original, tensor):
            part.copies[stored[name]] = copies[name]
        elif name == output and tied and "lm" in part.foreign.architecture.heads:
            raise MetaseqError(
                f"{source}: {name} differs from the embedding though config.json has "
                "tie_word_embeddings; set it to false there if the head has weights of its own"
            )
        elif name in spare or CONSTANTS.fullmatch(name):
            part.rest[stored[name]] = tensor
        else:
            raise MetaseqError(
                f"{source}: nothing is known of the tensor {name}, which a "
                f"{part.foreign.architecture.name} does not have"
            )


def write_part(part: ModulePart) -> dict[str, Tensor]:
    """Return the tensors for a folder with this model."""
    foreign = part.foreign
    tensors: dict[str, Tensor] = {}
    for parameter, names in tensor_names(foreign, part.main).items():
        pieces = part.weights[parameter].chunk(len(names))
        tensors |= {name: piece.clone() for name, piece in zip(names, pieces)}
    words, position = (
        tensors[_embedding_table_name(foreign, "word")],
        _embedding_table_name(foreign, "position"),
    )
    if not foreign.segments and foreign.architecture.has_segments:
        rows = int(part.config.get("type_vocab_size", 2))
        tensors[_embedding_table_name(foreign, "token_type")] = words.new_zeros(
            rows, words.shape[1]
        )
    rest = dict(part.rest)
    if foreign.offset:
        zeros = words.new_zeros(foreign.offset, words.shape[1])
        first = rest.pop(part.names.get(position, position), zeros)
        tensors[position] = torch.cat([first, tensors[position]])
    copies = {copy: tensors[original].clone() for copy, original in part.copies.items()}
    return {part.names.get(name, name): t for name, t in tensors.items()} | copies | rest


def _assemble(
    model: EncoderConfig, vocab_size: int, pad: int, names: set[str], generator: bool = False
) -> nn.Module:
    """Build a network with parameters `names`: an encoder with heads, or ELECTRA's generator.

    A generator is a ModuleDict with entries "embeddings", "stack" and "head".
    """
    if generator:
        head = LMHead(model, vocab_size, "generator.head.weight" not in names)
        parts = {"embeddings": Embeddings(model, vocab_size, pad), "stack": Stack(model)}
        return nn.ModuleDict({"generator": nn.ModuleDict({**parts, "head": head})})
    has = {name.split(".")[1] for name in names if name.startswith("heads.")}
    tied = "heads.lm.weight" not in names
    net = TransformerLM(model, vocab_size, pad, tuple(has & {"lm"}), tied)
    width = model.encoder_embed_dim
    if "rtd" in has:
        net.heads["rtd"] = BinaryHead(width)
    if "next_sentence" in has:
        net.heads["next_sentence"] = SentenceHead(width, 2, model.dropout, pooled=True)
    return net


def build(part: ModulePart, source: object) -> nn.Module:
    """Return the network of a part, ready to predict; CheckpointError if weights do not fit."""
    foreign, weights = part.foreign, dict(part.original or part.weights)
    weights.pop(LABEL_RANGE, None)
    with torch.device("meta"):  # no random weights, which would be replaced at once
        net = _assemble(foreign.model, foreign.vocab_size, foreign.pad, set(weights), not part.main)
        if isinstance(net, TransformerLM):
            add_fine_tuned_heads(net.heads, weights, foreign.architecture.activation)
    checkpoint.check_fit(net, weights, source)
    net.load_state_dict(weights, assign=True)
    return net.float().eval()
