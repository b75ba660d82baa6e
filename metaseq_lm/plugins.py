"""The composition root: loading of the built-in methods, installed plug-ins and --user-dir.

Only commands and programs import this module: what they run finds the names in the registries.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from metaseq_lm.core.errors import UsageError, say
from metaseq_lm.core.registry import FAILED

if TYPE_CHECKING:
    from metaseq_lm.core.config import RunConfig

ENTRY_POINTS = "metaseq_lm.plugins"
LOADED: list[Path] = []  # files and folders of plug-ins
CORE = ("config",)
# Modules that earlier versions had, for plug-ins that import them.
MOVED = {
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
    path = path_of(name_or_path)
    try:
        if path is not None:
            _import_path(path)
        else:
            module = importlib.import_module(name_or_path)
            file = Path(module.__file__ or os.devnull).resolve()
            is_file = "." not in name_or_path and file.name != "__init__.py"
            path = file if is_file else file.parent
        if not path.is_relative_to(Path(__file__).resolve().parent):
            LOADED.append(path)
    except UsageError:
        raise
    except Exception as error:  # a user's module may raise anything
        raise UsageError(
            f"plug-in {name_or_path} failed to import: {_where(error)}{type(error).__name__}: "
            f"{error}{_where_now(error)}"
        ) from error


def _where_now(error: Exception) -> str:
    """Return a hint at where what a plug-in imports from the package is now, "" without one."""
    if isinstance(error, ModuleNotFoundError) and error.name in MOVED:
        return f"; it is {MOVED[error.name]} now"
    named = re.match(r"cannot import name '(\w+)' from 'metaseq_lm\.", str(error))
    for name, module in list(sys.modules.items()):
        moved = getattr(module, named[1], None) if named else None
        if name.startswith("metaseq_lm.") and isinstance(moved, type):
            return f"; it is in {moved.__module__} now"
    return ""


def describe_failure(error: BaseException) -> str:
    """Return the deepest line of a plug-in that led to an error, and the error; "" if none did."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if any(Path(frame.filename).is_relative_to(path) for path in LOADED)
    ]
    if not frames:
        return ""
    last = frames[-1]
    return (
        f"{last.filename}:{last.lineno}: in {last.name}: {last.line}: {type(error).__name__}: "
        f"{error}"
    )


def path_of(name_or_path: str) -> Path | None:
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

    What the package registers is imported when it is first used. A broken installed plug-in is
    remembered and named when a name is not found; a broken `user_dir` or wing is an error.
    """
    for package in CORE:
        path = importlib.import_module(f"metaseq_lm.{package}").__path__
        for module in pkgutil.iter_modules(path, f"metaseq_lm.{package}."):
            importlib.import_module(module.name)
    importlib.import_module("metaseq_lm.data.tokenizers.loading")
    importlib.import_module("metaseq_lm.data.worlds")
    for wing in wings():
        load(f"metaseq_lm.methods.{wing}")
    load_installed(user_dir)


def load_installed(user_dir: str | None) -> None:
    """Load every installed plug-in, then `user_dir`; errors as in `load_all`."""
    for point in installed():
        try:
            load(point.value.split(":")[0])
        except UsageError as error:
            FAILED[point.name] = str(error)
            say(f"metaseq-lm: warning: {error}")
    if user_dir is not None:
        load(user_dir)


def installed() -> list[importlib.metadata.EntryPoint]:
    """Return the entry points of installed plug-ins."""
    return list(importlib.metadata.entry_points(group=ENTRY_POINTS))


def check_named(config: "RunConfig", user_dir: str | None) -> None:
    """Raise UsageError if a configuration names another plug-in than --user-dir did.

    Code is run only if the command line names it, never because a file does.
    """
    if config.user_dir != user_dir:
        raise UsageError(
            f"the configuration names the plug-in {config.user_dir}; a plug-in is loaded only if "
            "the command line names it: give --user-dir with its path"
        )


def wings() -> list[str]:
    """Return the names of the built-in method families."""
    package = importlib.import_module("metaseq_lm.methods")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.ispkg)


def _import_path(path: Path) -> None:
    if path.is_dir():
        if not (path / "__init__.py").is_file():
            raise UsageError(f"--user-dir {path}: a plug-in folder needs an __init__.py")
        file, name = path / "__init__.py", path.name
    else:
        file, name = path, path.stem
    loaded = sys.modules.get(name)
    if loaded is not None:
        if getattr(loaded, "__file__", None) == str(file):
            return
        raise UsageError(f"--user-dir {path}: a module named '{name}' is loaded already; rename it")
    search = [str(path)] if path.is_dir() else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=search)
    if spec is None or spec.loader is None:
        raise UsageError(f"--user-dir {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _where(error: Exception) -> str:
    """Return "file:line: " of the deepest frame of a failed import."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}: " if frame else ""
