"""Small Llamas as row programs (the target's graph after raising), with weights and steps to run them on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mlsdc.compiler.graph import Builder, Graph, Node, Weight
from mlsdc.compiler.interpret import KvState, StepTree, Value, interpret
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.ops_core import ArgMax, Binary, GatherRows, Reshape, Unary
from mlsdc.compiler.ops_nn import Attention, Embed, Linear, RmsNorm, Rope, RopeTable
from mlsdc.compiler.types import Dim, DType, KvType, TensorType
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.tree import Tree, ancestor_words

PAGE = 16
MAX_LEN = 64


@dataclass(frozen=True)
class Llama:
    """Dimensions of the row program. `windows[i]` is layer i's window (0: none); `act` the MLP's activation."""

    vocab: int = 96
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 96
    layers: int = 2
    biases: bool = False
    qk_norm: bool = False
    tied: bool = True
    act: str = "silu"
    windows: tuple[int, ...] = ()
    max_rows: int = 64
    max_out: int = 64

    def window(self, layer: int) -> int:
        return self.windows[layer] if layer < len(self.windows) else 0


TINY = Llama()
SMOLLM2 = Llama(vocab=49152, hidden=576, heads=9, kv_heads=3, head_dim=64, mlp=1536, layers=30, max_rows=256)


def row_program(shape: Llama) -> Graph:
    """tokens, positions, out_rows -> logits f32[out, vocab], choices i32[out]."""
    b = Builder("forward")
    rows, out = Dim("rows", 1, shape.max_rows), Dim("out", 1, shape.max_out)
    tokens = b.input("tokens", TensorType(DType.I32, (rows,)))
    positions = b.input("positions", TensorType(DType.I32, (rows,)))
    out_rows = b.input("out_rows", TensorType(DType.I32, (out,)))
    embedding = weight(b, "w.embed", "model.embed_tokens.weight", shape.vocab, shape.hidden)
    x = b.add("embed", Embed(), tokens, embedding)
    table = b.add("rope_table", RopeTable(), positions, weight(b, "w.inv_freq", "inv_freq", shape.head_dim // 2))
    for i in range(shape.layers):
        x = mlp(b, shape, i, attention(b, shape, i, x, table))
    x = b.add("final_norm", RmsNorm(1e-5), x, weight(b, "w.final_norm", "model.norm.weight", shape.hidden))
    x = b.add("out_hidden", GatherRows(), x, out_rows)
    head = embedding if shape.tied else weight(b, "w.lm_head", "lm_head.weight", shape.vocab, shape.hidden)
    logits = b.add("lm_head", Linear(), x, head)
    return b.build(logits=logits, choices=b.add("choices", ArgMax(), logits))


def attention(b: Builder, shape: Llama, i: int, x: str, table: str) -> str:
    path, source = f"layers.{i}", f"model.layers.{i}"
    h = b.add(f"{path}.attn_norm", RmsNorm(1e-5), x, weight(b, f"w.{path}.attn_norm", f"{source}.input_layernorm.weight", shape.hidden))

    def heads(leaf: str, count: int) -> str:
        inputs = [h, weight(b, f"w.{path}.attn.{leaf}", f"{source}.self_attn.{leaf}_proj.weight", count * shape.head_dim, shape.hidden)]
        if shape.biases:
            inputs.append(weight(b, f"w.{path}.attn.{leaf}.bias", f"{source}.self_attn.{leaf}_proj.bias", count * shape.head_dim))
        linear = b.add(f"{path}.attn.{leaf}", Linear(), *inputs)
        return b.add(f"{path}.attn.{leaf}_heads", Reshape((-1, count, shape.head_dim)), linear)

    def turned(leaf: str, split: str) -> str:
        if shape.qk_norm:
            norm = weight(b, f"w.{path}.attn.{leaf}_norm", f"{source}.self_attn.{leaf}_norm.weight", shape.head_dim)
            split = b.add(f"{path}.attn.{leaf}_norm", RmsNorm(1e-5), split, norm)
        return b.add(f"{path}.attn.{leaf}_rope", Rope(), split, table)

    q, k, v = heads("q", shape.heads), heads("k", shape.kv_heads), heads("v", shape.kv_heads)
    op = Attention(shape.head_dim**-0.5, shape.window(i))
    attended = b.add(f"{path}.attn.attend", op, turned("q", q), turned("k", k), v)
    merged = b.add(f"{path}.attn.merged", Reshape((-1, shape.heads * shape.head_dim)), attended)
    out = weight(b, f"w.{path}.attn.out", f"{source}.self_attn.o_proj.weight", shape.hidden, shape.heads * shape.head_dim)
    return b.add(f"{path}.attn.residual", Binary("add"), x, b.add(f"{path}.attn.out", Linear(), merged, out))


def mlp(b: Builder, shape: Llama, i: int, x: str) -> str:
    path, source = f"layers.{i}", f"model.layers.{i}"
    norm = weight(b, f"w.{path}.mlp_norm", f"{source}.post_attention_layernorm.weight", shape.hidden)
    h = b.add(f"{path}.mlp_norm", RmsNorm(1e-5), x, norm)
    w_gate = weight(b, f"w.{path}.mlp.gate", f"{source}.mlp.gate_proj.weight", shape.mlp, shape.hidden)
    gate = b.add(f"{path}.mlp.gate", Linear(), h, w_gate)
    w_up = weight(b, f"w.{path}.mlp.up", f"{source}.mlp.up_proj.weight", shape.mlp, shape.hidden)
    up = b.add(f"{path}.mlp.up", Linear(), h, w_up)
    act = b.add(f"{path}.mlp.act", Unary(shape.act), gate)
    gated = b.add(f"{path}.mlp.gated", Binary("mul"), act, up)
    down = weight(b, f"w.{path}.mlp.down", f"{source}.mlp.down_proj.weight", shape.hidden, shape.mlp)
    return b.add(f"{path}.mlp.residual", Binary("add"), x, b.add(f"{path}.mlp.down", Linear(), gated, down))


def weight(b: Builder, name: str, source: str, *shape: int) -> str:
    return b.weight(name, TensorType(DType.F32, shape), source)


def module_of(graph: Graph) -> Module:
    """The graph as the target of a cascade of one."""
    return Module("tiny", (LevelModule("target", "model", {}, {"forward": graph}),))


class Weights:
    """Random tensors by checkpoint name, of the shapes a row program gives them; what the interpreter asks for weights."""

    def __init__(self, graph: Graph, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}
        for node in graph.weights():
            assert isinstance(node.op, Weight)
            assert isinstance(node.type, TensorType)
            size = [n for n in node.type.shape if isinstance(n, int)]
            value = torch.randn(*size, generator=random) / size[-1] ** 0.5
            if node.name.endswith("norm"):
                value = 1 + 0.1 * value
            if node.name == "w.inv_freq":
                value = 100.0 ** -(torch.arange(size[0]) / size[0])
            (self.tensors[node.op.sources[0]],) = (value,)

    def __call__(self, node: Node) -> torch.Tensor:
        assert isinstance(node.op, Weight)
        return torch.cat([self.tensors[source] for source in node.op.sources])


def random_tokens(count: int, vocab: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(0).integers(0, vocab, count)]


def prefill(tokens: Sequence[int]) -> dict[str, Any]:
    """Inputs of a step that prefills one sequence: what the graph says before and after it has a cache must agree on it."""
    tree = StepTree.prefill(len(tokens), PAGE)
    rows = np.arange(len(tokens), dtype=np.int32)
    return {"tokens": np.array(tokens, np.int32), "positions": tree.positions, "out_rows": rows, "tree": tree}


def verify(committed: int, last: int, tree: Tree) -> dict[str, Any]:
    """Inputs of a step that verifies `tree` after the token `last`, which comes after `committed` tokens in pages 0, 1, ..."""
    rows = len(tree) + 1
    positions = np.array([committed, *(committed + depth for depth in tree.depths())], np.int32)
    pages = np.arange(MAX_LEN // PAGE, dtype=np.int32)[None]
    step = StepTree(
        positions, np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32), np.array(ancestor_words(tree), np.uint64),
        np.array([committed], np.int32), pages, np.arange(MAX_LEN // PAGE, 2 * MAX_LEN // PAGE, dtype=np.int32)[None])
    tokens = np.array([last, *tree.tokens], np.int32)
    return {"tokens": tokens, "positions": positions, "out_rows": np.arange(rows, dtype=np.int32), "tree": step}


def run(graph: Graph, weights: Weights, step: dict[str, Any], kv: KvState | None = None) -> dict[str, Value]:
    """The graph on a step; a graph that has a cache gets `kv`, or an empty one."""
    torch.set_num_threads(1)
    given = dict(step)
    if "kv" in graph.by_name:
        given["kv"] = kv or KvState.empty(geometry_of(graph), 2 * MAX_LEN // PAGE)
    return interpret(graph, given, weights)


def geometry_of(graph: Graph) -> KvGeometry:
    type_ = graph["kv"].type
    assert isinstance(type_, KvType)
    return KvGeometry(type_.format, type_.page_size, type_.num_layers, type_.num_kv_heads, type_.head_dim)
