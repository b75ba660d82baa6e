"""A model as named tensors: between the transformers library's names and ours."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.interop.configs import Foreign
from metaseq_lm.interop.names import (
    CONSTANTS,
    COPIES,
    GENERATOR,
    HEADS,
    MAIN,
    TWINS,
    Mapping,
    Places,
    canonical,
    known,
    mapping,
)
from metaseq_lm.models.transformer.encoder import (
    BinaryHead,
    Embeddings,
    LMHead,
    SentenceHead,
    Stack,
    TransformerConfig,
    TransformerLM,
)
from metaseq_lm.runs import checkpoint

# Key in manifest.json and state.pt of an imported checkpoint for what exporting it again needs.
KEY = "transformers"


@dataclass
class Part:
    """A model's parameters under our names, and the remaining content of its folder.

    `names` maps present names of tensors to differing ones in the folder, `copies` maps tensors to
    those that they equal, `rest` holds tensors that our model has no place for.
    """

    foreign: Foreign
    config: dict[str, Any]
    weights: dict[str, Tensor]
    names: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    rest: dict[str, Tensor] = field(default_factory=dict)

    @property
    def about(self) -> dict[str, Any]:
        """What the manifest keeps, so that the model can be exported unchanged."""
        return {"config": self.config, "names": self.names, "copies": self.copies}


def names_of(foreign: Foreign, places: Places) -> Mapping:
    """Return the mapping of a model's parameters."""
    return mapping(
        foreign.architecture,
        foreign.model.encoder_layers,
        bool(foreign.model.token_embed_dim),
        foreign.segments,
        foreign.tied,
        places,
    )


def table(foreign: Foreign, kind: str) -> str:
    """Return the name of the embedding table of "word", "position" or "token_type"."""
    return f"{foreign.architecture.base}.embeddings.{kind}_embeddings.weight"


def read_part(
    foreign: Foreign, config: dict[str, Any], tensors: dict[str, Tensor], place: object, main: bool
) -> Part:
    """Read the tensors of a folder into a Part; MetaseqError naming missing or unknown ones."""
    base = foreign.architecture.base
    calls = {canonical(name, base): name for name in tensors}
    if len(calls) < len(tensors):
        raise MetaseqError(f"{place}: a tensor is there under an old and under its present name")
    names = names_of(foreign, MAIN if main else GENERATOR)
    wanted = [name for pieces in names.values() for name in pieces]
    for name in wanted:
        if name not in calls and TWINS.get(name) in calls:
            calls[name] = calls.pop(TWINS[name])
    by_name = {name: tensors[call] for name, call in calls.items()}
    missing = [name for name in wanted if name not in by_name]
    if missing:
        raise MetaseqError(
            f"{place}: it lacks {', '.join(missing[:4])}, which a {foreign.architecture.name} has"
        )
    part = Part(foreign, config, {})
    part.names = {name: calls[name] for name in wanted if calls[name] != name}
    _sort_rest(part, {n: by_name[n] for n in by_name.keys() - wanted}, calls, by_name, place)
    position = table(foreign, "position")
    if foreign.offset:
        part.rest[calls[position]] = by_name[position][: foreign.offset].clone()
        by_name[position] = by_name[position][foreign.offset :].clone()
    try:
        part.weights = {
            parameter: torch.cat([by_name[n] for n in pieces])
            if len(pieces) > 1
            else by_name[pieces[0]]
            for parameter, pieces in names.items()
        }
    except RuntimeError as error:
        raise MetaseqError(f"{place}: its tensors do not fit together ({error})") from error
    return part


def _sort_rest(
    part: Part,
    others: dict[str, Tensor],
    calls: dict[str, str],
    by_name: dict[str, Tensor],
    place: object,
) -> None:
    """Tell copies from tensors to be kept; anything else is a model that is not understood."""
    base, tied = part.foreign.architecture.base, part.foreign.tied
    output = HEADS[base]["lm"][".weight"]
    copies = {**COPIES, output: table(part.foreign, "word")}
    spare = known(base) | ({table(part.foreign, "token_type")} - set(part.weights))
    for name, tensor in sorted(others.items()):
        original = by_name.get(copies.get(name, ""))
        if original is not None and torch.equal(original, tensor):
            part.copies[calls[name]] = copies[name]
        elif name == output and tied and "lm" in part.foreign.architecture.heads:
            raise MetaseqError(
                f"{place}: {name} differs from the embedding though config.json has "
                "tie_word_embeddings; set it to false there if the head has weights of its own"
            )
        elif name in spare or CONSTANTS.fullmatch(name):
            part.rest[calls[name]] = tensor
        else:
            raise MetaseqError(
                f"{place}: nothing is known of the tensor {name}, which a "
                f"{part.foreign.architecture.name} does not have"
            )


def write_part(part: Part, names: Mapping) -> dict[str, Tensor]:
    """Return the tensors of a folder that holds this model."""
    weights, foreign = part.weights, part.foreign
    tensors = {
        name: piece.clone()
        for parameter, pieces in names.items()
        for name, piece in zip(pieces, weights[parameter].chunk(len(pieces)))
    }
    words, position = tensors[table(foreign, "word")], table(foreign, "position")
    if not foreign.segments:
        rows = int(part.config.get("type_vocab_size", 2))
        tensors[table(foreign, "token_type")] = words.new_zeros(rows, words.shape[1])
    rest = dict(part.rest)
    if foreign.offset:
        zeros = words.new_zeros(foreign.offset, words.shape[1])
        first = rest.pop(part.names.get(position, position), zeros)
        tensors[position] = torch.cat([first, tensors[position]])
    copies = {copy: tensors[original].clone() for copy, original in part.copies.items()}
    return {part.names.get(name, name): t for name, t in tensors.items()} | copies | rest


def assemble(
    model: TransformerConfig, vocab_size: int, pad: int, names: set[str], generator: bool = False
) -> nn.Module:
    """Build a net whose parameters have our `names`: an encoder with heads, or ELECTRA's generator.

    A generator is a ModuleDict with entries "embeddings", "stack" and "head".
    """
    if generator:
        sizes = (model.encoder_embed_dim, model.embed_dim, vocab_size)
        head = LMHead(*sizes, "generator.head.weight" not in names, model.norm_eps)
        parts = {"embeddings": Embeddings(model, vocab_size, pad), "stack": Stack(model)}
        return nn.ModuleDict({"generator": nn.ModuleDict({**parts, "head": head})})
    has = {name.split(".")[1] for name in names if name.startswith("heads.")}
    tied = "heads.lm.weight" not in names
    net = TransformerLM(model, vocab_size, pad, ("lm",) if "lm" in has else (), tied)
    width = model.encoder_embed_dim
    if "rtd" in has:
        net.heads["rtd"] = BinaryHead(width)
    if "next_sentence" in has:
        net.heads["next_sentence"] = SentenceHead(width, 2, model.dropout, pooled=True)
    return net


def build(foreign: Foreign, weights: dict[str, Tensor], place: object, main: bool) -> nn.Module:
    """Return the net of `weights`, ready to predict; CheckpointError if they do not fit."""
    with torch.device("meta"):  # nothing is drawn that is replaced at once
        net = assemble(foreign.model, foreign.vocab_size, foreign.pad, set(weights), not main)
    checkpoint.check_fit(net, weights, place)
    net.load_state_dict(weights, assign=True)
    return net.float().eval()
