"""An EAGLE-3 head from an ONNX file: the target's hidden states and the next tokens in, logits of the draft vocabulary out.

The file's graph is converted as a decoder's is (capture/onnx_graph) and read from the logits back to the inputs:

    x = fc(hidden_states)     h = norm(x)     both = [norm(embedding) ; h]
    y = (x or h) + o(attention(q(both), k(both), v(both)))
    z = y + down(act(gate(norm(y))) * up(norm(y)))     logits = lm_head(norm(z))

Whatever else is found is an error that names it. The target's ids of draft ids are what the graph's own output of ids makes of them, else
`d2t`, which holds differences. Which layers the hidden states are of stands in no graph: a config.json beside the file may say so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from mlsdc.compiler.capture import ModelSource
from mlsdc.compiler.capture.onnx_file import FLOATS, OnnxFile, attributes
from mlsdc.compiler.capture.onnx_graph import OnnxGraph, logits_output
from mlsdc.compiler.capture.onnx_known import LENGTHS, Known, run
from mlsdc.compiler.capture.source import WithConstants
from mlsdc.compiler.errors import HeadError
from mlsdc.compiler.heads.checkpoint import HeadFile, check_d2t, check_tensors
from mlsdc.compiler.heads.config import EagleConfig
from mlsdc.compiler.heads.foreign import aux_layers, read_config
from mlsdc.compiler.heads.onnx_attention import AttentionWalk
from mlsdc.compiler.ops_core import Binary, Cat, Unary
from mlsdc.compiler.ops_nn import Embed, Linear
from mlsdc.compiler.types import DType, TensorType

Array = npt.NDArray[Any]
TOKENS, EMBEDS, TAPS = "tokens", "embeds", "taps"  # inputs of the converted graph
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
CHOICES = {"ArgMax": 0, "TopK": 1}  # operators that choose draft ids, and which of their outputs has them
SAME = ("Softmax", "LogSoftmax", "Cast", "Identity")  # what may stand between logits and a choice


def read_eagle(file: OnnxFile, source: ModelSource) -> HeadFile:
    """Raises HeadError, CaptureError, naming the file."""
    label, target, vocab = file.path.name, int(source.config["hidden_size"]), int(source.config["vocab_size"])
    graph = EagleGraph(file)
    if graph.columns % target:
        raise HeadError(f"{label}: input '{graph.taps}' has {graph.columns} columns, expected hidden states of the target's layers side by "
                        f"side, {target} each")
    weights = WithConstants(file, graph.constants, graph.turned)
    (logits,) = graph.values(logits_output(file))
    head = EagleWalk(label, graph)
    head.read(logits)
    attended = head.attention(head.attended, weights)
    names = head.tensors | {part: head.projections[getattr(attended, part)] for part in "qkv"}
    tensors: dict[str, Any] = {name: weights.read(tensor) for name, tensor in names.items()}
    (draft, hidden), count = tensors["lm_head"].shape, graph.columns // target
    made = EagleConfig(
        hidden, target, vocab, draft, _taps(file, source, count), attended.num_heads, attended.num_kv_heads, attended.head_dim,
        len(tensors["gate"]), head.eps, attended.rope_theta, style="eagle3", norm_before_residual=head.norm_before_residual, own_head=True,
        own_embed="embed" in tensors, act=head.act)
    if not made.own_embed and hidden != target:
        raise HeadError(f"{label}: embeddings of {hidden} columns come in, the target's have {target}")
    check_tensors(label, made, {name: values.shape for name, values in tensors.items()})
    d2t = _d2t(graph, head, logits, made)
    return HeadFile(label, made, {name: tensors[name] for name in made.shapes()}, check_d2t(label, d2t, made).astype(np.int32))


def _taps(file: OnnxFile, source: ModelSource, count: int) -> tuple[int, ...]:
    """Layers passed."""
    folder = file.path.parent
    config = read_config(folder) if (folder / "config.json").is_file() else {}
    taps = aux_layers(config, config.get("speculators_model_type") == "eagle3", int(source.config["num_hidden_layers"]))
    if len(taps) != count:
        raise HeadError(f"{file.path.name}: reads hidden states of {count} layers, and not of the {len(taps)} of {list(taps)}: "
                        "eagle_aux_hidden_state_layer_ids of a config.json beside it must say which")
    return taps


class EagleGraph(OnnxGraph):
    """A conversion from `tokens` i32[1, seq] or `embeds` f32[1, seq, .], and `taps` f32[1, seq, columns]."""

    def __init__(self, file: OnnxFile) -> None:
        given = {value.name: value for value in file.model.graph.input if value.name not in file.initializers}
        entering = {name: value for name, value in given.items() if "position" not in name and "mask" not in name}
        past = next((name for name in given if "past" in name or "cache" in name), None)
        if past is not None:
            raise HeadError(f"{file.path.name}: input '{past}': heads with a past are not read; export the head without one")
        floats = [name for name, value in entering.items() if value.type.tensor_type.elem_type in FLOATS]
        ids = [name for name in entering if name not in floats]
        embeds = [name for name in floats if "embed" in name]
        taps = [name for name in floats if name not in embeds]
        if len(taps) != 1 or len(ids) + len(embeds) != 1:
            raise HeadError(f"{file.path.name}: inputs are {', '.join(given) or 'none'}; expected hidden_states and input_ids (or "
                            "inputs_embeds)")
        (self.taps,), (other,) = taps, ids + embeds
        self.columns = _columns(file, given[self.taps])
        entry = helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "sequence"])
        super().__init__(_with_input(file, given[other] if ids else entry), 64, "heads")
        self.file, self.known = file, _Known(self, file, (self.taps, other))
        if embeds:
            self.env[other] = self.builder.input(EMBEDS, TensorType(DType.F32, (1, self.seq, _columns(file, given[other]))))
        self.env[self.taps] = self.builder.input(TAPS, TensorType(DType.F32, (1, self.seq, self.columns)))


class _Known(Known):
    """Two inputs are not known."""

    def __init__(self, graph: OnnxGraph, file: OnnxFile, unknown: tuple[str, ...]) -> None:
        super().__init__(file, graph.tokens, lambda value, length: graph.shape_at(graph.value(value), length))
        self._known |= dict.fromkeys(unknown, False)


def _with_input(file: OnnxFile, entry: onnx.ValueInfoProto) -> OnnxFile:
    """A view of the file with this input only: a decoder's conversion begins with its tokens."""
    graph = onnx.GraphProto(name="heads", node=file.model.graph.node[:1], input=[entry])
    return OnnxFile(file.path, onnx.ModelProto(graph=graph), file.initializers, file.opset, file.packed)


