"""Which messages an update sends, and in which order."""

import json
import os
import time
from collections import Counter
from pathlib import Path

import battery
import pytest
from meta_pseudo_data import make_ragged
from real_runs import on_replicas
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile

from metaseq_lm.distributed import process_group
from metaseq_lm.training.parts import build_parts
from metaseq_lm.training.prefetch import Prefetcher
from metaseq_lm.training.run import TrainingRun

GATHER, SUM, SMALL = "gather", "sum", "small"
NUMBERS = 100  # of a small message at most; those of a layer are more


def trace_of_an_update(data: str, out: str, more: list[str], seconds: float) -> EventList:
    """As one of the replicas, of which each is slower than the one before, return a trace of the
    second update.
    """
    process_group.initialise("cpu", 100)
    config = battery.configure(
        Path(data), Path(out, "run"), ("masked_lm", 0), "trainer.valid_split=''", *more
    )
    run = build_parts(config)
    run.model.train()
    wait = seconds * process_group.rank()
    run.model.encoder.stack.layers[1].register_full_backward_hook(lambda *_: time.sleep(wait))
    prefetcher = Prefetcher(run.task.needs, run.task.build_streams("train"), {}, run.shard)
    for update, batches in prefetcher.updates(0, 2):
        run.engine.begin(update)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
            run.task.update(run.engine, run.model, batches)
    return trace.events()


def messages_of_an_update(data: str, out: str, more: list[str]) -> None:
    """As one of the replicas write the messages of an update."""
    events = trace_of_an_update(data, out, more, 0.1)
    messages = []
    for event in sorted(events, key=lambda event: event.time_range.start):
        if event.name.startswith("gloo:"):
            numbers = (event.input_shapes[0] or [1])[0]
            kind = GATHER if event.name == "gloo:all_gather" else SUM
            messages.append([SMALL if numbers < NUMBERS else kind, numbers])
    Path(out, f"{process_group.rank()}.json").write_text(json.dumps(messages))
    process_group.finish()


@pytest.mark.parametrize(
    "parallel, more, expected",
    [
        # Sizes, then the gradients with the logs and with which of them there are.
        ("replicate", [], [SMALL, SUM]),
        # The root and two layers; backward the last layer is still there. Logs, and the norm.
        ("shard", [], [SMALL, *[GATHER] * 3, *[GATHER] * 2, *[SUM] * 3, SMALL, SMALL]),
        # Nothing is summed between three micro-batches, and the root is gathered once.
        (
            "shard",
            ["engine.micro_batch_size=3"],
            [SMALL, GATHER, *[GATHER] * 4 * 3, *[SUM] * 3, SMALL, SMALL],
        ),
        (
            "shard",
            ["engine.micro_batch_size=3", "engine.gather=model"],
            [SMALL, GATHER, SUM, SMALL, SMALL],
        ),
    ],
)
def test_messages_of_an_update(parallel, more, expected, moons, tmp_path):
    """The same on all replicas, in the same order, however fast each is."""
    more = [f"engine.parallel={parallel}", *more]
    on_replicas(2, messages_of_an_update, str(moons), str(tmp_path), more)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    kinds = [kind for kind, _ in first]
    assert kinds == expected


def times_of_sums_and_products(data: str, out: str) -> None:
    """As one of two nodes of two processes write when it sums, and when it multiplies matrices."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    events = trace_of_an_update(data, out, ["engine.parallel=hybrid"], 0.2)
    sums, products = (
        sorted((event.time_range.start, event.time_range.end) for event in events if of(event))
        for of in (
            lambda e: e.name == "gloo:all_reduce" and (e.input_shapes[0] or [1])[0] > NUMBERS,
            lambda e: e.name == "AddmmBackward0",
        )
    )
    Path(out, f"{process_group.rank()}.json").write_text(json.dumps([sums, products]))
    process_group.finish()


def test_sums_between_nodes_go_on_during_the_backward_pass(moons, tmp_path):
    """While the second node is still busy with the last layer, the first one goes on."""
    on_replicas(4, times_of_sums_and_products, str(moons), str(tmp_path))
    sums, products = json.loads((tmp_path / "0.json").read_text())
    _, end = max(sums, key=lambda each: each[1] - each[0])  # of the last layer, between the nodes
    assert all(finish < end for _, finish in products)


def messages_of_runs(data: str, out: str) -> None:
    """As one of two replicas write the lengths of the messages of runs of 3 and of 7 updates."""
    process_group.initialise("cpu", 100)
    lengths = []
    for updates in (3, 7):
        config = battery.configure(
            Path(data),
            Path(out, f"{updates}"),
            ("masked_lm", 0),
            f"trainer.max_update={updates}",
            "trainer.max_flops=1e12",
            "trainer.log_interval=100",
            "trainer.valid_split=''",
        )
        run = TrainingRun(config)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
            run.train()
        messages = [event for event in trace.events() if event.name.startswith("gloo:")]
        lengths.append([(event.input_shapes[0] or [1])[0] for event in messages])
    Path(out, f"{process_group.rank()}.json").write_text(json.dumps(lengths))
    process_group.finish()


def test_an_update_of_a_run_sends_one_small_message(moons, tmp_path):
    """The sizes, with what the limits and signals depend on; and the gradients."""
    on_replicas(2, messages_of_runs, str(moons), str(tmp_path))
    for rank in (0, 1):
        three, seven = map(Counter, json.loads((tmp_path / f"{rank}.json").read_text()))
        numbers = seven - three
        assert not three - seven and sorted(numbers.values()) == [4, 4]
        assert min(numbers) < NUMBERS < max(numbers)


def train_up_to_limits(data: str, out: str, limits: list[list[str]]) -> None:
    """As one of some replicas train until a limit is reached."""
    process_group.initialise("cpu", 100)
    for number, limit in enumerate(limits):
        config = battery.configure(
            Path(data), Path(out, f"{number}"), ("masked_lm", 0), "trainer.max_update=50", *limit
        )
        TrainingRun(config).train()
    process_group.finish()


def test_replicas_stop_at_the_update_that_reaches_a_limit(tmp_path):
    """Of FLOPs and of words, with batches of many lengths, whose FLOPs are known only later."""
    data = make_ragged(tmp_path)
    reached = []
    for update in (1, 4):
        folder = tmp_path / f"after {update}"
        on_replicas(
            2, train_up_to_limits, str(data), str(folder), [[f"trainer.max_update={update}"]]
        )
        reached.append(json.loads((folder / "0" / "results.json").read_text()))
    fewer, more = reached
    assert fewer["flops"] < more["flops"] and fewer["words_seen"] < more["words_seen"]
    limits = [
        f"trainer.{m}={r[k]}"
        for r in reached
        for m, k in (("max_flops", "flops"), ("max_words", "words_seen"))
    ]
    on_replicas(
        2, train_up_to_limits, str(data), str(tmp_path / "runs"), [[limit] for limit in limits]
    )
    results = [
        json.loads((tmp_path / "runs" / f"{n}" / "results.json").read_text()) for n in range(4)
    ]
    assert [result["updates"] for result in results] == [1, 1, 4, 4]
    assert [result["stopped_by"] for result in results] == ["max_flops", "max_words"] * 2
