"""Folders of the transformers library: in, out again, and the same model on both sides."""

import json
import shutil
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from outcomes import expect_error
from torch.nn import functional as F

from metaseq_lm.cli import main
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.interop.check import _native_outputs, _random_rows, foreign_outputs
from metaseq_lm.interop.exporting import export_part
from metaseq_lm.interop.parts import _assemble
from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.training.restore import open_run, stored_config

pytest.importorskip("transformers")
from hf_folders import make

NAMES = [
    *("BertModel", "BertForMaskedLM", "BertForPreTraining", "RobertaModel", "RobertaForMaskedLM"),
    *("ElectraModel", "ElectraForPreTraining", "ElectraForMaskedLM", "MegatronBertForMaskedLM"),
    *("DistilBertModel", "DistilBertForMaskedLM", "DistilBertForQuestionAnswering"),
    *("BertForSequenceClassification", "BertForQuestionAnswering", "BertForMultipleChoice"),
    *("ElectraForSequenceClassification", "DistilBertForSequenceClassification"),
    *("RobertaForSequenceClassification", "MegatronBertForSequenceClassification"),
    *("BertLMHeadModel", "MegatronBertForCausalLM", "RobertaForCausalLM", "ElectraForCausalLM"),
    *("ModernBertModel", "ModernBertForMaskedLM", "ModernBertDecoderForCausalLM"),
]
HEADS = ["BertForPreTraining", "RobertaForMaskedLM", "ElectraForPreTraining", "ElectraForMaskedLM"]
HEADS += ["BertLMHeadModel", "MegatronBertForCausalLM"]
HEADS += ["ModernBertForMaskedLM", "ModernBertDecoderForCausalLM"]
GENERATOR = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "intermediate_size": 96,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """One folder of each class, imported, and ELECTRA's with a generator of its own embeddings."""
    root = tmp_path_factory.mktemp("interop")
    for name in NAMES:
        make(root / name, name)
        assert main(["import", f"{root}/{name}", "--out", f"{root}/own/{name}", "--check"]) == 0
    make(root / "generator", "ElectraForMaskedLM", seed=1, **GENERATOR)
    both = ["--generator", f"{root}/generator", "--out", f"{root}/own/both", "--check"]
    assert main(["import", f"{root}/ElectraForPreTraining", *both]) == 0
    return root


def tensors(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def config(folder):
    return json.loads((folder / "config.json").read_text())


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


def part_of(folder, name="main"):
    found = checkpoint.load(manifests.resolve(str(folder)))
    tokenizer = load_tokenizer(folder)
    return export_part(found, stored_config(found), tokenizer.vocabulary, name), tokenizer


@pytest.mark.parametrize("name", NAMES)
def test_out_again_is_the_same(root, name, tmp_path):
    out = tmp_path / "out"
    assert main(["export", f"{root}/own/{name}", "--out", str(out), "--check"]) == 0
    assert_equal(tensors(root / name), tensors(out))
    assert config(root / name) == config(out)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / file).read_bytes() == (root / name / file).read_bytes()
    assert main(["import", str(out), "--out", str(tmp_path / "in")]) == 0
    first, second = (
        checkpoint.load(manifests.resolve(str(f))).weights
        for f in (root / "own" / name, tmp_path / "in")
    )
    assert_equal(first, second)


def test_generator(root, tmp_path):
    for name, source in (("main", "ElectraForPreTraining"), ("generator", "generator")):
        out = tmp_path / name
        assert main(["export", f"{root}/own/both", "--out", str(out), "--part", name]) == 0
        assert_equal(tensors(root / source), tensors(out))
        assert config(root / source) == config(out)
    found = checkpoint.load(manifests.resolve(f"{root}/own/both"))
    assert found.manifest["config"]["model"]["sharing"] == "none"
    assert found.manifest["config"]["model"]["generator_size"] == 2.0
    assert found.manifest["config"]["model"]["generator_layers"] == 0.5
    assert "generator.embeddings.tokens.weight" in found.weights
    opened = open_run(f"{root}/own/both").model.state_dict()
    assert {n: w.shape for n, w in found.weights.items()} == {
        n: opened[n].shape for n in found.weights
    }


