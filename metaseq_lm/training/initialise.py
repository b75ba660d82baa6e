"""Starting a run from the weights of another one (init_from)."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import DictConfig

from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.storage.manifest import tokenizer_hash
from metaseq_lm.runs import checkpoint, lineage_cost
from metaseq_lm.runs.checkpoint import Checkpoint, CheckpointError
from metaseq_lm.tasks.protocols import ChecksSource
from metaseq_lm.training.parts import Parts

# Options that change the hidden states of the same weights without a trace in their shapes.
SHAPELESS = ("encoder_attention_heads", "encoder_normalize_before", "norm_eps")


@dataclass(frozen=True)
class Initialisation:
    """What a run started from: a sentence for its log, and the cost of its ancestors."""

    message: str = ""
    costs: lineage_cost.Costs = field(default_factory=dict)


def initialise_from(parts: Parts, source: str) -> Initialisation:
    """Load the weights that the task takes from the run or checkpoint `source`.

    Raises CheckpointError if there are none or they do not fit, UsageError if tokenizer or layers
    differ from those that the weights were trained with.
    """
    stored = checkpoint.load(checkpoint.resolve(source))
    check_source(stored, parts.config)
    if isinstance(parts.task, ChecksSource):
        parts.task.check_facts(stored.manifest.get("facts") or {}, stored.path)
    chosen = parts.task.pretrained(stored.weights)
    if not chosen:
        raise CheckpointError(
            f"{stored.path} has no weights that task '{parts.config.task._name}' starts from; "
            f"it has {', '.join(sorted(stored.weights)[:3])}, ..."
        )
    current = parts.model.state_dict()
    fresh = {
        name: weight
        for name, weight in current.items()
        if name not in chosen and name.startswith(parts.task.fresh)
    }
    message = f"starts from {stored.path}: {len(chosen)} weights of it"
    if fresh:
        message += f"; fresh: {', '.join([*fresh][:4])}{', ...' * (len(fresh) > 4)}"
    checkpoint.load_into(parts.model, {**fresh, **chosen}, stored.path)
    return Initialisation(message, lineage_cost.ancestors(source))


def check_source(stored: Checkpoint, config: DictConfig) -> None:
    """Raise UsageError if a run cannot start from a checkpoint: another tokenizer or other layers."""
    check_tokenizer(stored, config.data)
    model = (stored.manifest.get("config") or {}).get("model") or {}
    for key in SHAPELESS:
        if key in model and key in config.model and model[key] != config.model[key]:
            raise UsageError(
                f"{stored.path} was trained with model.{key}={model[key]}, this run has "
                f"{config.model[key]}; its weights would compute something else"
            )


def check_tokenizer(stored: Checkpoint, data: str) -> None:
    """Raise UsageError if a checkpoint was trained on the tokens of another tokenizer than `data`'s."""
    trained_with, current = stored.manifest.get("tokenizer"), tokenizer_hash(data)
    if trained_with and current and trained_with != current:
        raise UsageError(
            f"{stored.path} was trained with another tokenizer than {data} has ({trained_with} and {current}); "
            "binarise the data with its tokenizer: preprocess --tokenizer-from FOLDER"
        )
