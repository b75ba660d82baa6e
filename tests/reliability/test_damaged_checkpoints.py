"""R10: a damaged checkpoint is passed over with a reason, or refused; a run never begins anew
unasked.
"""

import ctypes
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from battery import CASES, TINY, configure, train
from real_runs import MLM, final, rows

from metaseq_lm.cli import main
from metaseq_lm.runs import checkpoint, manifests


def rewrite(path: Path, change) -> None:
    """Save a checkpoint again, changed and with sums that agree."""
    found = checkpoint.load(path)
    weights, state, about = found.weights, found.state, dict(found.manifest)
    change(weights, state, about)
    for name in ("format", "update", "sha256", "state"):
        about.pop(name)
    checkpoint.save(path.parent, int(path.name[-9:]), weights, state, about)


def resign(path: Path) -> None:
    """Make the sums of a manifest agree with the files."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name in manifest["sha256"]:
        manifest["sha256"][name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


def missing_file(path: Path, other: Path) -> None:
    (path / "state.pt").unlink()


def zero_bytes(path: Path, other: Path) -> None:
    (path / "model.safetensors").write_bytes(b"")


def truncated(path: Path, other: Path) -> None:
    os.truncate(path / "state.pt", (path / "state.pt").stat().st_size - 100)


def bit_flip(path: Path, other: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-40] ^= 16
    (path / "model.safetensors").write_bytes(data)


def foreign_model(path: Path, other: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(manifests.resolve(str(other)), path)


def future_format(path: Path, other: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))


def forbidden_file(path: Path, other: Path) -> None:
    (path / "model.safetensors").chmod(0)


def forbidden_folder(path: Path, other: Path) -> None:
    path.chmod(0)


def dangling_file(path: Path, other: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to("nowhere")


def dangling_folder(path: Path, other: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to("nowhere")


def extra_key(path: Path, other: Path) -> None:
    state = torch.load(path / "state.pt", weights_only=True)
    torch.save(state | {"more": 1}, path / "state.pt")
    resign(path)


def missing_optimizer(path: Path, other: Path) -> None:
    rewrite(path, lambda weights, state, about: state["optimizers"].pop("main"))


def nan_weights(path: Path, other: Path) -> None:
    found = checkpoint.load(path)
    found.weights["encoder.stack.norm.weight"][0] = float("nan")
    (path / "model.safetensors").write_bytes(safetensors.torch.save(found.weights))
    resign(path)


def other_corpus(path: Path, other: Path) -> None:
    rewrite(path, lambda weights, state, about: about.update(data="0" * 32))


DAMAGES = {
    missing_file: "state.pt: No such file",
    zero_bytes: "model.safetensors is damaged",
    truncated: "state.pt is damaged",
    bit_flip: "model.safetensors is damaged",
    foreign_model: "does not fit the model",
    future_format: "has format 99",
    forbidden_file: "model.safetensors: Permission denied",
    forbidden_folder: "manifest.json: Permission denied",
    dangling_file: "model.safetensors: No such file",
    dangling_folder: "no manifest.json",
    extra_key: "one more than was saved",
    missing_optimizer: "optimizers ['main'] do not match",
    nan_weights: "encoder.stack.norm.weight is not finite",
    other_corpus: "trained on other data",
}


def name_of(damage) -> str:
    return damage.__name__


damages = pytest.mark.parametrize("damage", DAMAGES, ids=name_of)
OFTEN = ["trainer.save_interval_updates=1", "trainer.keep_last=9", "trainer.valid_split=''"]

KEYS = ["criterion=masked_lm", *CASES["masked_lm"][0], *TINY, *OFTEN, "trainer.max_update=5"]


@pytest.fixture(scope="module")
def trained(moons: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of three updates, one of five, and one of another model."""
    place = tmp_path_factory.mktemp("trained")
    for name, more in (("3", []), ("5", []), ("other", ["model.encoder_ffn_embed_dim=24"])):
        updates = f"trainer.max_update={5 if name == '5' else 3}"
        train(configure(moons, place / name, MLM, *OFTEN, updates, *more))
    return {name: place / name for name in ("3", "5", "other")}


