"""Graphs from ONNX: a decoder's file -> the core ops that torch.export's graphs become too, so that the same passes raise them.

    source = load_source("model.onnx")
    captured = capture_onnx(source, OnnxFile.open(source.onnx), max_tokens=2048)

Read are graphs from `input_ids` [batch, sequence] to logits, with or without a past and an attention mask: the past is taken as empty, the
mask as all ones. Operators: onnx_rules.

A graph that makes logits of the last token only is read as one that makes them of every token: where it takes the last position, all go on,
and what follows must be ops of one position by itself (`last`).
"""

from __future__ import annotations

import difflib
import re
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mlsdc.compiler.capture.onnx_file import OnnxFile, attributes
from mlsdc.compiler.capture.onnx_known import LENGTHS, Known
from mlsdc.compiler.capture.onnx_rules import EMPTY, RULES, key
from mlsdc.compiler.capture.source import Turned
from mlsdc.compiler.errors import CaptureError, IrError
from mlsdc.compiler.graph import Builder, Editor, Graph, Weight
from mlsdc.compiler.ops import Op
from mlsdc.compiler.ops_capture import CausalMask, Positions
from mlsdc.compiler.ops_core import Binary, Cast, Reduce, Reshape, Scalar, Unary
from mlsdc.compiler.ops_nn import Linear, RmsNorm
from mlsdc.compiler.types import Dim, DType, TensorType

KINDS = {"f": DType.F32, "b": DType.BOOL, "i": DType.I64, "u": DType.I64}
BY_POSITION = (Linear, RmsNorm, Unary, Scalar, Binary, Cast, Reduce, Reshape)  # what may follow where the last token is taken