def _columns(file: OnnxFile, value: onnx.ValueInfoProto) -> int:
    sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    if len(sizes) != 3 or sizes[-1] < 1:
        shown = [dim.dim_param or dim.dim_value or "?" for dim in value.type.tensor_type.shape.dim]
        raise HeadError(f"{file.path.name}: input '{value.name}' is [{', '.join(map(str, shown))}], expected [batch, sequence, a number]")
    return int(sizes[-1])


class EagleWalk(AttentionWalk):
    meant = "an EAGLE-3 head is fc, norms of embedding and hidden state, a decoder layer over both, a norm and a linear to the vocabulary"

    def read(self, logits: str) -> None:
        """Leaves names of `tensors`, of q's, k's and v's `projections` by value, `attended` (the input of o), and facts."""
        self.tensors: dict[str, str] = {}
        self.found_eps: list[tuple[str, float]] = []
        self.hidden = self.normed_by("norm", self.plain("lm_head", logits, "a linear to the draft vocabulary"), "the norm before it")
        middle, down = self.residual(self.hidden, "y + down(...)")
        self.mlp(self.plain("down", down, "the linear 'down'"), middle)
        start, out = self.residual(middle, "x + o(attention)")
        self.attended = self.plain("o", out, "the linear 'o'")
        linears, _ = self.between(self.attended)
        inputs = {name: self.linear(name, "q, k or v") for name in linears}
        if len({self.unshaped(x) for x, _ in inputs.values()}) != 1:
            raise self.refused(self.attended, "attention whose q, k and v read the same")
        self.projections = {name: self.without_bias(name, names) for name, (_, names) in inputs.items()}
        self.entry(self.unshaped(next(iter(inputs.values()))[0]), start)

    def entry(self, both: str, start: str) -> None:
        """`both` = [norm(embedding) ; norm(x)], `start`: where the residual begins."""
        joined = self.graph.op(both)
        if not isinstance(joined, Cat) or len(self.graph.inputs(both)) != 2 or joined.axis % 3 != 2:
            raise self.refused(both, "the normed embedding and the normed hidden state side by side")
        left, right = self.graph.inputs(both)
        embedding = self.normed_by("embed_norm", left, "the norm of the embedding")
        if embedding != EMBEDS:
            op = self.graph.op(embedding)
            if not isinstance(op, Embed) or op.scale != 1 or self.unshaped(self.graph.inputs(embedding)[0]) != TOKENS:
                raise self.refused(embedding, "the tokens' rows of a table")
            self.tensors["embed"] = self.tensor(self.graph.inputs(embedding)[1])
        x = self.normed_by("hidden_norm", right, "the norm of the hidden state")
        if x != TAPS and self.unshaped(self.plain("fc", x, "the linear 'fc' of the hidden states")) != TAPS:
            raise self.refused(x, "the linear 'fc' of the hidden states")
        start = self.unshaped(start)
        if start not in (x, self.unshaped(right)):
            raise self.refused(start, f"the hidden state before or after its norm ('{x}', '{right}')")
        self.norm_before_residual = start != x

    def mlp(self, gated: str, middle: str) -> None:
        """`gated` = act(gate(y)) * up(y), y = norm(middle)."""
        gated = self.unshaped(gated)
        for active, up in self.either(gated) if self.graph.op(gated) == Binary("mul") else ():
            op = self.graph.op(active)
            if isinstance(op, Unary) and op.fn in ACTIVATIONS:
                y = self.unshaped(self.plain("up", up, "the linear 'up'"))
                inner = self.unshaped(self.plain("gate", self.graph.inputs(active)[0], "the linear 'gate'"))
                if inner == y and self.normed_by("mlp_norm", y, "the norm before the MLP") == self.unshaped(middle):
                    self.act = op.fn
                    return
        raise self.refused(gated, f"act(gate(norm(y))) * up(norm(y)) of '{middle}', act one of {', '.join(ACTIVATIONS)}")

    def residual(self, value: str, wanted: str) -> tuple[str, str]:
        """A sum of something and a linear, which is not `fc`."""
        value = self.unshaped(value)
        for x, added in self.either(value) if self.graph.op(value) == Binary("add") else ():
            added = self.unshaped(added)
            if isinstance(self.graph.op(added), Linear) and self.unshaped(self.graph.inputs(added)[0]) != TAPS:
                return x, added
        raise self.refused(value, wanted)

    def plain(self, name: str, value: str, wanted: str) -> str:
        """The input of a linear without bias, whose tensor is noted."""
        x, names = self.linear(value, wanted)
        self.tensors[name] = self.without_bias(value, names)
        return x

    def without_bias(self, value: str, names: tuple[str, ...]) -> str:
        if len(names) > 1:
            raise HeadError(f"{self.label}: '{value}' has a bias ('{names[1]}'); linears of EAGLE-3 heads have none")
        return names[0]

    def normed_by(self, name: str, value: str, wanted: str) -> str:
        """The input of a norm, whose tensor is noted, without reshapes. All norms must have one epsilon."""
        x, self.tensors[name], eps = self.norm(value, wanted)
        self.found_eps.append((value, float(f"{eps:.6g}")))  # files keep it in f32
        if self.eps != self.found_eps[-1][1]:
            raise HeadError(f"{self.label}: norm '{value}' has epsilon {self.found_eps[-1][1]:g}, '{self.found_eps[0][0]}' {self.eps:g}; "
                            "norms with one are read")
        return self.unshaped(x)

    @property
    def eps(self) -> float:
        return self.found_eps[0][1]


