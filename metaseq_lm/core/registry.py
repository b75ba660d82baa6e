"""Registries of tasks, criterions, models, optimizers, suites and so on."""

import ast
import difflib
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from metaseq_lm.core.errors import UsageError

__all__ = [
    "NoOptions",
    "register_attention",
    "register_criterion",
    "register_feed_forward",
    "register_metric",
    "register_model",
    "register_norm",
    "register_optimizer",
    "register_position",
    "register_schedule",
    "register_suite",
    "register_task",
    "register_tokenizer",
    "register_world",
]

T = TypeVar("T")


class Entry(Generic[T]):
    """A registered class or function.

    Attributes:
        name: The name that a command line or config gives.
        dataclass: The dataclass of its options.
        origin: The module that defines it.
        takes: For a declared task, the criterions it takes that are not for every task.
    """

    def __init__(self, name: str, dataclass: type, path: str, value: T | None = None) -> None:
        self.name = name
        self.dataclass = dataclass
        self.origin, _, self._attribute = path.rpartition(".")
        self.takes: tuple[str, ...] = ()
        self._value = value

    @property
    def value(self) -> T:
        """The class or function; the first access imports its module."""
        if self._value is None:
            self._value = getattr(importlib.import_module(self.origin), self._attribute)
        assert self._value is not None
        return self._value

    @property
    def is_of_package(self) -> bool:
        """Whether the package registers it, rather than a plug-in."""
        return self.origin.startswith("metaseq_lm.")

    @property
    def is_imported(self) -> bool:
        """Whether the module of the class or function has been imported."""
        return self._value is not None

    @property
    def summary(self) -> str:
        """The first line of the docstring, read from the source if the module is not imported."""
        if self.is_imported:
            docstring = self.value.__doc__
        else:
            docstring = _docstring_in_source(self.origin, self._attribute)
        return (docstring or "").strip().split("\n")[0]


def _docstring_in_source(module: str, name: str) -> str | None:
    """Return the docstring of a class or function of the package without importing it."""
    folder = Path(__file__).parents[2].joinpath(*module.split("."))
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    for node in _parsed(file).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node)
    return None


@lru_cache(maxsize=8)
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@dataclass
class NoOptions:
    """Empty options."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint " Did you mean 'x'?" for a misspelt name, or "" without a close match.

    The common prefix of options (--x) and dotted keys is not compared. A name that begins with
    `name` is a close match.
    """
    names = list(names)
    group = re.match(r"--|(\w+\.)*", name)
    prefix = group[0] if group and any(other.startswith(group[0]) for other in names) else ""
    similar = {other.removeprefix(prefix): other for other in names}
    rest = name.removeprefix(prefix)
    longer = [other for other in similar if rest and other.startswith(rest)]
    matches = [*longer, *difflib.get_close_matches(rest, similar, n=3, cutoff=0.6)]
    close = [repr(similar[other]) for other in dict.fromkeys(matches)][:3]
    return f" Did you mean {' or '.join(close)}?" if close else ""


def abbreviated(names: Iterable[str], most: int = 10, width: int = 60) -> str:
    """Return the first `most` names joined by commas, each cut to `width` characters."""
    names = list(names)
    shown = ", ".join(name if len(name) <= width else f"{name[:width]}..." for name in names[:most])
    if len(names) <= most:
        return shown
    return f"{shown} and {len(names) - most:,} more"


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
            UsageError: Another module has registered the name, or there is none.
        """
        if not isinstance(name, str):
            raise UsageError(f"a {self.kind} is registered under a name, not under {name!r}")
        if not is_dataclass(dataclass):
            raise UsageError(f"{self.kind} '{name}': {dataclass!r} is not a dataclass")

        def add(value: T) -> T:
            if not callable(value):
                raise UsageError(f"{self.kind} '{name}' is {value!r}, no class or function")
            path = f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', '?')}"
            self._add(Entry(name, dataclass, path, value))
            return value

        return add

    def declare(self, name: str, dataclass: type, path: str, takes: Sequence[str] = ()) -> None:
        """Register a class or function without importing its module before the first use.

        The package registers classes that need torch this way: names and options need no import.

        Args:
            name: The name that a command line or config gives.
            dataclass: The class of its options.
            path: The module and the name in it, with a dot between them.
            takes: For a task, the criterions it takes that are not for every task.
        """
        entry: Entry[T] = Entry(name, dataclass, path)
        entry.takes = tuple(takes)
        self._add(entry)

    def _add(self, entry: Entry[T]) -> None:
        previous = self.entries.get(entry.name)
        if previous is not None and previous.origin != entry.origin:
            raise UsageError(
                f"{self.kind} '{entry.name}' of {entry.origin} is already registered by "
                f"{previous.origin}; give one of them another name"
            )
        self.entries[entry.name] = entry

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def names(self) -> list[str]:
        """Return the registered names in alphabetical order."""
        return sorted(self.entries)

    def entry(self, name: str) -> Entry[T]:
        """Return the entry called `name`; UsageError with similar names for an unknown one."""
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
# Calls that load the plug-ins of this process again, in processes that it spawns.
LOADERS: list[Callable[[], None]] = []


TASKS: Registry[Any] = Registry("task")
CRITERIONS: Registry[Any] = Registry("criterion")
MODELS: Registry[Any] = Registry("model")
OPTIMIZERS: Registry[Any] = Registry("optimizer")
SCHEDULES: Registry[Any] = Registry("schedule")
TOKENIZERS: Registry[Any] = Registry("tokenizer")
SUITES: Registry[Any] = Registry("suite")
WORLDS: Registry[Any] = Registry("world")
METRICS: Registry[Any] = Registry("metric")  # of benchmarks, see evaluation.official
# Parts of a Transformer, see models.transformer.parts.
ATTENTIONS: Registry[Any] = Registry("attention")
FEED_FORWARDS: Registry[Any] = Registry("feed_forward")
NORMS: Registry[Any] = Registry("norm")
POSITIONS: Registry[Any] = Registry("position")

ALL: dict[str, Registry[Any]] = {
    r.kind: r
    for r in (
        *(TASKS, CRITERIONS, MODELS, OPTIMIZERS, SCHEDULES, TOKENIZERS, SUITES, WORLDS),
        *(ATTENTIONS, FEED_FORWARDS, NORMS, POSITIONS),
    )
}


def is_compatible(name: str, task: Any, criterion: Any) -> bool:
    """Return whether a task, registered under `name`, takes a criterion; both are classes."""
    bases = [base for base in task.criterions if issubclass(criterion, base)]
    if criterion.tasks:
        return bool(bases) and name in criterion.tasks
    # `Criterion` itself derives from object only.
    return any(criterion.general or base.__base__ is not object for base in bases)


def tasks_for(criterion: Any) -> list[str]:
    """Return the names of the tasks that a criterion class is for; [] if it is for every task.

    Imports every task.
    """
    if criterion.general and not criterion.tasks:
        return []
    return [
        name
        for name, entry in sorted(TASKS.entries.items())
        if is_compatible(name, entry.value, criterion)
    ]


# Decorators of a class or function: its name, and `dataclass`, its options.
register_task = TASKS.register
register_criterion = CRITERIONS.register
register_model = MODELS.register
register_optimizer = OPTIMIZERS.register
register_schedule = SCHEDULES.register
register_tokenizer = TOKENIZERS.register
register_suite = SUITES.register
register_world = WORLDS.register
register_attention = ATTENTIONS.register
register_feed_forward = FEED_FORWARDS.register
register_norm = NORMS.register
register_position = POSITIONS.register
register_metric = METRICS.register
