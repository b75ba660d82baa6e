"""Temporary registrations."""

import contextlib
from collections.abc import Iterator

from metaseq_lm.core.registry import ALL, LOADERS


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Remove all names and plug-ins that the block registered on exit.

    Otherwise they would change the choices listed in messages of later tests.
    """
    loaders = list(LOADERS)
    registered = {kind: dict(registry.entries) for kind, registry in ALL.items()}
    try:
        yield
    finally:
        for kind, entries in registered.items():
            ALL[kind].entries = entries
        LOADERS[:] = loaders