def test_a_generator_with_the_same_embeddings_shares_them(root, tmp_path):
    shutil.copytree(root / "generator", tmp_path / "generator")
    merged = tensors(root / "generator") | {
        n: w for n, w in tensors(root / "ElectraForPreTraining").items() if ".embeddings." in n
    }
    file = tmp_path / "generator" / "model.safetensors"
    safetensors.torch.save_file(merged, file, {"format": "pt"})
    command = ["--generator", f"{tmp_path}/generator", "--out", f"{tmp_path}/own", "--check"]
    assert main(["import", f"{root}/ElectraForPreTraining", *command]) == 0
    found = checkpoint.load(manifests.resolve(f"{tmp_path}/own"))
    assert found.manifest["config"]["model"]["sharing"] == "embeddings"
    assert not [n for n in found.weights if n.startswith("generator.embeddings")]
    out = ["--out", f"{tmp_path}/out", "--part", "generator", "--check"]
    assert main(["export", f"{tmp_path}/own", *out]) == 0
    assert_equal(merged, tensors(tmp_path / "out"))


def loss_of(said, labels, keep):
    """The loss of every head: of tokens where `keep`, of the sentence by the first label."""
    total = 0.0
    for name, logits in said.items():
        if name == "lm":
            total = total + F.cross_entropy(logits[keep], labels[keep])
        elif name == "rtd":
            wanted = (labels % 2).to(logits.dtype)
            total = total + F.binary_cross_entropy_with_logits(logits[keep], wanted[keep])
        else:
            total = total + F.cross_entropy(logits, labels[:, 0] % 2)
    return total


@pytest.mark.parametrize("name", HEADS)
def test_one_step_of_adamw_is_the_same(root, name):
    """Loss and, after one step on the same rows, loss again: so the gradients agree as well."""
    part, tokenizer = part_of(root / "own" / name)
    foreign = part.foreign
    own = _assemble(foreign.model, foreign.vocab_size, foreign.pad, set(part.weights))
    own.load_state_dict(part.weights)
    other = make(root / "again" / name, name)
    rows, layout, segments = _random_rows(part, tokenizer.vocabulary, padded=True)
    labels = torch.randint(10, 50, rows.shape, generator=torch.Generator().manual_seed(3))
    losses = []
    for net in (own.train(), other.train()):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.01)
        for _ in range(2):
            outputs = _native_outputs if net is own else foreign_outputs
            said = dict(outputs(net, rows, layout, segments).items())
            said = {n: v for n, v in said.items() if n in own.heads}
            loss = loss_of(said, labels, ~layout.padding_of(rows))
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    before, after, before_there, after_there = losses
    assert abs(before - before_there) <= 1e-5 and abs(after - after_there) <= 1e-5
    assert after < before - 1e-3


def test_training_and_evaluating_go_on_from_it(root, tmp_path, capsys):
    own = root / "own" / "RobertaForMaskedLM"
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox\nit was the best of times\n" * 20)
    files = ["--trainpref", str(text), "--validpref", str(text)]
    made = ["--tokenizer-from", str(own), "--destdir", str(tmp_path / "data")]
    assert main(["preprocess", *files, *made]) == 0
    capsys.readouterr()
    options = ["engine.device=cpu", "engine.retain_heap=false"]
    data = ["--split", "valid", "--data", str(tmp_path / "data")]
    assert main(["evaluate", str(own), *data, *options]) == 0
    loss = json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]
    model = json.loads(json.dumps(checkpoint.load(manifests.resolve(str(own))).manifest))
    sizes = [f"model.{k}={v}" for k, v in model["config"]["model"].items() if k != "_name"]
    run = ["--init-from", str(own), "--save-dir", str(tmp_path / "run"), "--max-update", "2"]
    rest = """
        task.tokens_per_sample=20 --warmup-updates 1 trainer.validate_interval_updates=0
    """.split()
    assert main(["train", str(tmp_path / "data"), *run, *sizes, *options, *rest]) == 0
    assert loss > 0
    # The trained model is again one of theirs, with the tokenizer of the data.
    out = ["--out", str(tmp_path / "out"), "--check"]
    assert main(["export", str(tmp_path / "run"), *out]) == 0
    assert config(tmp_path / "out")["architectures"] == ["RobertaForMaskedLM"]


def test_older_names_and_files(root, tmp_path):
    """gamma and beta, position_ids, tied output weights, a base model's head; pytorch_model.bin."""
    source = tmp_path / "old"
    shutil.copytree(root / "BertForMaskedLM", source)
    there = tensors(source)
    (source / "model.safetensors").unlink()
    old = {}
    for name, tensor in there.items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        old[name.replace("LayerNorm.bias", "LayerNorm.beta")] = tensor
    old["bert.embeddings.position_ids"] = torch.arange(24)[None]
    old["cls.predictions.decoder.weight"] = there["bert.embeddings.word_embeddings.weight"]
    old["bert.pooler.dense.bias"] = torch.ones(32)
    torch.save(old, source / "pytorch_model.bin")
    assert main(["import", str(source), "--out", f"{tmp_path}/own"]) == 0
    assert_equal(
        part_of(tmp_path / "own")[0].weights, part_of(root / "own/BertForMaskedLM")[0].weights
    )
    assert main(["export", f"{tmp_path}/own", "--out", f"{tmp_path}/out"]) == 0
    assert_equal(tensors(tmp_path / "out"), old)


