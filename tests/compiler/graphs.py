"""Random small graphs and modules for properties of the IR."""

from __future__ import annotations

from hypothesis import strategies as st

from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.ops_core import ArgMax, Binary, Cast, Cat, Reduce, Reshape, Scalar, Slice, Softmax, Transpose, Unary
from mlsdc.compiler.ops_kv import AppendKv, ReadKv, TreeMask
from mlsdc.compiler.ops_nn import Linear, RmsNorm
from mlsdc.compiler.ops_quant import LinearQ, Quantise
from mlsdc.compiler.types import Dim, DType, KvType, TensorType, TreeType
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.manifest import Plan

ROWS, CTX, WIDTH = Dim("rows", 1, 64), Dim("ctx", 1, 128), 64
GEOMETRY = KvGeometry("bf16", 16, 2, 2, 32)
KV = KvType("bf16", 16, 2, 2, 32)
F32 = TensorType(DType.F32, (ROWS, WIDTH))

paths = st.sampled_from(["x", "embed", "layers.0.attn.q", "w.up", "0", "a-b/c"])
anything = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
numbers = st.floats(allow_nan=False)


@st.composite
def graphs(draw: st.DrawFn, *, odd_names: bool = True) -> Graph:
    """Chains of f32[rows, 64] values, with a few ops of every kind hung on them; all names unique, some of them odd."""
    names = st.one_of(paths, anything) if odd_names else paths
    builder = Builder(draw(names))

    taken: set[str] = set()

    def fresh() -> str:
        name = draw(names)
        while name in taken:
            name += "_"
        taken.add(name)
        return name

    values = [builder.input(fresh(), F32)]
    tree = builder.input(fresh(), TreeType())
    kv = builder.input(fresh(), KV)
    others: list[str] = [kv]
    for _ in range(draw(st.integers(0, 10))):
        x, y, name = draw(st.sampled_from(values)), draw(st.sampled_from(values)), fresh()
        origin = draw(st.one_of(st.just(""), anything))
        kind = draw(st.integers(0, 12))
        if kind == 0:
            values.append(builder.add(name, Unary(draw(st.sampled_from(["neg", "tanh", "silu"]))), x, origin=origin))
        elif kind == 1:
            values.append(builder.add(name, Binary("add"), x, y, origin=origin))
        elif kind == 2:
            values.append(builder.add(name, Scalar("mul", draw(numbers)), x, origin=origin))
        elif kind == 3:
            weight = builder.weight(fresh(), TensorType(DType.F32, (WIDTH, WIDTH)), *draw(st.lists(anything, max_size=2)))
            values.append(builder.add(name, Linear(), x, weight, origin=origin))
        elif kind == 4:
            packed = builder.weight(fresh(), TensorType(draw(st.sampled_from([DType.Q8, DType.Q4])), (WIDTH, WIDTH)))
            quantised = builder.add(fresh(), Quantise(), x, origin=origin)
            values.append(builder.add(name, LinearQ(residual=True), quantised, packed, y))
        elif kind == 5:
            norm = builder.weight(fresh(), F32.with_shape(WIDTH))
            values.append(builder.add(name, RmsNorm(draw(st.floats(1e-9, 1e-3)), draw(numbers)), x, norm, origin=origin))
        elif kind == 6:
            halves = [builder.add(fresh(), Slice(-1, *part), x) for part in ((0, 32), (32, WIDTH))]
            values.append(builder.add(name, Cat(), *halves[::-1], origin=origin))
        elif kind == 7:
            values.append(builder.add(name, Softmax(), x, origin=origin))
        elif kind == 8:
            others.append(builder.add(name, draw(st.sampled_from([ArgMax(), ArgMax(limit=5), Transpose(0, -1), Reduce("max", 0)])), x))
        elif kind == 9:
            others.append(builder.add(name, Cast(draw(st.sampled_from([DType.BF16, DType.F16]))), x, origin=origin))
        elif kind == 10:
            heads = builder.add(fresh(), Reshape((-1, 2, 32)), x)
            kv = builder.add(name, AppendKv(draw(st.integers(0, 1))), kv, heads, heads, tree, origin=origin)
            others.append(kv)
        elif kind == 11:
            others.append(builder.add(name, ReadKv(0, draw(st.sampled_from(["keys", "values"])), ROWS, CTX), kv, tree))
        else:
            others.append(builder.add(name, TreeMask(ROWS, CTX, draw(st.integers(0, 9))), tree, origin=origin))
    chosen = draw(st.lists(st.tuples(names, st.sampled_from(values + others)), max_size=3, unique_by=lambda pair: pair[0]))
    graph = Graph(builder.name, tuple(builder.nodes.values()), tuple(chosen))
    graph.verify()
    return graph


params = st.dictionaries(paths, st.one_of(st.integers(), st.booleans(), anything, st.floats(-9, 9)), max_size=3)


@st.composite
def modules(draw: st.DrawFn) -> Module:
    levels = []
    for name in draw(st.lists(anything, min_size=1, max_size=2, unique=True)):
        programs = draw(st.dictionaries(paths, graphs(), max_size=2))
        levels.append(LevelModule(name, draw(paths), draw(params), programs, draw(st.sampled_from([None, GEOMETRY]))))
    return Module(draw(anything), tuple(levels), draw(st.sampled_from([None, Plan(8, 3)])))
