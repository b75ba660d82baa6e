"""Prepares the batches of the next updates in threads."""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotReady
from typing import Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.streams import Shard, Stream
from metaseq_lm.tasks import Batches

Plan = list[tuple[str, int]]  # stream and number of each global batch of an update


class Prefetcher:
    """Prepares the batches of consecutive updates, ahead of time by threads if `workers` > 0.

    `positions`, the number of global batches that each stream has yielded, is its whole state.

    Args:
        needs: Returns how many global batches an update takes from each stream.
        streams: The streams by name.
        positions: Where to start in each stream.
        shard: This replica's share of each batch.
        workers: Number of threads.
        timeout: Seconds after which an unfinished batch raises MetaseqError with the stack of its
            thread.
        transfer: Moves the batches of an update to a device; called in the threads.
    """

    def __init__(
        self,
        needs: Callable[[int], dict[str, int]],
        streams: dict[str, Any],
        positions: dict[str, int],
        shard: Shard,
        workers: int = 0,
        timeout: float = 600.0,
        transfer: Callable[[Batches], Batches] | None = None,
    ) -> None:
        self.needs = needs
        self.streams = streams
        self.positions = {name: positions.get(name, 0) for name in streams}
        self.shard = shard
        self.workers = workers
        self.timeout = timeout
        self.transfer = transfer
        self.threads: dict[int, int] = {}  # update: the thread that prepares it

    def _plan(self, update: int, positions: dict[str, int]) -> Plan:
        """Return the batches of an update, and advance `positions` past them."""
        plan = []
        for name, count in self.needs(update).items():
            if name not in positions:
                known = ", ".join(positions)
                raise LookupError(f"needs() names stream '{name}', build_streams() builds {known}")
            plan += [(name, positions[name] + i) for i in range(count)]
            positions[name] += count
        return plan

    def _prepare(self, update: int, plan: Plan) -> Batches:
        self.threads[update] = threading.get_ident()
        batches: Batches = {}
        for name, number in plan:
            stream = self.streams[name]
            if isinstance(stream, Stream):
                stream = stream.at_update(update)
            batches.setdefault(name, []).append(stream.micro_batches(number, self.shard))
        if self.transfer is not None:
            batches = self.transfer(batches)
        del self.threads[update]
        return batches

    def updates(self, start: int, stop: int) -> Iterator[tuple[int, Batches]]:
        """Yield (update, batches) and advance `positions`."""
        if not self.workers:
            for update in range(start, stop):
                yield update, self._prepare(update, self._plan(update, self.positions))
            return
        pool = ThreadPoolExecutor(self.workers, "worker")
        planned = dict(self.positions)
        queue: deque[tuple[int, Future[Batches]]] = deque()
        following = start
        try:
            while queue or following < stop:
                while following < stop and len(queue) <= 2 * self.workers:
                    plan = self._plan(following, planned)
                    queue.append((following, pool.submit(self._prepare, following, plan)))
                    following += 1
                update, future = queue.popleft()
                batches = self._wait(update, future)
                self._plan(update, self.positions)
                yield update, batches
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _wait(self, update: int, future: Future[Batches]) -> Batches:
        try:
            return future.result(self.timeout)
        except NotReady:
            thread = self.threads.get(update, 0)
            names = {t.ident: t.name for t in threading.enumerate()}
            frame = sys._current_frames().get(thread)
            where = "it has not begun\n"
            if frame is not None:
                where = "".join(traceback.format_stack(frame))
            raise MetaseqError(
                f"replica {self.shard.rank}: {names.get(thread, 'no thread')} has not prepared the "
                f"batch of update {update} within {self.timeout:.0f} s "
                f"(engine.timeout). It is at\n{where}"
            ) from None


def sample_numbers(batches: Batches) -> dict[str, list[Any]]:
    """Return the numbers of the samples in an update, by stream."""
    numbers = {}
    for name, stream in batches.items():
        micro_batches = itertools.chain.from_iterable(stream)
        numbers[name] = [micro.samples.tolist() for micro in micro_batches]
    return numbers
