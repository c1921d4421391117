"""A graph as a launch list: every argument is an address that a device can bind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.graph import Builder, Graph, Node
from mlsdc.compiler.ops_core import ArgMax, Binary, Reshape, Unary
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.passes.emit_program import emit_lowering, emit_program, merge_specs
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.program import ArenaArg, InputArg, IntArg, PoolArg, ProgramSpec, WeightArg
from mlsdc.runtime.step import Limits
from mlsdc.targets.cpu import CpuTarget
from mlsdc.targets.cpu_isa import ISAS
from mlsdc.targets.protocol import Call, Declined, KernelSpec, Lowering, TempRef, ValueRef
from tests.passes.graphs import TINY
from tests.passes.lowered import Params, PretendTarget, call
from tests.passes.steps import compiled

LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, max_logit_rows=64, max_tree_nodes=15)
CPU = CpuTarget(ISAS["cpu-x86-64-v4"], LIMITS)
ROWS = Dim("rows", 1, 8)
WHOLE = replace(TINY, mlp=128)  # gated tiles of 64 columns


def head() -> Graph:
    """tokens (as numbers) + w -> logits, choices"""
    b = Builder("head")
    x, w = b.input("tokens", TensorType(DType.F32, (ROWS, 16))), b.weight("w", TensorType(DType.F32, (16,)))
    logits = b.add("logits", Binary("add"), x, w)
    return b.build(logits=logits, choices=b.add("choice", ArgMax(), logits))


def test_arguments_are_weights_inputs_arena_and_the_choices_buffer() -> None:
    spec, kernels = emit_program(head(), PretendTarget(), "forward", "target")
    add, choose = spec.launches
    assert add.args == (InputArg("tokens"), WeightArg("w"), ArenaArg(0))
    assert choose.args == (ArenaArg(0), InputArg("choices"))
    assert (add.node, add.kernel, choose.kernel) == ("logits", "binary", "argmax")
    assert [kernel.key for kernel in kernels] == ["binary", "argmax"]


def test_results_but_choices_can_be_tapped_at_their_largest_size() -> None:
    spec, _ = emit_program(head(), PretendTarget(), "forward", "target")
    assert {name: (tap.arena, tap.dtype, tap.shape) for name, tap in spec.taps.items()} == {"logits": (0, "f4", (8, 16))}


def test_a_view_has_the_address_of_what_it_views() -> None:
    b = Builder("views")
    x, w = b.input("tokens", TensorType(DType.F32, (ROWS, 16))), b.weight("w", TensorType(DType.F32, (8, 16)))
    y = b.add("y", Unary("exp"), x)
    of_value = b.add("of_value", Unary("exp"), b.add("v1", Reshape((-1, 4, 4)), y))
    of_input = b.add("of_input", Unary("exp"), b.add("v3", Reshape((-1, 4, 4)), b.add("v2", Reshape((-1, 2, 8)), x)))
    of_weight = b.add("of_weight", Unary("exp"), b.add("v4", Reshape((8, 4, 4)), w))
    graph = b.build(a=of_value, b=of_input, c=of_weight, d=y)
    sources = {launch.node: launch.args[0] for launch in emit_program(graph, PretendTarget(), "forward", "target")[0].launches}
    launches = {launch.node: launch for launch in emit_program(graph, PretendTarget(), "forward", "target")[0].launches}
    assert sources["of_value"] == launches["y"].args[-1]
    assert sources["of_input"] == InputArg("tokens")
    assert sources["of_weight"] == WeightArg("w")


def test_choices_seen_through_a_view_are_written_to_their_buffer() -> None:
    b = Builder("viewed")
    x = b.input("tokens", TensorType(DType.F32, (ROWS, 16)))
    graph = b.build(choices=b.add("flat", Reshape((-1, 2, 8)), b.add("choice", Unary("exp"), x)))
    (launch,) = emit_program(graph, PretendTarget(), "forward", "target")[0].launches
    assert launch.args == (InputArg("tokens"), InputArg("choices"))


def test_offsets_and_scratch_are_added_to_the_places_they_are_in() -> None:
    def change(node: Node, lowering: Lowering) -> Lowering | Declined:
        made = replace(call(node, "t", "work"), args=(*call(node).args, ValueRef(node.name, 128), TempRef("t"), TempRef("work"), IntArg(3)))
        return replace(lowering, calls=(made,), temps={"t": 10})

    plan = Call(KernelSpec("none", Params("plan"), ()), 1, None, (TempRef("work"),))
    target = PretendTarget(change, (Lowering((plan,), 0, {"work": 100}),))
    spec, _ = emit_program(head(), target, "forward", "target")
    first, add, choose = spec.launches
    assert (first.node, first.kernel) == ("none", "plan")
    at = {arg.arena for launch in spec.launches for arg in launch.args if isinstance(arg, ArenaArg)}
    assert all(offset % 64 == 0 for offset in at)
    assert add.args[2] == ArenaArg(spec.taps["logits"].arena)
    assert add.args[3] == ArenaArg(spec.taps["logits"].arena + 128)
    assert add.args[5] == choose.args[-2] == first.args[0]  # the prologue's scratch, for everybody
    assert add.args[-1] == IntArg(3)
    assert spec.arena_bytes >= 8 * 16 * 4 + 128


def test_an_input_that_is_no_step_input_is_an_error_with_its_name() -> None:
    b = Builder("bad")
    graph = b.build(out=b.add("y", Unary("exp"), b.input("hidden", TensorType(DType.F32, (ROWS, 16)))))
    with pytest.raises(CompileError, match="%y: reads input 'hidden', which is not a step input"):
        emit_program(graph, PretendTarget(), "forward", "target")


def test_a_declined_node_is_an_error() -> None:
    with pytest.raises(CompileError, match="declines %logits: not today"):
        emit_program(head(), PretendTarget(lambda node, lowering: Declined("not today")), "forward", "target")


def test_a_program_of_one_lowering_needs_no_arena() -> None:
    spec, kernels = emit_lowering(CPU.commit(KvGeometry("bf16", 16, 2, 2, 32)), "commit", "target")
    (launch,) = spec.launches
    assert launch.args == (PoolArg(0), InputArg("commit_src"), InputArg("commit_dst"))
    assert (launch.count, spec.arena_bytes, len(kernels)) == ("COMMITS", 0, 1)


def test_a_lowering_without_a_graph_has_no_values() -> None:
    lowering = Lowering((Call(KernelSpec("none", Params("k"), ()), 1, None, (ValueRef("x"),)),), 0)
    with pytest.raises(CompileError, match="in a program without a graph"):
        emit_lowering(lowering, "commit", "target")


def test_equal_kernels_are_one_and_unequal_ones_of_a_name_are_an_error() -> None:
    one, same, other = (KernelSpec(template, Params("k"), ()) for template in ("a", "a", "b"))
    assert merge_specs([[one], [same, KernelSpec("a", Params("l"), ())]]) == (one, KernelSpec("a", Params("l"), ()))
    with pytest.raises(CompileError, match="two different kernels are called 'k'"):
        merge_specs([[one], [other]])


def test_a_compiled_program_comes_back_from_json_and_names_only_what_exists() -> None:
    graph = compiled(WHOLE)
    spec, kernels = emit_program(graph, CPU, "forward", "target")
    assert not {launch.node for launch in spec.launches} - {node.name for node in graph} - {"attend_plan"}
    assert ProgramSpec.from_json(spec.to_json(), "here") == spec
    assert set(spec.kernels()) == {kernel.key for kernel in kernels}
    weights = {arg.weight for launch in spec.launches for arg in launch.args if isinstance(arg, WeightArg)}
    assert weights == {node.name for node in graph.weights()}
    assert all(0 <= arg.arena < spec.arena_bytes for launch in spec.launches for arg in launch.args if isinstance(arg, ArenaArg))
    assert emit_program(compiled(WHOLE), CPU, "forward", "target") == (spec, kernels)
