"""What an export may claim: the library's class that a run's objective declares."""

from torch import Tensor

from metaseq_lm.core.config import RunConfig, build
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.registry import ALL
from metaseq_lm.criterions import Criterion, Exported
from metaseq_lm.tasks.protocols import read_as

_KINDS = ("task", "criterion", "model")
_HEADS = "heads."


def claimed_export(config: RunConfig, source: object) -> Exported:
    """Return the export that a run's criterion declares, if its task and model may be exported.

    Raises:
        MetaseqError: One of the three may not be exported, or does not declare it; the message
            begins with `source`.
    """
    config = read_as(config)
    for kind in _KINDS:
        name = getattr(config, kind)._name
        entry = ALL[kind].entry(name)
        # Not an inherited declaration: a subclass may compute something else.
        declared = vars(entry.value).get("exported")
        if isinstance(declared, str):
            raise MetaseqError(f"{source}: {kind} {name}: {declared}")
        if not declared:
            raise MetaseqError(
                f"{source}: {kind} {name} (of {entry.origin}) does not say that a class of "
                "transformers computes what it trains: its attention, positions or heads may be "
                "others. If a class does, declare `exported` in the body of the class itself "
                "(docs/how_to/plugins.md)"
            )
    if getattr(config.task, "reach", "both") == "causal":
        raise MetaseqError(
            f"{source}: task.reach=causal: the head reads [SEP], the last token of an encoder that "
            "is causal, and no class of transformers with these weights does so"
        )
    criterion: Criterion = build("criterion", config.criterion)
    assert isinstance(criterion.exported, Exported)
    if "lm" in criterion.exported.heads and getattr(config.model, "width_ratio", 1.0) != 1.0:
        raise MetaseqError(
            f"{source}: model.base_width scales the logits, and no class of transformers does so"
        )
    return criterion.exported


def with_exported_heads(
    weights: dict[str, Tensor], claim: Exported
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights without heads that the criterion does not export, and their names."""
    heads = {name.split(".")[1] for name in weights if name.startswith(_HEADS)}
    omitted = sorted(heads - set(claim.heads))
    prefixes = tuple(f"{_HEADS}{head}." for head in omitted)
    return {n: w for n, w in weights.items() if not n.startswith(prefixes)}, omitted
