"""Unfused ops on the CPU: every kernel against the interpreter, every subset of the fusion passes, and the real model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlsdc.compiler.graph import Builder, Graph, Node
from mlsdc.compiler.interpret import KvState, StepTree, interpret
from mlsdc.compiler.ops_core import Binary, Expand, Reshape, Scalar, Slice, Softmax, Transpose, Unary
from mlsdc.compiler.ops_kv import AppendKv, Dequantise, Mask, MatMulPV, MatMulQK, ReadKv, TreeMask
from mlsdc.compiler.ops_nn import Embed, Linear, RmsNorm
from mlsdc.compiler.types import Dim, DType, KvType, TensorType, TreeType
from mlsdc.runtime.step import Limits
from mlsdc.runtime.tree import Tree
from mlsdc.targets.protocol import Declined
from tests.passes.graphs import MAX_LEN, PAGE, Llama, Weights, geometry_of, prefill, random_tokens, row_program, verify
from tests.passes.graphs import run as interpreted
from tests.passes.steps import FUSIONS, TREE, compiled, relative_error
from tests.targets.cpu_level import cpu, loaded, run

LIMITS = Limits(max_model_len=MAX_LEN, max_num_seqs=4, max_num_batched_tokens=64, max_logit_rows=64, max_tree_nodes=15)
ROWS = Dim("rows", 1, 64)
NUM_ROWS = 13


# row-wise kernels: one graph, every kernel a result


def table(b: Builder, name: str, *shape: int) -> str:
    """Random f32[rows, n]: rows of a table, picked by token."""
    return b.add(name, Embed(), "tokens", b.weight(f"w.{name}", TensorType(DType.F32, shape)))


def row_wise_graph() -> Graph:
    b = Builder("row_wise")
    b.input("tokens", TensorType(DType.I32, (ROWS,)))
    x, y, odd = table(b, "x", 64, 96), table(b, "y", 64, 96), table(b, "odd", 64, 7)
    positive = b.add("abs", Unary("abs"), x)
    away = b.add("away", Scalar("add", 0.5), positive)
    heads, other = (b.add(f"{name}_heads", Reshape((-1, 4, 24)), name) for name in (x, y))
    for fn in ("neg", "exp", "tanh", "silu", "gelu", "gelu_tanh", "sigmoid"):
        b.add(fn, Unary(fn), x)
        b.add(f"{fn}.odd", Unary(fn), odd)
    for fn in ("sqrt", "rsqrt"):
        b.add(fn, Unary(fn), away)
    for fn in ("add", "sub", "mul", "maximum", "minimum"):
        b.add(f"{fn}.xy", Binary(fn), x, y)
        b.add(f"{fn}.scalar", Scalar(fn, -1.25), x)
    b.add("div.xy", Binary("div"), x, away)
    b.add("div.scalar", Scalar("div", 3.0), x)
    for power in (2.0, 3.0, 1.0):
        b.add(f"pow{power}", Scalar("pow", power), x)
    for power in (0.5, -0.5, -1.0):
        b.add(f"pow{power}", Scalar("pow", power), away)
    b.add("by_weight", Binary("mul"), x, b.weight("w.factor", TensorType(DType.F32, (96,))))
    b.add("by_row", Binary("mul"), x, table(b, "one", 64, 1))
    b.add("by_head", Binary("sub"), heads, b.add("column", Slice(2, 3, 4), other))
    b.add("sliced", Slice(2, 5, 17), heads)
    b.add("turned", Transpose(1, 2), heads)
    b.add("expanded", Expand((-1, 4, 3)), b.add("narrow", Slice(2, 0, 1), heads))
    b.add("softmaxed", Softmax(), heads)
    b.add("embed.scaled", Embed(3.0), "tokens", "w.x")
    g = b.weight("w.g", TensorType(DType.F32, (96,)))
    b.add("normed", RmsNorm(1e-5), x, g)
    b.add("normed.offset", RmsNorm(1e-5, 1.0), x, g)
    b.add("normed.heads", RmsNorm(1e-6), heads, b.weight("w.g24", TensorType(DType.F32, (24,))))
    b.add("linear", Linear(), x, b.weight("w.linear", TensorType(DType.F32, (40, 96))))
    bias = b.weight("w.bias", TensorType(DType.F32, (13,)))
    b.add("linear.odd", Linear(), odd, b.weight("w.linear_odd", TensorType(DType.F32, (13, 7))), bias)
    graph = Graph("row_wise", tuple(b.nodes.values()), tuple((n.name, n.name) for n in b.nodes.values() if n.inputs))
    graph.verify()
    return graph


ROW_WISE = row_wise_graph()


def random_weight(node: Node) -> torch.Tensor:
    assert isinstance(node.type, TensorType)
    seed = sum(node.name.encode())
    return 3 * torch.randn(*(n for n in node.type.shape if isinstance(n, int)), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def row_wise(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """(device's, f64 interpreter's) results of every node of ROW_WISE, for rows 0 .. NUM_ROWS - 1."""
    step = prefill(range(NUM_ROWS))
    with loaded({"row_wise": ROW_WISE}, random_weight, tmp_path_factory.mktemp("row_wise"), LIMITS) as level:
        found = run(level, "row_wise", step)
    return found, interpret(ROW_WISE, step, random_weight, dtype=torch.float64)


@pytest.mark.parametrize("name", [name for name, _ in ROW_WISE.outputs])
def test_a_row_wise_kernel_agrees_with_the_interpreter(row_wise: tuple[dict[str, Any], dict[str, Any]], name: str) -> None:
    found, wanted = (results[name] for results in row_wise)
    largest = float(wanted.abs().max()) if name.startswith("linear") else 1.0  # of a sum, it is the terms that are rounded
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-6, atol=5e-7 * largest)


# attention, op by op

HEADS, KV_HEADS, DIM = 4, 2, 32
PREFIX, OTHER = 20, 9


def attention_graph(ctx: int) -> Graph:
    """The unfused chain with and without a window and a soft-cap; every f32 step of it is a result."""
    b, context = Builder("attention"), Dim("ctx", 1, ctx)
    b.input("tokens", TensorType(DType.I32, (ROWS,)))
    kv, tree = b.input("kv", KvType("bf16", PAGE, 2, KV_HEADS, DIM)), b.input("tree", TreeType())
    q, k, v = (b.add(f"{name}_heads", Reshape((-1, heads, DIM)), table(b, name, 64, heads * DIM))
               for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)))
    kv = b.add("kv.1", AppendKv(1), kv, k, v, tree)
    keys = b.add("keys", Dequantise(), b.add("keys.bf16", ReadKv(1, "keys", ROWS, context), kv, tree))
    values = b.add("values", Dequantise(), b.add("values.bf16", ReadKv(1, "values", ROWS, context), kv, tree))
    outputs = {"keys": keys, "values": values}
    for case, window, cap in (("plain", 0, 0.0), ("window", 7, 0.0), ("cap", 0, 2.0)):
        scores = b.add(f"{case}.scores", MatMulQK(0.2, cap), q, keys)
        masked = b.add(f"{case}.masked", Mask(), scores, b.add(f"{case}.mask", TreeMask(ROWS, context, window), tree))
        probs = b.add(f"{case}.probs", Softmax(), masked)
        attended = b.add(f"{case}.attended", MatMulPV(), probs, values)
        outputs |= {name: name for name in (scores, masked, probs, attended)}
    return Graph("attention", tuple(b.nodes.values()), (*outputs.items(), ("kv", kv)))


def mixed_step() -> dict[str, Any]:
    """Rows of two sequences: a tree after PREFIX committed tokens, and a prompt of OTHER tokens."""
    drafted, prompt = verify(PREFIX, 40, TREE), prefill(list(range(OTHER)))
    a, c = drafted["tree"], prompt["tree"]
    pages = np.zeros((2, a.page_table.shape[1]), np.int32)
    pages[0], pages[1, :1] = a.page_table[0], 6
    scratch = np.concatenate([a.scratch_table, np.zeros_like(a.scratch_table)])
    joined = [np.concatenate([getattr(a, name), getattr(c, name)]) for name in ("positions", "row_slot", "ancestors", "seq_ctx")]
    row_seq = np.repeat(np.arange(2, dtype=np.int32), (len(a.positions), OTHER))
    tree = StepTree(joined[0], row_seq, joined[1], joined[2], joined[3], pages, scratch)
    tokens = np.concatenate([drafted["tokens"], prompt["tokens"]])
    return {"tokens": tokens, "positions": tree.positions, "out_rows": np.arange(len(tokens), dtype=np.int32), "tree": tree}


def attended(ctx: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """(device's, interpreter's) results of a mixed step after a prefill, and its positions. Memory nobody wrote is NaN."""
    graph, limits = attention_graph(ctx), Limits(ctx, 4, 64, 64, 15)
    steps = prefill(list(range(10, 10 + PREFIX))), mixed_step()
    with loaded({"attention": graph}, random_weight, folder, limits) as level:
        level.pool[:] = 0xFF
        for step in steps:
            level.arena[:] = 0xFF
            found = run(level, "attention", step)
    state = interpret(graph, {**steps[0], "kv": KvState.empty(geometry_of(graph), 8, poison=0xFF)}, random_weight)["kv"]
    return found, interpret(graph, {**steps[1], "kv": state}, random_weight), steps[1]["positions"]


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Any]:
    return attended(MAX_LEN, tmp_path_factory.mktemp("attention"))


@pytest.mark.parametrize("name", [name for name, _ in attention_graph(MAX_LEN).outputs if name != "kv"])
def test_an_attention_kernel_agrees_with_the_interpreter_up_to_each_rows_position(
    attention: tuple[dict[str, Any], dict[str, Any], Any], name: str
) -> None:
    found, wanted, positions = attention
    for row, position in enumerate(positions):
        ours, theirs = found[name][row], wanted[name][row].numpy()
        if not name.endswith("attended"):
            ours, theirs = ours[:, : position + 1], theirs[:, : position + 1]
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=0 if name in ("keys", "values") else 5e-6)


def test_a_longest_context_that_is_no_multiple_of_the_vector_changes_nothing(tmp_path: Path) -> None:
    found, wanted, _ = attended(50, tmp_path)
    for case in ("plain", "window", "cap"):
        np.testing.assert_allclose(found[f"{case}.attended"], wanted[f"{case}.attended"].numpy(), rtol=1e-5, atol=5e-6)


def test_keys_and_values_that_would_take_more_than_4_gib_are_declined_with_the_limits_to_lower() -> None:
    limits = Limits(max_model_len=8192, max_num_seqs=4, max_num_batched_tokens=2048, max_logit_rows=64, max_tree_nodes=7)
    rows, context = Dim("rows", 1, 2048), Dim("ctx", 1, 8192)
    b = Builder("large")
    kv, tree = b.input("kv", KvType("bf16", PAGE, 1, KV_HEADS, DIM)), b.input("tree", TreeType())
    b.add("keys", ReadKv(0, "keys", rows, context), kv, tree)
    graph = b.build(keys="keys")
    declined = cpu(limits).lower(graph["keys"], graph)
    assert isinstance(declined, Declined)
    assert declined.why == (
        "unfused attention would hold 12.0 GiB of keys and values (limits.max_num_batched_tokens 2048 x limits.max_model_len 8192), "
        "at most 4 GiB is allowed: lower these limits or enable fuse-attention")


# every subset of the fusion passes

SUBSETS = [subset for size in range(len(FUSIONS) + 1) for subset in itertools.combinations(FUSIONS, size)]
GATED = Llama(mlp=128)  # gated_q8 wants a multiple of 64


def named(subset: tuple[str, ...]) -> str:
    return "without " + ", ".join(subset) if subset else "all"


def two_steps(level: Any, name: str) -> np.ndarray[Any, Any]:
    """Logits of a prefill of 11 tokens, then of a verify of TREE: f32[16, vocab]."""
    tokens = random_tokens(12, GATED.vocab)
    level.pool[:] = 0
    level.arena[:] = 0xFF
    first = run(level, name, prefill(tokens[:-1]))["logits"]
    level.arena[:] = 0xFF
    return np.concatenate([first, run(level, name, verify(11, tokens[-1], TREE))["logits"]])


def two_steps_interpreted(graph: Graph, weights: Weights) -> np.ndarray[Any, Any]:
    tokens = random_tokens(12, GATED.vocab)
    first = interpreted(graph, weights, prefill(tokens[:-1]))
    second = interpreted(graph, weights, verify(11, tokens[-1], TREE), first["kv"])  # type: ignore[arg-type]
    return np.concatenate([first["logits"].numpy(), second["logits"].numpy()])  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def subsets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray[Any, Any]]:
    """Logits of every subset on the device: 32 programs over the kernels of one library."""
    graphs = {named(subset): compiled(GATED, disable=subset) for subset in SUBSETS}
    weights = Weights(row_program(GATED))
    with loaded(graphs, weights, tmp_path_factory.mktemp("subsets"), LIMITS) as level:
        return {name: two_steps(level, name) for name in graphs}


@pytest.mark.parametrize("subset", [s for s in SUBSETS if "fuse-attention" not in s], ids=named)
def test_fusing_all_but_attention_changes_no_bit(subsets: dict[str, np.ndarray[Any, Any]], subset: tuple[str, ...]) -> None:
    assert np.array_equal(subsets[named(subset)], subsets["all"])


@pytest.mark.parametrize("subset", SUBSETS, ids=named)
def test_a_graph_without_some_fusions_gives_the_logits_of_the_interpreter(
    subsets: dict[str, np.ndarray[Any, Any]], subset: tuple[str, ...]
) -> None:
    wanted = two_steps_interpreted(compiled(GATED, disable=subset), Weights(row_program(GATED)))
    assert relative_error(torch.from_numpy(subsets[named(subset)]), torch.from_numpy(wanted)) < 0.01


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_stacking_plain_weights_changes_no_bit(weights: str, tmp_path: Path) -> None:
    fused, plain = compiled(GATED, weights=weights), compiled(GATED, weights=weights, disable=("fuse-qkv", "fuse-gate-up"))
    assert len(fused) < len(plain)
    with loaded({"fused": fused}, Weights(row_program(GATED)), tmp_path / "a", LIMITS) as level:
        found = two_steps(level, "fused")
    with loaded({"plain": plain}, Weights(row_program(GATED)), tmp_path / "b", LIMITS) as level:
        assert np.array_equal(found, two_steps(level, "plain"))


# other weights and other models

PLAIN = (*FUSIONS, "quantise-weights")
GEMMA_LIKE = Llama(mlp=128, biases=True, qk_norm=True, tied=False, act="gelu_tanh", windows=(0, 5))


ODD = Llama(act="gelu", mlp=100, vocab=93)


@pytest.mark.parametrize("shape", [GATED, GEMMA_LIKE, ODD], ids=["llama", "qk-norm, biases, window", "gelu, odd sizes"])
def test_f32_weights_give_the_logits_of_the_interpreter_fused_or_not(shape: Llama, tmp_path: Path) -> None:
    weights = Weights(row_program(shape))
    graphs = {"fused": compiled(shape, disable=("quantise-weights",)), "plain": compiled(shape, disable=PLAIN)}
    with loaded(graphs, weights, tmp_path, LIMITS) as level:
        for name, graph in graphs.items():
            wanted = torch.from_numpy(two_steps_interpreted(graph, weights))
            assert relative_error(torch.from_numpy(two_steps(level, name)), wanted) < 2e-3  # bf16 keys that round the other way


def test_packed_weights_with_qk_norm_biases_and_a_window_give_the_logits_of_the_interpreter_fused_or_not(tmp_path: Path) -> None:
    weights = Weights(row_program(GEMMA_LIKE))
    graphs = {"fused": compiled(GEMMA_LIKE), "plain": compiled(GEMMA_LIKE, disable=FUSIONS)}
    with loaded(graphs, weights, tmp_path, LIMITS) as level:
        for name, graph in graphs.items():
            wanted = torch.from_numpy(two_steps_interpreted(graph, weights))
            assert relative_error(torch.from_numpy(two_steps(level, name)), wanted) < 0.01


# law L2 without fusions


def chunk(tokens: list[int], start: int, end: int) -> dict[str, Any]:
    """Rows start .. end - 1 of a prompt whose earlier tokens are in pages."""
    step = prefill(tokens[:end])
    tree = step["tree"]
    by_row = {name: getattr(tree, name)[start:] for name in ("positions", "row_seq", "row_slot", "ancestors")}
    rows = replace(tree, **by_row, seq_ctx=np.array([start], np.int32))
    return {"tokens": step["tokens"][start:], "positions": rows.positions, "out_rows": np.arange(end - start, dtype=np.int32), "tree": rows}


@pytest.fixture(scope="module")
def plain_level(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    graphs = {"f32": compiled(GATED, disable=PLAIN)}
    with loaded(graphs, Weights(row_program(GATED)), tmp_path_factory.mktemp("plain"), LIMITS) as level:
        yield level


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 9])
def test_an_unfused_graph_gives_a_row_the_same_bits_in_chunks_of_any_size(plain_level: Any, size: int) -> None:
    tokens = random_tokens(19, GATED.vocab)
    whole = run(plain_level, "f32", prefill(tokens))["logits"]
    plain_level.pool[:] = 0
    parts = [run(plain_level, "f32", chunk(tokens, at, min(at + size, 19)))["logits"] for at in range(0, 19, size)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_an_unfused_graph_gives_a_drafted_path_the_bits_of_a_prompt(plain_level: Any) -> None:
    tokens = random_tokens(19, GATED.vocab)
    whole = run(plain_level, "f32", prefill(tokens))["logits"]
    plain_level.pool[:] = 0
    run(plain_level, "f32", prefill(tokens[:11]))
    tree = Tree((3, tokens[12], 4, tokens[13], tokens[14]), (-1, -1, 0, 1, 3))  # rows 0, 2, 4, 5 are the prompt's tokens 11 .. 14
    drafted = run(plain_level, "f32", verify(11, tokens[11], tree))["logits"]
    assert np.array_equal(drafted[[0, 2, 4, 5]], whole[11:15])


# the real model


@pytest.mark.model
def test_smollm2_without_fused_attention_writes_the_same_text(smollm2: Path, root: Path, tmp_path: Path) -> None:
    """On prompts whose every next token is clear: the two round otherwise, and where two tokens are about as likely int8 rows
    (a code more or less in every layer) may choose the other one."""
    from mlsdc.compiler import compile_model
    from mlsdc.runtime import Engine, SamplingParams

    settings = ["passes.disable=[fuse-attention]", "limits.max_model_len=256", "limits.max_num_batched_tokens=32"]
    plain = compile_model(root / "examples" / "smollm2.yaml", tmp_path / "plain.mlsdc", set=settings)
    prompts = ["1, 2, 3, 4, 5,", "A, B, C, D,"]
    texts = []
    for artifact in (smollm2, plain):
        with Engine.load(artifact, threads=2) as engine:
            texts.append([result.text for result in engine.generate(prompts, SamplingParams(max_tokens=24))])
    assert texts[0] == texts[1]
