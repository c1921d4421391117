"""raise-attention: torch's fused op or matmuls and softmax, grouped or not; only causal ones."""

from __future__ import annotations

import pytest

from mlsdc.compiler.graph import Builder, Editor, Graph
from mlsdc.compiler.ops_capture import CausalMask, Sdpa
from mlsdc.compiler.ops_core import Binary, MatMul, Scalar, Softmax, Transpose, Unary
from mlsdc.compiler.ops_nn import Attention
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.passes.raise_attention import RaiseAttention
from tests.passes.captured import assert_close, before, check_golden

HEADS = TensorType(DType.F32, (1, 2, Dim("seq", 1, 64), 8))


def attention(*, window: int = 0, softcap: float = 0.0, masked: bool = True) -> Graph:
    b = Builder("attention")
    tokens = b.input("tokens", TensorType(DType.I32, (1, HEADS.shape[2])))
    q, k, v = (b.input(name, HEADS) for name in "qkv")
    scores = b.add("scaled", Scalar("div", 4.0), b.add("scores", MatMul(), q, b.add("kt", Transpose(-2, -1), k)))
    if softcap:
        scores = b.add("cap", Scalar("mul", softcap), b.add("tanh", Unary("tanh"), b.add("uncap", Scalar("div", softcap), scores)))
    if masked:
        scores = b.add("masked", Binary("add"), scores, b.add("mask", CausalMask(window, additive=True), tokens))
    return b.build(y=b.add("y", MatMul(), b.add("probabilities", Softmax(), scores), v))


def found(graph: Graph) -> list[Attention]:
    return [node.op for node in graph if isinstance(node.op, Attention)]


@pytest.mark.parametrize("form", ["sdpa", "eager"])
def test_golden(form: str) -> None:
    graph, pass_ = before("raise-attention", form)
    check_golden(f"raise-attention-{form}", pass_.rewrite(graph))


@pytest.mark.parametrize("form", ["sdpa", "eager"])
def test_computes_the_same(form: str) -> None:
    graph, pass_ = before("raise-attention", form)
    assert_close(pass_.rewrite(graph), graph)


@pytest.mark.parametrize("form", ["sdpa", "eager"])
def test_repeated_heads_become_groups(form: str) -> None:
    graph, pass_ = before("raise-attention", form)
    (attend,) = (node for node in pass_.rewrite(graph) if isinstance(node.op, Attention))
    assert [str(pass_.rewrite(graph)[value].type) for value in attend.inputs] == ["f32[seq, 4, 16]", "f32[seq, 2, 16]", "f32[seq, 2, 16]"]


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 30.0}])
def test_windows_and_softcaps_are_kept(options: dict[str, int]) -> None:
    assert found(RaiseAttention().rewrite(attention(**options))) == [Attention(0.25, **options)]


def test_leaves_attention_without_a_mask_alone() -> None:
    graph = attention(masked=False)
    assert RaiseAttention().rewrite(graph) is graph


def test_leaves_a_fused_op_that_sees_everything_alone() -> None:
    b = Builder("bidirectional")
    q, k, v = (b.input(name, HEADS) for name in "qkv")
    graph = b.build(y=b.add("y", Sdpa(0.25), q, k, v))
    assert RaiseAttention().rewrite(graph) is graph


def test_heads_repeated_in_another_order_are_not_groups() -> None:
    """Groups are consecutive heads: repeating the whole block of kv heads is another model, and stays spelled out."""
    graph, pass_ = before("raise-attention")
    editor = Editor(graph)
    for node in graph:
        if node.op.opname == "expand":
            apart = graph[node.inputs[0]]
            editor.replace(apart.name, type(apart.op)((1, 1, 2, -1, 16)), *apart.inputs)  # type: ignore[call-arg]
            editor.replace(node.name, type(node.op)((-1, 2, -1, -1, -1)), apart.name)  # type: ignore[call-arg]
    raised = pass_.rewrite(editor.finish())
    (attend,) = (node for node in raised if isinstance(node.op, Attention))
    assert str(raised[attend.inputs[1]].type) == "f32[seq, 4, 16]"
