"""Tiny transformers models as ONNX files: exported by torch, and written out in onnxruntime's fused operators."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from tests.models.tiny import byte_tokenizer, folder, hf_model

LENGTH = 256
_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def new_folder(name: str) -> Path:
    """A folder with the model's config and tokenizer, which lives as long as the process."""
    kept = tempfile.TemporaryDirectory(prefix="mlsdc-onnx-")
    _KEPT.append(kept)
    path = Path(kept.name)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    (path / "config.json").write_text((folder(name) / "config.json").read_text())
    return path


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.model(input_ids=input_ids, use_cache=False).logits


class WithPast(nn.Module):
    """What optimum exports: a mask, positions and past key values come in, the present ones go out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, *past: torch.Tensor) -> Any:
        from transformers import DynamicCache

        pairs = list(zip(past[::2], past[1::2], strict=True))
        cache = DynamicCache(pairs)
        made = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, past_key_values=cache)
        present = [tensor for layer in made.past_key_values.layers for tensor in (layer.keys, layer.values)]
        return made.logits, *present


@functools.cache
def exported(name: str) -> Path:
    """By torch.onnx (dynamo), tokens in and logits out."""
    path = new_folder(name) / "model.onnx"
    with quiet():
        program = torch.onnx.export(
            Logits(hf_model(name)).eval(), (torch.zeros(1, 8, dtype=torch.int64),), dynamo=True, input_names=["input_ids"],
            output_names=["logits"], dynamic_shapes={"input_ids": {1: torch.export.Dim("sequence", min=2, max=LENGTH)}})
    assert program is not None
    program.save(str(path), external_data=True)
    return path


@functools.cache
def exported_with_past(name: str) -> Path:
    """The interface of optimum's exports: attention_mask, position_ids, past_key_values.N.key and .value."""
    path, model = new_folder(name) / "model.onnx", hf_model(name)
    config: Any = model.config
    heads, dim = config.num_key_value_heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    names = [f"past_key_values.{i}.{part}" for i in range(config.num_hidden_layers) for part in ("key", "value")]
    past = tuple(torch.zeros(1, heads, 4, dim) for _ in names)
    example = (torch.zeros(1, 8, dtype=torch.int64), torch.ones(1, 12, dtype=torch.int64), torch.arange(4, 12)[None], *past)
    sequence = torch.export.Dim("sequence", min=2, max=LENGTH)
    auto = torch.export.Dim.AUTO
    shapes = ({1: sequence}, {1: auto}, {1: sequence}, tuple({2: auto} for _ in past))
    with quiet():
        program = torch.onnx.export(
            WithPast(model).eval(), example, dynamo=True, input_names=["input_ids", "attention_mask", "position_ids", *names],
            output_names=["logits", *(name.replace("past_key_values", "present") for name in names)], dynamic_shapes=shapes)
    assert program is not None
    program.save(str(path))
    return path


@contextlib.contextmanager
def quiet() -> Any:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