class OnnxGraph:
    """One conversion. A value of the file is an IR name once it is converted; what follows from the length is evaluated (`known`).

    The graph reads `tokens` i32[1, seq]; with `features` not 0 it reads `features` f32[1, seq, features] in their place (heads).
    """

    def __init__(self, file: OnnxFile, max_tokens: int, name: str, *, features: int = 0) -> None:
        self.file = file
        self.builder = Builder(name)
        self.seq = Dim("seq", 1, max_tokens)
        self.max_tokens = max_tokens
        self.tokens = feature_input(file) if features else token_input(file)
        self.known = Known(file, self.tokens, lambda value, length: self.shape_at(self.value(value), length))
        entry = TensorType(DType.F32, (1, self.seq, features)) if features else TensorType(DType.I32, (1, self.seq))
        self.env: dict[str, Any] = {self.tokens: self.builder.input("features" if features else "tokens", entry)}
        self.constants: dict[str, NDArray[np.float32]] = {}
        self.turned: dict[str, Turned] = {}
        self.last: set[str] = set()  # values that are of the last position in the file, and of all here
        self._taken: dict[str, int] = {}
        self.node: onnx.NodeProto = file.model.graph.node[0]

    def run(self) -> Graph:
        """Raises CaptureError listing the nodes without a rule."""
        (logits,) = self.values(logits_output(self.file))
        if logits in self.last and len(self.shape(logits)) == 2:
            logits = self._batched(logits)
        graph = self.builder.build(logits=logits)
        return Editor(graph).finish()

    def values(self, *outputs: str) -> tuple[str, ...]:
        """The IR names of values of the file, after converting all that they need. Raises CaptureError listing the nodes without a rule."""
        live = self._live(*outputs)
        self._reject_unknown(live)
        for node in self.file.model.graph.node:
            if node.output[0] in live and node.output[0] not in self.env and not self.known.known(node.output[0]):
                self.convert(node)
        return tuple(self.value(output) for output in outputs)

    def _batched(self, logits: str) -> str:
        """[seq, vocab] -> [1, seq, vocab]; of a linear its input is reshaped, so that logits are made only where they are asked for."""
        if not isinstance(self.op(logits), Linear):
            return self.add(Reshape((1, -1, self.shape(logits)[-1])), logits)
        x, *rest = self.inputs(logits)
        return self.add(Linear(), self.add(Reshape((1, -1, self.shape(x)[-1])), x), *rest)

    def _live(self, *outputs: str) -> set[str]:
        live: set[str] = set()
        pending = [*outputs]
        while pending:
            node = self.known.maker.get(pending.pop())
            if node is not None and node.output[0] not in live:
                live.update(name for name in node.output if name)
                pending.extend(name for name in node.input if name and not self.known.known(name))
        return live

    def _reject_unknown(self, live: set[str]) -> None:
        unknown = [node for node in self.file.model.graph.node
                   if node.output[0] in live and not self.known.known(node.output[0]) and key(node) not in RULES]
        if not unknown:
            return
        kinds: dict[str, list[str]] = {}
        for node in unknown:
            kinds.setdefault(key(node), []).append(node.name or node.output[0])
        shown = "; ".join(f"{kind} ({', '.join(names[:2])}{f' and {len(names) - 2} more' if len(names) > 2 else ''})"
                          for kind, names in list(kinds.items())[:6])
        near = difflib.get_close_matches(next(iter(kinds)), RULES, 1, cutoff=0.3)
        hint = f"; the nearest operator that can is {near[0]}" if near else ""
        raise CaptureError(f"{self.file.path.name}: operators that cannot be read: {shown}{hint}")

    def convert(self, node: onnx.NodeProto) -> None:
        rule = RULES.get(key(node))
        if rule is None:
            raise CaptureError(f"{self.where(node)} cannot be read")
        outer, self.node = self.node, node
        try:
            made = rule(self, node, attributes(node))
        except IrError as error:
            raise CaptureError(f"{self.where(node)} cannot be read: {error}") from None
        except (TypeError, ValueError, KeyError, IndexError, StopIteration) as error:
            raise CaptureError(f"{self.where(node)} cannot be read with these inputs ({type(error).__name__}: {error})") from error
        finally:
            self.node = outer
        results = made if isinstance(made, list) else [made]
        self.env.update((name, value) for name, value in zip(node.output, results, strict=False) if name)

    def where(self, node: onnx.NodeProto) -> str:
        return f"{self.file.path.name}: {key(node)} '{node.name or node.output[0]}'"

    # what rules ask for

    def value(self, name: str) -> Any:
        """The IR name of a value (EMPTY for one without elements). What is known becomes positions, a mask, a weight, or its own op."""
        if name in self.env:
            return self.env[name]
        if not self.known.known(name):
            raise CaptureError(f"{self.where(self.node)} reads '{name}', which nothing makes")
        self.env[name] = self._from_known(name)
        return self.env[name]

    def _from_known(self, name: str) -> Any:
        if name in self.file.initializers and len(self.file.initializers[name].dims) in (1, 2):
            return self.weight(name)
        if self.known.at(name, LENGTHS[0]).size == 0:
            return EMPTY
        if self.known.same(name):
            return self._constant(name)
        if self.known.positions(name):
            return self._positions(name)
        mask = self.known.mask(name)
        if mask is not None:
            return self.mask(mask)
        node = self.known.maker.get(name)
        if node is None or key(node) not in RULES:
            kind = "an input" if node is None else f"made by {key(node)}"
            raise CaptureError(
                f"{self.where(self.node)} reads '{name}', {kind}: it follows from the length, but is neither positions nor a mask")
        self.convert(node)
        return self.env[name]

    def _constant(self, name: str) -> str:
        """A vector with axes of 1 around it, which is how exporters fold a table of frequencies, is a vector that is reshaped."""
        values = self.known.at(name, LENGTHS[0])
        vector = values.ndim > 2 and values.size == max(values.shape)
        made = self.constant(name, values.reshape(-1) if vector else values)
        return self.add(Reshape(values.shape), made) if vector else made

    def _positions(self, name: str) -> str:
        made = "positions" if "positions" in self.builder.nodes else self.builder.add("positions", Positions(), self.env[self.tokens])
        value = self.known.at(name, LENGTHS[0])
        dtype = KINDS[value.dtype.kind]
        if f"positions.{dtype}" not in self.builder.nodes:
            self.builder.add(f"positions.{dtype}", Cast(dtype), made)
        made = f"positions.{dtype}"
        return made if value.ndim == 1 else self.add(Reshape(tuple(-1 if size > 1 else 1 for size in value.shape)), made)

    def mask(self, mask: CausalMask) -> str:
        name = f"causal_mask{'.additive' if mask.additive else ''}{f'.window_{mask.window}' if mask.window else ''}"
        return name if name in self.builder.nodes else self.builder.add(name, mask, self.env[self.tokens])

    def positions(self) -> str:
        """i32[seq]"""
        return "positions" if "positions" in self.builder.nodes else self.builder.add("positions", Positions(), self.env[self.tokens])

    def weight(self, name: str) -> str:
        """An initializer as a weight."""
        return self._once(f"w.{self.clean(name)}", TensorType(DType.F32, self.file.shape(name)), name)

    def rows(self, name: str) -> str | None:
        """A known matrix [k, n], which is multiplied from the right, as the weight [n, k] of a linear; None for what is no matrix."""
        turned = True
        node = self.known.maker.get(name)
        while node is not None and node.op_type in ("Transpose", "Identity", "Cast"):
            turned ^= node.op_type == "Transpose"
            name = node.input[0]
            node = self.known.maker.get(name)
        if name in self.file.packed or (name in self.file.initializers and len(self.file.shape(name)) == 2):
            n, k = self.file.shape(name)
            if not turned:
                return self.weight(name)
            self.turned[f"{name}^T"] = Turned(name, 1)
            return self._once(f"w.{self.clean(name)}.turned", TensorType(DType.F32, (k, n)), f"{name}^T")
        if not self.known.known(name) or not self.known.same(name) or self.known.at(name, LENGTHS[0]).ndim != 2:
            return None
        values = self.known.at(name, LENGTHS[0])
        return self.constant(name, values.T if turned else values)

    def constant(self, name: str, values: NDArray[Any]) -> str:
        """A weight with these values."""
        self.constants[f"constant.{name}"] = np.ascontiguousarray(values, np.float32)
        return self._once(f"w.constant.{self.clean(name)}", TensorType(DType.F32, values.shape), f"constant.{name}")

    def number(self, name: str) -> float | None:
        """The one number of a constant of one element."""
        if not name or not self.known.known(name) or self.known.at(name, LENGTHS[0]).size != 1 or not self.known.same(name):
            return None
        return float(self.known.at(name, LENGTHS[0]).reshape(-1)[0])

    def ints(self, name: str) -> tuple[int, ...]:
        """Whole numbers that may follow from the length: those that are it are -1. Raises CaptureError for others that vary."""
        short, long = (self.known.at(name, n).reshape(-1).tolist() for n in LENGTHS)
        if any(a != b and (a, b) != LENGTHS for a, b in zip(short, long, strict=True)):
            raise CaptureError(f"{self.where(self.node)}: '{name}' varies with the length otherwise than as the length")
        return tuple(-1 if (a, b) == LENGTHS else int(a) for a, b in zip(short, long, strict=True))

    def shape(self, value: str) -> tuple[int, ...]:
        """Static sizes of an IR value, -1 for the sequence."""
        type_ = self.builder.nodes[value].type
        assert isinstance(type_, TensorType)
        return tuple(size if isinstance(size, int) else -1 for size in type_.shape)

    def shape_at(self, value: str, length: int) -> tuple[int, ...]:
        return tuple(length if size == -1 else size for size in self.shape(value))

    def dtype(self, value: str) -> DType:
        type_ = self.builder.nodes[value].type
        assert isinstance(type_, TensorType)
        return type_.dtype

    def reshaped(self, value: str, shapes: list[tuple[int, ...]]) -> str:
        """`value` in the shape it has at each of LENGTHS."""
        if any(a != b and (a, b) != LENGTHS for a, b in zip(*shapes, strict=True)):
            raise CaptureError(f"{self.where(self.node)}: gives {list(shapes[1])} for {LENGTHS[1]} tokens; the sequence must stay an axis")
        wanted = tuple(-1 if (a, b) == LENGTHS else a for a, b in zip(*shapes, strict=True))
        return value if wanted == self.shape(value) else self.add(Reshape(wanted), value)

    def only_last(self, value: str, shape: tuple[int, ...]) -> str:
        """`value`, of which the file goes on with the last position, in the shape that makes; the size 1 of that position is -1."""
        made = self._add(Reshape(shape), (value,))
        self.last.add(made)
        return made

    def add(self, op: Op, *inputs: str) -> str:
        if not self.last.isdisjoint(inputs):
            return self._add_of_last(op, inputs)
        return self._add(op, inputs)

    def _add_of_last(self, op: Op, inputs: tuple[str, ...]) -> str:
        """An op of what stands for the last position: it must be one of each position by itself."""
        others = [name for name in inputs if name not in self.last and not isinstance(self.op(name), Weight)]
        if others or not isinstance(op, BY_POSITION):
            what = f"with '{others[0]}', which is of all tokens" if others else f"by {op.opname}"
            raise CaptureError(
                f"{self.where(self.node)} takes the last token only, and goes on {what}; only ops of one position can be read")
        made = self._add(op, inputs)
        axis = [i for i, size in enumerate(self.shape(made)) if size == -1]
        mixes = isinstance(op, Reduce) and op.axis % len(self.shape(made)) != len(self.shape(made)) - 1
        if len(axis) != 1 or mixes:
            raise CaptureError(f"{self.where(self.node)} takes the last token only, and loses its axis by {op.opname}")
        self.last.add(made)
        return made

    def _add(self, op: Op, inputs: tuple[str, ...]) -> str:
        base = self.clean(self.node.output[0] or self.node.name)
        count = self._taken[base] = self._taken.get(base, 0) + 1
        name = base if count == 1 and base not in self.builder.nodes else f"{base}.{count}"
        return self.builder.add(name, op, *inputs, origin=f"{self.node.name} {key(self.node)}".strip())

    def op(self, name: str) -> Op:
        return self.builder.nodes[name].op

    def inputs(self, name: str) -> tuple[str, ...]:
        return self.builder.nodes[name].inputs

    def clean(self, name: str) -> str:
        return re.sub(r"[^A-Za-z0-9_.]", "_", name).strip("_.") or "value"

    def _once(self, name: str, type_: TensorType, source: str) -> str:
        if name not in self.builder.nodes:
            self.builder.weight(name, type_, source)
        return name


def token_input(file: OnnxFile) -> str:
    inputs = [value.name for value in file.model.graph.input if value.name not in file.initializers]
    found = [name for name in inputs if name in ("input_ids", "tokens", "inputs")] or [name for name in inputs if "ids" in name]
    if len(found) != 1:
        raise CaptureError(f"{file.path.name}: inputs are {', '.join(inputs) or 'none'}; expected one of token ids called input_ids")
    return str(found[0])


def feature_input(file: OnnxFile) -> str:
    inputs = [value.name for value in file.model.graph.input if value.name not in file.initializers]
    if len(inputs) != 1:
        raise CaptureError(f"{file.path.name}: inputs are {', '.join(inputs) or 'none'}; expected one of hidden states")
    return str(inputs[0])


def logits_output(file: OnnxFile) -> str:
    outputs = [value.name for value in file.model.graph.output]
    return "logits" if "logits" in outputs else str(outputs[0])
