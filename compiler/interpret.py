"""Reference interpreter of the IR in torch: slow, plain, and the oracle of every numeric test.

    interpret(graph, {"tokens": ..., "kv": KvState.empty(geometry, 4), "tree": StepTree.prefill(5, 32)}, weights) -> {"logits": ...}

Importing this module imports torch; nothing that a user runs without `[compile]` may do so at its top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from mlsdc.compiler import (  # noqa: F401  (they register their ops)
    interpret_capture,
    interpret_core,
    interpret_heads,
    interpret_kv,
    interpret_moe,
    interpret_quant,
    interpret_shard,
)
from mlsdc.compiler.errors import IrError
from mlsdc.compiler.graph import Graph, Input, Node, Weight
from mlsdc.compiler.interpret_core import EVAL, Context, Value
from mlsdc.compiler.interpret_state import KvState, StepTree
from mlsdc.compiler.quantise import A8, A16, F8, Q4, Q8, quantise_f8, quantise_q4, quantise_q8
from mlsdc.compiler.types import DType, KvType, TensorType, TreeType, Type

__all__ = ["Context", "KvState", "StepTree", "Value", "evaluate", "interpret"]


WeightSource = Callable[[Node], Any]
QUANTISE: dict[DType, Callable[[Any], Q8 | Q4 | F8]] = {DType.Q8: quantise_q8, DType.Q4: quantise_q4, DType.F8: quantise_f8}


def interpret(
    graph: Graph,
    inputs: Mapping[str, Any],
    weights: WeightSource,
    *,
    dtype: torch.dtype = torch.float32,
    taps: dict[str, Value] | None = None,
) -> dict[str, Value]:
    """The graph's outputs by result name.

    `inputs` holds a tensor or array, `KvState` or `StepTree` for every input node. `weights(node)` gives a weight node's value in its
    logical shape: a tensor or array, or `Q8` / `Q4` / `F8`; plain numbers for a node of such a type are quantised here. `dtype` is what f32
    is computed in (float64: all but a8 and the KV bytes, which are what they are). `taps`, if given, is filled with every node's value;
    without it values are dropped after their last use. Raises IrError naming the node for a missing input or a value of another type.
    """
    context, sizes = Context(dtype), dict[str, int]()
    values: dict[str, Value] = {}
    last_use = {name: node.name for node in graph for name in node.inputs}
    kept = {name for _, name in graph.outputs}
    with torch.no_grad():
        for node in graph:
            value = given(node, inputs, weights, context) if isinstance(node.op, Input | Weight) else evaluate(node, values, context)
            check(node, value, sizes, context)
            values[node.name] = value
            if taps is not None:
                taps[node.name] = value
            for name in (*dict.fromkeys(node.inputs), node.name):
                if last_use.get(name, name) == node.name and name not in kept:
                    del values[name]
    return {result: values[name] for result, name in graph.outputs}


def evaluate(node: Node, values: Mapping[str, Value], context: Context) -> Value:
    """One node's value from its inputs'. Raises IrError for an op without a meaning."""
    function = EVAL.get(type(node.op))
    if function is None:
        raise IrError(f"%{node.name}: the interpreter has no rule for {node.op.opname}")
    return function(node.op, tuple(values[name] for name in node.inputs), context)


def given(node: Node, inputs: Mapping[str, Any], weights: WeightSource, context: Context) -> Value:
    """The value of an input or weight node, brought to the node's type."""
    if isinstance(node.op, Input):
        if node.name not in inputs:
            raise IrError(f"%{node.name}: no value given for input {node.type}; given are {', '.join(inputs) or 'none'}")
        value = inputs[node.name]
    else:
        value = weights(node)
    if not isinstance(node.type, TensorType) or isinstance(value, Q8 | Q4 | F8 | A8 | A16):
        return value  # type: ignore[no-any-return]
    if node.type.dtype in QUANTISE:
        return QUANTISE[node.type.dtype](np.asarray(torch.as_tensor(value).to(torch.float32)))
    return torch.as_tensor(value).to(context.dtype(node.type.dtype))


def check(node: Node, value: Value, sizes: dict[str, int], context: Context) -> None:
    """Raises IrError unless the value has the node's type; binds symbolic sizes in `sizes` at first sight."""
    type_ = node.type
    if not isinstance(type_, TensorType):
        if not isinstance(value, StepTree if isinstance(type_, TreeType) else KvState) or not same_geometry(type_, value):
            raise IrError(f"%{node.name}: has type {type_}, its value is {described(value)}")
        return
    packed = {DType.Q8: Q8, DType.Q4: Q4, DType.F8: F8, DType.A8: A8, DType.A16: A16}.get(type_.dtype)
    if packed is not None and not isinstance(value, packed):
        raise IrError(f"%{node.name}: has type {type_}, its value is {described(value)}")
    if packed is None and (not isinstance(value, torch.Tensor) or value.dtype != context.dtype(type_.dtype)):
        raise IrError(f"%{node.name}: has type {type_}, its value is {described(value)}")
    shape = tuple(value.codes.shape if isinstance(value, Q8 | Q4 | F8 | A8 | A16) else value.shape)  # type: ignore[union-attr]
    pairs = zip(type_.shape, shape, strict=False)
    wanted = tuple(size if isinstance(size, int) else sizes.setdefault(size.name, have) for size, have in pairs)
    if len(shape) != type_.rank or shape != wanted:
        bound = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        raise IrError(f"%{node.name}: has type {type_}, its value is {described(value)}" + (f" with {bound}" if bound else ""))


def same_geometry(type_: Type, value: Value) -> bool:
    if not isinstance(type_, KvType) or not isinstance(value, KvState):
        return True
    g = value.geometry
    return KvType(g.format, g.page_size, g.num_layers, g.num_kv_heads, g.head_dim) == type_


def described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Q8 | Q4 | F8 | A8 | A16):
        return f"{type(value).__name__.lower()}{list(value.codes.shape)}"
    if isinstance(value, KvState):
        g = value.geometry
        return str(KvType(g.format, g.page_size, g.num_layers, g.num_kv_heads, g.head_dim))
    return type(value).__name__
