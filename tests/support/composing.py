"""Hydra's `compose` with a memory, for tests that compose thousands of configurations.

A composition takes 80 ms, most of it for the choice of names (`task=bam`), of which there are few.
Values (`task.batch_size=8`) are set in a copy, as Hydra itself sets them.
"""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from metaseq_lm.core import config

ROOT = Path(__file__).resolve().parents[2]
# Sets a value; everything else chooses a config or is for Hydra itself.
VALUE = re.compile(rf"(?!hydra\b|({'|'.join(config.GROUPS)})=)[a-z_]+(\.[a-z_0-9]+)*=.*", re.DOTALL)
compositions: dict[tuple, DictConfig] = {}


@contextmanager
def remembered() -> Iterator[None]:
    """Let `load_config` compose each choice of names once inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "compose", compose)
        yield


def compose(name: str, overrides: list[str]) -> DictConfig:
    """Return what `hydra.compose` returns."""
    names = [o for o in overrides if not VALUE.fullmatch(o)]
    places = [
        path.path for path in GlobalHydra.instance().config_loader().get_search_path().get_path()
    ]
    if not all(is_ours(place) for place in places if place is not None):
        return hydra.compose(name, overrides)  # files that a test writes may change
    key = (name, tuple(places), tuple(names), registered())
    try:
        if key not in compositions:
            compositions[key] = hydra.compose(name, names)
        changed = copy.deepcopy(compositions[key])
        for text in overrides:
            if VALUE.fullmatch(text):
                override = parsed(text)
                OmegaConf.update(changed, override.key_or_group, override.value(), merge=True)
        return changed
    except Exception:
        return hydra.compose(name, overrides)  # which finds the same mistake, and says so


def is_ours(place: str) -> bool:
    """Whether a place in Hydra's search path holds files of this repository, or none."""
    scheme, _, path = place.partition("://")
    return scheme in ("pkg", "structured") or Path(path or scheme).is_relative_to(ROOT)


def registered() -> tuple:
    """Return what is in Hydra's store now: tests register names of their own."""
    repo = ConfigStore.instance().repo
    return tuple(
        (group, name, OmegaConf.get_type(entry.node))
        for group, entries in repo.items()
        if isinstance(entries, dict)
        for name, entry in entries.items()
        if not isinstance(entry, dict)
    )


@cache
def parsed(text: str) -> Override:
    """Return one override as Hydra's parser reads it."""
    return OverridesParser.create().parse_overrides([text])[0]
