"""Checkpoints of other trainers: the graph made of their files computes what their model does; what is missing or too much is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mlsdc.compiler.capture.source import ModelSource
from mlsdc.compiler.errors import HeadError
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.heads.config import EagleConfig
from mlsdc.compiler.heads.graphs import Lent, head_graphs
from mlsdc.compiler.heads.open import open_heads
from mlsdc.compiler.heads.source import HeadWeights
from mlsdc.compiler.interpret import KvState, StepTree, interpret
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.weights import read_weight
from mlsdc.passes.insert_paged_kv import InsertPagedKv
from mlsdc.runtime.step import Limits
from tests.heads import reference

HIDDEN, VOCAB, DRAFT, LAYERS, MIDDLE = 32, 64, 48, 8, 64
HEADS, KV_HEADS, DIM, EPS, THETA, ROWS = 4, 2, 16, 1e-5, 10000.0, 7
LIMITS = Limits(max_model_len=64, max_num_seqs=1, max_num_batched_tokens=16, max_logit_rows=16, max_tree_nodes=7)


class TargetWeights:
    """What the target lends: random numbers."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.tensors = {"embed": rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32), "norm": np.ones(HIDDEN, np.float32),
                        "head": rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)}

    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read(self, name: str) -> Any:
        return self.tensors[name]

    def block(self, name: str) -> None:
        return None


TARGET = TargetWeights()
SOURCE = ModelSource("tiny", "tiny", "", {
    "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": LAYERS, "rms_norm_eps": EPS,
}, TARGET, "", "", VOCAB, None, ())


def eagle3_tensors(layer: str) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(3)
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN), f"{layer}.self_attn.q_proj": (HEADS * DIM, 2 * HIDDEN),
        f"{layer}.self_attn.k_proj": (KV_HEADS * DIM, 2 * HIDDEN), f"{layer}.self_attn.v_proj": (KV_HEADS * DIM, 2 * HIDDEN),
        f"{layer}.self_attn.o_proj": (HIDDEN, HEADS * DIM), f"{layer}.mlp.gate_proj": (MIDDLE, HIDDEN),
        f"{layer}.mlp.up_proj": (MIDDLE, HIDDEN),
        f"{layer}.mlp.down_proj": (HIDDEN, MIDDLE), "lm_head": (DRAFT, HIDDEN)}
    tensors = {f"{name}.weight": torch.randn(*shape, generator=g) / shape[1] ** 0.5 for name, shape in shapes.items()}
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"{layer}.{name}.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=g)
    tensors["norm.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=g)
    ids = torch.sort(torch.randperm(VOCAB, generator=g)[:DRAFT]).values
    tensors["d2t"] = ids - torch.arange(DRAFT)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


LAYER_CONFIG = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
                "intermediate_size": MIDDLE, "rms_norm_eps": EPS, "rope_theta": THETA, "vocab_size": VOCAB, "hidden_act": "silu"}
