"""Families as ONNX: onnx.checker takes the file and onnxruntime gives the interpreter's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from mlsdc.compiler.graph import Graph, Weight
from mlsdc.compiler.interpret import interpret
from mlsdc.compiler.onnx.export import DOMAIN, export_onnx, to_onnx
from tests.models.tiny import after, captured, proven_by, tokens_for, weights_of

LENGTH = 33


def run(path: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime runs the exported files")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, inputs), strict=True))


def inputs_of(graph: Graph, name: str) -> dict[str, Any]:
    tokens, rows = tokens_for(name, LENGTH).int(), torch.arange(LENGTH, dtype=torch.int32)
    whole = {"tokens": tokens, "positions": rows, "out_rows": rows[5:]}
    return whole if "out_rows" in graph.by_name else {"tokens": tokens[None]}


@pytest.mark.parametrize("stage", ["captured", "raised"])
@pytest.mark.parametrize("name", proven_by("onnx"))
@torch.no_grad()
def test_onnxruntime_gives_the_interpreters_numbers(name: str, stage: str, tmp_path: Path) -> None:
    graph = captured(name).graph if stage == "captured" else after(name, "gather-early")
    weights = weights_of(name)
    path = tmp_path / "model.onnx"
    export_onnx(graph, path, lambda node: weights(node).numpy())
    inputs = inputs_of(graph, name)
    found = run(path, {key: value.numpy() for key, value in inputs.items()})
    wanted = interpret(graph, inputs, weights)
    assert found.keys() == wanted.keys()
    for key, value in found.items():
        other = wanted[key]
        assert isinstance(other, torch.Tensor)
        np.testing.assert_allclose(value, other.numpy(), rtol=0, atol=1e-4)
    assert all(node.domain == "" for node in onnx.load(path).graph.node)


def test_what_onnx_has_no_operator_for_is_a_node_of_our_own_domain(tmp_path: Path) -> None:
    graph = after("Llama 2", "fuse-residual")
    path = tmp_path / "fused.onnx"
    export_onnx(graph, path)
    model = onnx.load(path)
    ours = {node.op_type for node in model.graph.node if node.domain == DOMAIN}
    assert ours >= {"paged_attention", "linear_q", "append_kv_slice"}
    (first, *_) = [node for node in model.graph.node if node.op_type == "paged_attention"]
    assert {a.name: onnx.helper.get_attribute_value(a) for a in first.attribute}["layer"] == 0
    assert {value.name for value in model.graph.input} >= {"tokens", "kv", "tree", "w.lm_head"}


def test_names_are_the_graphs() -> None:
    graph = after("Llama 2", "gather-early")
    made = {output for node in to_onnx(graph).graph.node for output in node.output}
    assert {node.name for node in graph if node.inputs and not isinstance(node.op, Weight)} <= made
