"""Checks that the core can call what plug-ins register, by the signatures of its base classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from metaseq_lm.core.errors import UsageError

Function = Callable[..., Any]
DOCS = "see docs/how_to/plugins.md"
_CALLED = ("__init__", "__call__")  # the special methods that are checked


def place_of(value: Any) -> str:
    """Return "file:line" of a class or function, the `repr` of another object."""
    if callable(value) and (code := getattr(inspect.unwrap(value), "__code__", None)):
        return f"{code.co_filename}:{code.co_firstlineno}"
    try:
        return f"{inspect.getsourcefile(value)}:{inspect.getsourcelines(value)[1]}"
    except (OSError, TypeError):
        return repr(value)


def check_call(
    title: str, function: Any, arguments: Sequence[str], by_name: str = "", at: Any = None
) -> None:
    """Raise UsageError unless a function or class can be called as the core does.

    Args:
        title: Name of the function in messages, such as "schedule 'restarts'".
        function: The function.
        arguments: The arguments that it gets by position.
        by_name: The arguments that it gets by name, separated by blanks.
        at: The class or function that the message locates; None for `function`.
    """
    place = place_of(at or function)
    if not callable(function):
        raise UsageError(f"{place}: {title} is a {type(function).__name__}, no function; {DOCS}")
    try:
        # A decorator's wrapper is what is called, not the function inside.
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # of some classes written in C
        return
    try:
        signature.bind(*arguments, **dict.fromkeys(by_name.split()))
    except TypeError as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        call = ", ".join([*arguments, *(f"{key}=..." for key in by_name.split())])
        parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        raise UsageError(
            f"{place}: {title} is called as {name}({call}), but is {name}"
            f"{inspect.Signature(parameters)}: {error}; {DOCS}"
        ) from None


def check_class(
    title: str, value: Any, bases: Sequence[type], required: Sequence[str] = ()
) -> None:
    """Raise UsageError unless the core can call a class as it calls the first of its bases.

    Args:
        title: Name of the class in messages, such as "task 'groups'".
        value: The registered class.
        bases: The class that it must derive from, and protocols that it may implement.
        required: The methods that it must define.
    """
    base = bases[0]
    if not isinstance(value, type) or not issubclass(value, base):
        raise UsageError(
            f"{place_of(value)}: {title} has to be a class that derives from {base.__name__} of "
            f"{base.__module__}; {DOCS}"
        )
    for name in (*required, *getattr(value, "__abstractmethods__", ())):
        if _owner(value, name) is base:
            raise UsageError(
                f"{place_of(value)}: {title} has to define "
                f"{name}({', '.join(inspect.signature(vars(base)[name]).parameters)}); {DOCS}"
            )
    for interface in bases:
        names = [name for name in vars(interface) if not name.startswith("_")]
        if interface is base:
            names += _CALLED
        for name in names:
            _check_method(title, value, interface, name)
    for name, default in vars(base).items():
        attribute = inspect.getattr_static(value, name, default)
        if isinstance(default, tuple) and not isinstance(attribute, tuple | list | property):
            raise UsageError(
                f"{place_of(value)}: {title}: {value.__name__}.{name} is a "
                f"{type(attribute).__name__}; it has to be a tuple; {DOCS}"
            )


def _check_method(title: str, value: type, interface: type, name: str) -> None:
    """Raise UsageError for a method of a plug-in that takes other arguments than the core gives."""
    owner, declared = _owner(value, name), vars(interface).get(name)
    if owner is None or owner.__module__.startswith("metaseq_lm."):
        return
    if not inspect.isfunction(_unbound(declared)):
        return
    method = _unbound(attribute := vars(owner)[name])
    if not inspect.isfunction(method):
        return
    parameters = list(inspect.signature(_unbound(declared)).parameters.values())
    if isinstance(declared, classmethod) or attribute is not method:  # without self or cls
        del parameters[0]
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    by_name = " ".join(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    check_call(title, getattr(value, name), by_position, by_name)


def _owner(value: type, name: str) -> type | None:
    """Return the class that defines a method, None if only object does."""
    return next((c for c in value.__mro__[:-1] if name in vars(c)), None)


def _unbound(method: Any) -> Any:
    """Return the function of a class method or static method, anything else unchanged."""
    return getattr(method, "__func__", method)
