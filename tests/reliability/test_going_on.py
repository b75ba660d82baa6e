"""What a run has reached stays, whatever it is asked when it goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from battery import CASES, TINY, configure, train
from outcomes import expect_error

from metaseq_lm.cli import main
from metaseq_lm.cli.train import train as command
from metaseq_lm.core.errors import Interrupted, MetaseqError, UsageError
from metaseq_lm.data.storage.manifest import fingerprint, fingerprint_of_run
from metaseq_lm.distributed import process_group, signals
from metaseq_lm.engine.engine import copy_nested
from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.runs.flops import FlopMeter
from metaseq_lm.runs.folder import read_results
from metaseq_lm.training import price
from metaseq_lm.training.run import TrainingRun

CASE = ("masked_lm", 0)
LINEAR = ["schedule=linear", "schedule.warmup_updates=0"]
OFTEN = ["trainer.validate_interval_updates=2", "trainer.save_interval_updates=2"]


def results(save: Path) -> dict[str, Any]:
    found = read_results(save)
    assert found is not None
    return found


def interrupt(run: TrainingRun, update: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send a signal to the run while it makes its update number `update`."""
    inner, made = run.task.update, []

    def noted(*arguments: Any) -> Any:
        made.append(1)
        if len(made) == update:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(*arguments)

    monkeypatch.setattr(run.task, "update", noted)


def test_a_start_that_failed_does_not_bind_the_next(moons, tmp_path):
    """Nothing was trained: what was wrong may be corrected in the same folder."""
    wrong = [*OFTEN, "trainer.max_update=2", "task.tokens_per_sample=1"]
    with pytest.raises(UsageError, match="tokens_per_sample"):
        TrainingRun(configure(moons, tmp_path, CASE, *wrong)).train()
    assert not list(tmp_path.iterdir())
    right = [*OFTEN, "trainer.max_update=2", "task.tokens_per_sample=34"]
    train(configure(moons, tmp_path, CASE, *right))
    assert results(tmp_path)["updates"] == 2
    with pytest.raises(UsageError, match="task.tokens_per_sample is 34.*30"):
        TrainingRun(configure(moons, tmp_path, CASE, *right, "task.tokens_per_sample=30"))


def test_a_start_that_failed_does_not_fix_the_number_of_updates(moons, tmp_path):
    paid = ["trainer.max_update=0", "trainer.max_flops=3e8", "task.valid_size=2"]
    first = TrainingRun(
        configure(moons, tmp_path, CASE, *paid, "task.batch_size=8")
    )  # and goes no further
    second = TrainingRun(configure(moons, tmp_path, CASE, *paid, "task.batch_size=2"))
    assert second.config.trainer.max_update > first.config.trainer.max_update


def test_a_run_from_before_an_option_had_its_default(moons, tmp_path):
    """What config.yaml lacks had its default: the run goes on unless another value is given."""
    more = [*OFTEN, "trainer.max_update=2"]
    train(configure(moons, tmp_path, CASE, *more))
    file = tmp_path / "config.yaml"
    lines = file.read_text().splitlines(keepends=True)
    kept = [line for line in lines if "random_token_prob" not in line]
    file.write_text("".join(kept))
    with pytest.raises(UsageError, match=r"task.random_token_prob is 0\.1.*0\.2"):
        TrainingRun(configure(moons, tmp_path, CASE, *more, "task.random_token_prob=0.2"))
    train(configure(moons, tmp_path, CASE, *OFTEN, "trainer.max_update=4"))
    assert results(tmp_path)["updates"] == 4 and len(kept) == len(lines) - 1
    assert file.read_text().count("random_token_prob: 0.1") == 1


def test_a_longer_run_of_a_schedule_that_ends_is_another(moons, tmp_path):
    train(configure(moons, tmp_path, CASE, *LINEAR, "trainer.max_update=2"))
    with pytest.raises(UsageError, match=r"total_updates is 2.*\b4\b.*init_from="):
        TrainingRun(configure(moons, tmp_path, CASE, *LINEAR, "trainer.max_update=4"))


