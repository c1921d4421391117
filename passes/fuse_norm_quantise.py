"""fuse-norm-quantise: a norm whose rows are only ever read quantised writes them quantised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.graph import Editor, Graph, Node
from mlsdc.compiler.ops_nn import RmsNorm
from mlsdc.compiler.ops_quant import NormQuantise, Quantise
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.compiler.rewrite import Rule, apply_rules


@dataclass(frozen=True)
class FuseNormQuantise(GraphPass):
    """quantise(rms_norm(x)) => norm_quantise(x), whatever the number of linears behind it.

    Before::

        %h = rms_norm(%x, %w.norm, eps=1e-05)    %h.a8 = quantise(%h)

    After::

        %h = norm_quantise(%x, %w.norm, eps=1e-05)

    Declines: a norm that somebody else reads unquantised, or that is an output.
    """

    name: ClassVar[str] = "fuse-norm-quantise"

    def rewrite(self, graph: Graph) -> Graph:
        return apply_rules(graph, RULES)[0]


def fuse(editor: Editor, quantise: Node) -> bool:
    norm = editor.producer(quantise, 0, RmsNorm)
    if norm is None or editor.only_user(norm.name) is None:
        return False
    assert isinstance(norm.op, RmsNorm) and isinstance(quantise.op, Quantise)
    editor.replace(norm.name, NormQuantise(norm.op.eps, norm.op.offset, quantise.op.fine), *norm.inputs)
    editor.redirect(quantise.name, norm.name)
    return True


RULES = (Rule("quantise(rms_norm(x)) -> norm_quantise(x)", Quantise, fuse),)
