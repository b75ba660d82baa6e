"""A program of the examples or scripts, imported from its file."""

import importlib.util
from pathlib import Path
from types import ModuleType


def imported(file: Path, name: str = "") -> ModuleType:
    """Return the program in a file as a module, without adding it to sys.modules."""
    spec = importlib.util.spec_from_file_location(name or file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
