"""The composition root: loading of the built-in methods, installed plug-ins and --user-dir.

Only commands and programs import this module; the code they run finds names in the registries.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metaseq_lm.core import interfaces
from metaseq_lm.core.errors import UsageError, say
from metaseq_lm.core.registry import ALL, FAILED, LOADERS, Entry

if TYPE_CHECKING:
    from metaseq_lm.core.config import RunConfig

__all__ = ["load_all"]

_ENTRY_POINTS = "metaseq_lm.plugins"
LOADED: list[Path] = []  # files and folders of plug-ins
_CORE = ("config",)
# For each kind of registered classes, their base class and the methods that they must define.
_CLASSES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "task": ("metaseq_lm.tasks", "Task", ("build_streams", "build_model")),
    "criterion": ("metaseq_lm.criterions", "Criterion", ("__call__",)),
    "suite": ("metaseq_lm.evaluation.suites", "Suite", ("read", "score")),
    "world": ("metaseq_lm.data.worlds.base", "World", ("sample", "log_probs")),
    "tokenizer": ("metaseq_lm.data.tokenizers.base", "Tokenizer", ()),
    "attention": ("metaseq_lm.models.transformer.attention", "Attention", ("forward",)),
    "feed_forward": ("metaseq_lm.models.transformer.parts", "FeedForward", ("forward",)),
    "position": ("metaseq_lm.models.transformer.attention", "Positions", ()),
}
# Abilities of tasks and criterions, see tasks.protocols.
_OF_CRITERIONS = ("NeedsEager", "ScoresTokens", "ComparesTokens", "HasLayout")
# For each kind of registered functions, the arguments that they are called with.
_FUNCTIONS = {
    "optimizer": ("config", "parameters"),
    "schedule": ("config",),
    "norm": ("options", "sizes", "width"),
}
# Modules of earlier versions, for plug-ins that import them.
_MOVED = {
    "metaseq_lm.core.arguments": "metaseq_lm.core.options",
    "metaseq_lm.core.overrides": "metaseq_lm.core.loading",
    "metaseq_lm.models.words.prediction_modules": "metaseq_lm.models.words.word_model",
    "metaseq_lm.engine.forward_pass": "metaseq_lm.forward.passes",
    "metaseq_lm.forward.context": "metaseq_lm.forward.passes",
    "metaseq_lm.models.transformer.configs": "metaseq_lm.config.transformer",
    "metaseq_lm.optim.groups": "metaseq_lm.config.groups",
    "metaseq_lm.tasks.options": "metaseq_lm.config.tasks",
}


def load(name_or_path: str) -> None:
    """Import a plug-in: a dotted module name, or the path of a Python file or package folder.

    Raises UsageError that names the plug-in and the cause if it cannot be imported.
    """
    path = _path_of(name_or_path)
    try:
        if path is not None:
            _import_path(path)
        else:
            module = importlib.import_module(name_or_path)
            file = Path(module.__file__ or os.devnull).resolve()
            is_file = "." not in name_or_path and file.name != "__init__.py"
            path = file if is_file else file.parent
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        place = _where(error)
        if isinstance(error, UsageError):  # from a registry, or because there is no such plug-in
            raise type(error)(f"{place}{error}") from error
        message = error.msg if isinstance(error, SyntaxError) else error  # str repeats the place
        problem = " ".join(f"{type(error).__name__}: {message}".split())
        raise UsageError(
            f"{place or f'{name_or_path}: '}{problem}{_where_now(error)}; plug-in {name_or_path} "
            "failed to import"
        ) from error
    if not path.is_relative_to(Path(__file__).resolve().parent):
        LOADED.append(path)
        LOADERS.append(partial(load, name_or_path))
        _check_registered()


def _check_registered() -> None:
    """Raise UsageError, and unregister it, for a plug-in's object that the core cannot call."""
    errors = []
    for kind, registry in ALL.items():
        for entry in list(registry.entries.values()):
            if entry.is_imported and not entry.is_of_package:
                try:
                    _check_entry(kind, entry)
                except UsageError as error:
                    errors.append(error)
                    del registry.entries[entry.name]
    if errors:
        raise errors[0]


