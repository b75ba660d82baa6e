"""Registered names, their options and summaries, read from the source that declares them.

Importing the modules takes seconds, because of torch. Nothing is executed here: a small part of
Python is evaluated, as much as declarations of options need, and what is beyond it is an
`UnreadableError`. In place of a class stands one of the same bases, docstring and constants,
without its methods.
"""

import ast
import builtins
import contextlib
import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import add, getitem, mul, neg, or_, pos, sub
from pathlib import Path
from typing import Any, ClassVar, get_origin

from metaseq_lm.core.registry import ALL, Entry, NoOptions, Registry

PACKAGE = Path(__file__).parents[1]
KINDS = (*ALL, "dataset_kind")
DECORATOR = re.compile(r'^@register_(\w+)\(\s*"([^"]+)"', re.M)
# Modules that are imported for what options are declared with; none of them imports torch.
IMPORTED = ("dataclasses", "pathlib", "typing", "omegaconf", "metaseq_lm.core.options")
CALLED = (
    "option",
    "with_default",
    "field",
    "II",
    "list",
    "tuple",
    "sorted",
    "range",
    "dict",
)
BUILT_IN = ("int", "float", "str", "bool", "list", "tuple", "sorted", "range", "dict")
OPERATORS: dict[type, Any] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.BitOr: or_,
    ast.USub: neg,
    ast.UAdd: pos,
}
# A plug-in that imports other modules, or uses these names, may register what its source does not
# show.
HARMLESS = {*sys.stdlib_module_names, "metaseq_lm", "numpy", "omegaconf", "torch"}
HIDING = {
    *("importlib", "pkgutil", "runpy", "builtins", "exec", "eval", "__import__"),
    *("registry", "plugins", "ALL", "*", *(f"{kind.upper()}S" for kind in KINDS)),
}


class UnreadableError(Exception):
    """The registrations of a source cannot be read statically; it must be imported."""


@dataclass
class Module:
    """The syntax tree of a module and the values of its names that are evaluated so far."""

    name: str
    file: Path
    tree: ast.Module
    values: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def definitions(self) -> dict[str, ast.AST]:
        """The class, function or value of each name that the top level defines."""
        nodes: dict[str, ast.AST] = {}
        for node in self.tree.body:
            match node:
                case ast.ClassDef() | ast.FunctionDef():
                    nodes[node.name] = node
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    nodes[name] = value
                case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                    nodes |= {t.id: v for t, v in zip(targets, values) if isinstance(t, ast.Name)}
                case ast.Assign(targets=[ast.Name(id=name)]):
                    nodes[name] = node.value
        return nodes

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Module and original name of each name that the top level imports from a module."""
        imports = {}
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    imports[alias.asname or alias.name] = (self.absolute(node), alias.name)
        return imports

    def absolute(self, node: ast.ImportFrom) -> str:
        """Return the dotted name of the module that names are imported from."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        dropped = node.level - (self.file.name == "__init__.py")
        return ".".join([*parts[: len(parts) - dropped], *filter(None, [node.module])])

    @cached_property
    def registrations(self) -> list[tuple[str, ast.Call, ast.ClassDef | ast.FunctionDef]]:
        """The kind of each registration, its decorator, and the class or function."""
        registrations = []
        for node in self.tree.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                continue
            for call in node.decorator_list:
                name = call.func if isinstance(call, ast.Call) else None
                if isinstance(name, ast.Name) and name.id.startswith("register_"):
                    assert isinstance(call, ast.Call)
                    registrations.append((name.id.removeprefix("register_"), call, node))
        return registrations


