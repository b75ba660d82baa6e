"""Runs that earlier versions made are opened and resumed: their options have the names of then."""

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from metaseq_lm.core.config import as_dict
from metaseq_lm.core.loading import load_config
from metaseq_lm.runs.folder import read_config
from metaseq_lm.training.restore import stored_config


def old_config(sharded: bool) -> dict[str, Any]:
    """Return a configuration as version 0.2.0 wrote it."""
    config = as_dict(load_config(["task=masked_lm", "criterion=masked_lm"]))
    del config["engine"]["parallel"]
    config["engine"]["shard_optimizer"] = sharded
    return config


@pytest.mark.parametrize(("sharded", "current"), [(False, "replicate"), (True, "shard")])
def test_checkpoints_and_config_files_of_version_0_2(tmp_path, sharded, current):
    stored: Any = SimpleNamespace(path=tmp_path, manifest={"config": old_config(sharded)})
    file = tmp_path / "config.yaml"
    OmegaConf.save(OmegaConf.create(old_config(sharded)), file)
    assert stored_config(stored).engine.parallel == current
    engine = read_config(file)["engine"]
    assert engine["parallel"] == current and "shard_optimizer" not in engine
