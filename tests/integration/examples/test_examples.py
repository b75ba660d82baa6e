"""Every config and every sweep of the examples composes: a renamed option would break
them unseen.
"""

from functools import cache
from pathlib import Path

import pytest
import yaml

from metaseq_lm.cli import main
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.loading import load_config
from metaseq_lm.core.registry import TASKS
from metaseq_lm.league.plan_files import read_plan
from metaseq_lm.tasks import check_pair
from metaseq_lm.tasks.protocols import Prepares

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
CONFIGS = sorted(EXAMPLES.rglob("config/*.yaml"))
OTHERS = sorted(path for path in EXAMPLES.rglob("*.yaml") if path.parent.name != "config")
PLANS = [p for p in OTHERS if {"base", "objectives"} & yaml.safe_load(p.read_text()).keys()]
SWEEPS = [path for path in OTHERS if path not in PLANS]
# test_documentation.py composes those of the pages' commands.
PAGES = [*EXAMPLES.rglob("README.md"), *EXAMPLES.with_name("docs").rglob("*.md")]
COMMANDS = "".join(page.read_text() for page in PAGES)
UNNAMED = [p for p in SWEEPS if f"sweep examples/{p.relative_to(EXAMPLES)} " not in COMMANDS]


@cache
def loaded(path: Path) -> RunConfig:
    """Compose a config, once for all tests of it."""
    return load_config([], str(path.parent), path.stem)


def name(path: Path) -> str:
    return str(path.relative_to(EXAMPLES))


def test_examples_have_configs_and_sweeps() -> None:
    assert len(CONFIGS) > 30 and len(SWEEPS) > 8 and len(PLANS) > 2


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_what_papers_ask_for_is_named(path: Path) -> None:
    """Attention dropout is 0 by default and 0.1 in the papers' systems."""
    assert getattr(loaded(path).model, "attention_dropout", 0.1) == 0.1


@pytest.mark.parametrize("name", ["bert_large", "roberta_base", "electra_large"])
def test_presets_name_attention_dropout(name: str) -> None:
    assert load_config([f"model={name}"]).model.attention_dropout == 0.1


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_each_config_composes(path: Path) -> None:
    config = loaded(path)
    assert config.task._name and config.criterion._name


@pytest.mark.parametrize("path", UNNAMED, ids=name)
def test_each_sweep_composes(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out"
    words = ["sweep", str(path), str(tmp_path), "--out", str(out), "--dry-run", "--seeds", "1"]
    assert main(words) == 0
    assert "metaseq-lm train" in capsys.readouterr().out and not out.exists()


@pytest.mark.parametrize("path", PLANS, ids=name)
def test_each_objective_of_a_plan_composes(path: Path) -> None:
    plan, _ = read_plan(path)
    for objective in plan.objectives:
        config = load_config([*plan.options, *objective.options])
        task = TASKS.entry(config.task._name).value
        check_pair(task.prepare(config) if issubclass(task, Prepares) else config)