def _check_entry(kind: str, entry: Entry[Any]) -> None:
    title = f"{kind} '{entry.name}'"
    if kind in _FUNCTIONS:
        interfaces.check_call(title, entry.value, _FUNCTIONS[kind])
        if kind == "optimizer" and not hasattr(entry.dataclass, "clip_norm"):
            raise UsageError(
                f"{interfaces.place_of(entry.value)}: the options of {title} have to derive "
                f"from OptimizerConfig of metaseq_lm.config.optimizers; {interfaces.DOCS}"
            )
    elif kind in _CLASSES:
        module, name, required = _CLASSES[kind]
        bases = [getattr(importlib.import_module(module), name)]
        if kind in ("task", "criterion"):
            abilities = vars(importlib.import_module("metaseq_lm.tasks.protocols"))
            names = set(_OF_CRITERIONS)
            if kind == "task":
                names = abilities.keys() - {"HasLayout"}
            chosen = [value for key, value in abilities.items() if key in names]
            bases += [value for value in chosen if getattr(value, "_is_protocol", False)]
        interfaces.check_class(title, entry.value, bases, required)


def _where_now(error: BaseException) -> str:
    """Return a hint at the new place of a name that a plug-in imports from the package, or ""."""
    if isinstance(error, ModuleNotFoundError) and error.name in _MOVED:
        return f"; it is {_MOVED[error.name]} now"
    named = re.match(r"cannot import name '(\w+)' from '(metaseq_lm\.[\w.]+)'", str(error))
    if named is None:
        return ""
    if moved := _MOVED.get(f"{named[2]}.{named[1]}"):
        return f"; it is {moved} now"
    for name, module in list(sys.modules.items()):
        if not name.startswith("metaseq_lm."):
            continue
        value = getattr(module, named[1], None)
        if getattr(value, "__module__", "").startswith("metaseq_lm.") and callable(value):
            return f"; it is in {value.__module__} now"
    return ""


def describe_failure(error: BaseException) -> str:
    """Return the deepest line of a plug-in that led to an error, and the error; "" if none did.

    Without such a line, names the plug-in's class or function among the deepest function's values.
    """
    problem = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if _is_loaded(frame.filename):
            return f"{frame.filename}:{frame.lineno}: in {frame.name}: {frame.line}: {problem}"
    last = frames[-1]  # a raised error has at least one
    for scope, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in _values_in(scope.f_locals):
            kind = value if inspect.isroutine(value) or isinstance(value, type) else type(value)
            if _is_loaded(getattr(sys.modules.get(kind.__module__ or ""), "__file__", None)):
                return (
                    f"{interfaces.place_of(kind)}: with {_title_of(kind)}: {problem} (at "
                    f"{last.filename}:{last.lineno})"
                )
    return ""


def _title_of(value: Any) -> str:
    """Return the registered name of a class or function; its own name if it has none."""
    for kind, registry in ALL.items():
        for entry in registry.entries.values():
            if entry.is_imported and entry.value is value:
                return f"{kind} '{entry.name}'"
    return str(value.__qualname__)


def _is_loaded(file: str | None) -> bool:
    """Return whether a file belongs to a plug-in."""
    return file is not None and any(Path(file).is_relative_to(path) for path in LOADED)


