"""A needle in a long cache, through an artifact's own attention kernels on a card: one token's key meets the query, all others are noise.

Pages are written by runtime/kv_format.py, a few of them, which the page table repeats, so that 128k tokens need no 128k tokens of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlsdc.compiler.graph import Graph
from mlsdc.compiler.ops_kv import PagedAttention
from mlsdc.compiler.types import TensorType
from mlsdc.runtime.bench.rig import Rig
from mlsdc.runtime.device.cuda import CudaLevel
from mlsdc.runtime.device.cuda_program import BoundLaunch, CudaProgram
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.step import Array
from mlsdc.targets.nvidia_values import RESULTS, arena_of, argument
from mlsdc.targets.values import whole
from mlsdc.templates.params_pages import chunk_of

NOISE = 8  # different pages, where the pool has them
GAP = 40.0  # nats that the needle's score lies above the others' together
CLOSE = 0.02  # of the largest element of the needle's value


@dataclass(frozen=True)
class Needle:
    """Attention of one row over `context` tokens of `kv`: `error` is how far it is from the needle's value, over that's largest element."""

    layer: int
    kv: str
    context: int
    at: int
    error: float
    us: float

    @property
    def passed(self) -> bool:
        return self.error < CLOSE


def find_needle(rig: Rig, graph: Graph, context: int, layer: int = 0) -> Needle | None:
    """None where the artifact's attention has a window, which hides the needle, or writes quantised rows only."""
    level, geometry = rig.memory, rig.geometry
    assert isinstance(level, CudaLevel)
    program = rig.forward
    assert isinstance(program, CudaProgram)
    node = next((n for n in graph if isinstance(n.op, PagedAttention) and n.op.layer == layer), None)
    assert node is not None
    assert isinstance(node.op, PagedAttention)
    if node.op.window:
        return None
    launches = [bound for bound in program.launches if bound.launch.node == node.name and not bound.launch.kernel.startswith("settle_kv")]
    q_type = graph[node.inputs[0]].type
    assert isinstance(q_type, TensorType)
    heads, dim = whole(q_type)
    rng = np.random.default_rng(context)
    direction = rng.standard_normal((geometry.num_kv_heads, dim)).astype(np.float32)
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    size, at = geometry.page_size, context // 3
    key = direction * np.float32((GAP + np.log(context)) / node.op.scale / dim**0.5)
    value = rng.standard_normal((geometry.num_kv_heads, dim)).astype(np.float32)
    pages = noise_pages(geometry, layer, direction, rng, min(NOISE, rig.limits.pages_per_seq(size) - 1))
    wanted = hide(geometry, pages[-1], layer, at % size, key, value)
    q = np.repeat(direction * np.float32(dim**0.5), heads // geometry.num_kv_heads, axis=0)
    place(rig, context, at // size, rng, len(pages) - 1)
    for i, page in enumerate(pages):
        level.write_page(i, page)
    clear_recent(level, launches, geometry)
    level.device.upload(arena_of(level, launches[0].launch, "q_ptr", "x_ptr"), q.reshape(-1))
    found, us = attend(level, program, launches, heads * dim, quantised="a8" in launches[-1].launch.kernel)
    expected = np.repeat(wanted, heads // geometry.num_kv_heads, axis=0).reshape(-1)
    error = float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max() / np.abs(expected).max())
    return Needle(layer, geometry.format, context, at, error, us)


def noise_pages(geometry: KvGeometry, layer: int, direction: Array, rng: np.random.Generator, count: int) -> list[Array]:
    """`count` pages of keys at right angles to the needle's, and one more for it."""
    found = []
    for _ in range(count + 1):
        page = np.zeros(geometry.page_bytes, np.uint8)
        for head in range(geometry.num_kv_heads):
            keys, values = rng.standard_normal((2, geometry.page_size, geometry.head_dim)).astype(np.float32)
            keys -= (keys @ direction[head])[:, None] * direction[head]
            write_page(geometry, page, layer, head, keys, values)
        found.append(page)
    return found


def write_page(geometry: KvGeometry, page: Array, layer: int, head: int, keys: Array, values: Array) -> None:
    if geometry.grouped:
        geometry.write_group(page, layer, head, keys, values)
        return
    for slot in range(geometry.page_size):
        geometry.write(page, layer, head, slot, keys[slot], values[slot])


def hide(geometry: KvGeometry, page: Array, layer: int, slot: int, key: Array, value: Array) -> Array:
    """Put the needle into its page; returns its values as they are read, f32[kv heads, d]."""
    wanted = []
    for head in range(geometry.num_kv_heads):
        keys, values = (x.copy() for x in geometry.read(page, layer, head))
        keys[slot], values[slot] = key[head], value[head]
        write_page(geometry, page, layer, head, keys, values)
        wanted.append(geometry.read(page, layer, head)[1][slot])
    return np.stack(wanted)


def place(rig: Rig, context: int, needle_page: int, rng: np.random.Generator, noise: int) -> None:
    """One committed row behind `context` tokens, whose pages are those of noise and, once, the needle's, behind them."""
    rig.set_rows(context, 1, drafted=False)
    buffers = rig.memory.buffers
    count = context // rig.geometry.page_size + 1
    buffers.page_table[0, :count] = rng.integers(0, noise, count)
    buffers.page_table[0, needle_page] = noise


def clear_recent(level: CudaLevel, launches: list[BoundLaunch], geometry: KvGeometry) -> None:
    """Of a grouped format: recent tokens in 16 bits, the row's own among them, are zeros."""
    if geometry.wide is None:
        return
    assert level.buffers.tail is not None
    zeros = np.zeros(geometry.wide.page_bytes, np.uint8)
    for page in level.buffers.tail_table[0, : level.buffers.tail.num_pages]:
        level.device.upload(level.pool + int(page) * level.wide_bytes, zeros)
    for bound in launches:
        if argument(level, bound.launch, "chunk") is not None:
            level.device.upload(arena_of(level, bound.launch, "chunk"), np.zeros(chunk_of(geometry).page_bytes, np.uint8))


def attend(level: CudaLevel, program: CudaProgram, launches: list[BoundLaunch], columns: int, quantised: bool) -> tuple[Array, float]:
    """The row's result, and the time of the launches once everything was read before."""
    program.bring_inputs()
    us = min(sum(time for _, _, time in program.timed(launches, level.counts())) for _ in range(3))
    at = arena_of(level, launches[-1].launch, *RESULTS)
    if not quantised:
        return level.device.download(at, 4 * columns).view(np.float32), us
    codes = level.device.download(at, columns).view(np.int8).astype(np.float32)
    scales = level.device.download(at + level.limits.max_num_batched_tokens * columns, columns // 8).view(np.float32)
    return codes * np.repeat(scales, 32), us
