"""Every kernel of an artifact on a card against its definition: the reference interpreter computes each node from the values that the
artifact itself fed the node's kernel, so that a wrong kernel is named and no other. For `mlsdc bench gpu-check`.

Kernels are the same in all layers: of the layers that have a kernel the first two and the last are compared, so that a model of 8 billion
weights takes minutes and next to no memory.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlsdc.compiler.cli_gpu_ahead import ahead_lines
from mlsdc.compiler.cli_gpu_sampling import Found, sampling_lines
from mlsdc.compiler.graph import Graph, Input, Node, Weight
from mlsdc.compiler.interpret_state import fill_page
from mlsdc.compiler.ops_kv import PagedAttention
from mlsdc.runtime.bench.rig import Rig
from mlsdc.runtime.device.cuda import CudaLevel
from mlsdc.runtime.device.cuda_program import CudaProgram
from mlsdc.runtime.kv_format import to_bf16
from mlsdc.runtime.step import Array, Header
from mlsdc.runtime.weight_files import LevelWeights
from mlsdc.targets.nvidia_values import SequencePages, run_launches, stored_weight, wide_page

WIDE_PROMPT = 96  # rows of the prompt that every kernel is compared over: the tiles for many rows begin at 65
CHAIN = 8  # rows of the step behind it


@dataclass(frozen=True)
class KernelNumerics:
    """A kernel against the reference interpreter, on what the artifact itself fed it: the worst of its `nodes`, relative to the largest
    element, and what rounding allows there."""

    kernel: str
    nodes: int
    worst: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed


def kernel_numerics(rig: Rig, graph: Graph, notes: list[str]) -> list[KernelNumerics]:
    """Of every kernel of a prompt's step, of a chain's behind it, of the choices, of the commit, and of what is behind the choices. Without
    torch of the choices and what is behind them only, and a note."""
    rig._rng = np.random.default_rng(2)
    lines: dict[str, list[Found]] = defaultdict(list)
    try:
        import mlsdc.compiler.diff  # noqa: F401  (needs torch)
    except ImportError:
        notes.append("kernels were not compared one by one: the reference interpreter needs torch (pip install torch)")
        rig.set_rows(0, min(CHAIN, rig.limits.max_num_batched_tokens), drafted=False)
        rig.forward.run()
        compared: Iterator[Found] = sampling_lines(rig)
    else:
        compared = all_lines(rig, graph)
    for found in (compared, ahead_lines(rig)):
        for line in found:
            lines[line[0]].append(line)
    programs = rig.artifact.programs(rig.manifest.target_level.name, rig.device.target)  # type: ignore[attr-defined]
    nodes = {node for every in lines.values() for _, node, _, _ in every}
    beside = {launch.kernel for spec in programs.values() for launch in spec.launches if launch.node in nodes}
    if "commit" in lines:
        beside |= set(programs["commit"].kernels())
    left = sorted({kernel for spec in programs.values() for kernel in spec.kernels()} - set(lines) - beside)
    notes.append(f"not compared one by one: {', '.join(left) or 'none'}")
    worst = {kernel: max(every, key=lambda line: line[2] / max(line[3], 1e-30)) for kernel, every in lines.items()}
    return [KernelNumerics(kernel, len(lines[kernel]), node, float(np.nan_to_num(error, nan=np.inf)), allowed)
            for kernel, (_, node, error, allowed) in sorted(worst.items())]


def all_lines(rig: Rig, graph: Graph) -> Iterator[Found]:
    level, program, size = rig.memory, rig.forward, rig.geometry.page_size
    assert isinstance(level, CudaLevel)
    assert isinstance(program, CudaProgram)
    weights = rig.artifact.level_weights(rig.manifest.target_level.name, level.device.target.name)
    prompt = min(WIDE_PROMPT, rig.limits.max_num_batched_tokens, rig.limits.max_model_len // 2)
    chain = min(CHAIN, rig.limits.max_tree_nodes + 1)
    if rig.geometry.grouped and prompt >= size:
        prompt = prompt // size * size - min(2, (chain + 1) // 2)  # what is committed behind it, every second row, fills a page
    pages = SequencePages(level, rig.geometry, -(-(prompt + chain) // size))
    nodes = chosen(graph, program)
    for context, rows, drafted in ((0, prompt, False), (prompt, chain, True)):
        rig.set_rows(context, rows, drafted=drafted)
        buffers, out = level.buffers, rows if drafted else 1
        inputs = {"tokens": buffers.tokens[:rows].copy(), "positions": buffers.positions[:rows].copy(),
                  "out_rows": buffers.out_rows[:out].copy(), "kv": pages.state(), "tree": pages.tree()}
        native = {ran.node: (ran.kernels, ran.value) for ran in run_launches(program, graph, pages, nodes | read_by(graph, program, nodes))}
        yield from own_errors(graph, inputs, weights, native, nodes)
        if pages.recent is not None and not drafted:
            yield from ring_lines(rig, graph, nodes, pages.recent, prompt)
    yield from sampling_lines(rig)
    yield from commit_lines(rig) if pages.recent is None else wide_commit_lines(rig)


def chosen(graph: Graph, program: CudaProgram) -> set[str]:
    """Nodes to compare: all outside of layers, and those of the layers that are the first two or the last to launch some kernel."""
    layers: dict[str, list[int]] = defaultdict(list)
    for bound in program.launches:
        layer = layer_of(bound.launch.node)
        if layer is not None and layer not in layers[bound.launch.kernel]:
            layers[bound.launch.kernel].append(layer)
    wanted = {layer for found in layers.values() for layer in (*sorted(found)[:2], max(found))} | {None}
    return {node.name for node in graph if not isinstance(node.op, Input | Weight) and layer_of(node.name) in wanted}


def layer_of(node: str) -> int | None:
    found = re.match(r"layers\.(\d+)\.", node)
    return int(found[1]) if found else None


def read_by(graph: Graph, program: CudaProgram, nodes: Collection[str]) -> set[str]:
    """Launched nodes whose values the definitions of `nodes` start from."""
    launched, found = {bound.launch.node for bound in program.launches}, set[str]()
    left = [name for node in nodes for name in graph[node].inputs]
    while left:
        name = left.pop()
        if name in found or name in nodes or isinstance(graph[name].op, Input | Weight):
            continue
        found.add(name)
        if name not in launched:  # a view
            left += graph[name].inputs
    return found


def own_errors(graph: Graph, inputs: Mapping[str, Any], weights: LevelWeights, native: Mapping[str, tuple[tuple[str, ...], Any]],
               nodes: Collection[str]) -> Iterator[Found]:
    """Each node against its definition over native inputs. A weight is in memory while a node reads it, no longer."""
    import torch

    from mlsdc.compiler.diff import allowed, error, filled_right
    from mlsdc.compiler.interpret import check, evaluate, given
    from mlsdc.compiler.interpret_core import Context, Value
    from mlsdc.compiler.interpret_state import KvState

    context, values, sizes = Context(torch.float32), dict[str, Value](), dict[str, int]()

    def value_of(name: str) -> Value:
        if name not in values:
            value = native[name][1]
            values[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        return values[name]

    with torch.no_grad():
        for node in graph:
            if isinstance(node.op, Input):
                values[node.name] = given(node, inputs, no_weight, context)
                continue
            if isinstance(node.op, Weight) or (node.name not in nodes and node.name in native):
                continue
            if not all(isinstance(graph[name].op, Weight) or name in values or name in native for name in node.inputs):
                continue  # of a layer that is not compared, or fed by what cannot be read
            read = {name: given(graph[name], inputs, lambda one: stored_weight(weights, one), context)
                    if isinstance(graph[name].op, Weight) else value_of(name) for name in node.inputs}
            wanted = evaluate(node, read, context)
            check(node, wanted, sizes, context)
            if node.name not in native:
                values[node.name] = wanted
                continue
            kernels, found = native[node.name][0], value_of(node.name)
            if isinstance(found, KvState) and isinstance(wanted, KvState) and found.recent is not None:  # rows, then pages they fill
                yield kernels[0], node.name, error(replace_pool(found, wanted), wanted), allowed(node, wanted)
                yield kernels[-1], node.name, 0.0 if filled_right(found, wanted) else np.inf, 0.0
            else:
                yield kernels[-1], node.name, error(found, wanted), allowed(node, wanted)


def no_weight(node: Node) -> Any:
    raise KeyError(node.name)


def replace_pool(found: Any, wanted: Any) -> Any:
    """`found` with pages as its own 16-bit forms make them: what its rows are is asked, not what fills pages."""
    from dataclasses import replace

    pool = found.pool.copy()
    for index, layer in np.ndindex(len(pool), found.geometry.num_layers):
        fill_page(found.geometry, pool[index], layer, found.recent[index, layer])
    return replace(found, pool=pool)


def ring_lines(rig: Rig, graph: Graph, nodes: Collection[str], recent: Array, length: int) -> Iterator[Found]:
    """Of a grouped format: the first and the last tokens of a prompt of `length` lie in wide pages, bit for bit what rows were. `recent`
    is set to what lies there: the next step's attention is fed that."""
    tail, geometry = rig.geometry.tail, rig.geometry.wide
    assert tail is not None
    assert geometry is not None
    program, level = rig.forward, rig.memory
    assert isinstance(program, CudaProgram)
    assert isinstance(level, CudaLevel)
    pages = {place: wide_page(level, int(level.buffers.tail_table[0, place])) for place in range(tail.num_pages)}
    kept = [j for j in range(length) if j < tail.sinks or j >= length - tail.slots]
    for bound in program.launches:
        node = graph.by_name.get(bound.launch.node)
        if node is None or node.name not in nodes or not bound.launch.kernel.startswith("settle_kv"):
            continue
        assert isinstance(node.op, PagedAttention)
        layer, different = node.op.layer, []
        for j in kept:
            place, slot = tail.place(j)
            page, at = divmod(j, rig.geometry.page_size)
            for head in range(geometry.num_kv_heads):
                for which, x in enumerate(geometry.read(pages[place], layer, head)):
                    stored = to_bf16(x[slot])
                    different.append(stored != recent[page, layer, head, at, which])
                    recent[page, layer, head, at, which] = stored
        yield bound.launch.kernel, node.name, float(np.mean(different)), 0.0


