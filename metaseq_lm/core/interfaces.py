"""Checks of plug-ins: whether the core can call their classes, and what their methods return.

The signatures and annotations of the package's base classes are the standard.
"""

from __future__ import annotations

import inspect
import numbers
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

from metaseq_lm.core.errors import UsageError

Function = Callable[..., Any]
DOCS = "see docs/how_to/plugins.md"
_CALLED = ("__init__", "__call__")  # methods to check although their names begin with "_"
# NumPy's numbers count as Python's.
_NUMBERS: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real}


def place_of(value: Any) -> str:
    """Return "file:line" of a class or function, the `repr` of another object."""
    code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
    if code is not None:
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
    place = place_of(function if at is None else at)
    if not callable(function):
        raise UsageError(f"{place}: {title} is a {type(function).__name__}, no function; {DOCS}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some classes written in C
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

    From then on, the results of its methods are checked against the annotations of the bases.

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
        names = [n for n in vars(interface) if not n.startswith("_")]
        for name in [*names, *(_CALLED if interface is base else ())]:
            _check_method(title, value, interface, name)
    for name, hint in _hints_of(base).items():
        attribute = inspect.getattr_static(value, name, None)
        is_value = name in vars(base) and not hasattr(attribute, "__get__")  # not a property
        if is_value and (wrong := next(_misfits(attribute, hint), None)):
            raise UsageError(
                f"{place_of(value)}: {title}: {value.__name__}.{name} is {wrong}; it has to be "
                f"{inspect.formatannotation(hint)}; {DOCS}"
            )


def _check_method(title: str, value: type, interface: type, name: str) -> None:
    """Check the signature of a plug-in's own method, and its results from then on."""
    owner, declared = _owner(value, name), vars(interface).get(name)
    if owner is None or _is_of_package(owner) or not inspect.isfunction(_unbound(declared)):
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
    nearest = next((c for c in value.__mro__ if _is_of_package(c) and name in vars(c)), interface)
    hint = _hints_of(_unbound(vars(nearest)[name])).get("return")
    if hint is None or hint is type(None) or hasattr(method, "is_checked"):
        return
    checked = _with_check(f"{place_of(method)}: {title}", method, hint)
    setattr(owner, name, checked if attribute is method else type(attribute)(checked))


def _with_check(title: str, method: Function, hint: Any) -> Function:
    """Return a method that raises UsageError if its result is not of a type."""
    torch = sys.modules.get("torch")  # worlds do not import it
    is_compiling: Callable[[], bool] = torch.compiler.is_compiling if torch else bool

    @wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if not is_compiling() and (wrong := next(_misfits(result, hint), None)):
            raise UsageError(
                f"{title}: {method.__qualname__} returns {wrong}; it has to return "
                f"{inspect.formatannotation(hint)}; {DOCS}"
            )
        return result

    checked.is_checked = True  # type: ignore[attr-defined]
    return checked


def _owner(value: type, name: str) -> type | None:
    """Return the class that defines a method; None if only `object` does."""
    return next((c for c in value.__mro__[:-1] if name in vars(c)), None)


def _is_of_package(value: type) -> bool:
    return value.__module__.startswith("metaseq_lm.")


def _unbound(method: Any) -> Any:
    """Return the function of a class method or static method, anything else unchanged."""
    return getattr(method, "__func__", method)


@cache
def _hints_of(value: Any) -> dict[str, Any]:
    """Return the annotations of a class or function; {} if one is imported only for types."""
    try:
        return get_type_hints(value)
    except NameError:
        return {}


def _misfits(value: Any, hint: Any, place: str = "") -> Iterator[str]:
    """Yield the parts of a value with a type other than annotated: "a float as its ['a'].sum".

    Types that cannot be checked, such as a TypeVar, fit everything. A list fits tuple[X, ...], and
    a tuple fits a named tuple.
    """
    kind, parts = get_origin(hint) or hint, get_args(hint)
    described = f"a {type(value).__name__}{place and f' as its {place.strip()}'}"
    if kind is ClassVar:
        yield from _misfits(value, parts[0], place)
        return
    if kind in (Union, types.UnionType):
        if all(any(True for _ in _misfits(value, part)) for part in parts):
            yield described
        return
    if kind is tuple and parts[1:] == (...,) and isinstance(value, list):
        value = tuple(value)
    names = getattr(kind, "_fields", None)
    if names is not None and isinstance(value, tuple) and len(value) == len(names):
        return
    kind = _NUMBERS.get(kind, kind)
    if hint is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return
    if not isinstance(value, kind):
        yield described
    elif isinstance(value, type):
        if parts and not issubclass(value, parts[0]):
            yield f"{value.__name__}{place and f' as its {place}'}"
    else:
        for item, part, inner in _parts_of(value, kind, parts):
            yield from _misfits(item, part, place + inner)


def _parts_of(value: Any, kind: type, parts: tuple[Any, ...]) -> Iterator[tuple[Any, Any, str]]:
    """Yield the parts of a container, or of a package's dataclass, with their types and places."""
    if issubclass(kind, Mapping) and parts:
        for key, item in value.items():
            yield key, parts[0], f" key {key!r}"
            yield item, parts[1], f"[{key!r}]"
    elif kind is tuple and parts:
        items = [*parts[:1]] * len(value) if parts[1:] == (...,) else parts
        for number, part in enumerate(items):
            yield value[number] if number < len(value) else None, part, f"[{number}]"
    elif is_dataclass(kind) and type(value) is kind and _is_of_package(kind):
        hinted: Any = kind
        for item in fields(hinted):
            yield getattr(value, item.name), _hints_of(hinted).get(item.name, Any), f".{item.name}"
