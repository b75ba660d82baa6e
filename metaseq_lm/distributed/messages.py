"""Messages between replicas as UTF-8 JSON: reading one runs no code that it names."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from metaseq_lm.core.errors import MetaseqError


def encode(value: Any, classes: Iterable[type] = ()) -> bytes:
    """Return a value as JSON, also tensors, arrays, tuples and the dataclasses in `classes`."""
    names = {kind: _name_of(kind) for kind in classes}

    def tagged(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, list):
            return [tagged(item) for item in value]
        if isinstance(value, tuple):
            return {"tuple": [tagged(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[tagged(key), tagged(item)] for key, item in value.items()]}
        if isinstance(value, Tensor):
            stored = save({"": value.detach().cpu().contiguous()})
            return {"tensor": base64.b64encode(stored).decode()}
        if isinstance(value, (np.ndarray, np.generic)):
            return {"array": tagged(torch.from_numpy(np.array(value)))}
        if type(value) in names:
            fields = {f.name: tagged(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return {"object": [names[type(value)], fields]}
        raise MetaseqError(
            f"a {type(value).__name__} cannot be sent to other processes; send numbers, texts, "
            "tensors, and lists, tuples and dicts of these"
        )

    return json.dumps(tagged(value)).encode()


def decode(message: bytes, classes: Iterable[type] = ()) -> Any:
    """Return the value of a message; KeyError for a class that is not among `classes`."""
    by_name = {_name_of(kind): kind for kind in classes}

    def decode(node: Any) -> Any:
        if isinstance(node, list):
            return [decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        ((tag, content),) = node.items()
        if tag == "tuple":
            return tuple(map(decode, content))
        if tag == "dict":
            return {decode(key): decode(item) for key, item in content}
        if tag == "tensor":
            return load(base64.b64decode(content))[""]
        if tag == "array":
            return decode(content).numpy()
        name, fields = content
        return by_name[name](**{key: decode(item) for key, item in fields.items()})

    return decode(json.loads(message))


def all_subclasses(kind: type) -> list[type]:
    """Return a class and all of its subclasses defined so far."""
    return [kind, *itertools.chain(*map(all_subclasses, kind.__subclasses__()))]


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
