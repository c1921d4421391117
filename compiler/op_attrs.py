"""Ops from their names and attributes, checked: what the text and the JSON form build nodes with."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from mlsdc.compiler import (  # noqa: F401  (importing them registers their ops)
    graph,
    ops_capture,
    ops_core,
    ops_heads,
    ops_kv,
    ops_moe,
    ops_nn,
    ops_quant,
    ops_shard,
)
from mlsdc.compiler.errors import IrError
from mlsdc.compiler.ops import OPS, Op
from mlsdc.compiler.types import Dim, DType


class AttrError(IrError):
    """An op or attribute that does not exist or has a value of the wrong kind; `attr` names it ('' for the op itself)."""

    def __init__(self, message: str, attr: str = "") -> None:
        super().__init__(message)
        self.attr = attr


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    # a field's annotation: (its name in errors, does a value fit)
    "int": ("an integer", is_int),
    "float": ("a number", lambda value: is_int(value) or isinstance(value, float)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "str": ("a string", lambda value: isinstance(value, str) and not isinstance(value, DType)),
    "DType": ("a dtype", lambda value: isinstance(value, DType)),
    "Size": ("a size", lambda value: is_int(value) or isinstance(value, Dim)),
    "tuple[int, ...]": ("a list of integers", lambda value: isinstance(value, tuple) and all(map(is_int, value))),
    "tuple[str, ...]": ("a list of strings", lambda value: isinstance(value, tuple) and all(type(item) is str for item in value)),
}


def make_op(name: str, attrs: Mapping[str, Any]) -> Op:
    """`OPS[name](**attrs)`. Raises AttrError naming what is unknown, missing or of the wrong kind."""
    cls = OPS.get(name)
    if cls is None:
        raise AttrError(f"'{name}' is not an op{closest(name, OPS)}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key, value in attrs.items():
        if key not in fields:
            raise AttrError(f"{name} has no attribute '{key}'{closest(key, fields)}", key)
        kind, fits = KINDS.get(str(fields[key].type), ("", lambda value: True))
        if not fits(value):
            raise AttrError(f"{name}: attribute '{key}' expects {kind}", key)
    for key, field in fields.items():
        if key not in attrs and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise AttrError(f"{name}: attribute '{key}' is missing")
    return cls(**attrs)


def closest(name: str, known: Mapping[str, Any]) -> str:
    """`; did you mean 'x'?`, or nothing."""
    matches = difflib.get_close_matches(name, known, 1)
    return f"; did you mean '{matches[0]}'?" if matches else ""