def test_shards(root, tmp_path):
    source = tmp_path / "shards"
    shutil.copytree(root / "BertForMaskedLM", source)
    there = tensors(source)
    (source / "model.safetensors").unlink()
    names = sorted(there)
    index = {}
    for number, group in enumerate((names[:10], names[10:])):
        file = f"model-{number}.safetensors"
        safetensors.torch.save_file({n: there[n] for n in group}, source / file)
        index |= dict.fromkeys(group, file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert main(["import", str(source), "--out", f"{tmp_path}/own"]) == 0
    assert_equal(
        part_of(tmp_path / "own")[0].weights, part_of(root / "own/BertForMaskedLM")[0].weights
    )


def test_an_untied_head(tmp_path):
    make(tmp_path / "hf", "BertForMaskedLM", tie_word_embeddings=False)
    assert main(["import", f"{tmp_path}/hf", "--out", f"{tmp_path}/own", "--check"]) == 0
    part, _ = part_of(tmp_path / "own")
    assert "heads.lm.weight" in part.weights
    assert main(["export", f"{tmp_path}/own", "--out", f"{tmp_path}/out", "--check"]) == 0
    assert_equal(tensors(tmp_path / "hf"), tensors(tmp_path / "out"))


def test_half_precision_stays(root, tmp_path):
    source = tmp_path / "half"
    shutil.copytree(root / "BertForMaskedLM", source)
    half = {n: t.half() for n, t in tensors(source).items()}
    safetensors.torch.save_file(half, source / "model.safetensors", {"format": "pt"})
    assert main(["import", str(source), "--out", f"{tmp_path}/own"]) == 0
    assert main(["export", f"{tmp_path}/own", "--out", f"{tmp_path}/out"]) == 0
    assert_equal(tensors(tmp_path / "out"), half)


def test_transformers_is_not_needed(root, tmp_path):
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from metaseq_lm.cli import main\n"
        f"assert main(['import', '{root}/BertModel', '--out', '{tmp_path}/own']) == 0\n"
        f"assert main(['export', '{tmp_path}/own', '--out', '{tmp_path}/out']) == 0\n"
        f"assert main(['import', '{root}/BertModel', '--out', '{tmp_path}/b', '--check']) == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--check needs transformers" in done.stderr


def edit(**changes):
    def change(folder):
        content = config(folder) | changes
        content = {k: v for k, v in content.items() if v is not KeyError}
        (folder / "config.json").write_text(json.dumps(content))

    return change


def weights(change):
    def rewrite(folder):
        there = tensors(folder)
        change(there)
        safetensors.torch.save_file(there, folder / "model.safetensors")

    return rewrite


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def cut(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:200])


