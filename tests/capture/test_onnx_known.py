"""What of an ONNX graph follows from the sequence's length: graphs that name a value twice or make it of itself end in an answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from mlsdc.compiler.capture.onnx_file import OnnxFile
from mlsdc.compiler.capture.onnx_known import Known
from mlsdc.compiler.errors import CaptureError


def known(folder: Path, *nodes: tuple[str, list[str], str]) -> Known:
    graph = helper.make_graph(
        [helper.make_node(op, inputs, [output], name=f"{op} {output}") for op, inputs, output in nodes], "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])], [helper.make_tensor_value_info("y", TensorProto.INT64, ["n"])],
        [numpy_helper.from_array(np.arange(4), "d2t")])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), str(folder / "g.onnx"))
    return Known(OnnxFile.open(folder / "g.onnx"), "ids", lambda value, length: (length,))


@pytest.mark.parametrize("nodes", [
    [("Neg", ["y"], "y")], [("Add", ["a", "d2t"], "y"), ("Neg", ["y"], "a")], [("Add", ["a", "a"], "y"), ("Add", ["b", "a"], "a")],
])
def test_a_value_made_of_itself_is_one_line(tmp_path: Path, nodes: list[tuple[str, list[str], str]]) -> None:
    with pytest.raises(CaptureError, match=r"^g\.onnx: node '[^\n]*' makes '[ya]' of itself: the graph has a cycle$"):
        known(tmp_path, *nodes).known("y")


def test_an_output_with_a_weights_name_is_the_weight(tmp_path: Path) -> None:
    found = known(tmp_path, ("Identity", ["d2t"], "d2t"), ("Neg", ["d2t"], "y"))
    assert found.known("y")
    assert found.at("y", 5).tolist() == [0, -1, -2, -3]


def test_one_value_read_twice_is_no_cycle(tmp_path: Path) -> None:
    found = known(tmp_path, ("Add", ["a", "b"], "y"), ("Neg", ["b"], "a"), ("Neg", ["d2t"], "b"))
    assert found.known("y")
    assert found.at("y", 5).tolist() == [0, 0, 0, 0]
    assert not known(tmp_path, ("Neg", ["ids"], "y")).known("y")
