"""The page pool of one level over the slabs that all levels share: its pages, and wide ones if its cache format quantises groups."""

from __future__ import annotations

from mlsdc.runtime.device.base import LevelMemory
from mlsdc.runtime.kv_pool import KvPool
from mlsdc.runtime.kv_window import KvWindow
from mlsdc.runtime.slabs import SlabPool
from mlsdc.runtime.wide_pages import WidePages


def level_pool(slabs: SlabPool, memory: LevelMemory, *, reuse: bool = True, window: KvWindow | None = None) -> KvPool:
    """The pool of the level whose bytes are `memory`'s. Raises CapacityError for slabs that hold no page of it."""
    tail = memory.buffers.tail
    wide = None if tail is None else WidePages(slabs, memory.wide_bytes, tail, copy_page=memory.copy_wide)
    return KvPool(slabs, memory.buffers.page_size, memory.page_bytes, copy_page=memory.copy_page, reuse=reuse, wide=wide,
                  window=window, most_rows=memory.buffers.limits.max_num_batched_tokens)
