"""Checkpoints: complete, verified, or passed over with a reason."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.runs.manifests import CheckpointError

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.tensor(7)}
STATE = {"update": 3, "nested": {"moment": torch.ones(2), "list": [1, 2.5, "x"]}}


def save(folder: Path, update: int) -> Path:
    weights = {n: w + update for n, w in WEIGHTS.items()}
    return checkpoint.save(folder, update, weights, STATE | {"update": update}, {"note": "hi"})


def test_round_trip(tmp_path):
    path = save(tmp_path, 5)
    found = checkpoint.load(path)
    assert all(torch.equal(found.weights[n], w + 5) for n, w in WEIGHTS.items())
    assert found.state["update"] == 5 and found.manifest["note"] == "hi"
    assert torch.equal(found.state["nested"]["moment"], torch.ones(2))
    assert manifests.resolve(str(tmp_path)) == path.resolve()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"update": "x"}, "update is 'x', not a whole"),
        ({"update": 10**30}, "update is 1000.*, not a whole"),
        ({"sha256": {"state.pt": 7}}, "state.pt is no text"),
        ({"sha256": 7}, "sha256 is no mapping"),
        ({"state": 7}, "state is no text"),
        ({"weights": 7}, "weights is no text"),
        ({"shards": 7}, "shards is no list"),
        ({"valid": "x"}, "valid is no mapping"),
        ({"valid": {"loss": "x"}}, "loss is 'x', not a number"),
        ({"valid": {"loss": 10**400}}, "loss is 1000.*, not a number"),
        ({"config": [1]}, "config is no mapping"),
        ({"config": {"model": 7}}, "model is no mapping"),
        ({"config": {"trainer": "x"}}, "trainer is no mapping"),
        ({"data": 7}, "data is no text"),
        ({"tokenizer": []}, "tokenizer is no text"),
        ({"facts": 7}, "facts is no mapping"),
        ({"facts": {"labels": {"set": 7}}}, "set is no list"),
    ],
)
def test_manifest_with_values_of_other_types(tmp_path, change, message):
    path = save(tmp_path, 5)
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=f"manifest.json is damaged: {message}"):
        checkpoint.load(path)


def damage(path: Path, how: str) -> None:
    """Spoil a checkpoint in one of the ways files get spoilt."""
    model, state, manifest = (path / n for n in ("model.safetensors", "state.pt", "manifest.json"))
    if how == "bit flip in weights":
        data = bytearray(model.read_bytes())
        data[-1] ^= 1
        model.write_bytes(data)
    elif how == "bit flip in state":
        data = bytearray(state.read_bytes())
        data[len(data) // 2] ^= 4
        state.write_bytes(data)
    elif how == "truncated":
        os.truncate(model, model.stat().st_size - 1)
    elif how == "empty":
        model.write_bytes(b"")
    elif how == "missing state":
        state.unlink()
    elif how == "missing manifest":
        manifest.unlink()
    elif how == "manifest not json":
        manifest.write_text("{")
    elif how == "manifest without sums":
        manifest.write_text('{"format": 1}')
    elif how == "future format":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    elif how == "foreign file":
        model.write_bytes(b"not safetensors at all")
    elif how == "dangling link":
        model.unlink()
        model.symlink_to("nowhere")
    elif how == "pickle in state":
        import pickle

        state.write_bytes(pickle.dumps(os.system))
        resign(path)


def resign(path: Path) -> None:
    """Give a damaged checkpoint a manifest that agrees with it, as an attacker would."""
    import hashlib

    manifest = json.loads((path / "manifest.json").read_text())
    for name in manifest["sha256"]:
        manifest["sha256"][name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


WAYS = [
    "bit flip in weights",
    "bit flip in state",
    "truncated",
    "empty",
    "missing state",
    "missing manifest",
    "manifest not json",
    "manifest without sums",
    "future format",
    "foreign file",
    "dangling link",
    "pickle in state",
]


@pytest.mark.parametrize("how", WAYS)
def test_damage_is_noticed_and_the_one_before_is_taken(tmp_path, how):
    save(tmp_path, 1)
    damage(save(tmp_path, 2), how)
    with pytest.raises(CheckpointError, match="update_000000002"):
        checkpoint.load(tmp_path / "update_000000002")
    found, skipped = checkpoint.find_newest(tmp_path)
    assert found is not None and found.state["update"] == 1
    assert len(skipped) == 1 and "update_000000002" in skipped[0]


def test_a_tensor_under_two_names(tmp_path):
    """A plug-in may tie weights, or keep views of one buffer."""
    embed = torch.randn(4, 3)
    weights = {"embed": embed, "out": embed, "first": embed[:1], "turned": embed.t()}
    found = checkpoint.load(checkpoint.save(tmp_path, 1, weights, {}, {}))
    assert found.weights.keys() == weights.keys()
    assert all(torch.equal(found.weights[name], weights[name]) for name in weights)


def test_leftovers_are_removed(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".tmp-update_000000002").mkdir()
    (tmp_path / ".tmp-update_000000002" / "model.safetensors").write_bytes(b"half")
    found, skipped = checkpoint.find_newest(tmp_path)
    assert found is not None and not skipped
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    """Fail at each file in turn: the old checkpoint stays the last one, nothing is half there."""
    save(tmp_path, 1)
    real = checkpoint._write
    for failing in range(4):
        calls = []

        def write(path: Path, pieces: Iterable[bytes]) -> str:
            calls.append(path)
            if len(calls) > failing:
                path.write_bytes(bytes(next(iter(pieces)))[:9])
                raise OSError(28, "No space left on device")
            return real(path, pieces)

        monkeypatch.setattr(checkpoint, "_write", write)
        with pytest.raises(CheckpointError, match="No space.*bytes needed"):
            save(tmp_path, 2)
        assert [p.name for p in manifests.all_updates(tmp_path)] == ["update_000000001"]
        assert (tmp_path / "last").resolve().name == "update_000000001"
        assert not list(tmp_path.glob(".tmp-*"))


def test_prune_keeps_the_newest_and_the_best(tmp_path):
    for update in range(1, 7):
        path = save(tmp_path, update)
        if update == 2:
            checkpoint.link(tmp_path, "best", path)
        checkpoint.prune(tmp_path, 2, update)
        assert len(manifests.all_updates(tmp_path)) <= 3
    names = [p.name[-1] for p in manifests.all_updates(tmp_path)]
    assert names == ["2", "5", "6"]
    assert manifests.resolve(str(tmp_path), "best").name.endswith("2")


def test_load_into_names_what_does_not_fit():
    module = torch.nn.Linear(2, 3)
    with pytest.raises(CheckpointError, match=r"weight: \(3, 5\).*\(3, 2\)"):
        checkpoint.load_into(module, {"weight": torch.ones(3, 5), "bias": torch.ones(3)}, "x")
    with pytest.raises(CheckpointError, match="bias; unexpected: extra"):
        checkpoint.load_into(module, {"weight": torch.ones(3, 2), "extra": torch.ones(1)}, "x")
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        manifests.resolve("/nowhere/at/all")


@pytest.mark.parametrize("shape, dtype", [((2,), torch.float32), ((3,), torch.int64), (None, None)])
def test_a_tensor_of_another_form_than_its_place_is_refused(shape, dtype):
    stored = {"a": SimpleNamespace(shape=shape, dtype=dtype)} if shape else {}
    with pytest.raises(ValueError, match="a is.*torch.float32"):
        checkpoint._find(stored, "a", torch.empty(3, device="meta"))


@pytest.mark.parametrize("length", [2, 4])
def test_a_part_of_an_old_checkpoint_of_another_shape_is_refused(length):
    tensors = {"weights/a": torch.zeros(length)}
    with pytest.raises(ValueError, match=rf"\[{length}\].*\[3\]"):
        checkpoint._insert([(["weights", "a"], [3])], tensors, {"weights": {}})
