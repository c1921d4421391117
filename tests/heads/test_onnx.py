"""Medusa heads from ONNX files: exported by torch.onnx, they compute what the module computes; other graphs are refused by their op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mlsdc.compiler.capture.source import ModelSource
from mlsdc.compiler.errors import HeadError
from mlsdc.compiler.heads.config import MedusaConfig
from mlsdc.compiler.heads.graphs import Lent, head_graphs
from mlsdc.compiler.heads.open import open_heads
from mlsdc.compiler.heads.source import HeadWeights
from mlsdc.compiler.interpret import interpret
from mlsdc.compiler.weights import read_weight
from mlsdc.runtime.step import Limits
from tests.models.onnx_writer import quiet

pytest.importorskip("onnxscript", reason="torch.onnx exports with onnxscript")
HIDDEN, VOCAB, HEADS, LAYERS, ROWS = 32, 64, 3, 2, 7
LIMITS = Limits(max_model_len=64, max_num_seqs=1, max_num_batched_tokens=16, max_logit_rows=16, max_tree_nodes=7)


class Target:
    """What the target lends: a norm of ones."""

    def names(self) -> tuple[str, ...]:
        return ("norm",)

    def shape(self, name: str) -> tuple[int, ...]:
        return (HIDDEN,)

    def read(self, name: str) -> Any:
        return np.ones(HIDDEN, np.float32)

    def block(self, name: str) -> None:
        return None


SOURCE = ModelSource("tiny", "tiny", "", {
    "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 4, "rms_norm_eps": 1e-5,
}, Target(), "", "", VOCAB, None, ())


class ResBlock(nn.Module):
    def __init__(self, bias: bool, act: nn.Module) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(HIDDEN, HIDDEN, bias=bias), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.act(self.linear(x))
        return made


class Medusa(nn.Module):
    """Medusa's own module: heads stacked along a new first axis, or (`apart`) outputs of their own."""

    def __init__(self, *, apart: bool = False, bias: bool = True, act: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        blocks = [[ResBlock(bias, act or nn.SiLU()) for _ in range(LAYERS)] for _ in range(HEADS)]
        self.heads = nn.ModuleList([nn.Sequential(*head, nn.Linear(HIDDEN, VOCAB, bias=False)) for head in blocks])
        self.apart = apart

    def forward(self, hidden_states: torch.Tensor) -> Any:
        made = [head(hidden_states) for head in self.heads]
        return tuple(made) if self.apart else torch.stack(made)


def exported(path: Path, module: nn.Module) -> Path:
    torch.set_num_threads(1)
    with quiet():
        program = torch.onnx.export(
            module.eval(), (torch.zeros(1, 8, HIDDEN),), dynamo=True, input_names=["hidden_states"],
            dynamic_shapes={"hidden_states": {1: torch.export.Dim("sequence", min=2, max=64)}})
    assert program is not None
    program.save(str(path))
    return path


@pytest.mark.parametrize("options", [{"apart": False}, {"apart": True, "bias": False}], ids=["stacked", "apart, no bias"])
@torch.no_grad()
def test_medusa_heads_of_an_onnx_file_compute_what_their_module_does(tmp_path: Path, options: dict[str, bool]) -> None:
    module = Medusa(**options)
    file = open_heads(exported(tmp_path / "medusa.onnx", module), "medusa", SOURCE)
    assert isinstance(file.config, MedusaConfig)
    assert (file.config.num_heads, file.config.num_layers, file.config.bias) == (HEADS, LAYERS, options.get("bias", True))
    graph = head_graphs(file.config, Lent("embed", "head", "norm"), LIMITS)["draft"]
    features, rows = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(7)), np.arange(ROWS, dtype=np.int32)
    weights = HeadWeights(file, Target())
    out = interpret(graph, {"tokens": rows, "positions": rows, "features": features, "out_rows": rows},
                    lambda node: read_weight(node, weights))
    normed = features * torch.rsqrt(features.pow(2).mean(-1, keepdim=True) + 1e-5)
    for i, logits in enumerate(module(normed[None])):
        best = logits[0].topk(8)
        assert torch.equal(out[f"top.{i}"][:, 8:16].long(), best.indices)
        log_p = out[f"top.{i}"][:, :8] - out[f"top.{i}"][:, 16:].log()
        torch.testing.assert_close(log_p, torch.log_softmax(logits[0], -1).gather(-1, best.indices), atol=1e-5, rtol=0)


def test_another_kind_of_block_is_refused_by_its_op(tmp_path: Path) -> None:
    path = exported(tmp_path / "medusa.onnx", Medusa(act=nn.Tanh()))
    with pytest.raises(HeadError, match=r"^medusa\.onnx: '.*' is made by binary, expected x \+ silu\(linear\(x\)\); a Medusa head is "):
        open_heads(path, "medusa", SOURCE)


def test_exits_of_an_onnx_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "exit.onnx"
    path.write_bytes(b"")
    with pytest.raises(HeadError, match=r"^exit\.onnx: heads of kind 'exit' are not read from ONNX files; medusa and eagle heads are$"):
        open_heads(path, "exit", SOURCE)
