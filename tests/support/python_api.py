"""Print the names and signatures that plug-ins may use, which are recorded in unit/python_api.txt.

    PYTHONPATH=.:docs python tests/support/python_api.py > tests/unit/python_api.txt

A line may go, or change, only with a minor version and a line in docs/how_to/upgrading.md.
"""

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import MISSING
from typing import Any

import generate


def describe(title: str, value: Any) -> Iterator[str]:
    """Yield a line for a name, and one for each option and public method that its class defines."""
    if inspect.isroutine(value):
        yield title + signature_of(value)
    elif not inspect.isclass(value):
        yield title
    else:
        options = vars(value).get("__dataclass_fields__", {})
        is_called = "__init__" in vars(value) and not options
        yield title + (signature_of(value) if is_called else "")
        for name, item in options.items():
            is_required = item.default is MISSING and item.default_factory is MISSING
            yield f"{title}.{name}{'' if is_required else ' = ...'}"
        for name, member in sorted(vars(value).items()):
            member = getattr(member, "__func__", member)
            if inspect.isfunction(member) and not name.startswith("_"):
                yield f"{title}.{name}{signature_of(member)}"


def signature_of(value: Any) -> str:
    """Return the names and kinds of arguments, with `=...` for a default."""
    signature = inspect.signature(value)
    parameters = []
    for parameter in signature.parameters.values():
        default = parameter.default if parameter.default is parameter.empty else ...
        parameters.append(parameter.replace(annotation=parameter.empty, default=default))
    text = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    return text.replace("=Ellipsis", "=...")


def lines() -> Iterator[str]:
    """Yield the lines of the file."""
    for module, names in generate.api_modules().items():
        for name in names:
            yield from describe(f"{module}.{name}", getattr(importlib.import_module(module), name))


if __name__ == "__main__":
    print("\n".join(lines()))
