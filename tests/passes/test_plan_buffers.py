"""The arena: what is alive is never overwritten, whatever the graph."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from mlsdc.compiler.graph import Builder, Graph, Input, Node, Weight
from mlsdc.compiler.ops_core import Binary, Reshape, Unary
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.passes.plan_buffers import ALIGNMENT, Interval, aligned, first_fit, plan_buffers
from mlsdc.passes.select_kernels import Selected, select_kernels
from mlsdc.targets.protocol import Declined, Lowering
from tests.passes.lowered import PretendTarget, call

INTERVALS = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 30), st.integers(0, 10)).map(lambda t: Interval(t[0], t[1], t[1] + t[2])), max_size=40)
ROWS = Dim("rows", 1, 8)


@given(INTERVALS)
@settings(max_examples=200)
def test_buffers_that_live_together_lie_apart_and_on_cache_lines(intervals: list[Interval]) -> None:
    size = first_fit(intervals)
    for i, one in enumerate(intervals):
        assert one.offset % ALIGNMENT == 0
        assert 0 <= one.offset <= one.offset + one.bytes <= size
        for other in intervals[:i]:
            if one.start <= other.end and other.start <= one.end:
                assert one.offset + one.bytes <= other.offset or other.offset + other.bytes <= one.offset
    assert size <= sum(aligned(i.bytes) for i in intervals)
    assert size >= max((sum(i.bytes for i in intervals if i.start <= step <= i.end) for step in range(41)), default=0)


@given(INTERVALS)
def test_the_same_buffers_are_placed_the_same_way(intervals: list[Interval]) -> None:
    again = [replace(i) for i in intervals]
    assert first_fit(intervals) == first_fit(again)
    assert intervals == again


def test_buffers_that_never_meet_share_their_place() -> None:
    intervals = [Interval(640, i, i) for i in range(10)]
    assert first_fit(intervals) == 640


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Graph, PretendTarget]:
    """Random dataflow of elementwise ops and views over rows of several widths; some nodes want scratch, some would work in place."""
    b = Builder("random")
    widths = {b.input("x", TensorType(DType.F32, (ROWS, 16))): 16, b.weight("w", TensorType(DType.F32, (8, 16))): 0}
    values = ["x"]
    lowerings: dict[str, tuple[dict[str, int], str | None]] = {}
    for i in range(draw(st.integers(1, 25))):
        source = draw(st.sampled_from(values[-6:]))
        kind = draw(st.sampled_from(["unary", "unary", "binary", "view"]))
        name = f"n{i}"
        if kind == "view":
            b.add(name, Reshape((-1, 4, 4)) if len(shape(b, source)) == 2 else Reshape((-1, 16)), source)
        elif kind == "binary":
            others = [v for v in values if shape(b, v) == shape(b, source)]
            b.add(name, Binary("add"), source, draw(st.sampled_from(others)))
        else:
            b.add(name, Unary("exp"), source)
        values.append(name)
        temps = draw(st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 900), max_size=2))
        lowerings[name] = temps, draw(st.sampled_from([None, *b.nodes[name].inputs]))
    outputs = draw(st.lists(st.sampled_from(values[1:]), min_size=1, max_size=3, unique=True))
    graph = b.build(**{f"o{i}": value for i, value in enumerate(outputs)})

    def change(node: Node, lowering: Lowering) -> Lowering | Declined:
        if lowering.alias_of is not None:
            return lowering
        temps, in_place = lowerings[node.name]
        return replace(lowering, calls=(call(node, *temps),), temps=temps, in_place_of=in_place)

    prologue = (Lowering((), 0, {"work": draw(st.integers(1, 500))}),) if draw(st.booleans()) else ()
    assert widths
    return graph, PretendTarget(change, prologue)


def shape(b: Builder, value: str) -> tuple[object, ...]:
    type_ = b.nodes[value].type
    assert isinstance(type_, TensorType)
    return type_.shape


@given(graphs())
@settings(max_examples=100)
def test_every_value_is_whole_whenever_it_is_read(case: tuple[Graph, PretendTarget]) -> None:
    """Play the program with bytes that say whose they are."""
    graph, target = case
    selected = select_kernels(graph, target)
    placement = plan_buffers(graph, selected)
    arena: list[str | None] = [None] * placement.arena_bytes
    root = roots(graph, selected)

    def write(start: int, size: int, owner: str) -> None:
        assert start % ALIGNMENT == 0
        assert start + size <= len(arena)
        arena[start : start + size] = [owner] * size

    def check(value: str) -> None:
        if root[value] in sizes:
            start = placement.values[value]
            assert arena[start : start + sizes[root[value]]] == [root[value]] * sizes[root[value]], f"{value} was overwritten"

    sizes = {node.name: lowering.result_bytes for node, lowering in selected.nodes if lowering.result_bytes}
    for lowering in selected.prologue:
        for name, size in lowering.temps.items():
            write(placement.temps["", name], size, f"work {name}")
    for node, lowering in selected.nodes:
        for value in node.inputs:
            check(value)
        for name, size in lowering.temps.items():
            write(placement.temps[node.name, name], size, f"{node.name} {name}")
        for value in node.inputs:  # scratch overwrites no input
            check(value)
        if lowering.result_bytes:
            write(placement.values[node.name], lowering.result_bytes, node.name)
            for name, size in lowering.temps.items():  # nor the result the scratch
                start = placement.temps[node.name, name]
                assert arena[start : start + size] == [f"{node.name} {name}"] * size
    for _, value in graph.outputs:
        check(value)
    for lowering in selected.prologue:
        for name, size in lowering.temps.items():
            start = placement.temps["", name]
            assert arena[start : start + size] == [f"work {name}"] * size


def roots(graph: Graph, selected: Selected) -> dict[str, str]:
    found = {node.name: node.name for node in graph if isinstance(node.op, Input | Weight)}
    for node, lowering in selected.nodes:
        found[node.name] = found[lowering.alias_of] if lowering.alias_of else node.name
    return found


@given(graphs())
def test_an_input_that_is_read_again_is_not_worked_on_in_place(case: tuple[Graph, PretendTarget]) -> None:
    graph, target = case
    selected = select_kernels(graph, target)
    placement, root = plan_buffers(graph, selected), roots(graph, selected)
    kept = {root[value] for _, value in graph.outputs}
    order = [node.name for node, _ in selected.nodes]
    for node, lowering in selected.nodes:
        source = root.get(lowering.in_place_of or "", "")
        if not lowering.result_bytes or source not in placement.values or placement.values[node.name] != placement.values[source]:
            continue
        readers = [user.name for user, _ in selected.nodes if source in (root[i] for i in user.inputs)]
        later = [name for name in readers if order.index(name) > order.index(node.name)]
        assert not later
        assert source not in kept


def straight(in_place: bool) -> Graph:
    b = Builder("straight")
    x = b.input("x", TensorType(DType.F32, (ROWS, 16)))
    for i in range(6):
        x = b.add(f"n{i}", Unary("exp"), x)
    return b.build(out=x)


def test_a_chain_in_place_needs_one_buffer_and_a_chain_of_copies_two() -> None:
    def change(node: Node, lowering: Lowering) -> Lowering | Declined:
        return replace(lowering, in_place_of=node.inputs[0])

    graph = straight(True)
    assert plan_buffers(graph, select_kernels(graph, PretendTarget(change))).arena_bytes == 8 * 16 * 4
    assert plan_buffers(graph, select_kernels(graph, PretendTarget())).arena_bytes == 2 * 8 * 16 * 4


def test_a_larger_result_never_takes_over_a_smaller_buffer() -> None:
    def change(node: Node, lowering: Lowering) -> Lowering | Declined:
        return replace(lowering, in_place_of=node.inputs[0], result_bytes=100 * (1 + int(node.name[1:])))

    graph = straight(True)
    placement = plan_buffers(graph, select_kernels(graph, PretendTarget(change)))
    assert all(placement.values[f"n{i}"] != placement.values[f"n{i + 1}"] for i in range(5))


def test_choices_have_no_place_in_the_arena() -> None:
    b = Builder("choose")
    x = b.input("x", TensorType(DType.F32, (ROWS, 16)))
    graph = b.build(choices=b.add("choices", Unary("exp"), x))
    placement = plan_buffers(graph, select_kernels(graph, PretendTarget()))
    assert placement.values == {}
    assert placement.arena_bytes == 0
