"""The roles that the modules of a model declare for their parameters, see `core.roles`."""

from collections.abc import Mapping
from typing import TypeVar

from torch import nn
from torch.nn.modules.conv import _ConvNd

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import nearest
from metaseq_lm.core.roles import ParameterRole, Role, vector_role

__all__ = ["roles_of"]

T = TypeVar("T")

# Roles of the matrices of torch's modules, unless a surrounding module declares another.
_TORCH_ROLES: dict[type[nn.Module], Role] = {
    nn.Linear: Role.HIDDEN,
    nn.MultiheadAttention: Role.HIDDEN,
    nn.Embedding: Role.EMBEDDING,
    nn.EmbeddingBag: Role.EMBEDDING,
    nn.RNNBase: Role.KERNEL,
    nn.RNNCellBase: Role.KERNEL,
    _ConvNd: Role.KERNEL,
}


def roles_of(model: nn.Module) -> dict[str, ParameterRole]:
    """Return the role of each parameter by its name, as in `model.named_parameters()`.

    A matrix that several modules share is an embedding if it is one in any of them.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for module in modules.values():
        _check_tables(module)
    roles: dict[str, ParameterRole] = {}
    first_names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        *path, own_name = name.split(".")
        owner = modules[".".join(path)]
        by_type = (role for kind, role in _TORCH_ROLES.items() if isinstance(owner, kind))
        is_joint = isinstance(owner, nn.MultiheadAttention) and own_name == "in_proj_weight"
        role = ParameterRole(
            vector_role(name, parameter)
            or _declared(modules, name, "parameter_roles", next(by_type, None)),
            _declared(modules, name, "parameter_pieces", 3 if is_joint else 1),
            _declared(modules, name, "parameter_levels", 0),
        )
        first_name = first_names.setdefault(id(parameter), name)
        if first_name == name or role.role is Role.EMBEDDING:
            roles[first_name] = role
    return roles


def _check_tables(module: nn.Module) -> None:
    """Raise UsageError if a table of a plug-in's module has a key that the module lacks."""
    # Tables of the package's modules, which plug-ins may inherit, may name children that some
    # options leave out.
    if type(module).__module__.startswith(("metaseq_lm.", "torch.")):
        return
    attributes = {**vars(type(module)), **vars(module)}  # without inherited tables
    names = {"", *dict(module.named_modules()), *dict(module.named_parameters())}
    for table in ("parameter_roles", "parameter_pieces", "parameter_levels"):
        entries = attributes.get(table)
        if not isinstance(entries, Mapping):  # absent, or a property
            continue
        for key in entries:
            if key not in names:
                raise UsageError(
                    f"{type(module).__name__}.{table} has {key!r}, which is no module or parameter "
                    f"of it.{nearest(key, names - {''})}"
                )


def assign_roles(model: nn.Module) -> None:
    """Give each parameter of a model its role, as `parameter.role`."""
    roles = roles_of(model)
    for name, parameter in model.named_parameters():
        parameter.role = roles[name]  # type: ignore[attr-defined]


def _declared(modules: Mapping[str, nn.Module], name: str, table: str, default: T) -> T:
    """Return the entry for a parameter in the table of the innermost module that has one."""
    path = name.split(".")
    for start in reversed(range(len(path))):
        entries: Mapping[str, T] = getattr(modules[".".join(path[:start])], table, {})
        for end in range(len(path), start - 1, -1):
            if (inner := ".".join(path[start:end])) in entries:
                return entries[inner]
    return default
