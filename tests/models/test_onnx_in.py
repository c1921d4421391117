"""Decoders from ONNX files: the same graphs, numbers and text as the model they were exported from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from mlsdc.compiler.capture import load_source
from mlsdc.compiler.capture.torch_export import Captured, capture_model
from mlsdc.compiler.errors import CaptureError
from mlsdc.compiler.graph import Graph, Weight
from mlsdc.compiler.interpret import interpret
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.pipeline import run_pipeline
from mlsdc.passes import PassOptions, default_pipeline
from tests.models.onnx_writer import Fused, exported, exported_with_past, new_folder
from tests.models.tiny import LIMITS, PAGE, after, hf_model, proven_by, tokens_for, weight_reader

LENGTH, NEW = 80, 12
pytest.importorskip("onnxscript", reason="torch.onnx exports with onnxscript")


def captured(path: Path) -> Captured:
    return capture_model(load_source(str(path)), max_tokens=LIMITS.max_model_len)


def raised(found: Captured) -> Graph:
    """After the raising passes."""
    passes = default_pipeline(PassOptions(LIMITS, kv_page_size=PAGE))
    last = [pass_.name for pass_ in passes].index("gather-early")
    module = Module("tiny", (LevelModule("target", "model", {}, {"forward": found.graph}),))
    return run_pipeline(module, passes[: last + 1]).target.graphs["forward"]


def logits(found: Captured, graph: Graph, tokens: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(tokens), dtype=torch.int32)
    by_row = {"tokens": tokens.int(), "positions": rows, "out_rows": rows}
    made = interpret(graph, by_row if "out_rows" in graph.by_name else {"tokens": tokens[None].int()}, weight_reader(found))["logits"]
    assert isinstance(made, torch.Tensor)
    return made.reshape(len(tokens), -1)


def continued(found: Captured, graph: Graph, prompt: torch.Tensor) -> list[int]:
    """Greedy, a full pass a token."""
    tokens = prompt
    for _ in range(NEW):
        tokens = torch.cat([tokens, logits(found, graph, tokens)[-1:].argmax(-1)])
    return tokens[len(prompt) :].tolist()


def shapes(graph: Graph) -> list[tuple[str, str]]:
    """Every node's op, its numbers to six digits, and its type; of a weight the type alone, its tensors have other names.

    Of a norm the offset of its weight is left out: exporters add it to some weights, and numbers are compared anyway.
    """
    ops = (("weight" if isinstance(node.op, Weight) else re.sub(r"offset=\d", "", repr(node.op)), repr(node.type)) for node in graph)
    return sorted((re.sub(r"\d+\.\d+(e-\d+)?", lambda number: f"{float(number[0]):.6g}", op), type_) for op, type_ in ops)


@pytest.mark.parametrize("name", proven_by("onnx-in"))
@torch.no_grad()
def test_an_export_becomes_the_same_row_program_and_gives_the_same_text(name: str) -> None:
    found = captured(exported(name))
    graph, own = raised(found), after(name, "gather-early")
    assert shapes(graph) == shapes(own)
    tokens = tokens_for(name, LENGTH)
    wanted: Any = hf_model(name)
    assert (logits(found, found.graph, tokens) - wanted(tokens[None]).logits[0]).abs().max() < 1e-4
    assert (logits(found, graph, tokens) - wanted(tokens[None]).logits[0]).abs().max() < 1e-4
    prompt = tokens[:20]
    assert continued(found, graph, prompt) == wanted.generate(prompt[None], max_new_tokens=NEW, do_sample=False)[0, 20:].tolist()


@torch.no_grad()
def test_an_export_with_a_past_gives_the_same_row_program() -> None:
    found = captured(exported_with_past("Llama 2"))
    graph = raised(found)
    assert shapes(graph) == shapes(after("Llama 2", "gather-early"))
    tokens = tokens_for("Llama 2", LENGTH)
    assert (logits(found, graph, tokens) - hf_model("Llama 2")(tokens[None]).logits[0]).abs().max() < 1e-4


FUSED = {
    "packed qkv, rotary inside": {"packed": True, "rotary": True, "bits": 0, "external": False},
    "rotary outside, external data": {"packed": False, "rotary": False, "bits": 0, "external": True},
    "4 bits": {"packed": False, "rotary": True, "bits": 4, "external": False},
    "8 bits": {"packed": False, "rotary": True, "bits": 8, "external": False},
}


@pytest.mark.parametrize("kind", FUSED)
@torch.no_grad()
def test_onnxruntimes_operators_give_onnxruntimes_numbers(kind: str) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime runs its own operators")
    path = Fused("Llama 2", **FUSED[kind]).write(new_folder("Llama 2") / "model.onnx")
    found = captured(path)
    tokens = tokens_for("Llama 2", LENGTH)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = {"input_ids": tokens[None].numpy(), "attention_mask": np.ones((1, LENGTH), np.int64), "position_ids": np.arange(LENGTH)[None]}
    given |= {value.name: np.zeros((1, 2, 0, 32), np.float32) for value in session.get_inputs() if "past" in value.name}
    (wanted,) = session.run(["logits"], {value.name: given[value.name] for value in session.get_inputs()})
    assert np.abs(logits(found, found.graph, tokens).numpy() - wanted[0]).max() < 2e-4
    assert np.abs(logits(found, raised(found), tokens).numpy() - wanted[0]).max() < 2e-4
    if FUSED[kind]["bits"] == 0:
        assert (logits(found, found.graph, tokens) - hf_model("Llama 2")(tokens[None]).logits[0]).abs().max() < 1e-4


# what cannot be read


def edited(change: Any) -> Path:
    """Llama 2's export, changed."""
    source = exported("Llama 2")
    path = new_folder("Llama 2") / "model.onnx"
    model = onnx.load(source)
    change(model)
    onnx.save(model, path)
    return path


