"""The `kv` section of a level in model.yaml: the formats of its keys and values, and which of them are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlsdc.compiler.schema import option
from mlsdc.runtime.kv_format import FORMATS, format_text
from mlsdc.runtime.kv_window import LEAST, PARAM, KvWindow

MOST_SINKS = 64


@dataclass(frozen=True)
class KvFormats:
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


def _kind(raw: Any) -> Any:
    """Raises ValueError for heavy hitters."""
    if raw == "h2o":
        raise ValueError("h2o needs every page's share of the attention, which no kernel reports; expected window")
    return raw


@dataclass(frozen=True)
class EvictionConfig:
    """Which tokens a target's cache forgets. Lossy: the text is that of a model that does not see them. `window`: all but the first `sinks`
    and the last ones, `budget` in all."""

    kind: str = option(choices=("window",), parse=_kind)
    budget: int = option(low=LEAST + MOST_SINKS, high=2**20)
    sinks: int = option(4, low=1, high=MOST_SINKS)


@dataclass(frozen=True)
class KvConfig(KvFormats):
    """Of the target: `eviction` is never a default."""

    eviction: EvictionConfig | None = option(None)

    def params(self) -> dict[str, Any]:
        """What the target's level says of it in the manifest."""
        if self.eviction is None:
            return {}
        return {PARAM: KvWindow(self.eviction.budget - self.eviction.sinks, self.eviction.sinks).param()}


@dataclass(frozen=True)
class DraftKvConfig(KvFormats):
    """Of a level with pages of its own. With a `window` a row sees the first `sinks` positions and the last `window`, and pages between are
    given back."""

    window: int | None = option(None, low=LEAST, high=2**20)
    sinks: int = option(4, low=1, high=MOST_SINKS)

    def params(self) -> dict[str, Any]:
        """What the level's runtime half and its passes read."""
        window = {} if self.window is None else {PARAM: KvWindow(self.window, self.sinks).param()}
        return {"kv_format": self.format, "kv_page_size": self.page_size, **window}


def kv_section(raw: Any) -> Any:
    """A name alone is that of both keys and values."""
    return {"dtype": raw} if isinstance(raw, str) else raw
