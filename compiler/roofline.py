"""What a step costs on a machine, from its graph: bytes and operations of every node, and the time a roofline model gives them.

A node takes `max(bytes / (bandwidth * reach), operations / (peak * reach)) + launches * launch time`. Nothing here was measured on a card:
bandwidths and peaks are those of NVIDIA's data sheets (dense, SXM where there is one), and the reaches are goals until
`mlsdc bench gpu-check` replaces them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from mlsdc.compiler.graph import Graph, Input, Node, Weight
from mlsdc.compiler.ops_core import ArgMax, GatherRows, Reshape
from mlsdc.compiler.ops_kv import AppendKv, PagedAttention
from mlsdc.compiler.ops_moe import ExpertLinear, ExpertLinearQ, pairs_alone
from mlsdc.compiler.ops_nn import Embed, Gated, Linear
from mlsdc.compiler.ops_quant import AppendKvSlice, Calibrated, GatedF8, GatedQuantise, LinearF8, LinearQ
from mlsdc.compiler.types import Dim, DType, KvType, TensorType, Type
from mlsdc.runtime.kv_format import FORMATS, KvGeometry, format_named

__all__ = ["KV_BITS", "MACHINES", "WEIGHT_BITS", "Cost", "Load", "Machine", "step_costs", "step_seconds", "weight_bytes"]


@dataclass(frozen=True)
class Machine:
    """`bandwidth` bytes/s of its memory, `peaks` operations/s of its tensor cores by operand, `memory` bytes.

    `reach` is the part of the bandwidth that a good kernel gets, `compute_reach` the part of a peak; `launch_s` a kernel of a CUDA graph.
    """

    name: str
    memory: float
    bandwidth: float
    peaks: Mapping[str, float]
    reach: float = 0.85
    compute_reach: float = 0.6
    launch_s: float = 1.5e-6


def _gpu(name: str, gib: float, gb_s: float, bf16: float, int8: float, fp8: float = 0.0) -> Machine:
    """Peaks in 10^12 operations a second; without fp8 units fp8 numbers are multiplied as bf16."""
    return Machine(name, gib * 2**30, gb_s * 1e9, {"bf16": bf16 * 1e12, "int8": int8 * 1e12, "fp8": (fp8 or bf16) * 1e12})


MACHINES: dict[str, Machine] = {machine.name: machine for machine in (
    _gpu("b200", 180, 8000, 2250, 4500, 4500),
    _gpu("h200", 141, 4800, 989, 1979, 1979),
    _gpu("h100", 80, 3350, 989, 1979, 1979),
    _gpu("rtx5090", 32, 1792, 209, 838, 419),
    _gpu("l40s", 48, 864, 362, 733, 733),
    _gpu("rtx4090", 24, 1008, 165, 660, 330),
    _gpu("a10", 24, 600, 125, 250),
    _gpu("a100", 80, 2039, 312, 624),
)}

WEIGHT_BITS = {DType.F32: 32.0, DType.F16: 16.0, DType.BF16: 16.0, DType.Q8: 8.5, DType.Q4: 5.0, DType.F8: 8.0}
VALUE_BYTES = {DType.A8: 1.125, DType.A16: 1.25, DType.BF16: 2.0, DType.BOOL: 1.0}
# Formats of the design that a graph may not have yet: bits an element with groups of 64 (the 16-bit tail is left out).
PLANNED_BITS = {"int4": 4.5, "int3": 3.5, "int2": 2.5}
KV_BITS = {name: format_named(name).bits_per_element(64, 128) for name in FORMATS} | {
    name: bits for name, bits in PLANNED_BITS.items() if name not in FORMATS}


@dataclass(frozen=True)
class Load:
    """A step: `rows` of all sequences together, `seqs` sequences of `context` cached tokens each, `out` rows that want logits (0: all).

    `kv_bits`, if not 0, stands for the cache's own bits an element.
    """

    rows: int
    seqs: int
    context: int
    out: int = 0
    kv_bits: float = 0.0

    def of(self, dim: Dim) -> int:
        return (self.out or self.rows) if dim.name == "out" else self.rows


@dataclass(frozen=True)
class Cost:
    """Of one node: bytes of weights, of the KV cache and of values that go through memory; operations, and on what they run."""

    node: str
    op: str
    weights: float = 0.0
    kv: float = 0.0
    values: float = 0.0
    operations: float = 0.0
    unit: str = "bf16"
    launches: int = 1
    terms: int = 1  # times its operations are done, where a number is the sum of several that the unit takes

    @property
    def bytes(self) -> float:
        return self.weights + self.kv + self.values

    def seconds(self, machine: Machine) -> float:
        memory = self.bytes / (machine.bandwidth * machine.reach)
        computing = self.terms * self.operations / (machine.peaks[self.unit] * machine.compute_reach)
        return max(memory, computing) + self.launches * machine.launch_s


def step_costs(graph: Graph, load: Load) -> list[Cost]:
    """Costs of the nodes that launch something, in the graph's order."""
    return [node_cost(node, graph, load) for node in graph if not isinstance(node.op, Input | Weight | Reshape | Calibrated)]


