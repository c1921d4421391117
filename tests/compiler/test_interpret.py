"""The interpreter's ops against plain torch, and its errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mlsdc.compiler import ops_core as core
from mlsdc.compiler import ops_nn as nn
from mlsdc.compiler import ops_quant as quant
from mlsdc.compiler.errors import IrError
from mlsdc.compiler.graph import Builder, Graph, Node
from mlsdc.compiler.interpret import interpret
from mlsdc.compiler.interpret_core import EVAL
from mlsdc.compiler.op_attrs import OPS
from mlsdc.compiler.ops import Op
from mlsdc.compiler.quantise import A8, Q8, linear_q, quantise_a8, quantise_q8
from mlsdc.compiler.text import parse_graph
from mlsdc.compiler.types import DType, TensorType

torch.set_num_threads(1)
DTYPES = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.int32: DType.I32, torch.bool: DType.BOOL}


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def call(op: Op, *inputs: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The op's value on tensors; a `Q8` stands for a q8 weight, an `A8` for quantised rows."""
    builder, given = Builder("g"), {}
    for i, x in enumerate(inputs):
        packed = {Q8: DType.Q8, A8: DType.A8}.get(type(x))
        shape = tuple((x.codes if packed else x).shape)
        given[builder.input(f"x{i}", TensorType(packed or DTYPES[x.dtype], shape))] = x
    builder.add("y", op, *given)
    return interpret(builder.build(y="y"), given, no_weights, dtype=dtype)["y"]


def no_weights(node: Node) -> torch.Tensor:
    raise KeyError(node.name)


def test_every_op_has_a_meaning() -> None:
    assert {cls for name, cls in OPS.items() if name not in ("input", "weight")} <= set(EVAL)


A, B = rand(3, 4, 8), rand(4, 1)
PLAIN = [
    (core.Unary("gelu"), (A,), F.gelu(A)),
    (core.Unary("gelu_tanh"), (A,), F.gelu(A, approximate="tanh")),
    (core.Unary("silu"), (A,), A * torch.sigmoid(A)),
    (core.Unary("rsqrt"), (A.abs(),), 1 / A.abs().sqrt()),
    (core.Binary("sub"), (A, B), A - B),
    (core.Binary("maximum"), (A, B), torch.where(A > B, A, B.expand_as(A))),
    (core.Scalar("pow", 2.0), (A,), A * A),
    (core.Scalar("sub", 1.0), (A,), A - 1),
    (core.Reduce("mean"), (A,), A.mean(-1, keepdim=True)),
    (core.Reduce("max", 1), (A,), A.max(1, keepdim=True).values),
    (core.Cast(DType.BF16), (A,), A.bfloat16()),
    (core.Reshape((12, 8)), (A,), A.reshape(12, 8)),
    (core.Transpose(0, -1), (A,), A.permute(2, 1, 0)),
    (core.Slice(-1, 2, 5), (A,), A[..., 2:5]),
    (core.Cat(1), (A, A), torch.cat((A, A), 1)),
    (core.Expand((2, 4, 8)), (B,), B.expand(2, 4, 8)),
    (core.Expand((-1, -1, 8)), (B[None],), B[None].expand(-1, -1, 8)),
    (core.MatMul(), (A, rand(8, 5)), A @ rand(8, 5)),
    (core.Softmax(), (A,), torch.exp(A) / torch.exp(A).sum(-1, keepdim=True)),
    (core.GatherRows(), (A[0], torch.tensor([3, 0, 3], dtype=torch.int32)), A[0][[3, 0, 3]]),
    (nn.Embed(2.0), (torch.tensor([3, 0], dtype=torch.int32), A[0]), 2 * A[0][[3, 0]]),
    (nn.Linear(), (A[0], rand(5, 8), rand(5)), A[0] @ rand(5, 8).T + rand(5)),
    (nn.RmsNorm(1e-5, 1.0), (A[0], rand(8)), F.rms_norm(A[0], (8,), rand(8) + 1, 1e-5)),
]


@pytest.mark.parametrize(("op", "inputs", "wanted"), PLAIN, ids=lambda x: repr(x) if isinstance(x, Op) else "")
def test_an_op_is_what_torch_says(op: Op, inputs: tuple[torch.Tensor, ...], wanted: torch.Tensor) -> None:
    torch.testing.assert_close(call(op, *inputs), wanted)


def test_argmax_takes_the_lowest_of_equals_and_looks_below_its_limit_only() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 9.0], [2.0, 2.0, 2.0, 2.0]])
    assert call(core.ArgMax(), x).tolist() == [3, 0]
    assert call(core.ArgMax(limit=3), x).tolist() == [1, 0]


def test_rope_is_the_complex_product() -> None:
    x, positions, freq = rand(5, 2, 16), torch.tensor([0, 1, 2, 7, 400], dtype=torch.int32), 100.0 ** -(torch.arange(6) / 6)
    table = call(nn.RopeTable(scaling=1.5), positions, freq)
    angles = positions[:, None] * freq
    turned = torch.complex(x[..., :6], x[..., 6:12]) * torch.polar(torch.full_like(angles, 1.5), angles)[:, None]
    wanted = torch.cat((turned.real, turned.imag, x[..., 12:]), -1)  # 12 of 16 channels turn
    torch.testing.assert_close(call(nn.Rope(), x, table), wanted)


