"""gather-early: rows that want no logits are dropped before the last norm, not after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.graph import Editor, Graph, Node
from mlsdc.compiler.ops_core import GatherRows
from mlsdc.compiler.ops_nn import RmsNorm
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.compiler.rewrite import Rule, apply_rules


@dataclass(frozen=True)
class GatherEarly(GraphPass):
    """gather_rows(rms_norm(x)) => rms_norm(gather_rows(x)): a norm works on each row by itself.

    Before::

        %final_norm = rms_norm(%x, %w.final_norm, eps=1e-05)    %out_hidden = gather_rows(%final_norm, %out_rows)

    After::

        %out_hidden.rows = gather_rows(%x, %out_rows)           %out_hidden = rms_norm(%out_hidden.rows, %w.final_norm, eps=1e-05)

    Declines: a norm that somebody else reads, or that is an output.
    """

    name: ClassVar[str] = "gather-early"

    def rewrite(self, graph: Graph) -> Graph:
        return apply_rules(graph, RULES)[0]


def swap(editor: Editor, gather: Node) -> bool:
    norm = editor.producer(gather, 0, RmsNorm)
    if norm is None or editor.only_user(norm.name) is None:
        return False
    rows = editor.add(f"{gather.name}.rows", GatherRows(), norm.inputs[0], gather.inputs[1], origin=gather.origin)
    editor.replace(gather.name, norm.op, rows, norm.inputs[1])
    return True


RULES = (Rule("gather_rows(rms_norm(x)) -> rms_norm(gather_rows(x))", GatherRows, swap),)