class Mortal:
    """Takes from root, inside the with block, the right to read what is forbidden."""

    DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2

    def __enter__(self) -> None:
        self.libc = ctypes.CDLL(None)
        self.header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # of this thread
        self.before = (ctypes.c_uint32 * 6)()
        assert self.libc.capget(self.header, self.before) == 0
        fewer = (ctypes.c_uint32 * 6)(*self.before)
        fewer[0] &= ~(1 << self.DAC_OVERRIDE | 1 << self.DAC_READ_SEARCH)
        assert self.libc.capset(self.header, fewer) == 0

    def __exit__(self, *exc: object) -> None:
        assert self.libc.capset(self.header, self.before) == 0


# A folder that nobody may look into cannot be written anew either.
@pytest.mark.parametrize("damage", [d for d in DAMAGES if d is not forbidden_folder], ids=name_of)
def test_the_newest_good_checkpoint_is_taken(damage, moons, trained, tmp_path):
    """It says which one was skipped and why, and the end is that of an undisturbed run."""
    save = tmp_path / "run"
    shutil.copytree(trained["3"], save, symlinks=True)
    newest = manifests.folder_of(save / "checkpoints", 3)
    with Mortal():
        damage(newest, trained["other"])
        train(configure(moons, save, MLM, *OFTEN, "trainer.max_update=5"))
    events = [row["message"] for row in rows(save, "event")]
    assert len(events) == 2
    assert "skipped" in events[0] and newest.name in events[0] and DAMAGES[damage] in events[0]
    assert events[1].startswith("resumed from") and "update_000000002" in events[1]
    assert final(save)[0] == final(trained["5"])[0]
    assert checkpoint.load(newest).state["update"] == 3  # written anew


@damages
def test_run_with_only_a_damaged_checkpoint_is_refused(damage, moons, trained, tmp_path, capsys):
    save = tmp_path / "run"
    shutil.copytree(trained["3"], save, symlinks=True)
    for update in (1, 2):
        shutil.rmtree(manifests.folder_of(save / "checkpoints", update))
    only = manifests.folder_of(save / "checkpoints", 3)
    with Mortal():
        damage(only, trained["other"])
        code = main(["train", str(moons), "--save-dir", str(save), *KEYS])
    text = capsys.readouterr().err
    assert code == 1 and "Traceback" not in text and DAMAGES[damage] in text, text
    assert "can be used" in text and "the run anew" in text
    assert [row["update"] for row in rows(save, "train")] == [1, 2, 3]


FROM_ELSEWHERE = [d for d in DAMAGES if d not in (missing_optimizer, other_corpus)]


@pytest.mark.parametrize("damage", FROM_ELSEWHERE, ids=name_of)
def test_a_damaged_checkpoint_to_begin_from_is_refused(damage, moons, trained, tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(trained["3"], source, symlinks=True)
    given = manifests.folder_of(source / "checkpoints", 3)
    save = tmp_path / "run"
    arguments = ["train", str(moons), "--save-dir", str(save), "--init-from", str(given)]
    with Mortal():
        damage(given, trained["other"])
        code = main([*arguments, *KEYS])
    text = capsys.readouterr().err
    assert code == (2 if damage is dangling_folder else 1), text
    assert "Traceback" not in text and str(given) in text
    assert not rows(save, "train")


@pytest.mark.parametrize(
    "group, key, value, reason",
    [
        ("model", "encoder_embed_dim", float("inf"), "converted to Integer"),
        ("model", "encoder_layers", "x", "model.encoder_layers: Value 'x'"),
        ("model", "encoder_lay}rs", 1, "'encoder_lay}rs' not in"),
        ("optimizer", "clip_nor}", 1.0, "'clip_nor}' not in"),
        ("task", "batch_size", [], "task.batch_size: "),
    ],
)
def test_damaged_options_are_refused(group, key, value, reason, moons, trained, tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(trained["3"], source, symlinks=True)
    file = manifests.folder_of(source / "checkpoints", 3) / "manifest.json"
    content = json.loads(file.read_text())
    content["config"][group][key] = value
    file.write_text(json.dumps(content))
    commands = [["evaluate", str(source), "--split", "valid"]]
    if group == "model":
        words = [word for word in KEYS if not word.startswith("model.")]
        start = ["model=inherit", f"init_from={source}", *words]
        commands.append(["train", str(moons), "--save-dir", str(tmp_path / "run"), *start])
    for words in commands:
        assert main(words) in (1, 2)
        error = capsys.readouterr().err
        assert error.count("metaseq-lm: ") == 1 and reason in error and str(file.parent) in error
    assert not (tmp_path / "run").exists()
