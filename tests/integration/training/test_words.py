"""Words seen: exact for one epoch, whatever cuts it, and checkpoints at numbers of them."""

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from battery import configure
from outcomes import expect_error

from metaseq_lm.cli import main
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.storage.word_starts import WordStartsWriter
from metaseq_lm.data.streams import Shard
from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.runs.folder import read_results
from metaseq_lm.training.parts import build_task
from metaseq_lm.training.price import resolve_budget
from metaseq_lm.training.words import numbers_of_words

SIZES = """
    model.encoder_layers=1 model.encoder_embed_dim=8 model.encoder_ffn_embed_dim=8
    model.encoder_attention_heads=1 model.max_positions=24 task.tokens_per_sample=24
    task.batch_size=8 trainer.valid_split='' trainer.log_interval=2 engine.tensorboard=false
    engine.threads=1
""".split()
MLM = ["--task", "masked_lm", "--criterion", "masked_lm"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A data folder of documents of lines in pieces of words, and the words of its text."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    lines = []
    for _ in range(160):
        words = ["".join(draw.choices("abcdeé'-", k=draw.randint(1, 9))) for _ in range(9)]
        lines += [draw.choice([" ", "  "]).join(words[: draw.randint(1, 9)])]
        lines += [""] * (draw.random() < 0.3)
    content = "\n".join(lines) + "\n"
    (folder / "train.txt").write_text(content)
    arguments = ["--trainpref", f"{folder}/train.txt", "--destdir", f"{folder}/data"]
    options = ["--tokenizer", "wordpiece", "--vocab-size", "90", "--documents", "blank"]
    assert main(["preprocess", *arguments, *options]) == 0
    return folder / "data", len(content.split())


def train(data: Path, save: Path, *more: str, objective: list[str] = MLM) -> dict[str, Any]:
    """Train a small run and return its results."""
    command = ["train", str(data), "--save-dir", str(save), *objective, *SIZES, *more]
    assert main(command) == 0
    results = read_results(save)
    assert results is not None
    return results


def epoch_of(data: Path, *more: str) -> int:
    """Return the updates of an epoch."""
    config = configure(data, data, ("masked_lm", 0), *SIZES, *more)
    return int(build_task(config).build_streams("train")["train"].order.per_epoch)


def logged(save: Path) -> dict[int, int]:
    """Return the words seen by update."""
    rows = [json.loads(line) for line in (save / "log.jsonl").read_text().splitlines()]
    return {row["update"]: row["words_seen"] for row in rows if "words_seen" in row}


def links(save: Path) -> dict[str, str]:
    """Return the checkpoints at numbers of words."""
    folder = save / "checkpoints"
    return {path.name: os.readlink(path) for path in folder.glob("words_*")}


@pytest.mark.parametrize("mode", ["none", "eos", "documents"])
def test_an_epoch_sees_the_words_of_the_text(text, mode, tmp_path):
    """As many as wc -w says, and as many again in the next one."""
    data, words = text
    rows = [f"task.sample_break_mode={mode}"]
    updates = epoch_of(data, *rows)
    more = [*rows, f"trainer.max_update={2 * updates}", f"trainer.log_interval={updates}"]
    results = train(data, tmp_path, *more)
    assert list(logged(tmp_path).values()) == [words, 2 * words]
    assert results["words_seen"] == 2 * words


def test_how_it_is_run_changes_no_words(text, tmp_path):
    short = ["trainer.max_update=5", "trainer.log_interval=1", "trainer.save_words=[100]"]
    train(text[0], tmp_path / "one", *short)
    train(text[0], tmp_path / "other", *short, "engine.micro_batch_size=3", "engine.workers=2")
    assert logged(tmp_path / "one") == logged(tmp_path / "other")
    assert links(tmp_path / "one") == links(tmp_path / "other") != {}


def reached(save: Path, numbers: list[int]) -> dict[str, str]:
    """Return the links that a log of every update asks for."""
    expected = {}
    for number in numbers:
        update = min(update for update, seen in logged(save).items() if seen >= number)
        expected[manifests.words_name(number)] = f"update_{update:09d}"
    return expected


def test_checkpoints_at_numbers_of_words(text, tmp_path, capsys):
    """At the first update that has seen so many; they stay, are listed, and can be loaded."""
    more = ["trainer.save_words=[100,250,251,500,0.9k,1M]", "trainer.max_update=20"]
    more += ["trainer.log_interval=1", "trainer.keep_last=1", "trainer.save_interval_updates=3"]
    train(text[0], tmp_path, *more)
    assert links(tmp_path) == reached(tmp_path, [100, 250, 251, 500, 900])
    found = {path.name for path in manifests.all_updates(tmp_path / "checkpoints")}
    assert found == {*links(tmp_path).values(), "update_000000020"}
    for name, update in links(tmp_path).items():
        stored = checkpoint.load(tmp_path / "checkpoints" / name)
        assert f"update_{stored.state['update']:09d}" == update
        assert stored.state["words"]["seen"] == logged(tmp_path)[stored.state["update"]]
    events = (tmp_path / "log.jsonl").read_text()
    assert "no words_1M:" in events and "no words_900" not in events
    capsys.readouterr()
    assert main(["list", "--checkpoints", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {name: row["path"][-16:] for row in rows for name in row["words"]} == links(tmp_path)
    assert main(["list", "--checkpoints", str(tmp_path)]) == 0
    assert "words_250, words_251" in capsys.readouterr().out


def test_a_resumed_run_skips_and_repeats_no_checkpoint(text, tmp_path):
    """Stopped between and at them, and killed before a link was made."""
    more = ["trainer.save_words=[100,400,401,900]", "trainer.log_interval=1"]
    train(text[0], tmp_path / "whole", *more, "trainer.max_update=14")
    expected = links(tmp_path / "whole")
    stops = sorted({int(name[-9:]) for name in expected.values()})
    part = tmp_path / "part"
    for stop in (*stops, stops[-1] + 1, 14):
        train(text[0], part, *more, f"trainer.max_update={stop}")
        for name in ("words_400", "words_1M"):
            path = part / "checkpoints" / name
            path.unlink(missing_ok=True)
            if name == "words_1M" and stop < 14:
                path.symlink_to(manifests.folder_of(path.parent, stop).name)
        (part / "results.json").unlink()
    train(text[0], part, *more, "trainer.max_update=14")
    assert links(part) == expected
    assert logged(part) == logged(tmp_path / "whole")
    state = [checkpoint.load(p / "checkpoints/last").state for p in (part, tmp_path / "whole")]
    assert state[0]["words"] == state[1]["words"]


def test_checkpoints_are_saved_with_their_validation(text, tmp_path):
    shutil.copytree(text[0], tmp_path / "data")
    for suffix in ("bin", "idx"):
        shutil.copy(text[0] / f"train.{suffix}", tmp_path / f"data/valid.{suffix}")
    (tmp_path / "data/manifest.json").unlink()
    more = ["trainer.save_words=[240]", "trainer.validate_interval_updates=1"]
    more += ["trainer.valid_split=valid", "task.valid_size=8", "trainer.max_update=5"]
    train(tmp_path / "data", tmp_path / "run", *more)
    stored = manifests.read_manifest(tmp_path / "run/checkpoints/words_240")
    assert "loss" in stored["valid"]


def test_a_run_ends_at_a_number_of_words(text, tmp_path):
    """The first update that has seen so many is the last, and the schedule ends there."""
    budget = ["trainer.max_update=0", "trainer.log_interval=1", "trainer.max_words=700"]
    budget.append("schedule=linear")
    results = train(text[0], tmp_path / "a", *budget)
    seen = logged(tmp_path / "a")
    last = max(seen)
    assert seen[last] >= 700 > seen[last - 1]
    assert results["updates"] == last and results["words_seen"] == seen[last]
    stored = manifests.newest_manifest(tmp_path / "a" / "checkpoints")
    assert stored is not None
    assert stored["config"]["trainer"]["max_update"] == last
    assert stored["config"]["schedule"]["total_updates"] == last
    train(text[0], tmp_path / "a", *budget)  # is finished
    # Without a fitted schedule, too; then with a larger number the run goes on.
    results = train(text[0], tmp_path / "b", *budget[1:], "trainer.max_update=90")
    assert results["updates"] == last and results["stopped_by"] == "max_words"
    more = ["trainer.max_words=900", "trainer.max_update=90", "schedule=linear"]
    results = train(text[0], tmp_path / "b", *more)
    assert results["updates"] > last and results["words_seen"] >= 900


def test_a_number_of_words_with_warm_ups_that_depend_on_it(text, tmp_path):
    warm = ["task.batch_warmup_ratio=0.8", "task.length_warmup_ratio=0.5"]
    budget = ["trainer.max_update=0", "trainer.log_interval=1", "trainer.max_words=900"]
    results = train(text[0], tmp_path, *budget, *warm)
    seen = logged(tmp_path)
    assert results["updates"] == max(seen) and seen[max(seen)] >= 900 > seen[max(seen) - 1]


def test_seeds_of_a_number_of_words_differ_in_their_updates(text, tmp_path):
    """Which reports know: each ends with the update that has seen so many."""
    options = [*SIZES, "task.sample_break_mode=eos", "trainer.max_update=0"]
    updates = set()
    for seed in range(6):
        words = [*options, "trainer.max_words=420", f"seed={seed}", f"data={text[0]}"]
        config = resolve_budget(configure(text[0], tmp_path, ("masked_lm", 0), *words))
        last = config.trainer.max_update
        stream = build_task(config).build_streams("train")["train"]
        seen = sum(map(stream.count_words, range(last)))
        assert seen >= 420 > seen - stream.count_words(last - 1)
        updates.add(last)
    assert len(updates) > 1


def test_data_that_do_not_say_where_words_begin(text, tmp_path, capsys):
    """Such folders train without a count; numbers of words are refused before anything is made.

    When the folder has it, the run goes on with a count from its beginning.
    """
    data = tmp_path / "data"
    shutil.copytree(text[0], data)
    record = (data / "train.words").read_bytes()
    manifest = Manifest.load(data)
    (data / "train.words").unlink()
    about = manifest.files.pop("train.words")
    manifest.save(data)
    save = tmp_path / "run"
    assert train(data, save, "trainer.max_update=4")["words_seen"] is None
    assert "words_seen" not in (save / "log.jsonl").read_text()
    for option in ("trainer.save_words=[7]", "trainer.max_words=7"):
        capsys.readouterr()
        command = ["train", str(data), "--save-dir", str(save), *MLM, *SIZES, option]
        assert main([*command, "trainer.max_update=9"]) == 2
        message = capsys.readouterr().err
        assert option.partition("=")[0] in message and f"--tokenizer-from {data}" in message
    assert (save / "results.json").exists()
    (data / "train.words").write_bytes(record)
    manifest.files["train.words"] = about
    manifest.save(data)
    train(data, save, "trainer.max_update=6")
    train(data, tmp_path / "other", "trainer.max_update=6")
    assert logged(save)[6] == logged(tmp_path / "other")[6]


def test_a_checkpoint_of_an_earlier_version(text, tmp_path):
    """Its state has no words: they are counted from the beginning."""
    train(text[0], tmp_path / "a", "trainer.max_update=4")
    stored = checkpoint.load(manifests.resolve(str(tmp_path / "a")))
    del stored.state["words"]
    folder, manifest = tmp_path / "a" / "checkpoints", stored.manifest
    manifest.pop("state")  # a hash of it
    checkpoint.save(folder, 4, stored.weights, stored.state, manifest)
    train(text[0], tmp_path / "a", "trainer.max_update=6")
    train(text[0], tmp_path / "b", "trainer.max_update=6")
    assert logged(tmp_path / "a") == logged(tmp_path / "b")


def test_tasks_that_read_no_corpus(moons, tmp_path, capsys):
    objective = ["--task", "token_labels", "--criterion", "token_labels"]
    sets = ["task.labelled=which_moon_20", "trainer.max_update=2"]
    sizes = [option for option in SIZES if "tokens_per_sample" not in option]
    command = ["train", str(moons), "--save-dir", str(tmp_path), *objective, *sizes, *sets]
    command.append("model.max_positions=34")
    expect_error(capsys, main([*command, "trainer.save_words=[5]"]), 2, "task token_labels")
    assert main(command) == 0
    results = read_results(tmp_path)
    assert results is not None and results["words_seen"] == 0


@pytest.mark.parametrize("entry", ["7G", "0", "-5", "1.5", "strict-smal", ""])
def test_entries_that_are_no_numbers_of_words(entry):
    with pytest.raises(UsageError, match="trainer.save_words has"):
        numbers_of_words([entry])


def test_schedules_of_numbers_of_words():
    million = 10**6
    small = [n * million for n in (*range(1, 10), *range(10, 101, 10))]
    assert numbers_of_words(["strict-small"]) == small and len(small) == 19
    strict = numbers_of_words(["strict"])
    assert len(strict) == 28 and strict[-1] == 1000 * million
    assert numbers_of_words(["20k", "1e4", "1.5M", "20000", "7"]) == [7, 10**4, 20000, 1500000]
    assert manifests.words_name(10**9) == "words_1000M"
    assert manifests.words_name(1500) == "words_1500"


# ---------------------------------------------------------------- wings


@pytest.fixture(scope="module")
def tokens_as_words(moons: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two Moons as if each token were a word, so that words are the tokens of a text."""
    folder = tmp_path_factory.mktemp("tokens") / "moons"
    shutil.copytree(moons, folder)
    (folder / "manifest.json").unlink()
    tokens = (folder / "train.bin").stat().st_size // 2
    with WordStartsWriter(folder / "train") as words:
        words.extend(np.ones(tokens, np.int32))
    return folder


def texts_of(tokens: torch.Tensor, padding: torch.Tensor | None, first: int | None) -> int:
    """Return the tokens of rows [CLS] x [SEP]; of those that begin with id `first` if given."""
    real = torch.ones_like(tokens, dtype=torch.bool) if padding is None else ~padding
    counts = real.flatten(0, -2).sum(-1) - 2
    return int(counts[tokens.flatten(0, -2)[:, 0] == first].sum() if first else counts.sum())


def corpus_batches(config: Any) -> Iterator[tuple[str, int, list[Any]]]:
    """Yield name, counted words and micro-batches of the first batches that read a corpus."""
    for name, stream in build_task(config).build_streams("train").items():
        for number in range(3) if stream.words is not None else ():
            yield name, stream.count_words(number), stream.micro_batches(number, Shard(0, 1, 3))


@pytest.mark.parametrize(
    "case",
    [("masked_lm", 0), ("electra_rtd", 0), ("masked_next_token", 1), ("causal_lm", 3)],
    ids=lambda case: case[0],
)
def test_tasks_of_a_corpus(case, tokens_as_words, tmp_path):
    for _, words, batches in corpus_batches(configure(tokens_as_words, tmp_path, case)):
        assert words == sum(texts_of(b.tokens, b.layout.padding, None) for b in batches) > 0


@pytest.mark.parametrize("case", [("meta_pseudo_label_soft", 0), ("masked_lm", 1)])
def test_meta_pseudo_labels(case, tokens_as_words, tmp_path):
    """A text counts once, not with its masked form; texts beside labelled rows count, too."""
    config = configure(tokens_as_words, tmp_path, case, "task.include_mlm_task=true")
    mlm = build_task(config).vocabulary.cls(1)
    names = set()
    for name, words, batches in corpus_batches(config):
        assert words == sum(texts_of(b.tokens, b.layout.padding, mlm) for b in batches)
        names |= {name} if words else set()
    assert names >= {"unlabelled", "support", "query"}


def test_tartan(tokens_as_words, tmp_path):
    config = configure(tokens_as_words, tmp_path, ("tartan_mt", 1))
    names = set()
    for name, words, batches in corpus_batches(config):
        assert words == sum(texts_of(b.tokens, b.layout.padding, None) for b in batches) > 0
        names.add(name)
    assert names == {"auxiliary.train"}  # the others read labelled sets


@pytest.mark.parametrize("case", [("cvt_aux", 0), ("language_modeling", 1)])
def test_sentences_of_words(case, moons, tmp_path):
    counted = list(corpus_batches(configure(moons, tmp_path, case)))
    for _, words, batches in counted:
        assert words == sum(int(batch.sizes["words"]) for batch in batches) > 0
    assert len(counted) == 3
