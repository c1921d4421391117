"""Translation validation: it lets right passes through, whatever the model looks like, and catches wrong rules by pass, node and rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsdc.compiler import ops_core, ops_kv, ops_nn, ops_quant
from mlsdc.compiler.errors import PassError
from mlsdc.compiler.graph import Builder, Editor, Graph, Node
from mlsdc.compiler.module import Module
from mlsdc.compiler.observers import ValidateObserver
from mlsdc.compiler.ops import Op
from mlsdc.compiler.pipeline import GraphPass, Pass, run_pipeline
from mlsdc.compiler.rewrite import Rule, apply_rules
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.passes.eliminate_common import EliminateCommon
from mlsdc.passes.eliminate_dead import EliminateDead
from mlsdc.passes.fold_constants import FoldConstants
from tests.passes.captured import captured
from tests.passes.graphs import Llama, module_of, row_program
from tests.passes.steps import middle, pipeline

Validate = Callable[..., Module]


@pytest.fixture(scope="module")
def validated() -> Validate:
    """Runs passes on a module or graph, every one executed and compared. Raises PassError naming the first that changes a number."""

    def run(start: Module | Graph, *passes: Pass) -> Module:
        torch.set_num_threads(1)
        return run_pipeline(module_of(start) if isinstance(start, Graph) else start, passes, [ValidateObserver()])

    return run


@st.composite
def llamas(draw: st.DrawFn) -> Llama:
    kv_heads = draw(st.sampled_from([1, 2]))
    return Llama(
        heads=kv_heads * draw(st.sampled_from([1, 2, 3])), kv_heads=kv_heads, layers=draw(st.integers(1, 2)), biases=draw(st.booleans()),
        qk_norm=draw(st.booleans()), tied=draw(st.booleans()), act=draw(st.sampled_from(["silu", "gelu_tanh"])),
        windows=draw(st.sampled_from([(), (4,), (0, 6)])))


@settings(max_examples=6)
@given(shape=llamas())
def test_every_pass_keeps_the_numbers_of_random_llamas(validated: Validate, shape: Llama) -> None:
    validated(row_program(shape), *middle())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_pass_up_to_the_row_program_keeps_the_numbers_of_a_capture(validated: Validate, attention: str) -> None:
    names = [pass_.name for pass_ in pipeline()]
    validated(captured(attention), *pipeline()[: names.index("insert-paged-kv")])


@st.composite
def elementwise(draw: st.DrawFn) -> Graph:
    """Random f32[rows, 64] arithmetic with repetitions, no-ops and dead ends: what the cleanup passes are for."""
    builder = Builder("forward")
    values = [builder.input("x", TensorType(DType.F32, (Dim("rows", 1, 8), 64)))]
    for i in range(draw(st.integers(1, 12))):
        x, y = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        op: Op = draw(st.sampled_from([
            ops_core.Unary("neg"), ops_core.Unary("tanh"), ops_core.Scalar("mul", 1.0), ops_core.Scalar("mul", 0.5),
            ops_core.Scalar("add", 0.0), ops_core.Scalar("add", 2.0), ops_core.Binary("add"), ops_core.Binary("mul"),
            ops_core.Reshape((-1, 64)), ops_core.Cast(DType.F32)]))
        values.append(builder.add(f"v{i}", op, *((x, y) if isinstance(op, ops_core.Binary) else (x,))))
    return builder.build(y=values[-1])


@settings(max_examples=40)
@given(graph=elementwise())
def test_cleanup_keeps_the_numbers_of_random_arithmetic(validated: Validate, graph: Graph) -> None:
    validated(graph, FoldConstants(), EliminateCommon(), EliminateDead())


@dataclass(frozen=True)
class Planted:
    """A wrong rule: at `node`, whose op is `root`, right after the pass `after`. `found` is the value that must be named."""

    equation: str
    root: type[Op]
    after: str
    node: str
    break_: Callable[[Editor, Node], Any]
    found: str = ""


def op_with(**fields: Any) -> Callable[[Editor, Node], Any]:
    return lambda editor, node: editor.replace(node.name, replace(node.op, **fields), *node.inputs)


def inputs_by(change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Callable[[Editor, Node], Any]:
    return lambda editor, node: editor.replace(node.name, node.op, *change(node.inputs))


WRONG = (
    Planted("rms_norm(x, eps) => rms_norm(x, 100 eps)", ops_nn.RmsNorm, "gather-early", "layers.1.mlp_norm", op_with(eps=1e-1)),
    Planted("x + y => x - y", ops_core.Binary, "gather-early", "layers.1.attn.residual", op_with(fn="sub")),
    Planted("silu(x) => tanh(x)", ops_core.Unary, "gather-early", "layers.0.mlp.act", op_with(fn="tanh")),
    Planted("rope(k) => k", ops_nn.Rope, "gather-early", "layers.1.attn.k_rope", lambda e, n: e.redirect(n.name, n.inputs[0]),
            "layers.1.attn.attend"),
    Planted("embed(x) => 2 embed(x)", ops_nn.Embed, "gather-early", "embed", op_with(scale=2.0)),
    Planted("q @ k^T => k read as values", ops_kv.ReadKv, "insert-paged-kv", "layers.1.attn.values", op_with(which="keys")),
    Planted("append_kv(kv, k, v) => append_kv(kv, v, k)", ops_kv.AppendKv, "insert-paged-kv", "layers.0.attn.kv",
            inputs_by(lambda i: (i[0], i[2], i[1], i[3]))),
    Planted("mask(x, tree) => x", ops_kv.Mask, "share-tree-mask", "layers.0.attn.masked", lambda e, n: e.redirect(n.name, n.inputs[0]),
            "layers.0.attn.probs"),
    Planted("paged_attention(scale) => paged_attention(2 scale)", ops_kv.PagedAttention, "fuse-attention", "layers.1.attn.attend",
            op_with(scale=0.5)),
    Planted("linear_q(h, w, x) => linear_q(h, w, embed)", ops_quant.LinearQ, "fuse-residual", "layers.1.mlp.residual",
            inputs_by(lambda i: (*i[:2], "embed"))),
)


@pytest.mark.parametrize("planted", WRONG, ids=lambda planted: planted.equation)
def test_a_wrong_rule_is_caught_by_pass_node_and_rule(validated: Validate, planted: Planted) -> None:
    @dataclass(frozen=True)
    class Wrong(GraphPass):
        name: ClassVar[str] = "wrong-rule"

        def rewrite(self, graph: Graph) -> Graph:
            done: list[str] = []

            def once(editor: Editor, node: Node) -> bool:
                if node.name != planted.node or done:
                    return False
                done.append(node.name)
                planted.break_(editor, node)
                return True

            return apply_rules(graph, [Rule(planted.equation, planted.root, once)])[0]

    right = middle()[: [pass_.name for pass_ in middle()].index(planted.after) + 1]
    with pytest.raises(PassError, match="^after 'wrong-rule': target/forward: ") as error:
        validated(row_program(Llama()), *right, Wrong())
    assert f"the first value that differs is %{planted.found or planted.node} (" in str(error.value)
    assert planted.equation in str(error.value)