WORDS = "bert.embeddings.word_embeddings.weight"
FAULTS = {
    "no config": (remove("config.json"), "config.json: no such file"),
    "cut config": (cut("config.json"), "config.json: damaged"),
    "no weights": (remove("model.safetensors"), "neither model.safetensors nor pytorch_model.bin"),
    "cut weights": (cut("model.safetensors"), "model.safetensors: damaged"),
    "no tokenizer": (remove("tokenizer.json", "vocab.txt"), "no tokenizer here"),
    "cut tokenizer": (cut("tokenizer.json"), "tokenizer.json: not usable"),
    "other architecture": (edit(architectures=["GPT2LMHeadModel"]), "architectures is"),
    "no architecture": (edit(architectures=KeyError), "architectures is None"),
    "other type": (edit(model_type="roberta"), "model_type is 'roberta'"),
    "other activation": (edit(hidden_act="relu"), "hidden_act is 'relu'; only models with 'gelu'"),
    "relative positions": (edit(position_embedding_type="relative_key"), "only models with"),
    "decoder": (edit(is_decoder=True), "is_decoder is 'True'"),
    "no decoder": (edit(architectures=["BertLMHeadModel"]), "is_decoder is 'False'"),
    "no size": (edit(hidden_size=KeyError), "hidden_size is 'None', not a number"),
    "text as size": (edit(hidden_size="32"), "hidden_size is '32', not a number"),
    "no end of layers": (edit(num_hidden_layers=1 << 30), "there is no model with"),
    "odd heads": (edit(num_attention_heads=5), "there is no model with"),
    "more layers": (edit(num_hidden_layers=3), "it lacks bert.encoder.layer.2."),
    "fewer layers": (edit(num_hidden_layers=1), "known of the tensor bert.encoder.layer.1"),
    "other width": (edit(intermediate_size=50), "does not fit the model"),
    "other vocabulary": (edit(vocab_size=7), "vocab_size is 7 but the tokenizer's is"),
    "other padding": (edit(pad_token_id=3), "pad_token_id is 3 but the tokenizer's is 0"),
    "a tensor less": (
        weights(lambda t: t.pop("cls.predictions.bias")),
        "it lacks cls.predictions.bias",
    ),
    "a tensor more": (weights(lambda t: t.update(x=t[WORDS].clone())), "known of the tensor x"),
    "pointer of Git LFS": (
        lambda folder: (folder / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 9\n"
        ),
        "model.safetensors: is a pointer of Git LFS",
    ),
    "sentencepiece of another name": (
        lambda folder: [
            (folder / "vocab.txt").rename(folder / "spiece.model"),
            (folder / "tokenizer.json").unlink(),
        ],
        "into its folder with save_pretrained",
    ),
    "not finite": (weights(lambda t: t[WORDS].fill_(float("nan"))), "is not finite"),
    "a head of its own": (
        weights(lambda t: t.update({"cls.predictions.decoder.weight": t[WORDS] + 1})),
        "tie_word_embeddings",
    ),
    "other rows": (
        weights(lambda t: t.update({WORDS: t[WORDS][:5].clone()})),
        "does not fit the model",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_cannot_be_used(root, tmp_path, fault, capsys):
    change, said = FAULTS[fault]
    shutil.copytree(root / "BertForMaskedLM", tmp_path / "hf")
    change(tmp_path / "hf")
    code = main(["import", f"{tmp_path}/hf", "--out", f"{tmp_path}/own"])
    error = capsys.readouterr().err
    # A file that is missing is what the command line can correct.
    assert code == (2 if "no such file" in error or "no tokenizer" in error else 1)
    assert said in error and error.count("\n") == 1 and "Traceback" not in error
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_what_is_no_run_folder_names_the_import(root, tmp_path, moons, capsys):
    folder = root / "BertForMaskedLM"
    assert main(["import", f"{folder}/model.safetensors", "--out", f"{tmp_path}/own"]) == 2
    assert "is a file;" in capsys.readouterr().err
    for source in (folder, folder / "model.safetensors", "bert-base-uncased"):
        options = ["--task", "masked_lm", "--model", "inherit", "--save-dir", f"{tmp_path}/run"]
        assert main(["train", str(moons), "--init-from", str(source), *options]) == 2
        assert "metaseq-lm import" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_malicious_pickle_is_not_run(root, tmp_path, capsys):
    source = tmp_path / "hf"
    shutil.copytree(root / "BertForMaskedLM", source)
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    assert main(["import", str(source), "--out", f"{tmp_path}/own"]) == 1
    assert "pytorch_model.bin: cannot" in capsys.readouterr().err


def test_wrong_usage(root, tmp_path, capsys):
    assert main(["import", f"{root}/BertModel", "--out", f"{root}/own/BertModel"]) == 2
    assert "is there already" in capsys.readouterr().err
    out = ["--out", f"{tmp_path}/own", "--generator", f"{root}/generator"]
    assert main(["import", f"{root}/BertModel", *out]) == 2
    electra = ["import", f"{root}/ElectraForPreTraining", *out[:2]]
    assert main([*electra, "--generator", f"{root}/BertModel"]) == 1
    expect_error(capsys, main(["import", "/nowhere", *out[:2]]), 2, "/nowhere/config.json: no such")
    assert main(["export", f"{root}/own/BertModel", *out[:2], "--part", "generator"]) == 2
    assert main(["export", "/nowhere", *out[:2]]) == 2
    assert not (tmp_path / "own").exists()


def test_a_generator_of_another_shape_is_refused(root, tmp_path, capsys):
    make(tmp_path / "generator", "ElectraForMaskedLM", **{**GENERATOR, "num_attention_heads": 2})
    out = ["--out", f"{tmp_path}/own", "--generator", f"{tmp_path}/generator"]
    assert main(["import", f"{root}/ElectraForPreTraining", *out]) == 1
    assert "num_attention_heads is 2" in capsys.readouterr().err


def test_the_check_fails_where_models_differ(root, tmp_path, capsys):
    """The proof itself: one weight changed by a thousandth is found."""
    from metaseq_lm.core.errors import MetaseqError
    from metaseq_lm.interop.check import check

    part, tokenizer = part_of(root / "own" / "BertForMaskedLM")
    part.weights["encoder.stack.layers.1.fc1.weight"][0, 0] += 0.5
    with pytest.raises(MetaseqError, match="logits differ by"):
        check(part, tokenizer, root / "BertForMaskedLM")