def test_the_rate_in_the_log_is_that_of_the_step(moons, tmp_path):
    more = [*LINEAR, "trainer.max_update=4", "trainer.log_interval=1"]
    train(configure(moons, tmp_path, CASE, *more, "optimizer.lr=0.1"))
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    rates = [row["lr_main"] for row in rows if row["kind"] == "train"]
    assert rates == pytest.approx([0.075, 0.05, 0.025, 0.0])


@pytest.mark.parametrize("update", [2, 6])
def test_a_signal_in_an_update_that_is_validated(update, moons, tmp_path, monkeypatch):
    """The checkpoint saved for it lacks the validation; at the end "best" has it all the same."""
    more = [*OFTEN, "trainer.max_update=6", "trainer.final_splits=[valid]"]
    train(configure(moons, tmp_path / "whole", CASE, *more))
    config = configure(moons, tmp_path / "parts", CASE, *more)
    run = TrainingRun(config)
    interrupt(run, update, monkeypatch)
    with pytest.raises(Interrupted, match="checkpoint is saved"):
        run.train()
    train(config)
    assert results(tmp_path / "whole")["metrics"] == results(tmp_path / "parts")["metrics"]
    stored = [
        manifests.read_manifest(tmp_path / n / "checkpoints/best") for n in ("whole", "parts")
    ]
    assert stored[0]["valid"] == stored[1]["valid"] != {}
    assert not list((tmp_path / "parts/checkpoints").glob(".*"))


def test_due_checkpoint_is_saved_before_validation(moons, tmp_path, monkeypatch):
    """A job that is killed in the middle of one loses the validation alone."""
    run = TrainingRun(configure(moons, tmp_path, CASE, *OFTEN))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run.task, "evaluate", killed)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert checkpoint.load(tmp_path / "checkpoints/last").state["update"] == 2


@pytest.mark.parametrize("stream", ["pipe", "full disk"])
def test_train_with_a_broken_output_stream_finishes(stream, moons, tmp_path):
    """ssh may be cut off, `| tee` may end: log.jsonl has the lines, and nothing is lost."""
    run = tmp_path / "run"
    words = ["train", str(moons), "--save-dir", str(run), "criterion=masked_lm"]
    words += [*CASES["masked_lm"][0], *TINY, *OFTEN]
    program = [sys.executable, "-m", "metaseq_lm", *words, "trainer.max_update=3"]
    if stream == "pipe":
        left, write = os.pipe()
        os.close(left)
    else:
        write = os.open("/dev/full", os.O_WRONLY)
    done = subprocess.run(program, stdout=write, stderr=write, timeout=120)
    os.close(write)
    assert done.returncode == 0
    assert results(run)["status"] == "finished"


def test_a_signal_before_the_first_update_says_so(moons, tmp_path):
    run = TrainingRun(configure(moons, tmp_path, CASE))
    with pytest.raises(Interrupted, match="before.*first update"):
        raise signals.make_interruption(signal.SIGTERM, run.trainer.progress_text())


@pytest.mark.parametrize("best", ["loss", "''"])
def test_a_copy_without_links_goes_on(best, moons, tmp_path):
    """As scp -r makes it: "last" and "best" are folders."""
    words = [*CASES["masked_lm"][0], *TINY, f"trainer.best_checkpoint_metric={best}"]
    run, copy = (["train", str(moons), "--save-dir", str(tmp_path / n)] for n in ("run", "copy"))
    assert main([*run, *words, "trainer.max_update=2"]) == 0
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    folder = tmp_path / "copy" / "checkpoints"
    assert not (folder / "last").is_symlink()
    (folder / ".tmp-last-copy").mkdir()  # of a kill
    if not (folder / "best").exists():
        shutil.copytree(folder / "last", folder / "best")
    assert main([*copy, *words, "trainer.max_update=4"]) == 0
    assert os.readlink(folder / "last") == "update_000000004"
    assert os.path.lexists(folder / "best") == (best == "loss")
    assert not list(folder.glob(".tmp*"))
    assert main(["evaluate", str(tmp_path / "copy"), "--split", "valid"]) == 0


