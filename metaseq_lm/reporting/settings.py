"""Settings: groups of runs that differ in nothing but their seed."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import nearest
from metaseq_lm.reporting.runs import BOOKKEEPING, PATH_KEYS, Run, bare_key, is_number, natural


@dataclass(frozen=True, eq=False)
class Setting:
    """The runs that share all keys of `values`: the label and what differs between the settings.

    `shown` are the keys that suffice to tell the settings apart; they make the name.
    """

    values: dict[str, Any]
    shown: tuple[str, ...]
    runs: list[Run]

    @property
    def name(self) -> str:
        """The label and the shown keys: `soft, labelled=which_moon_10`."""
        return self.name_without()

    def name_without(self, *keys: str | None) -> str:
        """Return the name without `keys`: that of the series in which only those vary."""
        remaining = [key for key in self.shown if key not in keys]
        ends = [key.removesuffix("._name").rpartition(".")[2] for key in remaining]
        parts = []
        for key, end in zip(remaining, ends):
            value = show(self.values[key])
            short = key if ends.count(end) > 1 else end
            parts.append(value if key == "label" else f"{short}={value}")
        return ", ".join(parts) or "all runs"

    def identity(self, keys: Iterable[str]) -> tuple[Any, ...]:
        """Return the values of `keys` in a form that compares and hashes."""
        return tuple(identity(self.values[key]) for key in keys)

    @cached_property
    def content(self) -> tuple[Any, ...]:
        """What computed the runs and what came out, without labels: equal for the same runs."""
        keys = (key for key in self.values if bare_key(key) != "label")
        return (self.identity(keys), *sorted(run.outcome for run in self.runs))

    def scored(self, metric: str) -> list[Run]:
        """Return the finished runs with a finite value of `metric`."""
        return [run for run in self.runs if run.why_unscored(metric) is None]

    def scores(self, metric: str) -> list[float]:
        """Return one value of `metric` per scored run, in the order of `scored`."""
        return [run.metrics[metric] for run in self.scored(metric)]

    def scored_by_seed(self, metric: str) -> dict[Any, list[Run]]:
        """Return the scored runs of each seed."""
        runs: dict[Any, list[Run]] = {}
        for run in self.scored(metric):
            runs.setdefault(run.seed, []).append(run)
        return runs

    def seed_means(self, metric: str) -> dict[Any, float]:
        """Return the score of each seed, the mean of its runs."""
        by_seed = self.scored_by_seed(metric).items()
        return {
            seed: sum(run.metrics[metric] for run in runs) / len(runs) for seed, runs in by_seed
        }


def group(runs: Sequence[Run], keys: Iterable[str] = ()) -> list[Setting]:
    """Group runs into settings by label, `keys` (even excluded ones) and all keys that differ.

    Data at different paths count as equal if their fingerprints are.
    Settings come sorted by their shown keys, numbers by size. Raises UsageError for a key that no
    run has.
    """
    for key in keys:
        require_key(runs, key)
    differing = differing_keys(runs)
    places = [key for key in differing if bare_key(key) == "data" and key not in keys]
    telling = dict.fromkeys(["label", *keys, *(key for key in differing if key not in places)])
    mixed = [s.runs for s in group_by(runs, telling)]
    needed = [key for key in places if any(are_other_data(key, same) for same in mixed)]
    return group_by(runs, [*telling, *needed])


def are_other_data(key: str, runs: Sequence[Run]) -> bool:
    """Return whether runs have data at several paths (key `key`) that are not known to be equal."""
    if len({run.values.get(key) for run in runs}) == 1:
        return False
    hashes = {run.values.get(f"{key}_hash") for run in runs if run.results is not None}
    return len(hashes) > 1 or None in hashes


def group_by(runs: Sequence[Run], keys: Iterable[str]) -> list[Setting]:
    """Group runs by exactly these keys, ignoring all others."""
    keys = list(keys)
    buckets: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        buckets.setdefault(tuple(identity(run.values.get(k)) for k in keys), []).append(run)
    shown = telling_keys(list(buckets), keys)
    settings = [
        Setting({key: group[0].values.get(key) for key in keys}, shown, group)
        for group in buckets.values()
    ]
    return sorted(settings, key=lambda s: [order(s.values[key]) for key in shown])


# What runs did that have no such option.
BEFORE = {"engine.reduce_precision": "fp32"}


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Return the config keys that differ between the runs, in config order.

    Left out are seeds, paths, bookkeeping, and `engine`, of which only the precisions change results.
    """
    known = dict.fromkeys(key for run in runs for key in run.values)
    sources = {key for run in runs for key in run.sources}
    return [
        key
        for key in known
        if not (key in sources or is_excluded(key))
        and len({identity(run.values.get(key, BEFORE.get(key))) for run in runs}) > 1
    ]


def is_excluded(key: str) -> bool:
    """Return whether a key concerns where or how a run was made, not what it computed."""
    bare = bare_key(key)
    if bare.partition(".")[0] in ("seed", "engine"):
        return bare not in ("engine.precision", "engine.reduce_precision")
    return bare in (*PATH_KEYS, *BOOKKEEPING, "data_hash")


