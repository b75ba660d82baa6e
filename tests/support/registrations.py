"""What is registered for a while only."""

import contextlib
from collections.abc import Iterator

from metaseq_lm.core.registry import ALL


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Remove, in the end, whatever name the block has registered.

    A name that stays registered changes the choices which messages of later tests list.
    """
    registered = {kind: dict(registry.entries) for kind, registry in ALL.items()}
    try:
        yield
    finally:
        for kind, entries in registered.items():
            ALL[kind].entries = entries