def commit_lines(rig: Rig) -> Iterator[Found]:
    """Every second slot of the chain that was drafted last, copied behind the prompt: the share of the sequence's cached numbers that are
    not what they must be then."""
    level, size = rig.memory, rig.geometry.page_size
    buffers, context = level.buffers, int(level.buffers.seq_ctx[0])
    taken = range(0, int(buffers.header[Header.ROWS]), 2)
    pages = buffers.page_table[0, : (context + len(taken)) // size + 1].tolist()
    drafted = buffers.scratch_table[0, : rig.limits.scratch_pages(size)].tolist()
    wanted, slots = cached(rig, pages), cached(rig, drafted)
    for i, slot in enumerate(taken):
        buffers.commit_src[i] = drafted[slot // size] * size + slot % size
        buffers.commit_dst[i] = pages[(context + i) // size] * size + (context + i) % size
        wanted[..., context + i, :] = slots[..., slot, :]
    commit(rig, len(taken), 0)
    yield "commit", "commit", float((cached(rig, pages) != wanted).mean()), 0.0


def commit(rig: Rig, count: int, groups: int) -> None:
    header = rig.memory.buffers.header
    header[Header.COMMITS], header[Header.GROUPS] = count, groups
    rig.memory.programs["commit"].run()
    rig.device.synchronise()  # type: ignore[attr-defined]
    header[Header.COMMITS] = header[Header.GROUPS] = 0


def cached(rig: Rig, pages: list[int]) -> Array:
    """What pages hold, dequantised: f32[layers, kv heads, keys or values, tokens, d]."""
    geometry, read = rig.geometry, [rig.memory.read_page(page) for page in pages]
    return np.array([[[np.concatenate([geometry.read(page, layer, head)[which] for page in read]) for which in (0, 1)]
                      for head in range(geometry.num_kv_heads)] for layer in range(geometry.num_layers)])


def wide_commit_lines(rig: Rig) -> Iterator[Found]:
    """The same of a grouped format: slots go from scratch into the ring, and what is a page's last token fills the page from there."""
    level, tail, geometry, wide = rig.memory, rig.geometry.tail, rig.geometry, rig.geometry.wide
    assert tail is not None
    assert wide is not None
    buffers, context = level.buffers, int(level.buffers.seq_ctx[0])
    taken = range(0, int(buffers.header[Header.ROWS]), 2)
    ring, scratch = buffers.tail_table[0].tolist(), buffers.scratch_table[0].tolist()
    wanted = {page: sixteen(rig, page) for page in ring[: tail.num_pages]}
    slots = {page: sixteen(rig, page) for page in scratch}
    filled: list[tuple[int, int, Array]] = []
    for i, slot in enumerate(taken):
        place, at = tail.place(context + i)
        source, from_ = scratch[slot // tail.page_size], slot % tail.page_size
        buffers.commit_src[i] = source * tail.page_size + from_
        buffers.commit_dst[i] = ring[place] * tail.page_size + at
        wanted[ring[place]][:, :, at] = slots[source][:, :, from_]
        if (context + i + 1) % tail.group == 0:
            first = context + i + 1 - tail.group
            page = int(buffers.page_table[0, first // tail.group])
            buffers.group_page[len(filled)], buffers.group_seq[len(filled)], buffers.group_first[len(filled)] = page, 0, first
            filled.append((page, first, level.read_page(page).copy()))
    commit(rig, len(taken), len(filled))
    different = [(sixteen(rig, page) != values).mean() for page, values in wanted.items()]
    yield "commit", "commit", float(np.mean(different)), 0.0
    for page, first, content in filled:
        places = [tail.place(first + i) for i in range(tail.group)]
        tokens = np.stack([wanted[ring[place]][:, :, at] for place, at in places], 2)  # u16[layers, kv heads, tokens, 2, d]
        for layer in range(geometry.num_layers):
            fill_page(geometry, content, layer, tokens[layer])
        yield "commit", "commit of a page", float((level.read_page(page) != content).mean()), 0.0


def sixteen(rig: Rig, page: int) -> Array:
    """A wide page's numbers: u16[layers, kv heads, tokens, keys or values, d]."""
    level, geometry = rig.memory, rig.geometry.wide
    assert isinstance(level, CudaLevel)
    assert geometry is not None
    data = wide_page(level, page)
    return np.stack([np.stack([np.stack([to_bf16(x) for x in geometry.read(data, layer, head)], 1)
                               for head in range(geometry.num_kv_heads)]) for layer in range(geometry.num_layers)])
