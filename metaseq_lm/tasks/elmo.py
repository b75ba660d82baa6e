"""A frozen language model beside a tagger or parser (ELMo, Peters et al. 2018; Clark et al. 2018).

Its layers, mixed with learned weights and through dropout, go into the encoder, one mix for all
sets, and into the heads, one mix for each set.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from omegaconf import DictConfig

from metaseq_lm.core.config import option
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.storage.manifest import tokenizer_hash
from metaseq_lm.data.words.vocabulary import PAD, WordVocabulary
from metaseq_lm.models.bilstm import BiLSTM, BiLSTMConfig
from metaseq_lm.models.layers import ScalarMix
from metaseq_lm.runs import checkpoint
from metaseq_lm.tasks.finetuning import ENCODER

MODEL = "bilstm_lm"


@dataclass
class ElmoConfig:
    """Whose states are further input, and how."""

    elmo: str = option(
        "",
        "run of task word_language_modeling on DATA; its states are added to the input ('' = none)",
        source="language_model",
    )
    elmo_dropout: float = option(
        0.5, "dropout of the mixed states; the paper names no rate", at_least=0, below=1
    )
    elmo_sizes: list[int] = option(
        [], "words, layers, width and cells of that model; taken from its run, not to be set"
    )


def with_sizes(config: DictConfig) -> DictConfig:
    """Return `config` with task.elmo_sizes as the run that task.elmo names has them.

    So a checkpoint, which has the weights, needs that run no more. Raises UsageError for a run of
    another model or of another vocabulary than the data folder's, CheckpointError if there is none.
    """
    config = config.copy()
    config.task.elmo_sizes = []
    if not config.task.elmo:
        return config
    place = checkpoint.resolve(config.task.elmo, prefer="best")
    source = checkpoint.load(place)
    model = (source.manifest.get("config") or {}).get("model") or {}
    if model.get("_name") != MODEL:
        raise UsageError(
            f"task.elmo: {place} has model {model.get('_name')}; give a run of --task "
            f"word_language_modeling --criterion language_modeling --model {MODEL}"
        )
    then, now = source.manifest.get("tokenizer"), tokenizer_hash(config.data)
    if then != now or f"{ENCODER}ids" not in source.weights:
        raise UsageError(
            f"task.elmo: {place} was trained on another vocabulary than {config.data} has ({then} and "
            f"{now}); train it on this folder, or make the folder with its vocabulary: preprocess "
            "--words --tokenizer-from FOLDER"
        )
    words = len(source.weights[f"{ENCODER}tokens.weight"])
    sizes = ("encoder_layers", "encoder_embed_dim", "encoder_hidden_dim")
    config.task.elmo_sizes = [words, *(model[name] for name in sizes)]
    return config


def language_model(options: DictConfig, vocabulary: WordVocabulary) -> BiLSTM | None:
    """Return the net for the language model, whose weights are still to come, or None without one."""
    if not getattr(options, "elmo_sizes", None):
        return None
    words, layers, width, cells = options.elmo_sizes
    ids = torch.zeros(len(vocabulary), dtype=torch.long)
    return BiLSTM(BiLSTMConfig(layers, width, cells, 0.0), words, PAD, ids)


def scalar_mix(options: DictConfig) -> ScalarMix | None:
    """Return a mix of the layers of the language model, or None without one."""
    if not getattr(options, "elmo_sizes", None):
        return None
    _, layers, width, _ = options.elmo_sizes
    return ScalarMix(layers + 1, 2 * width, options.elmo_dropout)


def head_mixes(options: DictConfig, names: Sequence[str]) -> dict[str, ScalarMix]:
    """Return a mix for the heads of each of the sets `names`, none without a language model."""
    mixes = {name: scalar_mix(options) for name in names}
    return {name: mix for name, mix in mixes.items() if mix is not None}


def load_language_model(net: BiLSTM, source: str) -> None:
    """Give `net` the weights of the best checkpoint of the run `source`."""
    stored = checkpoint.load(checkpoint.resolve(source, prefer="best"))
    encoder = {n: w for n, w in stored.weights.items() if n.startswith(ENCODER)}
    weights = {name.removeprefix(ENCODER): weight for name, weight in encoder.items()}
    checkpoint.load_into(net, weights, stored.path)