def telling_keys(identities: list[tuple[Any, ...]], keys: list[str]) -> tuple[str, ...]:
    """Return the first key, and each later one that separates settings the earlier ones do not."""
    chosen: list[int] = []
    distinct = 0
    for i in range(len(keys)):
        count = len({tuple(row[j] for j in (*chosen, i)) for row in identities})
        if not chosen or count > distinct:
            chosen.append(i)
            distinct = count
    return tuple(keys[i] for i in chosen)


def hidden_keys(settings: Sequence[Setting]) -> list[str]:
    """Return the keys that vary within a label but always together with a shown key."""
    labels: dict[Any, list[Setting]] = {}
    for setting in settings:
        labels.setdefault(setting.values.get("label"), []).append(setting)
    keys = [k for k in (settings[0].values if settings else ()) if k not in settings[0].shown]
    return [
        key
        for key in keys
        if any(len({identity(s.values[key]) for s in same}) > 1 for same in labels.values())
    ]


def where(runs: Sequence[Run], conditions: Iterable[str], option: str = "--where") -> list[Run]:
    """Return the runs that meet `KEY=VALUE` conditions: for each key, one of its values.

    Raises UsageError for a malformed condition, an unknown key, or a value that no run has.
    """
    allowed: dict[str, set[str]] = {}
    for condition in conditions:
        key, equals, value = condition.partition("=")
        if not equals:
            raise UsageError(f"{option} {condition}: write it as KEY=VALUE, e.g. label=soft")
        require_key(runs, key)
        existing = {show(run.values.get(key)) for run in runs}
        if canonical(value) not in existing:
            raise UsageError(
                f"{option} {condition}: no run has that value.{nearest(value, sorted(existing))} "
                f"Values of {key}: {', '.join(sorted(existing, key=natural))}."
            )
        allowed.setdefault(key, set()).add(canonical(value))
    matching = [r for r in runs if all(show(r.values.get(k)) in v for k, v in allowed.items())]
    if not matching:
        raise UsageError(f"no run meets all {option} conditions together; drop one of them.")
    return matching


def repeated(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Return the groups of settings that are the same runs under several labels."""
    by_content: dict[tuple[Any, ...], list[Setting]] = {}
    for setting in settings:
        by_content.setdefault(setting.content, []).append(setting)
    return [same for same in by_content.values() if len(same) > 1]


def require_key(runs: Sequence[Run], key: str) -> None:
    """Raise UsageError with the nearest names unless some run has the config key."""
    known = sorted({k for run in runs for k in run.values})
    if key not in known:
        differing = ", ".join(["label", *(k for k in differing_keys(runs) if k != "label")])
        hint = suggestion(key, known)
        raise UsageError(f"no run has the config key '{key}'.{hint} Keys that differ: {differing}.")


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return a hint at the dotted names that end in `name`, or at the nearest one."""
    ends = [full for full in known if full.rpartition(".")[2] == name]
    return f" Did you mean {' or '.join(map(repr, ends))}?" if ends else nearest(name, list(known))


def identity(value: Any) -> tuple[str, Any]:
    """Return a value by which config values compare: 1 equals 1.0, but not true."""
    if is_number(value):
        return ("number", float(value))
    return ("other", json.dumps(value, sort_keys=True, default=str))


def order(value: Any) -> tuple[int, float, list[tuple[int, Any]]]:
    """Return a sort key for config values: numbers, then text in natural order, then none."""
    if is_number(value):
        return (0, float(value), [])
    return (2, 0.0, []) if value is None else (1, 0.0, natural(show(value)))


def distinct(values: Iterable[Any]) -> list[Any]:
    """Return the distinct config values in order."""
    return sorted({identity(value): value for value in values}.values(), key=order)


def show(value: Any) -> str:
    """Return a config value as it is written on the command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(show, value))}]"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def canonical(value: str) -> str:
    """Return a value that the user typed as `show` writes it: 5e-4 as 0.0005, null as none.

    Quotes around a text are those of an override, such as label='k = 3'; in a list, [chunk, pos],
    spaces around values do not count.
    """
    if re.fullmatch(r"\[.*\]", value):
        return f"[{','.join(canonical(part.strip()) for part in value[1:-1].split(','))}]"
    if re.fullmatch(r"'.+'|\".+\"", value):
        return value[1:-1]
    try:
        return show(int(value) if re.fullmatch(r"[-+]?\d+", value) else float(value))
    except ValueError:
        return "none" if value == "null" else value


def axis_numbers(values: Sequence[Any]) -> tuple[list[float], str] | None:
    """Return the numbers that config values stand for and their common prefix, else None.

    `["which_moon_10", "which_moon_20"]` gives `([10.0, 20.0], "which_moon_")`.
    """
    if all(is_number(v) for v in values):
        return [float(v) for v in values], ""
    matches = [
        re.fullmatch(r"(.*?)(\d+(?:\.\d+)?)", v) if isinstance(v, str) else None for v in values
    ]
    parts = [match.groups() for match in matches if match]
    if len(parts) < len(values) or len({prefix for prefix, _ in parts}) != 1:
        return None
    numbers = [float(digits) for _, digits in parts]
    return (numbers, parts[0][0]) if all(map(math.isfinite, numbers)) else None
