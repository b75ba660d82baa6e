"""Models and tokenizers trained here, opened by the transformers library."""

import json
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from outcomes import expect

from metaseq_lm.cli import main
from metaseq_lm.config.transformer import TransformerConfig
from metaseq_lm.core.config import as_dict
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.tokenizers.loading import load_tokenizer, tokenizer_class
from metaseq_lm.interop.configs import ExternalModel
from metaseq_lm.interop.names import ARCHITECTURES
from metaseq_lm.interop.parts import _assemble, tensor_names
from metaseq_lm.runs import checkpoint, manifests

pytest.importorskip("transformers")
from hf_folders import TEXT, transformers

LINES = [
    *TEXT,
    "  indented   text\twith tabs, naïve café, 漢字 and ½ ²",
    "never seen: ∀x∃y 😀 of\u00a0it\x1cs e\u0301 \ufb01ne",
    "",
    "x",
]
SIZES = {
    "encoder_layers": 2,
    "encoder_embed_dim": 32,
    "encoder_ffn_embed_dim": 48,
    "encoder_attention_heads": 4,
    "encoder_normalize_before": False,
    "max_positions": 20,
    "dropout": 0.0,
}
KINDS = {
    "byte_bpe": {},
    "wordpiece": {},
    "sentencepiece_unigram": {"vocab_size": 120},
    "sentencepiece_bpe": {"vocab_size": 120},
    "word": {},
    "char": {},
}


def train_tokenizer(kind, task_tokens=2):
    options = {"vocab_size": 330, **KINDS[kind]}
    return tokenizer_class(kind).train(TEXT * 5, task_tokens=task_tokens, **options)


OBJECTIVES = {
    "rtd": ["task=electra", "criterion=electra_rtd", "model=electra"],
    "generator": ["task=electra", "criterion=electra_rtd", "model=electra"],
    "next_sentence": ["task=sentence_pairs", "criterion=bert_pretraining", "model=transformer"],
    "lm": ["task=masked_lm", "criterion=masked_lm", "model=transformer"],
}


def write_run(folder, tokenizer, model, names=()):
    """Write a run folder as training does, with random weights; returns them."""
    torch.manual_seed(5)
    objective = next((n for n in OBJECTIVES if any(n in name for name in names)), "lm")
    config = load_config(OBJECTIVES[objective])
    config.model = replace(config.model, **model)
    config.data, config.save_dir = str(folder / "data"), str(folder)
    (folder / "data").mkdir(parents=True)
    tokenizer.save(folder / "data")
    options = TransformerConfig(**model)
    size, pad = len(tokenizer.vocabulary), tokenizer.vocabulary.pad
    net = _assemble(options, size, pad, set(names) or {"heads.lm.bias"})
    weights = dict(net.state_dict())
    if any(name.startswith("generator.") for name in names):
        other = TransformerConfig(
            **{**model, "encoder_embed_dim": 64, "encoder_attention_heads": options.heads_for(64)}
            | {
                "encoder_ffn_embed_dim": options.encoder_ffn_embed_dim
                * 64
                // options.encoder_embed_dim,
                "token_embed_dim": options.embed_dim,
            }
        )
        found = _assemble(other, size, pad, {"generator.head.bias"}, generator=True).state_dict()
        weights |= {n: w for n, w in found.items() if ".embeddings." not in n}
    weights = {n: w + 0.05 * torch.randn_like(w) for n, w in weights.items()}
    about = {"config": as_dict(config), "valid": {}, "data": {}}
    checkpoint.save(folder / "checkpoints", 3, weights, {}, about)
    return weights


def assert_equal(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(w, second[n]) for n, w in first.items())


