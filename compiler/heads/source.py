"""Where the weights of a head's graph come from: its file, and what the target lends (embedding, head rows, norm)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.capture.source import Blocks, WeightSource
from mlsdc.compiler.heads.checkpoint import HeadFile
from mlsdc.compiler.heads.config import EagleConfig

Array = npt.NDArray[Any]
HEAD, LENT, ROWS = "head/", "target/", "target-rows/"


@dataclass(frozen=True)
class HeadWeights:
    """`head/NAME` of the file, `head/NAME[a:b]` columns a..b of it; `target/NAME` or NAME of the model; `target-rows/NAME` rows `d2t`."""

    file: HeadFile
    target: WeightSource

    def names(self) -> tuple[str, ...]:
        lent = (prefix + name for prefix in (LENT, ROWS, "") for name in self.target.names())
        return (*(HEAD + name for name in self.file.names()), *lent)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.read(name).shape

    def read(self, name: str) -> Array:
        if name.startswith(ROWS):
            return self.target.read(name.removeprefix(ROWS))[self.file.d2t]
        if not name.startswith(HEAD):
            return self.target.read(name.removeprefix(LENT))
        base, columns = split(name)
        if base == "inv_freq":
            return self.inv_freq()
        values = self.file.read(base)
        return values if columns is None else np.ascontiguousarray(values[:, columns])

    def block(self, name: str) -> Blocks | None:
        if name.startswith(ROWS):
            blocks = self.target.block(name.removeprefix(ROWS))
            if blocks is None:
                return None
            rows = blocks.rows.reshape(blocks.shape[0], -1)[self.file.d2t]
            return Blocks(blocks.kind, (len(self.file.d2t), blocks.shape[1]), rows)
        if not name.startswith(HEAD):
            return self.target.block(name.removeprefix(LENT))
        base, columns = split(name)
        blocks = None if base == "inv_freq" else self.file.block(base)
        if blocks is None or columns is None:
            return blocks
        n, k = blocks.shape
        grouped = blocks.rows.reshape(n, k // 32, -1)[:, columns.start // 32 : columns.stop // 32]
        return Blocks(blocks.kind, (n, columns.stop - columns.start), np.ascontiguousarray(grouped).reshape(n, -1))

    def inv_freq(self) -> Array:
        """f32[head_dim / 2]: RoPE frequencies of an eagle's layer."""
        c = self.file.config
        assert isinstance(c, EagleConfig)
        frequencies: Array = c.rope_theta ** (-np.arange(0, c.head_dim, 2, dtype=np.float64) / c.head_dim)
        return frequencies.astype(np.float32)


def split(name: str) -> tuple[str, slice | None]:
    """`head/fc[0:576]` -> ("fc", slice(0, 576))."""
    base, _, columns = name.removeprefix(HEAD).partition("[")
    if not columns:
        return base, None
    first, last = columns.rstrip("]").split(":")
    return base, slice(int(first), int(last))