def test_a_checkpoint_that_is_written_again_is_never_gone(tmp_path, monkeypatch):
    """Killed between the two renames, where names cannot be exchanged, the old one comes back."""
    checkpoint.save(tmp_path, 3, {}, {"x": 1}, {})
    with monkeypatch.context() as patch:
        renames = []

        def once(source: Any, target: Any, rename: Any = os.rename) -> None:
            if renames:
                raise KeyboardInterrupt
            renames.append(rename(source, target))

        patch.setattr(checkpoint, "exchange_names", lambda first, second: False)
        patch.setattr(checkpoint.os, "rename", once)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, 3, {}, {"x": 2}, {})
    found, _ = checkpoint.find_newest(tmp_path)
    assert found is not None and found.state == {"x": 1}
    checkpoint.save(tmp_path, 3, {}, {"x": 2}, {})
    assert checkpoint.load(tmp_path / "last").state == {"x": 2}


@pytest.mark.parametrize(
    "option, error",
    [("trainer.final_splits=[tset]", MetaseqError), ("trainer.final_splits=[train]", UsageError)],
)
def test_a_mistake_leaves_the_results(option, error, moons, tmp_path):
    train(configure(moons, tmp_path, CASE, "trainer.max_update=2"))
    before = results(tmp_path)
    with pytest.raises(error):
        command(configure(moons, tmp_path, CASE, "trainer.max_update=2", option))
    assert results(tmp_path) == before and before["status"] == "finished"


def test_a_failure_after_going_on_is_on_record(moons, tmp_path, monkeypatch):
    train(configure(moons, tmp_path, CASE, "trainer.max_update=2"))
    monkeypatch.setattr("metaseq_lm.training.trainer.Trainer._update", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command(configure(moons, tmp_path, CASE, "trainer.max_update=4"))
    assert results(tmp_path)["status"] == "failed"


def test_a_split_more_is_scored(moons, tmp_path):
    """The run is trained already; only the scores are made up."""
    train(configure(moons, tmp_path, CASE, "trainer.max_update=3", "trainer.valid_split=''"))
    assert results(tmp_path)["metrics"] == {}
    more = ["trainer.max_update=3", "trainer.final_splits=[valid]", "trainer.valid_split=''"]
    train(configure(moons, tmp_path, CASE, *more))
    assert results(tmp_path)["metrics"]["valid"]["loss"] > 0
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows if row["kind"] == "train"] == [1, 2, 3]


def test_a_run_without_patience_left_does_not_go_on(moons, tmp_path):
    """Asked for the scores of a split, it makes no updates that it had not made before."""
    more = ["trainer.max_update=50", "trainer.validate_interval_updates=2", "trainer.patience=2"]
    more += ["optimizer.lr=0"]
    train(configure(moons, tmp_path, CASE, *more))
    train(configure(moons, tmp_path, CASE, *more, "trainer.final_splits=[valid]"))
    assert results(tmp_path)["updates"] == 6 and results(tmp_path)["stopped_by"] == "patience"
    train(configure(moons, tmp_path, CASE, *more, "trainer.max_update=60"))
    assert results(tmp_path)["updates"] == 6
    train(configure(moons, tmp_path, CASE, *more, "trainer.patience=4"))  # more of it goes on
    assert results(tmp_path)["updates"] == 10


def test_a_wrong_metric_costs_no_updates(moons, tmp_path):
    more = ["trainer.max_update=5", "trainer.validate_interval_updates=0"]
    more += ["trainer.save_interval_updates=0"]
    with pytest.raises(UsageError, match="'acuracy'.*accuracy, loss"):
        train(configure(moons, tmp_path, CASE, *more, "trainer.best_checkpoint_metric=acuracy"))
    assert not (tmp_path / "checkpoints" / "last").exists()
    train(configure(moons, tmp_path, CASE, *more, "trainer.best_checkpoint_metric=loss"))
    assert results(tmp_path)["updates"] == 5
    assert (tmp_path / "checkpoints" / "best").resolve().name == "update_000000005"