class Sources:
    """The modules of packages and the values of their declarations.

    Args:
        roots: The folder of each package by its name, or the file of one that is a single module.
    """

    def __init__(self, roots: Mapping[str, Path]) -> None:
        self.roots = roots
        self.modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """Return a module, None if no package has it."""
        if name not in self.modules:
            top, *parts = name.split(".")
            files: list[Path] = []
            if top in self.roots:
                base = self.roots[top].joinpath(*parts)
                files = [base.with_suffix(".py") if parts else base, base / "__init__.py"]
            file = next(filter(Path.is_file, files), None)
            self.modules[name] = None if file is None else Module(name, file, parse(file))
        return self.modules[name]

    def named(self, module: Module, name: str) -> Any:
        """Return the value of a name at the top level of a module."""
        if name not in module.values:
            module.values[name] = self._named(module, name)
        return module.values[name]

    def _named(self, module: Module, name: str) -> Any:
        node = module.definitions.get(name)
        if isinstance(node, ast.ClassDef):
            return self.stand_in(node, module)
        if node is not None:
            return self.value(node, module)
        if name in module.imports:
            source, original = module.imports[name]
            if source in IMPORTED:
                return getattr(importlib.import_module(source), original)
            if (imported := self.module(source)) is not None:
                return self.named(imported, original)
        elif name in BUILT_IN:
            return getattr(builtins, name)
        raise UnreadableError(f"{module.file}: {name}")

    def value(self, node: ast.AST, module: Module, names: Mapping[str, Any] | None = None) -> Any:
        """Return the value of an expression; `names` are the local names of its function."""

        def of(child: ast.AST) -> Any:
            return self.value(child, module, names)

        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return names[node.id] if names and node.id in names else self.named(module, node.id)
            case ast.Tuple() | ast.List() | ast.Set():
                items: list[Any] = []
                for child in node.elts:
                    items += of(child.value) if isinstance(child, ast.Starred) else [of(child)]
                return items if isinstance(node, ast.List) else tuple(items)
            case ast.Dict():
                # Where choices are the keys of a table, its values need not be readable.
                table = {of(key): UnreadableError for key in node.keys if key is not None}
                for key, child in zip(table, node.values):
                    with contextlib.suppress(UnreadableError):
                        table[key] = of(child)
                if len(table) == len(node.keys):
                    return table
            case ast.UnaryOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](of(node.operand))
            case ast.BinOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](of(node.left), of(node.right))
            case ast.Subscript():
                item = getitem(of(node.value), of(node.slice))
                if item is not UnreadableError:
                    return item
            case ast.Lambda() if not node.args.args:
                body = of(node.body)
                return lambda: body
            case ast.FunctionDef():
                return node, module
            case ast.Call(func=ast.Name(id=name)) if all(k.arg for k in node.keywords):
                function = of(node.func)
                arguments = of(ast.List(node.args))
                keywords = {str(k.arg): of(k.value) for k in node.keywords}
                if isinstance(function, tuple):
                    definition, source = function
                    return self.returned(definition, source, arguments, keywords)
                if name in CALLED:
                    return function(*arguments, **keywords)
        raise UnreadableError(f"{module.file}: {ast.unparse(node)}")

    def returned(
        self,
        function: ast.FunctionDef,
        module: Module,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
    ) -> Any:
        """Evaluate a function whose body is assignments and a return statement."""
        parameters = [argument.arg for argument in function.args.args]
        names = {**dict(zip(parameters, arguments)), **keywords}
        for node in function.body if names.keys() == set(parameters) else []:
            match node:
                case ast.Return(value=ast.expr() as value):
                    return self.value(value, module, names)
                case ast.Assign(targets=[ast.Name(id=name)]):
                    names[name] = self.value(node.value, module, names)
                case ast.Expr(value=ast.Constant()):
                    pass
                case _:
                    break
        raise UnreadableError(f"{module.file}: {function.name}")

    def stand_in(self, node: ast.ClassDef, module: Module) -> type:
        """Return a class with the bases, docstring and constants of the one that is declared.

        A dataclass has all its fields. Of another class what cannot be read is left out.
        """
        is_options = any(map(is_dataclass_decorator, node.decorator_list))
        if is_options and len(node.decorator_list) > 1:
            raise UnreadableError(f"{module.file}: {node.name}")
        bases: list[type] = []
        content: dict[str, Any] = {"__module__": module.name, "__doc__": ast.get_docstring(node)}
        types: dict[str, Any] = {}
        for base in node.bases:
            with contextlib.nullcontext() if is_options else readable_part():
                bases.append(self.value(base, module))
        for statement in node.body:
            match statement:
                case ast.AnnAssign(target=ast.Name(id=name)) if is_options:
                    kind = self.value(statement.annotation, module)
                    if kind is not ClassVar and get_origin(kind) is not ClassVar:
                        types[name] = kind
                        if statement.value is not None:
                            content[name] = self.value(statement.value, module)
                case (
                    ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                    | ast.Assign(targets=[ast.Name(id=name)], value=value)
                ):
                    with readable_part():
                        content[name] = self.value(value, module)
                case ast.FunctionDef() | ast.Expr() | ast.Pass():
                    pass
                case _ if is_options:
                    raise UnreadableError(f"{module.file}: {node.name}")
        stand_in = type(node.name, tuple(bases), content | {"__annotations__": types})
        return dataclass(kw_only=True)(stand_in) if is_options else stand_in

    def plug_in(self, name: str) -> Iterator[Module]:
        """Yield the modules that the import of a plug-in imports from its package.

        Raises UnreadableError if one of them may register names in another way than by decorators.
        """
        parts = name.split(".")
        pending = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        for dotted in pending:
            module = self.module(dotted)
            if module is None:
                raise UnreadableError(f"{dotted}: no source")
            check_decorators(module)
            yield module
            for node in module.tree.body:
                if isinstance(node, ast.ImportFrom | ast.Import):
                    source = module.absolute(node) if isinstance(node, ast.ImportFrom) else ""
                    names = [f"{source}.{alias.name}".strip(".") for alias in node.names]
                    pending += [
                        imported
                        for imported in (source, *names)
                        if imported.split(".")[0] == parts[0]
                        and imported not in pending
                        and self.module(imported)
                    ]