SPECFORGE = {**LAYER_CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT,
             "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}
SPECULATORS = {"speculators_model_type": "eagle3", "transformer_layer_config": LAYER_CONFIG, "draft_vocab_size": DRAFT,
               "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 6]}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder


def run(graph: Graph, weights: HeadWeights, inputs: dict[str, Any]) -> dict[str, Any]:
    """The graph over one sequence's rows, all of them committed, in float64; its keys and values are kept as bf16."""
    def value(node: Node) -> Any:
        return read_weight(node, weights)

    module = InsertPagedKv(64, "bf16", 16).run(Module("m", (LevelModule("heads", "eagle", {}, {"draft": graph}),)))
    level = module.levels[0]
    state = {} if level.kv is None else {"kv": KvState.empty(level.kv, 4), "tree": StepTree.prefill(ROWS, 16)}
    return interpret(level.graphs["draft"], {**inputs, **state}, value, dtype=torch.float64)


@pytest.mark.parametrize(("config", "layer", "taps"), [(SPECFORGE, "midlayer", (2, 4, 6)), (SPECULATORS, "layers.0", (2, 4, 6))],
                         ids=["specforge", "speculators"])
def test_an_eagle_3_checkpoint_computes_what_its_model_does(
    tmp_path: Path, config: dict[str, Any], layer: str, taps: tuple[int, ...]
) -> None:
    tensors = eagle3_tensors(layer)
    file = open_heads(write(tmp_path / "heads", config, tensors), "eagle", SOURCE)
    assert isinstance(file.config, EagleConfig)
    assert file.config.taps == taps
    assert file.d2t.tolist() == (tensors["d2t"] + torch.arange(DRAFT)).tolist()
    graphs = head_graphs(file.config, Lent("embed", "head", "norm"), LIMITS)
    weights = HeadWeights(file, TARGET)
    g = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (ROWS,), generator=g)
    taps_in = torch.randn(ROWS, 3 * HIDDEN, generator=g)
    rows = np.arange(ROWS, dtype=np.int32)
    fused = interpret(graphs["fuse"], {"taps": taps_in.double()}, lambda node: read_weight(node, weights), dtype=torch.float64)["features"]
    out = run(graphs["draft"], weights, {"tokens": tokens.int(), "positions": rows, "features": fused, "out_rows": rows})
    w = {name: value.double() for name, value in tensors.items()}
    logits, hidden = reference.eagle3(
        w, layer, taps_in.double(), torch.from_numpy(TARGET.read("embed"))[tokens].double(), heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM,
        eps=EPS, theta=THETA, norm_before_residual=bool(config.get("norm_before_residual")))
    assert torch.allclose(out["hidden"], hidden, atol=2e-2)  # bf16 keys and values
    best = logits.topk(8)
    log_p = out["top"][:, :8] - out["top"][:, 16:].log()
    assert torch.allclose(log_p, torch.log_softmax(logits, -1).gather(-1, out["top"][:, 8:16].long()), atol=5e-2)
    assert (out["top"][:, 8].long() == best.indices[:, 0]).float().mean() > 0.8


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_a_medusa_checkpoint_computes_what_its_model_does(tmp_path: Path, prefix: str) -> None:
    g = torch.Generator().manual_seed(7)
    tensors: dict[str, torch.Tensor] = {}
    for i in range(3):
        for j in range(2):
            tensors[f"{i}.{j}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=g) / HIDDEN**0.5
            tensors[f"{i}.{j}.linear.bias"] = torch.randn(HIDDEN, generator=g)
        tensors[f"{i}.2.weight"] = torch.randn(VOCAB, HIDDEN, generator=g)
    named = {prefix + name: value for name, value in tensors.items()}
    folder = write(tmp_path / "medusa", {"medusa_num_heads": 3, "medusa_num_layers": 2}, named, "medusa_lm_head.pt")
    file = open_heads(folder, "medusa", SOURCE)
    graph = head_graphs(file.config, Lent("embed", "head", "norm"), LIMITS)["draft"]
    features = torch.randn(ROWS, HIDDEN, generator=g).double()
    rows = np.arange(ROWS, dtype=np.int32)
    out = run(graph, HeadWeights(file, TARGET), {"tokens": rows, "positions": rows, "features": features, "out_rows": rows})
    hidden = reference.norm(features, torch.ones(HIDDEN).double(), EPS)
    for i, logits in enumerate(reference.medusa({name: value.double() for name, value in tensors.items()}, hidden, 3, 2)):
        best = logits.topk(8)
        assert torch.equal(out[f"top.{i}"][:, 8:16].long(), best.indices)
        log_p = out[f"top.{i}"][:, :8] - out[f"top.{i}"][:, 16:].log()
        assert torch.allclose(log_p, torch.log_softmax(logits, -1).gather(-1, best.indices), atol=1e-5)


def test_all_missing_tensors_are_named(tmp_path: Path) -> None:
    tensors = eagle3_tensors("midlayer")
    del tensors["fc.weight"], tensors["midlayer.mlp.up_proj.weight"]
    with pytest.raises(HeadError, match="heads: has no tensor 'fc.weight', 'midlayer.mlp.up_proj.weight'"):
        open_heads(write(tmp_path / "heads", SPECFORGE, tensors), "eagle", SOURCE)


def test_a_tensor_that_nothing_reads_is_named(tmp_path: Path) -> None:
    tensors = eagle3_tensors("midlayer") | {"midlayer.self_attn.q_norm.weight": torch.ones(DIM)}
    with pytest.raises(HeadError, match="heads: has a tensor that nothing reads: 'midlayer.self_attn.q_norm.weight'"):
        open_heads(write(tmp_path / "heads", SPECFORGE, tensors), "eagle", SOURCE)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    tensors = eagle3_tensors("midlayer") | {"norm.weight": torch.ones(HIDDEN + 1)}
    with pytest.raises(HeadError, match=r"tensor 'norm.weight' has shape \[33\], config.json and the model say \[32\]"):
        open_heads(write(tmp_path / "heads", SPECFORGE, tensors), "eagle", SOURCE)


def test_a_draft_vocabulary_beyond_the_targets_is_refused(tmp_path: Path) -> None:
    tensors = eagle3_tensors("midlayer")
    tensors["d2t"][-1] = VOCAB
    with pytest.raises(HeadError, match="d2t names token 111, the target has ids below 64"):
        open_heads(write(tmp_path / "heads", SPECFORGE, tensors), "eagle", SOURCE)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadError, match=r"heads/config.json: says LlamaForCausalLM; EAGLE-3 heads say LlamaForCausalLMEagle3"):
        open_heads(write(tmp_path / "heads", {"architectures": ["LlamaForCausalLM"]}, eagle3_tensors("midlayer")), "eagle", SOURCE)
