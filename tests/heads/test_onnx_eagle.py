"""EAGLE-3 heads from ONNX files: exported by torch.onnx, they become the tensors and facts that their safetensors checkpoint becomes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn
from torch.nn import functional as F

from mlsdc.compiler.errors import HeadError
from mlsdc.compiler.heads.checkpoint import HeadFile
from mlsdc.compiler.heads.config import EagleConfig
from mlsdc.compiler.heads.graphs import Lent, head_graphs
from mlsdc.compiler.heads.open import open_heads
from mlsdc.compiler.heads.source import HeadWeights
from mlsdc.compiler.interpret import interpret
from mlsdc.compiler.weights import read_weight
from tests.heads import reference
from tests.heads.test_foreign import (
    DIM,
    DRAFT,
    EPS,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LIMITS,
    MIDDLE,
    ROWS,
    SOURCE,
    SPECFORGE,
    TARGET,
    THETA,
    VOCAB,
    eagle3_tensors,
    run,
    write,
)
from tests.models.onnx_writer import quiet

pytest.importorskip("onnxscript", reason="torch.onnx exports with onnxscript")
Tensor = torch.Tensor


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))
        return made


class Attention(nn.Module):
    """By torch's own attention, or (`eager`) written out with a mask, for positions that come in."""

    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.eager = eager
        self.q_proj = nn.Linear(2 * HIDDEN, HEADS * DIM, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(2 * HIDDEN, KV_HEADS * DIM, bias=False) for _ in "kv")
        self.o_proj = nn.Linear(HEADS * DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        _, n, _ = x.shape
        q, k, v = (part(x).view(1, n, -1, DIM).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        angles = positions[0].float()[:, None] * THETA ** (-torch.arange(0, DIM, 2, dtype=torch.float32) / DIM)
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        q, k = (y * cos + torch.cat([-y[..., DIM // 2 :], y[..., : DIM // 2]], -1) * sin for y in (q, k))
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
        if self.eager:
            mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)
            made = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(DIM) + mask, -1) @ v
        else:
            made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(made.transpose(1, 2).reshape(1, n, -1))
        return out


class Layer(nn.Module):
    def __init__(self, eager: bool, normed_first: bool) -> None:
        super().__init__()
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = Norm(), Norm(), Norm()
        self.self_attn, self.normed_first = Attention(eager), normed_first
        shapes = {"gate_proj": (HIDDEN, MIDDLE), "up_proj": (HIDDEN, MIDDLE), "down_proj": (MIDDLE, HIDDEN)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})

    def forward(self, embedding: Tensor, x: Tensor, positions: Tensor) -> Tensor:
        h = self.hidden_norm(x)
        both = torch.cat([self.input_layernorm(embedding), h], -1)
        x = (h if self.normed_first else x) + self.self_attn(both, positions)
        y = self.post_attention_layernorm(x)
        made: Tensor = x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y))
        return made


class Eagle(nn.Module):
    """Tensors named as in the checkpoint. `alone`: with its own embedding, and the target's ids of its best guesses go out."""

    d2t: Tensor

    def __init__(self, *, alone: bool, eager: bool, normed_first: bool) -> None:
        super().__init__()
        self.alone = alone
        self.fc, self.lm_head = nn.Linear(3 * HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, DRAFT, bias=False)
        self.midlayer, self.norm = Layer(eager, normed_first), Norm()
        if alone:
            self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.register_buffer("d2t", torch.zeros(DRAFT, dtype=torch.int64))

    def forward(self, tokens: Tensor, hidden_states: Tensor, position_ids: Tensor) -> Any:
        embedding = self.embed_tokens(tokens) if self.alone else tokens
        x = self.midlayer(embedding, self.fc(hidden_states), position_ids)
        logits = self.lm_head(self.norm(x))
        best = logits.topk(4).indices
        return logits, x, best + self.d2t[best] if self.alone else self.d2t.clone()


def tensors(alone: bool) -> dict[str, Tensor]:
    made = eagle3_tensors("midlayer")
    del made["t2d"]
    return made | ({"embed_tokens.weight": torch.from_numpy(TARGET.read("embed"))} if alone else {})


def exported(path: Path, *, alone: bool, eager: bool, normed_first: bool, optimize: bool) -> Path:
    """`alone`: input_ids in, and ids out; else embeddings in, and d2t out. Not optimised, nodes turn matrices."""
    module = Eagle(alone=alone, eager=eager, normed_first=normed_first).eval()
    module.load_state_dict(tensors(alone))
    first = torch.zeros(1, 8, dtype=torch.int64) if alone else torch.zeros(1, 8, HIDDEN)
    names = ["input_ids" if alone else "inputs_embeds", "hidden_states", "position_ids"]
    sequence = torch.export.Dim("sequence", min=2, max=64)
    with quiet():
        program = torch.onnx.export(
            module, (first, torch.zeros(1, 8, 3 * HIDDEN), torch.arange(8)[None]), dynamo=True, optimize=optimize, input_names=names,
            output_names=["logits", "hidden", "ids" if alone else "d2t"], dynamic_shapes=tuple({1: sequence} for _ in names))
    assert program is not None
    program.save(str(path))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether the head is alone."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("eagle")
    return {alone: exported(folder / f"eagle{alone}.onnx", alone=alone, eager=not alone, normed_first=not alone, optimize=alone)
           for alone in (True, False)}


def computed(file: HeadFile, tokens: Tensor, taps: Tensor) -> tuple[Any, Any]:
    """What the programs made of a file of heads give: best guesses, hidden states."""
    graphs, weights, rows = head_graphs(file.config, Lent("embed", "head", "norm"), LIMITS), HeadWeights(file, TARGET), np.arange(ROWS)
    fused = interpret(graphs["fuse"], {"taps": taps.double()}, lambda node: read_weight(node, weights), dtype=torch.float64)["features"]
    given = {"tokens": tokens.int(), "positions": rows.astype(np.int32), "features": fused, "out_rows": rows.astype(np.int32)}
    out = run(graphs["draft"], weights, given)
    return out["top"], out["hidden"]


@pytest.mark.parametrize("alone", [True, False], ids=["ids, torch's attention, optimised", "embeddings, written out, d2t"])
@torch.no_grad()
def test_an_eagle_head_of_an_onnx_file_is_that_of_its_checkpoint(tmp_path: Path, files: dict[bool, Path], alone: bool) -> None:
    config = {**SPECFORGE, "norm_before_residual": not alone}
    checkpoint = open_heads(write(tmp_path / "heads", config, tensors(alone)), "eagle", SOURCE)
    path = tmp_path / "eagle.onnx"
    path.write_bytes(files[alone].read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(SPECFORGE))  # says which layers are read
    file = open_heads(path, "eagle", SOURCE)
    assert file.config == checkpoint.config
    assert file.d2t.tolist() == checkpoint.d2t.tolist()
    assert set(file.names()) == set(checkpoint.names())
    for name in checkpoint.names():
        assert np.array_equal(file.read(name), checkpoint.read(name)), name
    generator = torch.Generator().manual_seed(5)
    tokens, taps = torch.randint(0, VOCAB, (ROWS,), generator=generator), torch.randn(ROWS, 3 * HIDDEN, generator=generator)
    for mine, theirs in zip(computed(file, tokens, taps), computed(checkpoint, tokens, taps), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("alone", [True, False])
@torch.no_grad()
def test_an_eagle_head_of_an_onnx_file_computes_what_its_module_does(files: dict[bool, Path], alone: bool) -> None:
    file = open_heads(files[alone], "eagle", SOURCE)
    assert isinstance(file.config, EagleConfig)
    assert file.config.taps == (2, 4, 5)  # of 8 layers, where no config.json says otherwise
    generator = torch.Generator().manual_seed(5)
    tokens, taps = torch.randint(0, VOCAB, (ROWS,), generator=generator), torch.randn(ROWS, 3 * HIDDEN, generator=generator)
    embedding = torch.from_numpy(TARGET.read("embed"))[tokens]
    module = Eagle(alone=alone, eager=not alone, normed_first=not alone).eval()
    module.load_state_dict(tensors(alone))
    logits, hidden, _ = module(tokens[None] if alone else embedding[None], taps[None], torch.arange(ROWS)[None])
    plain, _ = reference.eagle3(tensors(alone), "midlayer", taps, embedding, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, eps=EPS,
                                theta=THETA, norm_before_residual=not alone)
    assert torch.allclose(logits[0], plain, atol=1e-4)
    top, out = computed(file, tokens, taps)
    assert torch.allclose(out.float(), hidden[0], atol=2e-2)  # bf16 keys and values
    log_p = top[:, :8] - top[:, 16:].log()
    assert torch.allclose(log_p.float(), torch.log_softmax(logits[0], -1).gather(-1, top[:, 8:16].long()), atol=5e-2)


def without(kind: str) -> Callable[[onnx.ModelProto], None]:
    """Takes the named input or output away."""
    def edit(model: onnx.ModelProto) -> None:
        for listed in (model.graph.input, model.graph.output):
            for value in [value for value in listed if value.name == kind]:
                listed.remove(value)

    return edit


def instead(kind: str, other: str) -> Callable[[onnx.ModelProto], None]:
    """The first operator of a kind becomes another."""
    def edit(model: onnx.ModelProto) -> None:
        next(node for node in model.graph.node if node.op_type == kind).op_type = other

    return edit


def with_past(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("past_key_values.0.key", onnx.TensorProto.FLOAT, [1, KV_HEADS, "past", DIM]))


def another_epsilon(model: onnx.ModelProto) -> None:
    """Of the last norm."""
    epsilon = next(x.name for x in model.graph.initializer if not x.dims and numpy_helper.to_array(x) == np.float32(EPS))
    model.graph.initializer.append(numpy_helper.from_array(np.float32(1e-3), "other"))
    [node for node in model.graph.node if epsilon in node.input][-1].input[1] = "other"


def theta_of_frequencies(model: onnx.ModelProto) -> None:
    """RoPE whose frequencies are scaled."""
    table = next(x for x in model.graph.initializer if list(x.dims) == [DIM // 2])
    values = numpy_helper.to_array(table) / np.array([1, *[4] * (DIM // 2 - 1)], np.float32)
    table.CopyFrom(numpy_helper.from_array(values, table.name))


def biased(model: onnx.ModelProto) -> None:
    """The head gets a bias."""
    made = next(node for node in model.graph.node if "logits" in node.output)
    made.output[0] = "unbiased"
    model.graph.initializer.append(numpy_helper.from_array(np.ones(DRAFT, np.float32), "bias"))
    model.graph.node.append(helper.make_node("Add", ["unbiased", "bias"], ["logits"]))


@pytest.mark.parametrize(("edit", "message"), [
    (without("input_ids"), r"inputs are hidden_states, position_ids; expected hidden_states and input_ids \(or inputs_embeds\)"),
    (without("hidden_states"), r"inputs are input_ids, position_ids; expected hidden_states and input_ids \(or inputs_embeds\)"),
    (without("ids"), "has no tensor or output 'd2t' and no output of ids, which a draft vocabulary of 48 of 64 needs"),
    (instead("Sigmoid", "Tanh"), r"'mul_\d+' is made by binary, expected act\(gate\(norm\(y\)\)\) \* up\(norm\(y\)\)"),
    (instead("Neg", "Abs"), "'.*' is not causal attention over heads of 16 that are rotated in halves with theta 10000, scaled by"),
    (instead("Sqrt", "Exp"), r"'mul_\d+' is made by binary, expected the norm of the .*, x / sqrt\(mean\(x\^2\) \+ eps\) \* w; an EAGLE-3"),
    (theta_of_frequencies, "'.*': attention reads no tensor of 8 frequencies of plain RoPE"),
    (another_epsilon, "norm '.*' has epsilon 1e-05, '.*' 0.001; norms with one are read"),
    (with_past, "input 'past_key_values.0.key': heads with a past are not read; export the head without one"),
    (biased, r"'logits' has a bias \('bias'\); linears of EAGLE-3 heads have none"),
], ids=["no tokens", "no hidden states", "no d2t", "activation", "rotation", "norm", "frequencies", "epsilon", "past", "bias"])
def test_another_graph_is_refused_in_a_line_that_names_what_differs(
    tmp_path: Path, files: dict[bool, Path], edit: Callable[[onnx.ModelProto], None], message: str
) -> None:
    model = onnx.load(str(files[True]))
    edit(model)
    path = tmp_path / "eagle.onnx"
    onnx.save(model, str(path))
    with pytest.raises(HeadError, match=rf"^eagle\.onnx: {message}") as caught:
        open_heads(path, "eagle", SOURCE)
    assert "\n" not in str(caught.value)


def test_hidden_states_of_another_target_are_refused(files: dict[bool, Path]) -> None:
    other = replace(SOURCE, config={**SOURCE.config, "hidden_size": 2 * HIDDEN})
    with pytest.raises(HeadError, match="input 'hidden_states' has 96 columns, expected hidden states of the target's layers .*, 64 each"):
        open_heads(files[True], "eagle", other)


def test_hidden_states_of_two_layers_need_a_config_that_says_which(files: dict[bool, Path]) -> None:
    other = replace(SOURCE, config={**SOURCE.config, "hidden_size": 3 * HIDDEN // 2})
    with pytest.raises(HeadError, match=r"hidden states of 2 layers, and not of the 3 of \[2, 4, 5\]: eagle_aux_hidden_state_layer_ids"):
        open_heads(files[True], "eagle", other)