def test_the_best_of_another_metric_is_not_compared(moons, tmp_path):
    """An accuracy is below any loss: maximised, it could never be better."""
    train(configure(moons, tmp_path, CASE, *OFTEN, "trainer.max_update=2"))
    more = ["trainer.best_checkpoint_metric=accuracy"]
    more += ["trainer.maximize_best_checkpoint_metric=true", "trainer.max_update=4"]
    run = TrainingRun(configure(moons, tmp_path, CASE, *OFTEN, *more))
    run.train()
    assert run.trainer.best.update == 4 and run.trainer.best.value < 1


def test_the_link_to_the_best_of_another_metric_goes(moons, tmp_path):
    """Of a finished run the last weights are the first to be judged by the new metric."""
    worse = ["optimizer.lr=30", "schedule=constant", "trainer.max_update=4"]
    train(configure(moons, tmp_path, CASE, *OFTEN, *worse))
    best = tmp_path / "checkpoints" / "best"
    assert best.resolve().name == "update_000000002"
    (tmp_path / "results.json").unlink()
    more = ["trainer.best_checkpoint_metric=accuracy", "trainer.final_splits=[valid]"]
    train(configure(moons, tmp_path, CASE, *OFTEN, *worse, *more))
    assert best.resolve().name == "update_000000004"
    none = ["trainer.best_checkpoint_metric=''", "trainer.max_update=5"]
    train(configure(moons, tmp_path, CASE, *OFTEN, *worse, *none))
    assert not best.is_symlink()


def test_damaged_metrics_are_named(moons, tmp_path):
    train(configure(moons, tmp_path, CASE, "trainer.max_update=1"))
    (tmp_path / "results.json").write_text(json.dumps(results(tmp_path) | {"metrics": 5}))
    with pytest.raises(MetaseqError, match="metrics is no"):
        train(configure(moons, tmp_path, CASE, "trainer.max_update=1"))


def test_pruning_keeps_what_was_just_written(tmp_path):
    """A later checkpoint that could not be read must not push it out."""
    for update in (500, 1000):
        checkpoint.save(tmp_path, update, {}, {}, {})
    (tmp_path / "update_000001000" / "state.pt").write_bytes(b"")
    checkpoint.save(tmp_path, 600, {}, {}, {})
    checkpoint.prune(tmp_path, 1, 600)
    found, skipped = checkpoint.find_newest(tmp_path)
    assert found is not None and found.path.name == "update_000000600" and len(skipped) == 1
    assert not (tmp_path / "update_000000500").exists()


