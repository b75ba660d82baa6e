"""Every optimizer with every model and objective: roles, and one update."""

import re
from dataclasses import replace
from typing import Any

import battery
import pytest

from metaseq_lm.core.config import section
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import MODELS, OPTIMIZERS
from metaseq_lm.core.roles import Role, role_of
from metaseq_lm.training.parts import Parts, build_parts, prepare_config
from metaseq_lm.training.price import kind_streams_of, updates_of_kinds

BUILT_IN = [name for name in OPTIMIZERS.names() if OPTIMIZERS.entry(name).is_of_package]
# Why one may be refused: a model without hidden matrices, a virtual step of another optimizer.
REFUSED = "matrices between hidden states|needs optimizer=adamw"
STACKS = {
    "encoder_embed_dim": 8,
    "encoder_ffn_embed_dim": 8,
    "encoder_attention_heads": 2,
    "encoder_layers": 1,
    "directed_layers": 1,
}
# Models that no case has, and the case whose data they take.
OTHERS: dict[str, tuple[battery.Case, dict[str, Any]]] = {
    "transformer_views": (("tagging", 0), STACKS),
    "no_encoder": (("tagging", 1), {}),
}
PAIRS = [*((case, "") for case in battery.ALL), *((case, m) for m, (case, _) in OTHERS.items())]


def updated(optimizer: str, model: str, *places: Any) -> Parts | None:
    """Return the parts of a run that made one update, None if the pair is refused."""
    config = battery.configure(*places, f"optimizer={optimizer}")
    if model:
        config = replace(config, model=section("model", _name=model, **OTHERS[model][1]))
    try:
        parts = build_parts(prepare_config(config), dry_run=True)
        batches = next(updates_of_kinds(parts, kind_streams_of(parts.task), 1))
        parts.task.update(parts.engine, parts.model, batches)
    except UsageError as error:
        assert not optimizer.startswith("adam") and re.search(REFUSED, str(error))
        return None
    return parts


@pytest.mark.parametrize(
    ("case", "model"), PAIRS, ids=[f"{c[0]}-{c[1]}{model and '-'}{model}" for c, model in PAIRS]
)
def test_an_update_by_each_optimizer(case, model, moons, tmp_path):
    parts_by_optimizer = {
        name: updated(name, model, moons, tmp_path, case) for name in (*BUILT_IN, "soap")
    }
    assert parts_by_optimizer["adamw"] and parts_by_optimizer["adam_uncorrected"]
    for name, parts in parts_by_optimizer.items():
        if parts is None:
            continue
        roles = {id(p): role_of(n, p).role for n, p in parts.model.named_parameters()}
        groups = [g for o in parts.engine.optimizers.values() for g in o.inner.param_groups]
        trained = [id(p) for group in groups for p in group["params"]]
        assert trained and all(roles[p] is not None for p in trained)
        assert (
            any(o.updates and o.state_dict()["state"] for o in parts.engine.optimizers.values())
            or name == "sgd"
        )
        stepped = {id(p) for group in groups if "pieces" in group for p in group["params"]}
        hidden = {p for p in trained if roles[p] is Role.HIDDEN}
        assert stepped == (hidden if name == "muon" else set())


def test_all_models_have_a_pair(moons, tmp_path):
    names = {battery.configure(moons, tmp_path, case).model._name for case in battery.ALL}
    assert {*names, *OTHERS, "inherit"} == set(MODELS.names())