def step_seconds(costs: Iterable[Cost], machine: Machine) -> float:
    """A step's time on the machine, host time left out."""
    return sum(cost.seconds(machine) for cost in costs)


def node_cost(node: Node, graph: Graph, load: Load) -> Cost:
    inputs = [graph[name] for name in node.inputs]
    weights = sum(weight_bytes(i.type) for i in inputs if isinstance(i.op, Weight))
    values = sum(value_bytes(i.type, load) for i in inputs if not isinstance(i.op, Weight)) + value_bytes(node.type, load)
    match node.op:
        case Linear() | LinearQ() | GatedQuantise() | Gated() | LinearF8() | GatedF8():
            weight = inputs[1].type
            assert isinstance(weight, TensorType)
            unit, launches, terms = "int8", 1, 1
            if isinstance(node.op, LinearF8 | GatedF8):
                unit, launches = "fp8", 2  # rows are quantised by a launch of their own
            elif isinstance(node.op, Linear | Gated):
                unit, terms = "bf16", 2  # whatever the weights: they become bf16, and rows of f32 are the sum of two such numbers
            operations = 2.0 * rows_of(node.type, load) * elements(weight)
            return Cost(node.name, node.op.opname, weights, 0.0, values, operations, unit, launches, terms)
        case ExpertLinear(experts) | ExpertLinearQ(experts):
            weight, slots = inputs[1].type, elements(inputs[2].type)
            assert isinstance(weight, TensorType)
            pairs = rows_of(node.type, load) * slots
            read = weights * min(experts, pairs) / experts  # experts hit, each once: at most all of them
            unit = "int8" if isinstance(node.op, ExpertLinearQ) else "bf16"
            launches = 1 if load.rows <= pairs_alone(experts, slots) else 2
            return Cost(node.name, node.op.opname, read, 0.0, values, 2.0 * pairs * elements(weight) / experts, unit, launches)
        case Embed():
            table = inputs[1].type
            assert isinstance(table, TensorType)
            row = weight_bytes(table) / int(table.shape[0])  # type: ignore[arg-type]
            return Cost(node.name, node.op.opname, row * load.rows, 0.0, values)
        case AppendKv(layer) | AppendKvSlice(layer):
            return Cost(node.name, node.op.opname, 0.0, load.rows * token_bytes(node.type, layer, load), values)
        case PagedAttention(layer) as attention:
            q = inputs[0].type
            assert isinstance(q, TensorType)
            seen = min(load.context, attention.window) if attention.window else load.context
            width = int(q.shape[1]) * int(q.shape[2])  # type: ignore[arg-type]
            operations = 4.0 * load.rows * width * seen
            read = load.seqs * seen * token_bytes(inputs[1].type, layer, load)
            return Cost(node.name, node.op.opname, 0.0, read, values, operations, launches=2)
        case GatherRows():
            return Cost(node.name, node.op.opname, values=2 * value_bytes(node.type, load))
        case ArgMax():
            return Cost(node.name, node.op.opname, values=values, launches=2)
    return Cost(node.name, node.op.opname, weights, 0.0, values)


def elements(type_: Type) -> int:
    assert isinstance(type_, TensorType)
    return prod(size for size in type_.shape if isinstance(size, int))


def weight_bytes(type_: Type) -> float:
    """Bytes of a weight as packed, scales included."""
    assert isinstance(type_, TensorType)
    return elements(type_) * WEIGHT_BITS.get(type_.dtype, 32.0) / 8


def rows_of(type_: Type, load: Load) -> int:
    assert isinstance(type_, TensorType)
    return load.of(type_.shape[0]) if isinstance(type_.shape[0], Dim) else 1


def value_bytes(type_: Type, load: Load) -> float:
    """Bytes of a value's rows; 0 for the cache and the tree."""
    if not isinstance(type_, TensorType):
        return 0.0
    return rows_of(type_, load) * elements(type_) * VALUE_BYTES.get(type_.dtype, 4.0)


def token_bytes(type_: Type, layer: int, load: Load) -> float:
    """Bytes of one token's keys and values in a layer."""
    assert isinstance(type_, KvType)
    if load.kv_bits:
        return 2 * type_.num_kv_heads * type_.head_dim * load.kv_bits / 8
    geometry = KvGeometry(type_.format, type_.page_size, type_.num_layers, type_.num_kv_heads, type_.head_dim)
    return type_.num_kv_heads * geometry.layer_bytes(layer)[2] / type_.page_size
