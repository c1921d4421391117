"""What torch and, where it is installed, FlashInfer take on the same card for a step's linears and attention: for `mlsdc bench gpu-check`.

bf16 everywhere: cuBLAS by torch's linear, scaled_dot_product_attention over a cache that lies in one piece, FlashInfer's decode over it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlsdc.compiler.graph import Graph, Weight
from mlsdc.compiler.ops_kv import PagedAttention
from mlsdc.compiler.types import KvType, TensorType

RUNS = 20


@dataclass(frozen=True)
class PeerTime:
    """`us` of one call over one row, once warm."""

    peer: str
    what: str
    us: float


def peer_times(graph: Graph, context: int, notes: list[str]) -> list[PeerTime]:
    """Nothing, and a note, where torch is missing or sees no GPU."""
    try:
        import torch
    except ImportError:
        notes.append("no comparison with torch: it is not installed")
        return []
    if not torch.cuda.is_available():
        notes.append("no comparison with torch: it sees no GPU")
        return []
    return list(compare(graph, context, "cuda", notes))


def compare(graph: Graph, context: int, device: str, notes: list[str]) -> Iterator[PeerTime]:
    """Each shape of linear once, then attention of the first layer."""
    import torch
    from torch.nn import functional

    with torch.no_grad():
        for n, k in sorted(linears(graph)):
            x = torch.randn(1, k, dtype=torch.bfloat16, device=device)
            weight = torch.randn(n, k, dtype=torch.bfloat16, device=device)
            yield PeerTime("cuBLAS", f"linear {n} x {k}, bf16", microseconds(partial(functional.linear, x, weight), device))
        heads, kv_heads, dim = attention(graph)
        q = torch.randn(1, heads, 1, dim, dtype=torch.bfloat16, device=device)
        k_, v = (torch.randn(1, kv_heads, context, dim, dtype=torch.bfloat16, device=device) for _ in range(2))
        what = f"attention of a row over {context:,} tokens, {heads} heads over {kv_heads} of {dim}, bf16"

        def sdpa() -> Any:
            return functional.scaled_dot_product_attention(q, k_, v, enable_gqa=True)

        yield PeerTime("torch SDPA", what, microseconds(sdpa, device))
        try:
            import flashinfer  # type: ignore[import-not-found]
        except ImportError:
            notes.append("no comparison with FlashInfer: it is not installed")
            return
        rows = [x[0].transpose(0, 1).contiguous() for x in (k_, v)]  # [context, kv heads, d]
        one = q[0, :, 0].contiguous()
        yield PeerTime("FlashInfer", what, microseconds(lambda: flashinfer.single_decode_with_kv_cache(one, *rows), device))


def linears(graph: Graph) -> set[tuple[int, int]]:
    """(outputs, inputs) of the graph's matrices."""
    shapes = (node.type.shape for node in graph if isinstance(node.op, Weight) and isinstance(node.type, TensorType))
    return {(int(shape[0]), int(shape[1])) for shape in shapes if len(shape) == 2}  # type: ignore[arg-type]


def attention(graph: Graph) -> tuple[int, int, int]:
    """(heads, kv heads, head dim) of the first layer."""
    node = next(node for node in graph if isinstance(node.op, PagedAttention))
    q, kv = graph[node.inputs[0]].type, graph[node.inputs[1]].type
    assert isinstance(q, TensorType)
    assert isinstance(kv, KvType)
    return int(q.shape[1]), kv.num_kv_heads, kv.head_dim  # type: ignore[arg-type]


def microseconds(call: Callable[[], Any], device: str) -> float:
    """Of one call, by the card's own events where there is one."""
    import torch

    for _ in range(3):
        call()
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(RUNS):
            call()
        return (time.perf_counter() - start) / RUNS * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(RUNS):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / RUNS * 1e3