def test_operators_without_a_rule_are_listed_by_node() -> None:
    def change(model: Any) -> None:
        for node in model.graph.node:
            if node.op_type == "Softmax":
                node.op_type = "Hardmax"

    with pytest.raises(CaptureError, match=r"^model\.onnx: operators that cannot be read: Hardmax \(.*\); the nearest operator that"):
        captured(edited(change))


def test_an_opset_out_of_range_is_refused() -> None:
    def change(model: Any) -> None:
        model.opset_import[0].version = 9

    with pytest.raises(CaptureError, match=r"^model\.onnx: opset 9; models of opset 13 to 24 can be read$"):
        captured(edited(change))


MISSING = r"^model\.onnx: external data file 'model\.onnx\.data' is missing \(tensor '"
SHORT = r"^model\.onnx\.data: cut short: tensor '.*' ends at byte \d+, the file has 1000$"


@pytest.mark.parametrize(("damage", "message"), [
    (lambda path: path.unlink(), MISSING), (lambda path: path.write_bytes(path.read_bytes()[:1000]), SHORT),
])  # fmt: skip
def test_external_data_that_is_missing_or_cut_short_is_refused(damage: Any, message: str) -> None:
    path = Fused("Llama 2", packed=False, rotary=False, bits=0, external=True).write(new_folder("Llama 2") / "model.onnx")
    damage(path.with_name("model.onnx.data"))
    with pytest.raises(CaptureError, match=message):
        load_source(str(path))


def test_what_is_no_onnx_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\x00nonsense")
    with pytest.raises(CaptureError, match=r"^model\.onnx: (not an ONNX model|opset 0)"):
        load_source(str(tmp_path / "model.onnx"))


LAST = {
    "a slice": lambda g: helper.make_node("Slice", [g, "minus_one", "top", "one"], ["last"], "last"),
    "a gather by a list": lambda g: helper.make_node("Gather", [g, "minus_one"], ["last"], "last", axis=1),
    "a gather by a number": lambda g: helper.make_node("Gather", [g, "number"], ["last"], "last", axis=1),
}


def takes_last(made: Any, behind: Any = None) -> Any:
    """Change a model into one that makes logits of the last token only; `behind` adds a node between that and the head."""

    def change(model: Any) -> None:
        (head,) = [node for node in model.graph.node if "logits" in node.output]
        for name, value in (("minus_one", [-1]), ("top", [2**63 - 1]), ("one", [1])):
            model.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [1], value))
        model.graph.initializer.append(helper.make_tensor("number", TensorProto.INT64, [], [-1]))
        nodes = [made(head.input[0]), *([behind(head.input[0])] if behind else [])]
        for node in nodes:
            model.graph.node.insert(len(model.graph.node) - 1, node)
        head.input[0] = nodes[-1].output[0]
        del model.graph.output[0].type.tensor_type.shape.dim[:]

    return change


@pytest.mark.parametrize("kind", LAST)
@torch.no_grad()
def test_logits_of_the_last_token_only_are_read_as_those_of_every_token(kind: str) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime says what the file computes")
    path = edited(takes_last(LAST[kind]))
    found = captured(path)
    graph = raised(found)
    assert shapes(graph) == shapes(after("Llama 2", "gather-early"))
    tokens = tokens_for("Llama 2", LENGTH)
    every = logits(found, graph, tokens)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for end in (9, 40, LENGTH):
        (wanted,) = session.run(["logits"], {"input_ids": tokens[None, :end].numpy()})
        assert np.abs(every[end - 1].numpy() - wanted.reshape(-1)).max() < 1e-4


@pytest.mark.parametrize(("behind", "message"), [
    (lambda h: helper.make_node("Softmax", ["last"], ["soft"], "soft", axis=-1),
     "Softmax 'soft' takes the last token only, and goes on by softmax; only ops of one position can be read"),
    (lambda h: helper.make_node("Add", ["last", h], ["sum"], "sum"),
     "Add 'sum' takes the last token only, and goes on with '[^']*', which is of all tokens; only ops of one position can be read"),
])  # fmt: skip
def test_what_mixes_the_last_token_with_others_is_refused(behind: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=rf"^model\.onnx: {message}$"):
        captured(edited(takes_last(LAST["a slice"], behind)))
