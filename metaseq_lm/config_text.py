"""A configuration as text: the keys that --help shows, and values spelled for Hydra's grammar."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, ListConfig, OmegaConf

from metaseq_lm.config import GROUPS, EngineConfig, Nothing, RunConfig, TrainerConfig, dotted
from metaseq_lm.registry import ALL


def describe(config: DictConfig) -> str:
    """Return one line per key of a configuration: key=value as it can be given, and the key's help."""
    helps = {group: "'metaseq-lm list' shows all" for group in GROUPS}
    for prefix, schema in (("", RunConfig), ("trainer.", TrainerConfig), ("engine.", EngineConfig)):
        for item in fields(schema):
            helps.setdefault(prefix + item.name, item.metadata.get("help", ""))
    for group in GROUPS:
        for item in fields(ALL[group].entry(config[group]._name).dataclass or Nothing):
            helps[f"{group}.{item.name}"] = item.metadata.get("help", "")
    lines = []
    for key in sorted(dotted(config), key=lambda key: not key.endswith("._name")):  # choices first
        value, name = OmegaConf.select(config, key), key.removesuffix("._name")
        if isinstance(value, ListConfig):
            value = OmegaConf.to_container(value)
        lines.append(f"  {f'{name}={spelled(value)}':<48}{helps.get(name, '')}".rstrip())
    return "\n".join(lines)


def spelled(value: Any) -> str:
    """Return a text, number, truth value, None or a list of them as Hydra's grammar spells it."""
    if isinstance(value, list):
        return f"[{','.join(map(spelled, value))}]"
    if value is None:
        return "null"
    return quote(value) if isinstance(value, str) else repr(value).lower()


def quote(text: str) -> str:
    """Quote a text for Hydra if it holds more than plain characters."""
    if re.fullmatch(r"[A-Za-z0-9._/+-]+", text):
        return text
    return QuotedString(text, Quote.single).with_quotes()
