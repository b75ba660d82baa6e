"""The meta-learning tasks start from an imported BERT or RoBERTa folder, with its tokenizer."""

from pathlib import Path

import pytest
import torch
from outcomes import expect_error

from metaseq_lm.cli import main
from metaseq_lm.core.loading import load_config
from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.training.parts import Parts, build_parts, prepare_config
from metaseq_lm.training.price import estimate_price
from metaseq_lm.training.restore import initialise_from

pytest.importorskip("transformers")
from hf_folders import make

# Their models have 24 places, of which RoBERTa uses 22.
RUN = ["model=inherit", "task.tokens_per_sample=20", "schedule=constant", "optimizer.lr=0.01"]
RUN += ["engine.device=cpu", "engine.threads=1", "engine.tensorboard=false", "task.batch_size=4"]
TARTAN = ["task=tartan", "task.labelled=topic", "task.auxiliary=[tapt,train]"]
TARTAN += ["task.meta_head_batch_size=4", "criterion.meta_head_steps=2"]
META = ["task=meta_pretrain", "criterion=bert_pretraining", "task.inner_steps=1"]


def imported(folder: Path, name: str) -> tuple[Path, Path]:
    """Import a folder of the class `name`; return it, and a data folder with its tokenizer."""
    make(folder / "hf", name)
    own, data = folder / "own", folder / "data"
    assert main(["import", str(folder / "hf"), "--out", str(own)]) == 0
    text = folder / "text.txt"
    text.write_text("the quick fox\nit was the best\nof times\na b c d\n\n" * 12)
    files = ["--trainpref", str(text), "--validpref", str(text), "--documents", "blank"]
    made = ["--tokenizer-from", str(own), "--destdir", str(data)]
    assert main(["preprocess", *files, *made]) == 0
    rows = folder / "topic.tsv"
    rows.write_text("text\tlabel\n" + "the quick fox\tno\nit was the best\tyes\n" * 8)
    splits = [f"--{split}pref={rows}" for split in ("train", "valid")]
    assert main(["preprocess", "--labelled", "topic", *splits, "--destdir", str(data)]) == 0
    return own, data


def started(folder: Path, name: str, *options: str) -> tuple[Parts, dict, dict]:
    """Return a run from the folder, its weights before its one update, and those of the folder."""
    own, data = imported(folder, name)
    places = [f"data={data}", f"init_from={own}", f"save_dir={folder / 'run'}"]
    config = prepare_config(load_config([*RUN, *options, *places]))
    parts = build_parts(config, dry_run=True)
    initialise_from(parts, config.init_from)
    before = {n: w.clone() for n, w in parts.model.state_dict().items()}
    estimate = estimate_price(config)
    assert len(estimate.first_updates) == 1
    return estimate.parts, before, checkpoint.load(manifests.resolve(str(own))).weights


def check_taken(before: dict, known: dict, prefix: str, source: str = "") -> None:
    """Expect all weights under `prefix` to be those of the folder under `source`."""
    taken = [name for name in before if name.startswith(prefix)]
    assert len(taken) > 1
    for name in taken:
        assert torch.equal(before[name], known[(source or prefix) + name.removeprefix(prefix)]), (
            name
        )


@pytest.mark.parametrize("criterion", ["tartan_mt", "tartan_meta"])
@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForMaskedLM", "RobertaModel"])
def test_tartan(name, criterion, tmp_path):
    """Encoder and LM head, once for each auxiliary; without an LM head there it is fresh."""
    options = [o for o in TARTAN if criterion == "tartan_meta" or "criterion." not in o]
    run, before, known = started(tmp_path, name, *options, f"criterion={criterion}")
    check_taken(before, known, "encoder.")
    if name != "RobertaModel":
        check_taken(before, known, "heads.lm.")
        check_taken(before, known, "heads.lm1.", "heads.lm.")
    after = run.model.state_dict()
    for part in ("encoder.", "heads.lm.", "heads.lm1.", "heads.sentence."):
        assert any((after[n] != w).any() for n, w in before.items() if n.startswith(part)), part


@pytest.mark.parametrize("name", ["BertForPreTraining", "BertForMaskedLM"])
def test_meta_pretrain(name, tmp_path):
    """Encoder, LM head and, where there is one, the head for the next sentence."""
    run, before, known = started(tmp_path, name, *META)
    check_taken(before, known, "encoder.")
    check_taken(before, known, "heads.lm.")
    if name == "BertForPreTraining":
        check_taken(before, known, "heads.next_sentence.")
    after = run.model.state_dict()
    assert all((after[n] != w).any() for n, w in before.items() if n.endswith("fc1.weight"))


def test_another_tokenizer_of_the_same_size_is_refused(tmp_path, capsys):
    """All shapes would fit, and every embedding be that of another symbol."""
    own, _ = imported(tmp_path, "RobertaForMaskedLM")
    size = len((own / "dict.txt").read_text().splitlines())
    text = tmp_path / "numbers.txt"
    text.write_text("".join(f"{i * i:x} {i * 7919:o} {i**3}\n" for i in range(400)))
    files = ["--trainpref", str(text), "--validpref", str(text), "--vocab-size", str(size)]
    assert main(["preprocess", *files, "--destdir", str(tmp_path / "other")]) == 0
    capsys.readouterr()
    words = [str(tmp_path / "other"), "--init-from", str(own), "--save-dir", str(tmp_path / "run")]
    expect_error(capsys, main(["train", *words, *RUN]), 2, "with another tokenizer")
