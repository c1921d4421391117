"""What kernels over the paged KV cache of any target ask of a level's geometry and of a step's limits."""

from __future__ import annotations

from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.kv_tail import Tail
from mlsdc.runtime.step import Limits

CHUNK_ROWS = 16  # rows of a page in the arena that holds a step's own rows in 16 bits


def chunk_of(geometry: KvGeometry) -> KvGeometry:
    """Of a grouped geometry: a step's own committed rows in 16 bits lie in the arena as one layer's pages, in order."""
    return KvGeometry("bf16", CHUNK_ROWS, 1, geometry.num_kv_heads, geometry.head_dim)


class OverPages:
    """Sizes that follow from `geometry` and `limits`."""

    geometry: KvGeometry
    limits: Limits

    @property
    def pages_per_seq(self) -> int:
        return self.limits.pages_per_seq(self.geometry.page_size)

    @property
    def scratch_pages(self) -> int:
        return self.limits.scratch_pages(self.slot_page)

    @property
    def slot_page(self) -> int:
        """Tokens of a page that holds drafted rows."""
        return self.tail.page_size if self.grouped else self.geometry.page_size

    @property
    def grouped(self) -> bool:
        return self.geometry.grouped

    @property
    def tail(self) -> Tail:
        """Of a grouped geometry."""
        assert self.geometry.tail is not None
        return self.geometry.tail

    @property
    def wide(self) -> KvGeometry:
        """Of a grouped geometry: that of its 16-bit pages."""
        assert self.geometry.wide is not None
        return self.geometry.wide

    @property
    def chunk(self) -> KvGeometry:
        """`chunk_of` the geometry."""
        return chunk_of(self.geometry)

    @property
    def chunk_bytes(self) -> int:
        return -(-self.limits.max_num_batched_tokens // CHUNK_ROWS) * self.chunk.page_bytes
