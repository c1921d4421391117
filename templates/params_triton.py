"""Parameters of the Triton templates: frozen dataclasses, one a template, everything a template may ask for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import ClassVar


def digest(params: object) -> str:
    """Eight hex digits of a dataclass's fields: they make a readable key unique."""
    text = ",".join(f"{f.name}={getattr(params, f.name)!r}" for f in fields(params))  # type: ignore[arg-type]
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Rope:
    """`rope`: RoPE of `heads` heads that start at column `start` of rows of `columns` f32, by a table of [2, half] a row: the
    first 2 `half` channels of a head turn."""

    template: ClassVar[str] = "rope"

    columns: int
    start: int
    heads: int
    head_dim: int
    half: int
    max_rows: int

    @property
    def key(self) -> str:
        return f"rope_c{self.columns}_at{self.start}_h{self.heads}_d{self.head_dim}_{digest(self)}"
