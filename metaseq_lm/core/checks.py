"""Checks that the classes of data are those that a model was trained on."""

from collections.abc import Mapping, Sequence

from metaseq_lm.core.errors import UsageError


def check_classes(source: object, name: str, then: Sequence[str], now: Sequence[str]) -> None:
    """Raise UsageError if `source` was trained on other classes of a set, or in another order."""
    if list(then) != list(now):
        was, is_now = (", ".join(labels) or "real values" for labels in (then, now))
        raise UsageError(
            f"{source} was trained on {name} with the classes {was}, but DATA has {is_now}; their order is "
            "that of the outputs. Preprocess the set again with --labels-from the set of then, or with "
            "--labels in its order"
        )


def check_heads(
    source: object, then: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]
) -> None:
    """Raise UsageError if the classes of a set of `now` are not those that its head was trained on.

    `then` are the classes of the sets that `source` was trained on; where that is one, its head is
    that of a set of another name, too.
    """
    for name, labels in now.items():
        only = next(iter(then.values())) if len(then) == 1 else labels
        check_classes(source, name, then.get(name, only), labels)