def test_labels_are_part_of_the_fingerprint(moons, tmp_path):
    """A run on a labelled set does not go on with other labels."""
    data = tmp_path / "data"
    shutil.copytree(moons, data)
    found = []
    for turn in (0, 1):
        rows = [f"12 34\t{(i + turn) % 2}" for i in range(8)]
        (tmp_path / "rows.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
        arguments = ["preprocess", "--labelled", "mine", "--trainpref", str(tmp_path / "rows.tsv")]
        assert main([*arguments, "--destdir", str(data), *["--overwrite"] * turn]) == 0
        found.append(fingerprint_of_run(data, {"labelled": ["mine"], "nested": {"x": 1}}))
    unnamed = {"labelled": "none", "elmo": "", "teachers": ["..", "."]}
    assert fingerprint_of_run(data, unnamed) == fingerprint(data) == fingerprint(moons)
    assert len({*found, fingerprint(data)}) == 3


@pytest.mark.parametrize("case", [("cvt_aux", 0), ("cvt_vision", 0), ("masked_lm", 0)])
def test_refused_update_leaves_no_trace(case, moons, tmp_path, monkeypatch):
    """Not in averages of the weights either, nor in running statistics."""
    run = TrainingRun(configure(moons, tmp_path, case, "trainer.on_nonfinite=skip"))
    trainer, engine = run.trainer, run.engine
    run.model.train()
    with torch.no_grad():  # away from the average, which starts at the weights
        for parameter in engine.parameters("main"):
            parameter.add_(0.1)
    streams = run.task.build_streams("train")
    batches = {n: [streams[n].micro_batches(0, run.parts.shard)] for n in run.task.needs(0)}
    before = copy_nested(run.model.state_dict())
    moved = []

    def refuse(name: str, grads: Any) -> bool:
        moved.append(any(not torch.equal(w, before[n]) for n, w in run.model.state_dict().items()))
        engine.finite_check.refused.append(name)
        return False

    monkeypatch.setattr(engine, "step", refuse)
    trainer._update(0, batches)
    after = run.model.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert any(moved) == (case[0] != "masked_lm")


def test_the_number_of_updates_that_flops_pay_for_stays(moons, tmp_path, monkeypatch):
    """A run that goes on with other micro-batches does not price its updates anew."""
    more = ["trainer.max_update=0", "trainer.max_flops=3e7", "trainer.valid_split=''"]
    train(configure(moons, tmp_path, CASE, *more))
    updates = results(tmp_path)["updates"]
    monkeypatch.setattr(price, "estimate_price", lambda config: 1 / 0)
    run = TrainingRun(configure(moons, tmp_path, CASE, *more, "engine.micro_batch_size=2"))
    assert run.config.trainer.max_update == updates > 2


def test_flops_of_all_replicas_go_to_the_first(monkeypatch):
    """A checkpoint holds their sum; on the next number of processes one of them goes on with it."""
    meter = FlopMeter()
    meter.total = 3.0
    state = meter.state_dict()
    shares = [FlopMeter(), FlopMeter()]
    for rank, share in enumerate(shares):
        monkeypatch.setattr(process_group, "rank", lambda rank=rank: rank)
        share.load_state_dict(state)
    assert [share.total for share in shares] == [3.0, 0.0]


def test_run_folder_in_use_refuses_a_second_process(moons, tmp_path):
    """A second one is told; when the first has ended, whatever way, the next may go on."""
    hold = (
        "import sys, pathlib; from metaseq_lm.runs.folder import _open_locked; "
        "f = _open_locked(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    first = subprocess.Popen(
        [sys.executable, "-c", hold, tmp_path / "command.txt"], stdin=pipe, stdout=pipe
    )
    try:
        assert first.stdout is not None and first.stdout.readline() == b"held\n"
        with pytest.raises(MetaseqError, match="another process"):
            TrainingRun(configure(moons, tmp_path, CASE, "trainer.max_update=1"))
    finally:
        first.kill()
        first.wait()
    train(configure(moons, tmp_path, CASE, "trainer.max_update=1"))


def test_finished_run_is_compared_with_the_data_it_claims(moons, tmp_path, capsys):
    """By train and by sweep: a set that was made again with one label changed is another set."""
    data, run, out = tmp_path / "data", tmp_path / "run", tmp_path / "out"
    shutil.copytree(moons, data)
    rows = [f"{word}\t{label}" for word in ("a", "b", "c", "d") for label in ("yes", "no")]

    def make_set(rows: list[str]) -> None:
        shutil.rmtree(data / "votes", ignore_errors=True)
        (tmp_path / "votes.tsv").write_text("".join(f"{row}\n" for row in ["text\tlabel", *rows]))
        files = [f"--{split}pref={tmp_path}/votes.tsv" for split in ("train", "valid")]
        assert main(["preprocess", "--labelled", "votes", *files, "--destdir", str(data)]) == 0

    make_set(rows)
    options = [
        "task=sentence_prediction",
        "criterion=sentence_prediction",
        "task.labelled=votes",
        *TINY,
    ]
    options += ["task.batch_size=4", "task.tokens_per_sample=12"]
    options += ["trainer.max_update=2"]
    commands = (
        ["train", str(data), "--save-dir", str(run)],
        ["sweep", str(data), "--out", str(out)],
    )
    for command_line in commands:
        assert main([*command_line, *options]) == 0
    before = (run / "results.json").read_bytes()
    make_set(rows)
    for command_line in commands:
        assert main([*command_line, *options]) == 0  # the same again
    make_set([*rows[:-1], "d\tyes"])
    for command_line in commands:
        capsys.readouterr()
        expect_error(capsys, main([*command_line, *options]), 1, "other data", "choose another")
    assert (run / "results.json").read_bytes() == before
