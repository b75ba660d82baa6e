"""The tables of docs/objectives, by the comments that stand in their place.

Defaults are those of the registered options, costs the FLOPs by rule of the league's laptop
division: its model, rows and vocabulary.
"""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

from cells import code, escape, table
from objective_catalogue import CATALOGUE, Objective

from metaseq_lm.core.config import as_dict, flatten
from metaseq_lm.core.loading import format_value, load_config
from metaseq_lm.core.registry import ALL
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary, special_symbols
from metaseq_lm.data.worlds.base import build_world
from metaseq_lm.league.plan_files import read_plan
from metaseq_lm.tasks.protocols import PricedByRule
from metaseq_lm.training.parts import build_task, prepare_config

ROOT = Path(__file__).resolve().parent.parent
LEAGUE = ROOT / "metaseq_lm" / "league" / "laptop.yaml"
PAGES = ROOT / "docs" / "objectives"


def objective_tables() -> Iterator[tuple[str, str]]:
    """Yield each table of the pages of objectives, by its comment."""
    with tempfile.TemporaryDirectory() as folder:
        for objective in CATALOGUE:
            yield f"<!-- defaults: {objective.name} -->", defaults(objective)
            yield f"<!-- cost: {objective.name} -->", costs(objective, Path(folder))
        yield "<!-- objectives -->", index(Path(folder))


def defaults(objective: Objective) -> str:
    """Return the options of an objective with their defaults."""
    config = load_config(list(objective.options))
    values = flatten(as_dict(config))
    rows = []
    for key in objective.keys:
        kind, _, name = key.partition(".")
        entry = ALL[kind].entry(values[f"{kind}._name"])
        (item,) = (item for item in fields(entry.dataclass) if item.name == name)
        link = f"../reference/options/{kind}.md#{entry.name}.{name}"
        shown = f"[`{key}`]({link})" if entry.origin.startswith("metaseq_lm.") else f"`{key}`"
        about = escape(item.metadata.get("help", ""))
        rows.append((shown, code(format_value(values[key])), about))
    return table(("key", "default", "what"), rows)


def costs(objective: Objective, folder: Path) -> str:
    """Return what settings of an objective cost; `folder` is for vocabularies."""
    if not objective.costs:
        return "No rule counts its FLOPs; `metaseq-lm train … --dry-run` measures them."
    causal = flops_per_token(CATALOGUE[0], (), folder)
    rows = ["| setting | options | FLOPs a token | of `causal_lm` |", "|---|---|---|---|"]
    for label, options in objective.costs.items():
        flops = flops_per_token(objective, options, folder)
        shown = " ".join(code(option) for option in options)
        rows.append(f"| {label} | {shown} | {flops:,.0f} | {flops / causal:.2f} |")
    return "\n".join(rows)


def index(folder: Path) -> str:
    """Return the table of all objectives with the first sentence of each page."""
    rows = ["| objective | | options | FLOPs a token |", "|---|---|---|---|"]
    for objective in CATALOGUE:
        page = (PAGES / f"{objective.name}.md").read_text(encoding="utf-8")
        title, sentence = re.findall(r"\A# (.+)\n\n((?:.+\n)+)", page)[0]
        setting = next(iter(objective.costs.values()), None)
        cost = "" if setting is None else f"{flops_per_token(objective, setting, folder):,.0f}"
        options = (*objective.options, *(setting or ()))
        shown = " ".join(code(option) for option in options if not option.startswith("model="))
        link = f"[{title}]({objective.name}.md)"
        rows.append(f"| {link} | {' '.join(sentence.split())} | {shown} | {cost} |")
    return "\n".join(rows)


def flops_per_token(objective: Objective, options: tuple[str, ...], folder: Path) -> float:
    """Return the FLOPs by rule of an update in the laptop division, for each token of its rows."""
    plan, _ = read_plan(LEAGUE)
    data = folder / f"{objective.task_tokens} task tokens"
    if not data.exists():
        data.mkdir()
        symbols = special_symbols(objective.task_tokens, unk=True) + world_symbols()
        Vocabulary(symbols).save(data / "dict.txt")
    words = [*plan.options, *objective.options, *options, f"data={data}"]
    task = build_task(prepare_config(load_config(words)))
    assert isinstance(task, PricedByRule)
    flops = task.flops_by_rule()
    assert flops is not None, objective.name
    return flops / (task.config.batch_size * task.config.tokens_per_sample)


@cache
def world_symbols() -> list[str]:
    """Return the words of the world of the laptop division."""
    data = read_plan(LEAGUE)[0].data
    return list(build_world(data["world"], data["world_seed"]).symbols)