class Fused:
    """A Llama in com.microsoft operators. `bits`: linears by MatMulNBits of that many bits, blocks of 32; 0: by MatMul."""

    def __init__(self, name: str, *, packed: bool, rotary: bool, bits: int, external: bool) -> None:
        self.model = hf_model(name)
        self.config: Any = self.model.config
        self.state = {key: value.numpy() for key, value in self.model.state_dict().items()}
        self.packed, self.rotary, self.bits, self.external = packed, rotary, bits, external
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[TensorProto] = []

    def write(self, path: Path) -> Path:
        config = self.config
        self.put("embed", self.state["model.embed_tokens.weight"])
        self.table()
        x = self.node("Gather", ["embed", "input_ids"], "x0")
        attended = ""
        for i in range(config.num_hidden_layers):
            at = f"model.layers.{i}"
            norm = self.put(f"{at}.norm1", self.state[f"{at}.input_layernorm.weight"])
            if i == 0:
                h = self.node("SimplifiedLayerNormalization", [x, norm], f"{at}.h", axis=-1, epsilon=config.rms_norm_eps)
            else:
                h, x = self.skip(x, attended, norm, f"{at}.h")
            attended = self.attention(h, at)
            h, x = self.skip(x, attended, self.put(f"{at}.norm2", self.state[f"{at}.post_attention_layernorm.weight"]), f"{at}.m")
            gate, up = (self.linear(h, f"{at}.mlp.{part}_proj") for part in ("gate", "up"))
            active = self.node("Mul", [gate, self.node("Sigmoid", [gate], f"{at}.s")], f"{at}.a")
            attended = self.linear(self.node("Mul", [active, up], f"{at}.g"), f"{at}.mlp.down_proj")
        h, _ = self.skip(x, attended, self.put("norm", self.state["model.norm.weight"]), "final")
        self.linear(h, "lm_head", out="logits")
        return self.save(path)

    def attention(self, h: str, at: str) -> str:
        config = self.config
        q, k, v = (self.linear(h, f"{at}.self_attn.{part}_proj") for part in "qkv")
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        if not self.rotary:
            q, k = (self.node("RotaryEmbedding", [x, "position_ids", "cos", "sin"], f"{x}.turned", ms=True, num_heads=n, interleaved=0,
                              rotary_embedding_dim=0) for x, n in ((q, heads), (k, kv)))
        if self.packed:
            q, k, v = self.node("Concat", [q, k, v], f"{at}.qkv", axis=-1), "", ""
        tables = ["cos", "sin"] if self.rotary else []
        past = [f"past_key_values.{at.rpartition('.')[2]}.{part}" for part in ("key", "value")]
        present = [name.replace("past_key_values", "present") for name in past]
        self.nodes.append(helper.make_node(
            "GroupQueryAttention", [q, k, v, *past, "seqlens_k", "total", *tables], [f"{at}.o", *present], f"{at}.gqa",
            domain="com.microsoft", num_heads=heads, kv_num_heads=kv, do_rotary=int(self.rotary), rotary_interleaved=0))
        return self.linear(f"{at}.o", f"{at}.self_attn.o_proj")

    def skip(self, x: str, skip: str, norm: str, name: str) -> tuple[str, str]:
        self.nodes.append(helper.make_node("SkipSimplifiedLayerNormalization", [x, skip, norm], [name, "", "", f"{name}.sum"], name,
                                           domain="com.microsoft", epsilon=self.config.rms_norm_eps))
        return name, f"{name}.sum"

    def linear(self, x: str, path: str, out: str = "") -> str:
        out, weight = out or f"{path}.y", self.state[f"{path}.weight"]
        if not self.bits:
            return self.node("MatMul", [x, self.put(path, np.ascontiguousarray(weight.T))], out)
        n, k = weight.shape
        groups = weight.reshape(n, k // 32, 32)
        top = (1 << self.bits) - 1
        low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
        scale = (high - low) / top
        zero = np.clip(np.rint(-low / scale), 0, top)
        codes = np.clip(np.rint(groups / scale) + zero, 0, top).astype(np.uint8)
        self.state[f"{path}.weight"] = ((codes - zero) * scale).astype(np.float32).reshape(n, k)
        zeros = zero[..., 0].astype(np.uint8)
        if self.bits == 4:
            codes, zeros = codes[..., ::2] | codes[..., 1::2] << 4, zeros[:, ::2] | zeros[:, 1::2] << 4
        inputs = [x, self.put(f"{path}.codes", codes), self.put(f"{path}.scales", scale.astype(np.float32).reshape(-1)),
                  self.put(f"{path}.zeros", zeros.reshape(-1))]
        return self.node("MatMulNBits", inputs, out, ms=True, N=n, K=k, bits=self.bits, block_size=32)

    def table(self) -> None:
        inv_freq = self.model.model.rotary_emb.inv_freq.numpy()  # type: ignore[union-attr]
        angles = np.arange(LENGTH, dtype=np.float32)[:, None] * inv_freq
        self.put("cos", np.cos(angles))
        self.put("sin", np.sin(angles))
        for name, value in (("one", 1), ("axis", [1]), ("last", 1)):
            self.put(name, np.array(value, np.int64))
        counts = self.node("ReduceSum", ["attention_mask", "axis"], "counts", keepdims=0)
        self.node("Cast", [self.node("Sub", [counts, "one"], "seqlens.i64")], "seqlens_k", to=TensorProto.INT32)
        size = self.node("Gather", [self.node("Shape", ["attention_mask"], "mask.shape"), "last"], "total.i64", axis=0)
        self.node("Cast", [size], "total", to=TensorProto.INT32)

    def node(self, kind: str, inputs: list[str], out: str, *, ms: bool = False, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [out], out, domain="com.microsoft" if ms else "", **attributes))
        return out

    def put(self, name: str, values: Any) -> str:
        if name not in {tensor.name for tensor in self.tensors}:
            self.tensors.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def save(self, path: Path) -> Path:
        config = self.config
        dim = config.hidden_size // config.num_attention_heads
        info = helper.make_tensor_value_info
        inputs = [info(name, TensorProto.INT64, ["batch", size]) for name, size in
                  (("input_ids", "sequence"), ("attention_mask", "total_sequence"), ("position_ids", "sequence"))]
        names = [f"past_key_values.{i}.{part}" for i in range(config.num_hidden_layers) for part in ("key", "value")]
        shape = [config.num_key_value_heads, "past", dim]
        inputs += [info(name, TensorProto.FLOAT, ["batch", *shape]) for name in names]
        outputs = [info("logits", TensorProto.FLOAT, ["batch", "sequence", config.vocab_size])]
        outputs += [info(name.replace("past_key_values", "present"), TensorProto.FLOAT, ["batch", *shape]) for name in names]
        graph = helper.make_graph(self.nodes, "main_graph", inputs, outputs, self.tensors)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)], ir_version=9)
        if self.external:
            onnx.save(model, path, save_as_external_data=True, location="model.onnx.data", size_threshold=1024)
        else:
            onnx.save(model, path)
        return path
