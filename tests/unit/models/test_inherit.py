"""model=inherit: what model.changes and a checkpoint without a model of its own are told."""

from pathlib import Path
from typing import Any

import pytest

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.models.inherit import inherit_model
from metaseq_lm.runs import manifests


def start(monkeypatch: pytest.MonkeyPatch, stored: object, *changes: str) -> Any:
    """Return the model that a run inherits from a checkpoint with the configuration `stored`."""
    monkeypatch.setattr(manifests, "resolve", Path)
    monkeypatch.setattr(manifests, "read_manifest", lambda path: {"config": stored})
    given = ",".join(f"'{change}'" for change in changes)
    options = ["model=inherit", "init_from=runs/x", f"model.changes=[{given}]"]
    return inherit_model(load_config(options)).model


def stored() -> dict:
    return {"model": vars(load_config(["model=cnn_bilstm_tiny"]).model)}


def test_changes_get_the_type_of_their_option(monkeypatch):
    model = start(monkeypatch, stored(), "dropout=0", "char_widths=[2,3]", "projection_dim=8")
    expected = stored()["model"] | {"dropout": 0.0, "char_widths": [2, 3], "projection_dim": 8}
    assert vars(model) == expected and type(model.dropout) is float
    assert vars(start(monkeypatch, stored())) == stored()["model"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dropout", "model.changes has 'dropout'; write it as 'NAME=VALUE'"),
        ("=3", "model.changes has '=3'; write it as 'NAME=VALUE'"),
        ("dropot=3", "dropot; runs/x was .*cnn_bilstm, which has no such.*'dropout'"),
        ("_name=transformer", "which has no such option"),
        ("dropout=x", r"model.changes=\['dropout=x'\]: model.dropout: Value 'x'"),
        ("dropout=", "model.dropout: Incompatible value 'None'"),
        ("dropout=[", "a value is no YAML"),
        ("dropout.x=3", "'model.dropout.x' is no option .*'model.dropout'"),
        ("char_widths=3", "give a list"),
    ],
)
def test_changes_that_the_model_does_not_take(monkeypatch, change, message):
    with pytest.raises(UsageError, match=message):
        start(monkeypatch, stored(), change)


@pytest.mark.parametrize("config", [None, [], 5, {}, {"model": 5}, {"model": {"_name": 5}}])
def test_a_checkpoint_that_names_no_model(monkeypatch, config):
    with pytest.raises(UsageError, match="runs/x does.*model"):
        start(monkeypatch, config)