def test_attention_is_scaled_dot_product_attention() -> None:
    q, k, v = rand(6, 4, 16), rand(6, 2, 16), rand(6, 2, 16) + 1
    heads = [x.transpose(0, 1) for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.3, enable_gqa=True).transpose(0, 1)
    torch.testing.assert_close(call(nn.Attention(0.3), q, k, v), wanted)


def test_a_window_of_attention_sees_the_last_positions_only() -> None:
    q, k, v = rand(6, 2, 16), rand(6, 2, 16), rand(6, 2, 16) + 1
    last = call(nn.Attention(0.3, window=2), q, k, v)[-1]
    torch.testing.assert_close(last, call(nn.Attention(0.3), q[-2:], k[-2:], v[-2:])[-1])


def test_softcap_bounds_the_scores() -> None:
    q, k, v = rand(3, 1, 16) * 100, rand(3, 1, 16) * 100, rand(3, 1, 16)
    capped = 2 * torch.tanh((q[2, 0] @ k[:, 0].T) / 2)
    torch.testing.assert_close(call(nn.Attention(1.0, softcap=2.0), q, k, v)[2, 0], torch.softmax(capped, -1) @ v[:, 0])


def test_quantised_ops_are_their_parts() -> None:
    x, norm, w = rand(3, 64), rand(64), quantise_q8(rand(128, 64).numpy())
    h = call(quant.NormQuantise(1e-5), x, norm)
    parts = call(quant.Quantise(), call(nn.RmsNorm(1e-5), x, norm))
    assert np.array_equal(h.codes, parts.codes)
    assert np.array_equal(h.scales, parts.scales)
    out = call(quant.LinearQ(), h, w)
    assert np.array_equal(out.numpy(), linear_q(h, w))
    gated = call(quant.GatedQuantise(), h, w)
    wanted = quantise_a8((F.silu(out[:, :64]) * out[:, 64:]).numpy())
    assert np.array_equal(gated.codes, wanted.codes)
    bias, residual = rand(128), rand(3, 128)
    torch.testing.assert_close(call(quant.LinearQ(bias=True, residual=True), h, w, bias, residual), out + bias + residual)


def test_rope_slice_turns_heads_of_the_projection() -> None:
    x, table = rand(3, 96), call(nn.RopeTable(), torch.arange(3, dtype=torch.int32), torch.rand(8))
    wanted = call(nn.Rope(), x[:, 32:64].reshape(3, 2, 16), table)
    torch.testing.assert_close(call(quant.RopeSlice(32, 2, 16), x, table), wanted)


def test_packed_weights_mean_their_dequantised_numbers() -> None:
    w = quantise_q8(rand(16, 64).numpy())
    plain, tokens = torch.from_numpy(w.dequantise()), torch.tensor([5, 1], dtype=torch.int32)
    torch.testing.assert_close(call(nn.Linear(), rand(2, 64), w), rand(2, 64) @ plain.T)
    assert torch.equal(call(nn.Embed(), tokens, w), plain[[5, 1]])


def test_float64_computes_in_float64() -> None:
    y = call(core.Softmax(), A, dtype=torch.float64)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, torch.softmax(A.double(), -1), rtol=1e-14, atol=0)


GRAPH = parse_graph(
    'graph g\ndims rows in 1..8\n%x = input() : f32[rows, 32]\n%w = weight(sources=["a"]) : q8[32, 32]\n'
    "%h = quantise(%x)\n%y = linear_q(%h, %w)\n%z = softmax(%y)\nreturn y=%y")


def run(graph: Graph, taps: dict[str, Any] | None = None, **inputs: Any) -> dict[str, Any]:
    return interpret(graph, inputs, lambda node: np.eye(32, dtype=np.float32), taps=taps)


def test_plain_weights_are_quantised_to_the_nodes_type() -> None:
    x = rand(2, 32)
    assert run(GRAPH, x=x)["y"].sub(x).abs().max() < 0.02


def test_taps_keep_every_value() -> None:
    taps: dict[str, Any] = {}
    run(GRAPH, taps, x=rand(2, 32))
    assert list(taps) == ["x", "w", "h", "y", "z"]
    assert isinstance(taps["h"], A8)


def test_an_input_that_is_not_given_is_named() -> None:
    with pytest.raises(IrError, match=r"%x: no value given for input f32\[rows, 32\]; given are y"):
        run(GRAPH, y=rand(2, 32))


def test_an_input_of_another_shape_is_named() -> None:
    with pytest.raises(IrError, match=r"%x: has type f32\[rows, 32\], its value is float32\[2, 33\] with rows = 2"):
        run(GRAPH, x=rand(2, 33))


def test_a_symbolic_size_is_the_same_everywhere() -> None:
    graph = parse_graph("graph g\ndims rows in 1..8\n%a = input() : f32[rows]\n%b = input() : f32[rows]\nreturn a=%a, b=%b")
    with pytest.raises(IrError, match=r"%b: has type f32\[rows\], its value is float32\[3\] with rows = 2"):
        run(graph, a=rand(2), b=rand(3))