def check_decorators(module: Module) -> None:
    """Raise UnreadableError if a module may register names in another way than by decorators."""
    decorators = [call.func for _, call, _ in module.registrations]
    harmless = HARMLESS | {module.name.split(".")[0]}
    for node in ast.walk(module.tree):
        words: list[str] = []
        packages: set[str] = set()
        is_hiding = False
        match node:
            case ast.Import():
                words = [word for alias in node.names for word in alias.name.split(".")]
                packages = {alias.name.split(".")[0] for alias in node.names}
            case ast.ImportFrom():
                words = [alias.name for alias in node.names]
                packages = set() if node.level else {module.absolute(node).split(".")[0]}
                is_hiding = any(a.asname and a.name.startswith("register_") for a in node.names)
            case ast.Attribute():
                words = [node.attr]
            case ast.Name() if node not in decorators:
                words = [node.id]
                is_hiding = node.id.startswith("register_")
        if is_hiding or HIDING & {*words, *packages} or packages - harmless:
            raise UnreadableError(f"{module.file}: {ast.unparse(node)}")
    for node in module.tree.body:
        may_fail = isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While)
        if may_fail and "TYPE_CHECKING" not in ast.unparse(node).split("\n")[0]:
            for child in ast.walk(node):
                if isinstance(child, ast.Import | ast.ImportFrom):
                    raise UnreadableError(f"{module.file}: {ast.unparse(child)} under a condition")


class DeclaredEntry(Entry[Any]):
    """A registration that is read from the source on access to its class or options."""

    kind: str
    sources: Sources

    def __init__(self, sources: Sources, kind: str, name: str, origin: str) -> None:
        self.__dict__.update(name=name, origin=origin, kind=kind, sources=sources)  # it is frozen

    @cached_property
    def _declaration(self) -> tuple[Module, ast.Call, ast.ClassDef | ast.FunctionDef]:
        module = self.sources.module(self.origin)
        assert module is not None
        for kind, call, node in module.registrations:
            if kind == self.kind and self.sources.value(call.args[0], module) == self.name:
                return module, call, node
        raise UnreadableError(f"{module.file}: {self.kind} {self.name}")

    @cached_property
    def value(self) -> Any:
        """A class with the docstring and the constants of the registered one."""
        module, _, node = self._declaration
        if isinstance(node, ast.ClassDef):
            return self.sources.named(module, node.name)
        return type(node.name, (), {"__doc__": ast.get_docstring(node)})

    @cached_property
    def dataclass(self) -> type:
        """A dataclass with the fields of that of the options."""
        module, call, _ = self._declaration
        nodes = [*call.args[1:], *(k.value for k in call.keywords if k.arg == "dataclass")]
        options = NoOptions
        with wrong_as_unreadable(module):
            if nodes:
                options = self.sources.value(nodes[0], module)
        return options


def declared(plug_ins: Mapping[str, Path]) -> dict[str, Registry[Any]]:
    """Return registries of the declarations of the package and plug-ins, by kind.

    Args:
        plug_ins: The folder or file of each plug-in's package by the dotted name of the plug-in.

    Raises:
        UnreadableError: A plug-in may register more than its source shows.
    """
    registries: dict[str, Registry[Any]] = {
        kind: Registry(kind.replace("_", " ")) for kind in KINDS
    }
    sources = Sources({"metaseq_lm": PACKAGE, **{n.split(".")[0]: p for n, p in plug_ins.items()}})
    named = []
    for file in sorted(PACKAGE.rglob("*.py")):
        module_name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        for kind, name in DECORATOR.findall(file.read_text(encoding="utf-8")):
            named.append((kind, name, module_name))
    for plug_in in plug_ins:
        for module in sources.plug_in(plug_in):
            for kind, call, _ in module.registrations:
                with wrong_as_unreadable(module):
                    named.append((kind, sources.value(call.args[0], module), module.name))
    for kind, name, origin in named:
        entries = registries[kind].entries if kind in registries else {}
        if name in entries:
            raise UnreadableError(f"two of {kind} {name}")
        entries[name] = DeclaredEntry(sources, kind, name, origin.removesuffix(".__init__"))
    return registries


@contextlib.contextmanager
def wrong_as_unreadable(module: Module) -> Iterator[None]:
    """Convert the exceptions of an invalid expression to UnreadableError."""
    try:
        yield
    except (
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ImportError,
        RecursionError,
    ) as error:
        raise UnreadableError(f"{module.file}: {error}") from error


def readable_part() -> contextlib.suppress:
    """Return a context that skips unreadable declarations."""
    return contextlib.suppress(UnreadableError, TypeError)


def is_dataclass_decorator(node: ast.expr) -> bool:
    """Return whether a decorator is `@dataclass`, with arguments or without."""
    function = node.func if isinstance(node, ast.Call) else node
    return isinstance(function, ast.Name) and function.id == "dataclass"


def parse(file: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise UnreadableError(f"{file}: {error}") from error