def _d2t(graph: EagleGraph, head: EagleWalk, logits: str, config: EagleConfig) -> Array:
    """i64[draft_vocab]: the target's id of every draft id. Checks the outputs beside the logits on the way."""
    file, found = graph.file, None
    for value in file.model.graph.output:
        name = value.name
        if name == logits_output(file) or name == "d2t":
            continue
        if value.type.tensor_type.elem_type not in FLOATS:
            found = _chosen(graph, name, config.draft_vocab)
        elif head.unshaped(graph.values(name)[0]) != head.unshaped(head.hidden):
            raise HeadError(f"{head.label}: output '{name}' is not the hidden state before the last norm ('{head.hidden}'), which the head "
                            "goes on with")
    if found is not None:
        return found
    ids = np.arange(config.draft_vocab, dtype=np.int64)
    if "d2t" in file.initializers:  # first: exporters may give the output that is a copy of it the same name
        stored = file.array("d2t")
    elif "d2t" in graph.known.maker and graph.known.known("d2t"):
        stored = graph.known.at("d2t", LENGTHS[0])
    elif config.draft_vocab == config.vocab_size:
        return ids
    else:
        raise HeadError(f"{head.label}: has no tensor or output 'd2t' and no output of ids, which a draft vocabulary of "
                        f"{config.draft_vocab} of {config.vocab_size} needs")
    if stored.shape != ids.shape:
        raise HeadError(f"{head.label}: 'd2t' has shape {list(stored.shape)}, expected {config.draft_vocab} differences of ids")
    differences: Array = stored.astype(np.int64)
    return ids + differences


def _chosen(graph: EagleGraph, output: str, draft: int) -> Array:
    """What an output of ids makes of each draft id: its operators after ArgMax or TopK of the logits, evaluated."""
    known, label = graph.known, graph.file.path.name

    def choice(name: str) -> onnx.NodeProto | None:
        node = known.maker.get(name)
        if node is None or known.known(name):
            return None
        return node if node.op_type in CHOICES else next((found for i in node.input if (found := choice(i)) is not None), None)

    start = choice(output)
    of = "" if start is None else start.input[0]
    while of in known.maker and known.maker[of].op_type in SAME:
        of = known.maker[of].input[0]
    if start is None or of != logits_output(graph.file):
        raise HeadError(f"{label}: output '{output}' is neither the hidden state nor ids that ArgMax or TopK chooses by the logits")
    at = start.output[CHOICES[start.op_type]]
    best = 1 if start.op_type == "ArgMax" else int(graph.number(start.input[1]) or 1)
    keeps = start.op_type == "TopK" or attributes(start).get("keepdims", 1)
    each = np.arange(draft, dtype=np.int64)
    values = {at: np.repeat(each, best).reshape(1, draft, best) if keeps else each[None]}

    def value(name: str) -> Array:
        if name not in values:
            if known.known(name):
                values[name] = known.at(name, draft)
            else:
                node = known.maker[name]
                made = run(node, {i: value(i) for i in node.input if i}, graph.file.opset)
                values.update(zip(node.output, made, strict=True))
        return values[name]

    ids: Array = value(output).reshape(draft, -1)[:, 0].astype(np.int64)
    return ids
