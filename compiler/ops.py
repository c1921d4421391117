"""What an op is: a frozen dataclass whose fields are its attributes and whose `infer` is its type rule.

`@op("rms_norm")` registers a class under the name it prints with; text, JSON and the interpreter find it there. To add an op, see
CONTRIBUTING.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from mlsdc.compiler.errors import IrError
from mlsdc.compiler.types import DType, TensorType, Type

OPS: dict[str, type[Op]] = {}
O = TypeVar("O", bound="type[Op]")


@dataclass(frozen=True)
class Op:
    """Base of all ops. Field values are int, float, bool, str, DType, or tuples of these: they print and parse as text."""

    opname: ClassVar[str]

    def infer(self, *inputs: Type) -> Type:
        """Type of the result; raises `Mismatch` saying what the op expects."""
        raise Mismatch(f"{self.opname} has no type rule")

    def attrs(self) -> dict[str, Any]:
        """Fields that differ from their default, in order: what the text form shows."""
        shown = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING or value != field.default:
                shown[field.name] = value
        return shown


class Mismatch(IrError):
    """Inputs that do not fit an op; the graph adds the node's name to it."""


def op(name: str) -> Callable[[O], O]:
    def register(cls: O) -> O:
        if name in OPS:
            raise ValueError(f"op '{name}' is registered twice")
        cls.opname = name
        OPS[name] = cls
        return cls

    return register


def expect_arity(inputs: tuple[Type, ...], low: int, high: int | None = None) -> None:
    high = low if high is None else high
    if not low <= len(inputs) <= high:
        wanted = str(low) if low == high else f"{low} to {high}"
        raise Mismatch(f"expects {wanted} inputs, found {len(inputs)}")


def expect_tensor(type_: Type, what: str, *, rank: int | None = None, dtypes: tuple[DType, ...] = ()) -> TensorType:
    """`type_` as a tensor type, of the given rank and dtypes if they are given."""
    if not isinstance(type_, TensorType):
        raise Mismatch(f"{what} expects a tensor, found {type_}")
    if rank is not None and type_.rank != rank:
        raise Mismatch(f"{what} expects rank {rank}, found {type_}")
    if dtypes and type_.dtype not in dtypes:
        raise Mismatch(f"{what} expects {' or '.join(dtypes)}, found {type_}")
    return type_


def expect_equal(found: object, wanted: object, what: str) -> None:
    if found != wanted:
        raise Mismatch(f"{what} is {found}, expected {wanted}")
