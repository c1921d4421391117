"""Run nodes through NvidiaTarget's lowering and Triton's interpreter: `python -m tests.targets.interpret_attention IN OUT`.

A process of its own, because triton decides at import whether it interprets, and a kernel that reads wildly kills its process.
Every array lies between guard zones of NaN bytes, and what a kernel must not write is compared afterwards.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.ops import Op
from mlsdc.compiler.ops_kv import PagedAttention
from mlsdc.compiler.types import Dim, DType, KvType, TensorType, TreeType, Type
from mlsdc.runtime.program import InputArg, PoolArg
from mlsdc.runtime.step import INPUTS, Limits
from mlsdc.targets.nvidia import NvidiaTarget
from mlsdc.targets.protocol import Call, Lowering, TempRef, ValueRef
from mlsdc.targets.triton_build import render
from tests.targets.attention_vectors import POISON, Case, Shape

Array = npt.NDArray[Any]
GUARD = 4096


@dataclass(frozen=True)
class Job:
    """A node over a case's step buffers and pool. `values` are its tensors by input name; the node is called `result`."""

    name: str
    case: Case
    graph: Graph
    values: Mapping[str, Array]
    reverse: bool = False
    exact: bool = True


@dataclass(frozen=True)
class Outcome:
    """`result` is the raw result buffer, `pool` the page pool, u8; `harmed` names changed inputs and arrays with a broken guard zone."""

    result: Array
    pool: Array
    harmed: tuple[str, ...]

    def rows(self, case: Case) -> Array:
        shape = case.shape
        return self.result.view(np.float32).reshape(-1, shape.heads, shape.head_dim)[: case.num_rows]


def node_graph(limits: Limits, op: Op, **inputs: Type | tuple[int, ...]) -> Graph:
    """A graph of one node, `result`; an input given as a shape is f32 with rows in front."""
    graph = Builder("one node")
    rows = Dim("rows", 1, limits.max_num_batched_tokens)
    for name, type_ in inputs.items():
        graph.input(name, TensorType(DType.F32, (rows, *type_)) if isinstance(type_, tuple) else type_)
    return graph.build(out=graph.add("result", op, *inputs))


def kv_type(shape: Shape) -> KvType:
    return KvType(shape.format, shape.page_size, shape.num_layers, shape.kv_heads, shape.head_dim)


def attention_graph(shape: Shape, limits: Limits, quantise: bool = False) -> Graph:
    op = PagedAttention(shape.layer, shape.scale, shape.window, shape.softcap, quantise, shape.sinks, shape.coarse)
    return node_graph(limits, op, q=(shape.heads, shape.head_dim), kv=kv_type(shape), tree=TreeType())


def attention(name: str, case: Case, quantise: bool = False) -> Job:
    return Job(name, case, attention_graph(case.shape, case.buffers.limits, quantise), {"q": case.q})


def lowered(graph: Graph, limits: Limits, gpu: str = "h100", exact: bool = True) -> Lowering:
    lowering = NvidiaTarget(gpu, limits, exact).lower(graph["result"], graph)
    assert isinstance(lowering, Lowering), lowering
    return lowering


class Memory:
    """Arrays between guard zones, found again by what a call's argument names."""

    def __init__(self, job: Job, lowering: Lowering) -> None:
        inputs = {**job.values, "pool": job.case.pool, **{name: getattr(job.case.buffers, name) for name in INPUTS}}
        self.before = {name: array.copy().reshape(-1).view(np.uint8) for name, array in inputs.items()}
        sizes = {"result": lowering.result_bytes, **lowering.temps}
        self.raw = {name: np.full(2 * GUARD + len(data), POISON, np.uint8) for name, data in self.before.items()}
        self.raw |= {name: np.full(2 * GUARD + size, POISON, np.uint8) for name, size in sizes.items()}
        for name, data in self.before.items():
            self.bytes(name)[:] = data

    def bytes(self, name: str) -> Array:
        return self.raw[name][GUARD:-GUARD]

    def argument(self, arg: Any, type_: str) -> Array:
        """Bytes of a call's argument, as an array of the type its ABI entry says."""
        match arg:
            case ValueRef(value):
                data = self.bytes(value)
            case TempRef(temp):
                data = self.bytes(temp)
            case InputArg(name):
                data = self.bytes(name)
            case PoolArg(offset):
                data = self.bytes("pool")[offset:]
            case _:
                raise ValueError(f"unexpected argument {arg}")
        return data.view({"*f32": "f4", "*i32": "i4", "*i64": "i8", "*u8": "u1", "*i8": "i1"}[type_])

    def harmed(self) -> tuple[str, ...]:
        guards = [name for name, raw in self.raw.items() if not (np.all(raw[:GUARD] == POISON) and np.all(raw[-GUARD:] == POISON))]
        changed = [name for name, data in self.before.items() if not np.array_equal(self.bytes(name), data)]
        return tuple(sorted({*guards, *changed}))


def interpret(job: Job, folder: Path) -> Outcome:
    from mlsdc.targets.triton_interpreter import launch

    lowering = lowered(job.graph, job.case.buffers.limits, exact=job.exact)
    memory = Memory(job, lowering)
    for call in lowering.calls:
        launch(source_of(call, folder), call.spec.key, programs(call, job), [
            memory.argument(arg, entry.split(": ")[1]) for arg, entry in zip(call.args, call.spec.abi, strict=True)], reverse=job.reverse)
    return Outcome(memory.bytes("result").copy(), memory.bytes("pool").copy(), memory.harmed())


def programs(call: Call, job: Job) -> int:
    """Programs of a launch for the most rows there can be: those beyond the step's must return at once."""
    rows = job.case.buffers.limits.max_num_batched_tokens
    return call.grid * (-(-rows // call.grain) if call.count else 1)


def source_of(call: Call, folder: Path) -> Path:
    path = folder / f"k_{call.spec.key}.py"
    path.write_text(render(call.spec))
    return path


def conversions() -> dict[str, Array]:
    """What the interpreter makes of numbers that are hard to round, as Triton ships it and patched: name -> result."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    from mlsdc.targets.triton_interpreter import decode, patch

    values = np.random.default_rng(0).standard_normal(4096, np.float32)
    codes = np.arange(256, dtype=np.uint8)
    found = {"values": values}
    for state in ("stock", "patched"):
        if state == "patched":
            patch()
        handle = TensorHandle(values, tl.float32)
        bf16 = interpreter_builder.cast_impl(handle, tl.bfloat16)
        found[f"{state} bf16"] = bf16.data
        found[f"{state} square"] = interpreter_builder.create_fmul(bf16, bf16).data
        found[f"{state} e4m3"] = interpreter_builder.create_fp_to_fp(handle, tl.float8e4nv, None).data
        found[f"{state} e5m2"] = interpreter_builder.create_fp_to_fp(handle, tl.float8e5, None).data
    found["decoded e4m3"] = decode(TensorHandle(codes, tl.float8e4nv))
    return found


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    jobs: list[Job] = pickle.loads(source.read_bytes())
    converted = conversions()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = {job.name: interpret(job, Path(folder)) for job in jobs}
    target.write_bytes(pickle.dumps((converted, outcomes)))


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    # Pickled classes are known by the module's name, not as __main__.
    from tests.targets.interpret_attention import main as run

    run()
