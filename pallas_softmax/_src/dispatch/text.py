"""Text for the static arguments of a call: equal calls have equal texts, and any process can read them back.

None, bool, int, float, str         JSON's own
tuple                               a JSON list
dtype                               {"dtype": "bfloat16"}
Operation                           {"operation": "topk"}, by its name
dataclass, NamedTuple               {"module:Class": {field: value}}, of this package only
"""

import dataclasses
import json
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_softmax._src.dispatch.operation import OPERATIONS, Operation

_PACKAGE = __name__.split(".")[0]


def encode(value: Any) -> Any:
    """Returns the value in types that `json.dumps` accepts. Raises TypeError for types other than those above."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return [encode(part) for part in value]
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    cls = type(value)
    name = f"{cls.__module__}:{cls.__qualname__}"
    if isinstance(value, Operation):
        if OPERATIONS.get(value.name) is value:
            return {"operation": value.name}
    elif _class(name) is cls:
        fields = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else cls._fields
        return {name: {field: encode(getattr(value, field)) for field in fields}}
    raise TypeError(f"no text for a static argument {value!r} ({cls.__name__})")


def decode(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(map(decode, data))
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "dtype":
        return jnp.dtype(content)
    if kind == "operation":
        return OPERATIONS[content]
    if (cls := _class(kind)) is None:
        raise ValueError(f"{_PACKAGE} has no class {kind!r}: another version of it wrote the text")
    return cls(**{field: decode(value) for field, value in content.items()})


def dumps(value: Any) -> str:
    return json.dumps(encode(value), sort_keys=True, separators=(",", ":"))


def loads(text: str | bytes) -> Any:
    return decode(json.loads(text))


def _class(name: str) -> Any:
    """Returns the class of this name, "module:Class", if it is a dataclass or NamedTuple of this package."""
    module, _, qualname = name.partition(":")
    if module.split(".")[0] != _PACKAGE:
        return None
    found = getattr(sys.modules.get(module), qualname, None)
    has_fields = dataclasses.is_dataclass(found) or hasattr(found, "_fields")
    return found if isinstance(found, type) and has_fields else None
