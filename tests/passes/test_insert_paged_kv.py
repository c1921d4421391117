"""insert-paged-kv: attention over a cache says what attention over the step's own rows said."""

from __future__ import annotations

import pytest

from mlsdc.compiler.graph import Builder
from mlsdc.compiler.ops_kv import AppendKv, ReadKv
from mlsdc.compiler.ops_nn import Attention
from mlsdc.compiler.pipeline import run_pipeline
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.passes.insert_paged_kv import InsertPagedKv
from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.kv_format import KvGeometry
from tests.passes.graphs import Llama, module_of, row_program
from tests.passes.steps import apply, before, golden, relative_error, results


def test_golden() -> None:
    golden("insert-paged-kv", Llama(layers=1))


def test_a_prompt_gets_the_logits_of_plain_attention_up_to_bf16() -> None:
    graph, pass_ = before("insert-paged-kv", shape := Llama(windows=(0, 5)))
    (wanted,), (found, _) = results(graph, shape), results(apply(graph, pass_), shape)
    assert relative_error(found["logits"], wanted["logits"]) < 0.02


def test_layers_count_up_in_order_and_thread_one_cache() -> None:
    graph, pass_ = before("insert-paged-kv", Llama(layers=3))
    after = apply(graph, pass_)
    appends = [node for node in after if isinstance(node.op, AppendKv)]
    assert [node.op.layer for node in appends if isinstance(node.op, AppendKv)] == [0, 1, 2]
    assert [node.inputs[0] for node in appends] == ["kv", "layers.0.attn.kv", "layers.1.attn.kv"]
    assert dict(after.outputs)["kv"] == "layers.2.attn.kv"


def test_a_layer_reads_the_cache_that_its_own_append_made() -> None:
    graph, pass_ = before("insert-paged-kv", Llama(layers=2))
    after = apply(graph, pass_)
    reads = [(node.op.layer, node.inputs[0]) for node in after if isinstance(node.op, ReadKv)]
    assert reads == [(i, f"layers.{i}.attn.kv") for i in (0, 0, 1, 1)]


def test_the_level_gets_its_page_geometry() -> None:
    module = run_pipeline(module_of(row_program(Llama())), [InsertPagedKv(64, page_size=16)])
    assert module.target.kv == KvGeometry("bf16", 16, num_layers=2, num_kv_heads=2, head_dim=32)


def test_leaves_a_graph_without_attention_alone() -> None:
    b = Builder("forward")
    x = b.input("x", TensorType(DType.F32, (Dim("rows", 1, 8), 32)))
    module = module_of(b.build(y=x))
    assert InsertPagedKv(64).run(module) == module


def test_leaves_layers_of_different_heads_alone() -> None:
    b = Builder("forward")
    rows = Dim("rows", 1, 8)
    q = b.input("q", TensorType(DType.F32, (rows, 4, 32)))
    for heads in (1, 2):
        k = b.input(f"k{heads}", TensorType(DType.F32, (rows, heads, 32)))
        q = b.add(f"attend{heads}", Attention(1.0), q, k, k)
    module = module_of(b.build(y=q))
    assert InsertPagedKv(64).run(module) == module


def test_a_head_dim_that_no_page_can_have_is_one_clear_line() -> None:
    with pytest.raises(MlsdcError, match="head_dim: 24, expected a multiple of 16"):
        apply(row_program(Llama(head_dim=24)), InsertPagedKv(64))
