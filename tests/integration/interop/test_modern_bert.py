"""Modern encoders trained here as ModernBERT of the transformers library, and back."""

import json
from pathlib import Path

import battery
import pytest
import torch

from metaseq_lm.cli import main
from metaseq_lm.runs import checkpoint, manifests

pytest.importorskip("transformers")
from hf_folders import make, transformers

MASKED = ["task=masked_lm", *battery.TEXT]
CAUSAL = ["task=causal_lm", *battery.TEXT]
ODD = ["model.gate=silu", "model.vocab_multiple=10", "model.global_theta=777"]


def trained(moons: Path, run: Path, criterion: str, *more: str) -> Path:
    """Train a small model for an update; return its folder."""
    options = ["model=modern", "model.local_window=6", "model.encoder_layers=4"]
    updates = ["trainer.max_update=1", "trainer.valid_split=''"]
    number = {"masked_lm": 0, "causal_lm": 0, "electra_rtd": 0, "sentence_prediction": 1}
    case = (criterion, number[criterion])
    battery.train_uncounted(battery.configure(moons, run, case, *options, *updates, *more))
    return run


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(manifests.resolve(str(folder))).weights


@pytest.mark.parametrize(
    ("criterion", "more", "name"),
    [
        ("masked_lm", [], "ModernBertForMaskedLM"),
        ("masked_lm", ODD, "ModernBertForMaskedLM"),
        ("causal_lm", ODD, "ModernBertDecoderForCausalLM"),
    ],
)
def test_out_and_in_again(criterion, more, name, moons, tmp_path, capsys):
    run, out = trained(moons, tmp_path / "run", criterion, *more), tmp_path / "out"
    assert main(["export", str(run), "--out", str(out), "--check"]) == 0
    assert "logits differ by" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [name]
    assert config["layer_types"] == ["full_attention", *["sliding_attention"] * 2, "full_attention"]
    assert config["rope_parameters"]["full_attention"]["rope_theta"] == (777 if more else 10_000)
    assert config["vocab_size"] % (10 if more else 1) == 0
    kind = (
        transformers.AutoModelForCausalLM
        if "Causal" in name
        else (transformers.AutoModelForMaskedLM)
    )
    assert type(kind.from_pretrained(out)).__name__ == name
    # What other programs put before a text to score its first token, too.
    first = transformers.AutoTokenizer.from_pretrained(out).bos_token
    assert first == ("[CLS0]" if "Causal" in name else None)
    assert main(["import", str(out), "--out", str(tmp_path / "in"), "--check"]) == 0
    before, after = weights_of(run), weights_of(tmp_path / "in")
    assert before.keys() == after.keys()
    assert all(torch.equal(weight, after[n]) for n, weight in before.items())
    assert main(["export", str(tmp_path / "in"), "--out", str(tmp_path / "again")]) == 0
    for file in set(out.iterdir()) - {out / "README.md"}:
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


@pytest.mark.parametrize(
    ("criterion", "more", "named"),
    [
        ("masked_lm", ["model.qk_norm=true"], "model.qk_norm=true"),
        ("masked_lm", ["model.norm=rms"], "model.norm=rms"),
        ("masked_lm", ["model.gate=none"], "model.gate=none"),
        ("causal_lm", ["model.positions=learned"], "model.positions=learned"),
        ("masked_lm", ["model.segments=2"], "model.segments"),
        ("causal_lm", ["model.token_embed_dim=4"], "model.token_embed_dim"),
        ("electra_rtd", ["model=modern_electra"], "the head rtd"),
        ("sentence_prediction", ["model.segments=0"], "the head sentence"),
    ],
)
def test_what_the_library_lacks_is_refused_by_name(criterion, more, named, moons, tmp_path, capsys):
    run = trained(moons, tmp_path / "run", criterion, *more)
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 1
    assert f"nothing like {named}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_training_goes_on_from_an_imported_model(moons, tmp_path):
    """With the model of the folder; sizes, thetas and the pattern of layers are read off it."""
    make(tmp_path / "theirs", "ModernBertForMaskedLM")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    # As configurations of 2024 have it.
    del config["layer_types"], config["rope_parameters"]
    config |= {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0}
    config |= {"local_rope_theta": 10000.0}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    words = ["import", str(tmp_path / "theirs"), "--out", str(tmp_path / "in"), "--check"]
    assert main(words) == 0
    stored = checkpoint.load(manifests.resolve(str(tmp_path / "in"))).manifest["config"]["model"]
    assert stored["_name"] == "modern" and stored["encoder_layers"] == 4
    assert (stored["global_every"], stored["local_window"]) == (3, 7)
    assert (stored["global_theta"], stored["local_theta"]) == (160_000, 10_000)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"norm_bias": True}, "norm_bias is 'True'"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_parameters"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"full_attention": {"rope_theta": -1}}}, "rope_parameters"),
        ({"local_attention": None}, "local_attention"),
        ({"num_hidden_layers": 10**6, "layer_types": None}, "there is no model"),
    ],
)
def test_another_architecture_is_refused(change, fact, tmp_path, capsys):
    make(tmp_path / "theirs", "ModernBertForMaskedLM")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config | change))
    assert main(["import", str(tmp_path / "theirs"), "--out", str(tmp_path / "in")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert fact in line
