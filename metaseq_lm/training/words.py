"""Words of the corpus that a run has seen, and checkpoints at given numbers of them.

Words count with repetition, over epochs and streams. Their number is a function of the positions of
the streams, so it depends neither on processes nor on micro-batches, and stays exact when a run is
resumed. Refused updates count, as they do for FLOPs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from metaseq_lm.core.config import TrainerConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import nearest
from metaseq_lm.runs.manifests import words_name
from metaseq_lm.tasks import Task
from metaseq_lm.tasks.protocols import kinds_of

_MILLION = 10**6
# Checkpoints that BabyLM requires, by track (Charpentier et al. 2025).
_SCHEDULES = {
    "strict-small": [*range(1, 10), *range(10, 101, 10)],
    "strict": [*range(1, 10), *range(10, 100, 10), *range(100, 1001, 100)],
}
NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)([kM]?)")
_UNITS = {"": 1, "k": 1000, "M": _MILLION}


def numbers_of_words(entries: Sequence[str]) -> list[int]:
    """Return the numbers of words that trainer.save_words names, in ascending order.

    Raises UsageError for an entry that is neither a whole number above 0, such as 20000, 20k or
    7M, nor the name of a schedule.
    """
    numbers = set()
    for entry in map(str, entries):
        match = NUMBER.fullmatch(entry)
        value = float(match[1]) * _UNITS[match[2]] if match else 0.0
        if entry in _SCHEDULES:
            numbers |= {million * _MILLION for million in _SCHEDULES[entry]}
        elif value >= 1 and value.is_integer():
            numbers.add(int(value))
        else:
            raise UsageError(
                f"trainer.save_words has '{entry}'.{nearest(entry, list(_SCHEDULES))} Give "
                f"numbers, such as 20000, 20k or 7M, or a schedule: {' or '.join(_SCHEDULES)}"
            )
    return sorted(numbers)


def check_words(options: TrainerConfig, task: Task) -> None:
    """Raise UsageError if an option needs the number of words and it cannot be counted."""
    if numbers_of_words(options.save_words) or options.max_words:
        option = "trainer.max_words" if options.max_words else "trainer.save_words"
        _require_words(task, task.build_streams("train"), option)


def _require_words(task: Task, streams: Mapping[str, Any], option: str) -> None:
    """Raise UsageError, which names `option`, if words cannot be counted."""
    read = _corpora(streams)
    # The kinds of updates of a mixture are its objectives, which share a stream.
    needed = set(task.needs(0)).union(*(needs for _, needs in kinds_of(task)))
    if not needed & read.keys():
        name = task.run_config.task._name
        raise UsageError(f"{option} counts words of a corpus, but task {name} here reads none")
    if reasons := [stream.words.missing for stream in read.values() if stream.words.missing]:
        raise UsageError(f"{option} counts words, but {reasons[0]}")


def _corpora(streams: Mapping[str, Any]) -> dict[str, Any]:
    return {n: s for n, s in streams.items() if getattr(s, "words", None) is not None}


def _words_between(
    streams: Mapping[str, Any], before: Mapping[str, int], after: Mapping[str, int]
) -> int:
    """Return the number of words in the batches between two positions of each stream."""
    words = 0
    for name, stream in streams.items():
        words += sum(map(stream.count_words, range(before.get(name, 0), after.get(name, 0))))
    return words


class WordCounter:
    """Counts the words that the updates of a run see.

    Attributes:
        seen: The number of words so far, 0 if no stream reads a corpus; None if it is unknown.
        checkpoints: The update of the checkpoint at each number of words reached so far.
    """

    def __init__(self, options: TrainerConfig) -> None:
        self.numbers = numbers_of_words(options.save_words)
        self.seen: int | None = None
        self.checkpoints: dict[int, int] = {}
        self._streams: dict[str, Any] = {}

    def start(self, streams: Mapping[str, Any], positions: Mapping[str, int]) -> None:
        """Count the words of streams from now on; if none were counted, from their beginning."""
        self._streams = _corpora(streams)
        if any(stream.words.missing for stream in self._streams.values()):
            self._streams, self.seen = {}, None
        elif self.seen is None:
            self.seen = _words_between(self._streams, {}, positions)

    def advance(self, update: int, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        """Count the words of update number `update`, from the positions before and after it."""
        if self.seen is None:
            return
        seen = self.seen + _words_between(self._streams, before, after)
        reached = [number for number in self.numbers if self.seen < number <= seen]
        self.checkpoints |= dict.fromkeys(reached, update)
        self.seen = seen

    def names_at(self, update: int) -> list[str]:
        """Return the names of an update's checkpoint by numbers of words; [] if it has none."""
        return [name for name, at in self.named.items() if at == update]

    @property
    def named(self) -> dict[str, int]:
        """The update of each checkpoint at a number of words, by its name."""
        return {words_name(number): update for number, update in self.checkpoints.items()}

    @property
    def missed(self) -> str:
        """Which checkpoints are missing, and why; "" if none is."""
        absent = [number for number in self.numbers if number not in self.checkpoints]
        seen = self.seen or 0
        later = ", ".join(words_name(number) for number in absent if number > seen)
        earlier = ", ".join(words_name(number) for number in absent if number <= seen)
        reasons = []
        if later:
            reasons.append(f"no {later}: the run has seen {seen:,} words")
        if earlier:
            reasons.append(f"no {earlier}: seen before trainer.save_words asked for it")
        return "; ".join(reasons)

    @property
    def values(self) -> dict[str, float]:
        """The number of words seen, for the log; empty if none are counted."""
        if self.seen is None or not self._streams:
            return {}
        return {"words_seen": self.seen}

    def state_dict(self) -> dict[str, Any]:
        """Return the words seen and the checkpoints at numbers of them."""
        return {"seen": self.seen, "checkpoints": dict(self.checkpoints)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state."""
        self.seen = None if state["seen"] is None else int(state["seen"])
        self.checkpoints = {int(n): int(update) for n, update in state["checkpoints"].items()}


def updates_for(task: Task, streams: Mapping[str, Any], words: float) -> int:
    """Return the smallest number of updates that see at least `words` words of the corpus."""
    _require_words(task, streams, "trainer.max_words")
    read = _corpora(streams)
    positions = dict.fromkeys(read, 0)
    seen = 0
    for update in itertools.count():
        if seen >= words:
            return update
        before = dict(positions)
        for name, count in task.needs(update).items():
            if name in read:
                positions[name] += count
        seen += _words_between(read, before, positions)
    raise AssertionError("unreachable")
