"""A run starts from any checkpoint that has its encoder: heads are new where it lacks them."""

from pathlib import Path
from typing import Any

import battery
import pytest
import torch

from metaseq_lm.core.errors import UsageError
from metaseq_lm.runs import checkpoint
from metaseq_lm.runs.manifests import CheckpointError
from metaseq_lm.training.parts import Parts, build_parts, prepare_config
from metaseq_lm.training.restore import initialise_from

ENCODER = "encoder."
MLM = ("masked_lm", 0)


def has_encoder(case: battery.Case) -> bool:
    """Return whether a case trains an encoder of tokens, alone or with heads and a noise model."""
    options = battery.CASES[case[0]][case[1]]
    others = ("model=", "task=cvt", "task=meta_pseudo", "task=tagging", "task=parsing")
    return case[0] != "two_tower_cloze" and not any(
        option.startswith(others) and option != "model=electra" for option in options
    )


@pytest.fixture(scope="module")
def encoder(moons: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights of an encoder for Two Moons, of one segment or more."""
    built: dict[int, dict[str, torch.Tensor]] = {}

    def weights(segments: int) -> dict[str, torch.Tensor]:
        if segments not in built:
            config = battery.configure(moons, moons / "none", MLM, f"model.segments={segments}")
            state = build_parts(config, dry_run=True).model.state_dict()
            built[segments] = {n: w for n, w in state.items() if n.startswith(ENCODER)}
        return built[segments]

    return weights


def started(config: Any, weights: dict[str, torch.Tensor], place: Path) -> tuple[Parts, str]:
    """Return a run that started from a checkpoint of these weights, and what it says."""
    source = checkpoint.save(place, 1, weights, {}, {})
    parts = build_parts(prepare_config(config), dry_run=True)
    return parts, initialise_from(parts, str(source)).message


@pytest.mark.parametrize(
    "case", [c for c in battery.FIRST if has_encoder(c)], ids=lambda case: case[0]
)
def test_every_head_may_be_missing(case, moons, encoder, tmp_path):
    """An encoder alone is enough for each objective; a layer of it that is missing is named."""
    config = battery.configure(moons, tmp_path / "run", case)
    symbols = len((Path(config.data) / "dict.txt").read_text().splitlines())
    weights = encoder(config.model.segments)
    table = f"{ENCODER}embeddings.tokens.weight"
    weights = weights | {table: torch.rand(symbols, weights[table].shape[1])}
    parts, message = started(config, weights, tmp_path / "encoder")
    state = parts.model.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in weights.items())
    heads = sorted({".".join(n.split(".")[:2]) for n in state if n.startswith("heads.")})
    assert heads and "; fresh: " in message and "not used" not in message
    assert set(heads) <= set(message.rpartition("fresh: ")[2].split(", "))
    lacking = {name: weight for name, weight in weights.items() if "0.fc1.bias" not in name}
    with pytest.raises(CheckpointError, match=r"missing: encoder\.stack\.layers\.0\.fc1\.bias"):
        started(config, lacking, tmp_path / "lacking")


def test_heads_are_exchanged_as_a_whole(moons, tmp_path):
    """Those of another objective are not used, and that is said; a part of one is no head."""
    config = battery.configure(moons, tmp_path / "run", MLM)
    there = {n: w.clone() for n, w in build_parts(config, dry_run=True).model.state_dict().items()}
    there["encoder.stack.layers.0.fc1.bias"] += 1
    alone = {name: weight for name, weight in there.items() if name.startswith(ENCODER)}
    other = {"heads.sentence.out.bias": torch.ones(2)}
    parts, message = started(config, there | other, tmp_path / "both")
    assert message.endswith("; not used: heads.sentence") and "fresh" not in message
    assert all(torch.equal(weight, there[n]) for n, weight in parts.model.state_dict().items())
    message = started(config, alone | other, tmp_path / "other")[1]
    assert message.partition("; ")[2].split("; ") == ["fresh: heads.lm", "not used: heads.sentence"]
    assert f" {len(alone)} weights" in message
    for name, weights, text in (
        ("part", {n: w for n, w in there.items() if "lm.norm" not in n}, "missing: heads.lm.norm."),
        ("kind", there | {"heads.lm.weight": torch.ones(1)}, "unexpected: heads.lm.weight"),
        ("shape", there | {"heads.lm.bias": torch.ones(3)}, r"shape: heads.lm.bias: \(3,\) there"),
        ("heads", other, "missing: encoder."),
    ):
        with pytest.raises(CheckpointError, match=f"not fit.*{text}"):
            started(config, weights, tmp_path / name)


def test_a_head_that_is_to_be_kept_must_be_there(pairs, tmp_path):
    for case in (("sentence_prediction", 1), ("bam_distill", 1)):
        config = battery.configure(pairs, tmp_path / "run", case, "task.keep_head=true")
        weights = build_parts(config, dry_run=True).model.state_dict()
        lacking = {name: w for name, w in weights.items() if not name.startswith("heads.")}
        with pytest.raises((CheckpointError, UsageError), match="heads|which classes"):
            started(config, lacking, tmp_path / case[0])
