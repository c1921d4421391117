"""Heads from an ONNX file: an EAGLE-3 head (onnx_eagle), or Medusa heads, hidden states in, logits of every head out.

The file's graph is converted as a decoder's is (capture/onnx_graph), and then read from each head's logits back to the hidden states:

    x_0 = hidden states     x_j = x_j-1 + silu(W x_j-1 + b)     logits = W' x_n

Whatever else is found there is an error that names the op. Names of tensors do not matter: exporters change them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mlsdc.compiler.capture import ModelSource
from mlsdc.compiler.capture.onnx_file import OnnxFile
from mlsdc.compiler.capture.onnx_graph import OnnxGraph
from mlsdc.compiler.capture.source import WithConstants
from mlsdc.compiler.errors import HeadError
from mlsdc.compiler.heads.checkpoint import HeadFile, check_tensors
from mlsdc.compiler.heads.config import MedusaConfig
from mlsdc.compiler.heads.onnx_eagle import read_eagle
from mlsdc.compiler.heads.onnx_walk import Walk
from mlsdc.compiler.ops_core import Binary, Cat, Unary


def read_onnx(path: Path, kind: str, source: ModelSource) -> HeadFile:
    """Raises HeadError, CaptureError, naming the file."""
    if kind not in ("medusa", "eagle"):
        raise HeadError(f"{path.name}: heads of kind '{kind}' are not read from ONNX files; medusa and eagle heads are")
    file = OnnxFile.open(path)
    if kind == "eagle":
        return read_eagle(file, source)
    hidden = int(source.config["hidden_size"])
    graph = OnnxGraph(file, 64, "heads", features=hidden)
    outputs = graph.values(*(value.name for value in file.model.graph.output))
    weights = WithConstants(file, graph.constants, graph.turned)
    heads = _Heads(path.name, graph)
    found = [heads.read(logits) for output in outputs for logits in heads.parts(output)]
    layers, bias = len(found[0][1]), any(len(names) > 1 for _, blocks in found for names in blocks)
    tensors = {}
    for i, (head, blocks) in enumerate(found):
        if len(blocks) != layers or any((len(names) > 1) != bias for names in blocks):
            raise HeadError(f"{path.name}: head {i} is not built as the others: {len(blocks)} residual blocks (head 0 has {layers}), "
                            "each with a bias if any has one")
        tensors[f"heads.{i}.lm_head"] = weights.read(head)
        for j, names in enumerate(blocks):
            tensors[f"heads.{i}.{j}"] = weights.read(names[0])
            if bias:
                tensors[f"heads.{i}.{j}.bias"] = weights.read(names[1])
    vocab = tensors["heads.0.lm_head"].shape[0]
    made = MedusaConfig(hidden, hidden, vocab, vocab, len(found), float(source.config.get("rms_norm_eps", 1e-6)),
                        (int(source.config["num_hidden_layers"]),), num_layers=layers, bias=bias, own_head=True)
    check_tensors(path.name, made, {name: values.shape for name, values in tensors.items()})
    return HeadFile(path.name, made, tensors, np.arange(vocab, dtype=np.int32))


class _Heads(Walk):
    meant = "a Medusa head is x + silu(linear(x)), once or more, and a linear to the vocabulary"

    def parts(self, output: str) -> list[str]:
        """The logits of each head: outputs of their own, or stacked along a new first axis."""
        output = self.unshaped(output)
        if not isinstance(self.graph.op(output), Cat):
            return [output]
        return [part for name in self.graph.inputs(output) for part in self.parts(name)]

    def read(self, logits: str) -> tuple[str, list[tuple[str, ...]]]:
        """The tensor of the head's matrix, and of each block, first to last, those of its matrix and bias."""
        x, head = self.linear(logits, "a linear to the vocabulary")
        if len(head) > 1:
            raise HeadError(f"{self.label}: '{logits}': the linear to the vocabulary has a bias, which no Medusa head has")
        blocks: list[tuple[str, ...]] = []
        while (x := self.unshaped(x)) != "features":
            x, names = self.block(x)
            blocks.insert(0, names)
        return head[0], blocks

    def block(self, value: str) -> tuple[str, tuple[str, ...]]:
        """`value` = x + silu(linear(x)): x, and the tensors of the linear."""
        if self.graph.op(value) != Binary("add"):
            raise self.refused(value, "x + silu(linear(x))")
        for x, active in self.either(value):
            if self.graph.op(active) == Unary("silu"):
                inner, names = self.linear(self.graph.inputs(active)[0], "silu of a linear")
                if self.unshaped(inner) == self.unshaped(x):
                    return x, names
        raise self.refused(value, "x + silu(linear(x))")