def imported(folder):
    return checkpoint.load(manifests.resolve(str(folder))).weights


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_each_tokenizer(tmp_path, kind):
    tokenizer = train_tokenizer(kind)
    weights = write_run(tmp_path / "run", tokenizer, {**SIZES, "segments": 2})
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), "--out", str(out), "--check"]) == 0
    model = transformers.AutoModelForMaskedLM.from_pretrained(out)
    assert type(model).__name__ == "BertForMaskedLM"
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    for line, ids in zip(LINES, tokenizer.encode_batch(LINES)):
        assert theirs(line, add_special_tokens=False)["input_ids"] == ids, line
    vocabulary = tokenizer.vocabulary
    specials = [theirs.pad_token_id, theirs.mask_token_id, theirs.sep_token_id, theirs.cls_token_id]
    assert specials == [vocabulary.pad, vocabulary.mask, vocabulary.sep, vocabulary.cls()]
    pair = theirs(TEXT[0], TEXT[2])
    first, second = tokenizer.encode_batch([TEXT[0], TEXT[2]])
    cls, sep = vocabulary.cls(), vocabulary.sep
    assert pair["input_ids"] == [cls, *first, sep, *second, sep]
    assert pair["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert vocabulary.mask in theirs(f"a {theirs.mask_token} b")["input_ids"]
    # And in again: the same weights, and the very same tokenizer.
    assert main(["import", str(out), "--out", str(tmp_path / "in")]) == 0
    assert_equal(weights, imported(tmp_path / "in"))
    assert load_tokenizer(tmp_path / "in").fingerprint == tokenizer.fingerprint
    assert main(["export", str(tmp_path / "in"), "--out", str(tmp_path / "again")]) == 0
    for file in set(out.iterdir()) - {out / "README.md"}:
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


MODELS = {
    "no segments": ({}, {"heads.lm.bias"}, "BertForMaskedLM"),
    "wider than its embeddings": ({"token_embed_dim": 16}, {"heads.lm.bias"}, "ElectraForMaskedLM"),
    "encoder alone": ({"segments": 2}, {"encoder."}, "BertModel"),
    "own head": ({"segments": 2}, {"heads.lm.weight"}, "BertForMaskedLM"),
    "next sentence": (
        {"segments": 2},
        {"heads.lm.bias", "heads.next_sentence.out.bias"},
        "BertForPreTraining",
    ),
    "pre-LN": ({"encoder_normalize_before": True}, {"heads.lm.bias"}, "MegatronBertForMaskedLM"),
    "pre-LN, next sentence": (
        {"encoder_normalize_before": True, "segments": 2},
        {"heads.lm.bias", "heads.next_sentence.out.bias"},
        "MegatronBertForPreTraining",
    ),
    "discriminator": ({"token_embed_dim": 16}, {"heads.rtd.out.bias"}, "ElectraForPreTraining"),
}


@pytest.mark.parametrize("what", MODELS)
def test_each_kind_of_model(tmp_path, what):
    options, names, architecture = MODELS[what]
    weights = write_run(tmp_path / "run", train_tokenizer("byte_bpe"), SIZES | options, names)
    out = ["--out", str(tmp_path / "out"), "--check"]
    assert main(["export", str(tmp_path / "run"), *out]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [architecture]
    assert main(["import", str(tmp_path / "out"), "--out", str(tmp_path / "in"), "--check"]) == 0
    assert_equal(weights, imported(tmp_path / "in"))


def test_both_nets_of_electra(tmp_path):
    names = {"heads.rtd.out.bias", "generator.head.bias"}
    options = SIZES | {"token_embed_dim": 16, "segments": 2, "norm_eps": 1e-12}
    weights = write_run(tmp_path / "run", train_tokenizer("wordpiece"), options, names)
    for part, name in (("main", "ElectraForPreTraining"), ("generator", "ElectraForMaskedLM")):
        out = ["--out", str(tmp_path / part), "--part", part, "--check"]
        assert main(["export", str(tmp_path / "run"), *out]) == 0
        config = json.loads((tmp_path / part / "config.json").read_text())
        assert config["architectures"] == [name]
    again = ["--generator", str(tmp_path / "generator"), "--out", str(tmp_path / "in"), "--check"]
    assert main(["import", str(tmp_path / "main"), *again]) == 0
    assert_equal(weights, imported(tmp_path / "in"))


def test_export_refuses_unsupported_runs(tmp_path, capsys):
    def said(name, options, names=(), *more):
        write_run(tmp_path / name, train_tokenizer("char"), SIZES | options, names)
        out = ["--out", str(tmp_path / "out"), *more]
        code = main(["export", str(tmp_path / name), *out])
        assert not (tmp_path / "out").exists()
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return code, error

    code, error = said("pre", {"encoder_normalize_before": True, "token_embed_dim": 16})
    assert code == 1 and "pre-LN" in error and "encoder_normalize_before=false" in error
    expect(said("untrained generator", {}, (), "--part", "generator"), 2, "no generator")
    code, error = said("odd head", {"token_embed_dim": 16}, {"heads.next_sentence.out.bias"})
    assert code == 1 and "ElectraModel" in error and "heads.next_sentence" in error
    other = train_tokenizer("byte_bpe")
    (tmp_path / "other").mkdir()
    other.save(tmp_path / "other")
    expect(said("other", {}, (), "--data", str(tmp_path / "other")), 1, "symbols, but")
    pattern = tokenizer_class("word").train(TEXT, 50, 2, pattern="[a-z]+")
    write_run(tmp_path / "pattern", pattern, SIZES)
    assert main(["export", str(tmp_path / "pattern"), "--out", str(tmp_path / "out")]) == 1
    assert "kind word" in capsys.readouterr().err


def test_a_damaged_memory_is_one_message(tmp_path, capsys):
    write_run(tmp_path / "run", train_tokenizer("char"), SIZES)
    path = manifests.resolve(str(tmp_path / "run"))
    content = json.loads((path / "manifest.json").read_text())
    for memory in ({}, {"main": 3}, {"main": {"config": {}, "names": {}, "copies": {"a": 1}}}, 7):
        (path / "manifest.json").write_text(json.dumps(content | {"transformers": memory}))
        assert main(["export", str(path), "--out", str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        warning, refusal = error.splitlines()
        assert "warning: manifest.json" in warning and "transformers: damaged" in refusal


def test_every_name_is_used_once():
    model = TransformerConfig(encoder_layers=3, token_embed_dim=8)
    for main_net in (True, False):
        for architecture in ARCHITECTURES.values():
            foreign = ExternalModel(architecture, model, 10, 0, tied=False, segments=True)
            names = [n for group in tensor_names(foreign, main_net).values() for n in group]
            assert len(set(names)) == len(names)


def test_the_files_hold_their_own_tensors(tmp_path):
    """Query, key and value are three tensors of their own, not views of one."""
    weights = write_run(tmp_path / "run", train_tokenizer("char"), SIZES)
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    name = "bert.encoder.layer.1.attention.self.{}.weight"
    joined = torch.cat([found[name.format(part)] for part in ("query", "key", "value")])
    assert torch.equal(joined, weights["encoder.stack.layers.1.attention.in_proj.weight"])
