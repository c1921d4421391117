"""The JSON form: lossless, deterministic, and clear about what it cannot read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from mlsdc.compiler.errors import IrError
from mlsdc.compiler.graph import Graph
from mlsdc.compiler.module import Module
from mlsdc.compiler.serial import from_json, graph_to_json, module_to_json
from mlsdc.compiler.text import parse_graph
from tests.compiler.graphs import graphs, modules

GRAPH = parse_graph('graph g\n%x = input() : f32[4]\n%y = unary(%x, fn="exp")\nreturn y=%y')


@given(graphs())
def test_a_graph_reads_back_as_itself(graph: Graph) -> None:
    assert from_json(graph_to_json(graph)) == graph


@given(modules())
def test_a_module_reads_back_as_itself(module: Module) -> None:
    text = module_to_json(module)
    assert from_json(text) == module
    assert module_to_json(from_json(text)) == text  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "graph": {"name": "g"}}', '{"format": 1, "module": 3}'])
def test_what_is_no_graph_is_one_clear_line(text: str) -> None:
    with pytest.raises(IrError, match=r"^x\.json: not a graph or module") as error:
        from_json(text, "x.json")
    assert "\n" not in str(error.value)


def test_another_format_is_refused() -> None:
    with pytest.raises(IrError, match="format 9, expected 1"):
        from_json('{"format": 9}')


def test_a_graph_that_does_not_verify_names_its_node() -> None:
    raw = json.loads(graph_to_json(GRAPH))
    raw["graph"]["nodes"][1]["type"] = "f32[5]"
    with pytest.raises(IrError, match=r"%y: has type f32\[5\], but unary gives f32\[4\]"):
        from_json(json.dumps(raw))


def test_an_unknown_op_names_its_node() -> None:
    raw = json.loads(graph_to_json(GRAPH))
    raw["graph"]["nodes"][1]["op"] = "unari"
    with pytest.raises(IrError, match=r"%y: 'unari' is not an op; did you mean 'unary'\?"):
        from_json(json.dumps(raw))