def _values_in(scope: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values of variables, and of the attributes of `self`."""
    yield from scope.values()
    yield from getattr(scope.get("self"), "__dict__", {}).values()


def _path_of(name_or_path: str) -> Path | None:
    """Return the path of a plug-in, None for a dotted name; UsageError if it does not exist."""
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path.resolve()
    if os.sep in name_or_path:
        raise UsageError(f"--user-dir {name_or_path}: there is no such file or folder")
    return None


def check_runs(runs: Iterable[str], user_dir: str | None, overrides: Sequence[str]) -> None:
    """Raise UsageError for a missing run or an invalid override, before torch is imported."""
    from metaseq_lm.runs import manifests

    for run in runs:
        folder = manifests.resolve(run, prefer="best")
        manifest = manifests.read_manifest(folder)
        manifests.reopened_config(folder, manifest, user_dir, overrides)


def load_all(user_dir: str | None = None) -> None:
    """Load the names of the core and of every wing, every installed plug-in, then `user_dir`.

    The package's registered classes are imported at their first use. A broken installed plug-in is
    remembered and reported when a name is not found; a broken `user_dir` or wing is an error.
    """
    for package in _CORE:
        path = importlib.import_module(f"metaseq_lm.{package}").__path__
        for module in pkgutil.iter_modules(path, f"metaseq_lm.{package}."):
            importlib.import_module(module.name)
    for module_name in ("benchmarks", "tokenizers.loading", "worlds"):
        importlib.import_module(f"metaseq_lm.data.{module_name}")
    for wing in _builtin_methods():
        load(f"metaseq_lm.methods.{wing}")
    load_installed(user_dir)


def load_installed(user_dir: str | None) -> None:
    """Load every installed plug-in, then `user_dir`; errors as in `load_all`."""
    for point in _installed_plugins():
        try:
            load(point.value.split(":")[0])
        except UsageError as error:
            FAILED[point.name] = str(error)
            say(f"metaseq-lm: warning: {error}")
    if user_dir is not None:
        load(user_dir)


def _installed_plugins() -> list[importlib.metadata.EntryPoint]:
    """Return the entry points of installed plug-ins."""
    return list(importlib.metadata.entry_points(group=_ENTRY_POINTS))


def check_named(config: "RunConfig", user_dir: str | None) -> None:
    """Raise UsageError if a configuration names another plug-in than --user-dir did.

    Code runs only if the command line names it, never because a file does. Plug-ins of the same
    name, such as a job's copy, count as equal.
    """
    if config.user_dir is None or Path(config.user_dir).name == Path(user_dir or "").name:
        return
    if user_dir is not None:
        raise UsageError(
            f"the configuration names the plug-in {config.user_dir}, --user-dir {user_dir}, but "
            "one is loaded: name a folder whose __init__.py imports both (from . import A, B)"
        )
    raise UsageError(
        f"the configuration names the plug-in {config.user_dir}; a plug-in is loaded only if "
        "the command line names it: give --user-dir with its path"
    )


def _builtin_methods() -> list[str]:
    """Return the names of the built-in method families."""
    package = importlib.import_module("metaseq_lm.methods")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.ispkg)


def _import_path(path: Path) -> None:
    file, name, search = path, path.stem, None
    if path.is_dir():
        if not (path / "__init__.py").is_file():
            raise UsageError(f"--user-dir {path}: a plug-in folder needs an __init__.py")
        file, name, search = path / "__init__.py", path.name, [str(path)]
    loaded = sys.modules.get(name)
    if loaded is not None:
        if getattr(loaded, "__file__", None) == str(file):
            return
        raise UsageError(f"--user-dir {path}: a module named '{name}' is loaded already; rename it")
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=search)
    if spec is None or spec.loader is None:
        raise UsageError(f"--user-dir {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # Like the import statement, which runs a module that failed again at the next import.
        del sys.modules[name]
        raise


def _where(error: BaseException) -> str:
    """Return "file:line: " of a failed import: the deepest line of the plug-in that led to it."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        return f"{error.filename}:{error.lineno}: "
    frames = traceback.extract_tb(error.__traceback__)
    first = next((f for f in frames if not _is_loader(f.filename)), None)
    if first is None:
        return ""
    file = Path(first.filename)
    root = file.parent if file.name == "__init__.py" else file
    last = [f for f in frames if Path(f.filename).is_relative_to(root)][-1]
    return f"{last.filename}:{last.lineno}: "


def _is_loader(file: str) -> bool:
    """Return whether a file is this one, or part of the import system."""
    return file in (__file__, importlib.__file__) or file.startswith("<frozen importlib")
