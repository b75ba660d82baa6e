"""Registries of tasks, criterions, models, optimizers, suites and so on."""

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from typing import Any, Generic, TypeVar

from metaseq_lm.core.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A registered class or function, the dataclass of its options, and its module."""

    name: str
    value: T
    dataclass: type
    origin: str


@dataclass
class NoOptions:
    """Empty options."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint " Did you mean 'x'?" for a misspelt name, or "" without a close match.

    Of options (--x) and dotted keys what they have in common is not compared. What begins with the
    name is near.
    """
    names = list(names)
    group = re.match(r"--|(\w+\.)*", name)
    prefix = group[0] if group and any(other.startswith(group[0]) for other in names) else ""
    similar = {other.removeprefix(prefix): other for other in names}
    rest = name.removeprefix(prefix)
    longer = [other for other in similar if rest and other.startswith(rest)]
    matches = [*longer, *difflib.get_close_matches(rest, similar, n=3, cutoff=0.6)]
    close = [similar[other] for other in dict.fromkeys(matches)][:3]
    return " Did you mean " + " or ".join(repr(c) for c in close) + "?" if close else ""


def abbreviated(names: Iterable[str], most: int = 10, width: int = 60) -> str:
    """Return names with commas between them: the first `most`, each cut to `width` characters."""
    names = list(names)
    shown = [name if len(name) <= width else f"{name[:width]}..." for name in names[:most]]
    others = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(shown) + others


class Registry(Generic[T]):
    """Names of one kind of thing, filled by decorators when modules are imported."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.entries: dict[str, Entry[T]] = {}

    def register(self, name: str, dataclass: type = NoOptions) -> Callable[[T], T]:
        """Register the decorated class or function under `name`.

        Args:
            name: The name that a command line or config gives.
            dataclass: The class of its options, made with `options.option`; an instance of it is
                the first argument of the class or function.

        Raises:
            UsageError: Another module has registered the name.
        """
        if not is_dataclass(dataclass):
            raise TypeError(f"{dataclass!r} is not a dataclass")

        def add(value: T) -> T:
            origin = getattr(value, "__module__", "?")
            previous = self.entries.get(name)
            if previous is not None and previous.origin != origin:
                raise UsageError(
                    f"{self.kind} '{name}' of {origin} is already registered by {previous.origin}; "
                    "give one of them another name"
                )
            self.entries[name] = Entry(name, value, dataclass, origin)
            return value

        return add

    def names(self) -> list[str]:
        """Return the registered names in alphabetical order."""
        return sorted(self.entries)

    def entry(self, name: str) -> Entry[T]:
        """Return the entry called `name`; UsageError with the near names for an unknown one."""
        if name not in self.entries:
            raise UsageError(self.describe_unknown(name))
        return self.entries[name]

    def describe_unknown(self, name: str, presets: Iterable[str] = ()) -> str:
        """Return the message for an unknown name; `presets` are further names to choose from."""
        names = sorted({*self.names(), *presets})
        broken = "; ".join(f"{name} ({reason})" for name, reason in FAILED.items())
        return (
            f"unknown {self.kind} '{name}'.{nearest(name, names)} Registered: "
            f"{', '.join(names) or 'none'}. One of your own is loaded with "
            f"--user-dir.{broken and f' These plug-ins failed to import: {broken}'}"
        )

    def build(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the class or function registered under `name`."""
        return self.entry(name).value(*args, **kwargs)  # type: ignore[operator]


# Installed plug-ins that could not be imported, and why; filled by plugins.py.
FAILED: dict[str, str] = {}


TASKS: Registry[Any] = Registry("task")
CRITERIONS: Registry[Any] = Registry("criterion")
MODELS: Registry[Any] = Registry("model")
OPTIMIZERS: Registry[Any] = Registry("optimizer")
SCHEDULES: Registry[Any] = Registry("schedule")
TOKENIZERS: Registry[Any] = Registry("tokenizer")
SUITES: Registry[Any] = Registry("suite")
WORLDS: Registry[Any] = Registry("world")

ALL: dict[str, Registry[Any]] = {
    r.kind: r
    for r in (TASKS, CRITERIONS, MODELS, OPTIMIZERS, SCHEDULES, TOKENIZERS, SUITES, WORLDS)
}


def takes(name: str, task: Any, criterion: Any) -> bool:
    """Return whether a task, registered under `name`, takes a criterion; both are classes."""
    bases = [base for base in task.criterions if issubclass(criterion, base)]
    if criterion.tasks:
        return bool(bases) and name in criterion.tasks
    # `Criterion` itself derives from object only.
    return any(criterion.general or base.__base__ is not object for base in bases)


def tasks_for(criterion: Any) -> list[str]:
    """Return the names of the tasks that a class of criterion is for; none if it is for any."""
    if criterion.general and not criterion.tasks:
        return []
    return [
        name for name, entry in sorted(TASKS.entries.items()) if takes(name, entry.value, criterion)
    ]


register_task = TASKS.register
register_criterion = CRITERIONS.register
register_model = MODELS.register
register_optimizer = OPTIMIZERS.register
register_schedule = SCHEDULES.register
register_tokenizer = TOKENIZERS.register
register_suite = SUITES.register
register_world = WORLDS.register
