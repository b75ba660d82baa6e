"""Which messages an update sends, and in which order."""

import json
import time
from pathlib import Path

import battery
import pytest
from real_runs import on_replicas
from torch.profiler import ProfilerActivity, profile

from metaseq_lm.distributed import process_group
from metaseq_lm.training.parts import build_parts
from metaseq_lm.training.prefetch import Prefetcher

GATHER, SUM, SMALL = "gather", "sum", "small"
NUMBERS = 100  # of a small message at most; those of a layer are more


def messages_of_an_update(data: str, out: str, parallel: str, more: list[str]) -> None:
    """As one of the replicas, of which the others are slower, write the messages of an update."""
    process_group.initialise("cpu", 100)
    more = [f"engine.parallel={parallel}", "trainer.valid_split=''", *more]
    config = battery.configure(Path(data), Path(out, "run"), ("masked_lm", 0), *more)
    run = build_parts(config)
    run.model.train()
    rank = process_group.rank()
    run.model.encoder.stack.layers[1].register_full_backward_hook(lambda *_: time.sleep(0.1 * rank))
    prefetcher = Prefetcher(run.task.needs, run.task.build_streams("train"), {}, run.shard)
    for update, batches in prefetcher.updates(0, 2):
        run.engine.begin(update)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
            run.task.update(run.engine, run.model, batches)
    messages = []
    for event in sorted(trace.events(), key=lambda event: event.time_range.start):
        if event.name.startswith("gloo:"):
            numbers = (event.input_shapes[0] or [1])[0]
            kind = GATHER if event.name == "gloo:all_gather" else SUM
            messages.append([SMALL if numbers < NUMBERS else kind, numbers])
    Path(out, f"{rank}.json").write_text(json.dumps(messages))
    process_group.finish()


@pytest.mark.parametrize(
    "parallel, more, expected",
    [
        # Sizes, then the gradients with the logs and with which of them there are.
        ("replicate", [], [SMALL, SUM]),
        # The root and two layers; backward the last layer is still there. Logs, and the norm.
        (
            "shard",
            [],
            [SMALL, *[GATHER] * 3, *[GATHER] * 2, *[SUM] * 3, SMALL, SMALL],
        ),
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
def test_messages_of_an_update(
    parallel: str, more: list[str], expected: list[str], moons: Path, tmp_path: Path
) -> None:
    """The same on all replicas, in the same order, however fast each is."""
    on_replicas(2, messages_of_an_update, str(moons), str(tmp_path), parallel, more)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    kinds = [kind for kind, _ in first]
    assert kinds == expected
