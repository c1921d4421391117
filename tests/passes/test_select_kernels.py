"""Selecting kernels: everything is lowered, or one error says what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.graph import Builder, Graph, Node
from mlsdc.compiler.ops_core import Softmax, Unary
from mlsdc.compiler.ops_quant import LinearQ
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.passes.select_kernels import select_kernels
from mlsdc.runtime.step import Limits
from mlsdc.targets.cpu import CpuTarget
from mlsdc.targets.cpu_isa import ISAS
from mlsdc.targets.protocol import Declined, Lowering
from tests.passes.graphs import TINY
from tests.passes.lowered import PretendTarget
from tests.passes.steps import compiled

LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, max_logit_rows=64, max_tree_nodes=15)
CPU = CpuTarget(ISAS["cpu-x86-64-v4"], LIMITS)
ROWS = Dim("rows", 1, 8)


def chain(length: int) -> Graph:
    b = Builder("chain")
    x = b.input("x", TensorType(DType.F32, (ROWS, 16)))
    for i in range(length):
        x = b.add(f"n{i}", Unary("exp"), x)
    return b.build(out=x)


def test_nodes_come_in_the_graphs_order_without_inputs_and_weights() -> None:
    graph = chain(4)
    assert [node.name for node, _ in select_kernels(graph, PretendTarget()).nodes] == ["n0", "n1", "n2", "n3"]


def test_a_compiled_graph_is_lowered_whole_for_the_cpu() -> None:
    graph = compiled(replace(TINY, mlp=128))  # gated tiles of 64 columns
    selected = select_kernels(graph, CPU)
    assert {node.name for node, _ in selected.nodes} == {node.name for node in graph if node.inputs}
    assert len(selected.prologue) == 1


def declining(names: set[str]) -> PretendTarget:
    def change(node: Node, lowering: Lowering) -> Lowering | Declined:
        return Declined(f"no kernel {node.name[1:]}") if node.name in names else lowering

    return PretendTarget(change)


def test_the_error_names_every_declined_node_and_why() -> None:
    with pytest.raises(CompileError) as caught:
        select_kernels(chain(4), declining({"n1", "n3"}))
    assert str(caught.value) == "target pretend declines %n1: no kernel 1; %n3: no kernel 3"


def test_a_long_list_of_declined_nodes_is_counted() -> None:
    with pytest.raises(CompileError) as caught:
        select_kernels(chain(30), declining({f"n{i}" for i in range(30)}))
    assert str(caught.value).endswith("%n4: no kernel 4; and 25 more")
    assert "\n" not in str(caught.value)


def test_the_cpu_declines_what_it_has_no_kernel_for_and_never_raises() -> None:
    b = Builder("odd")
    x = b.input("x", TensorType(DType.F32, (ROWS, 16)))
    h = b.input("h", TensorType(DType.A8, (ROWS, 64)))
    w8 = b.weight("w8", TensorType(DType.Q8, (24, 64)))
    graph = b.build(
        a=b.add("softmax", Softmax(), x), b=b.add("ragged", LinearQ(), h, w8))
    assert isinstance(CPU.lower(graph["ragged"], graph), Declined)
