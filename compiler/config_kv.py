"""The `kv` section of a level in model.yaml: the formats of its keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlsdc.compiler.schema import option
from mlsdc.runtime.kv_format import FORMATS, format_text


@dataclass(frozen=True)
class KvConfig:
    """`kv: int8` is short for `kv: {dtype: int8}`; `keys` and `values` say otherwise for one of the two. `page_size` counts tokens.

    Layers in `skip_layers`, counted from 0, keep 16 bits.
    """

    dtype: str = option("bf16", choices=tuple(FORMATS))
    keys: str | None = option(None, choices=tuple(FORMATS))
    values: str | None = option(None, choices=tuple(FORMATS))
    page_size: int = option(32, choices=(16, 32, 64))
    skip_layers: tuple[int, ...] = option((), low=0)

    @property
    def format(self) -> str:
        """As runtime.kv_format.parse_format reads it: `int8/fp8@0.29=bf16`."""
        keys, values = self.keys or self.dtype, self.values or self.dtype
        return format_text(keys if keys == values else f"{keys}/{values}", dict.fromkeys(self.skip_layers, "bf16"))


def kv_section(raw: Any) -> Any:
    """A name alone is that of both keys and values."""
    return {"dtype": raw} if isinstance(raw, str) else raw
