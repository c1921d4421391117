"""A pass of your own, in front of the default pipeline's end: every `neg(neg(x))` becomes `x`.

    python examples/add_a_pass.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.graph import Builder, Editor, Graph, Node
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.ops_core import Unary
from mlsdc.compiler.pipeline import GraphPass, run_pipeline
from mlsdc.compiler.rewrite import Rule, apply_rules
from mlsdc.compiler.text import print_graph
from mlsdc.compiler.types import Dim, DType, TensorType


@dataclass(frozen=True)
class CancelNeg(GraphPass):
    """
    before: %a = unary(%x, fn="neg")    %b = unary(%a, fn="neg")    %y = unary(%b, fn="exp")
    after:  %y = unary(%x, fn="exp")

    Declines: a negation of anything but a negation.
    """

    name: ClassVar[str] = "cancel-neg"

    def rewrite(self, graph: Graph) -> Graph:
        return apply_rules(graph, RULES)[0]


def cancel(editor: Editor, node: Node) -> bool:
    inner = editor.producer(node, 0, Unary)
    if node.op != Unary("neg") or inner is None or inner.op != Unary("neg"):
        return False
    editor.redirect(node.name, inner.inputs[0])
    return True


RULES = (Rule("neg(neg(x)) => x", Unary, cancel),)


def main() -> None:
    builder = Builder("forward")
    x = builder.input("x", TensorType(DType.F32, (Dim("rows", 1, 8), 64)))
    a = builder.add("a", Unary("neg"), x)
    b = builder.add("b", Unary("neg"), a)
    module = Module("example", (LevelModule("target", "model", graphs={"forward": builder.build(y=builder.add("y", Unary("exp"), b))}),))
    print(print_graph(module.target.graphs["forward"]))
    print(print_graph(run_pipeline(module, [CancelNeg()]).target.graphs["forward"]), end="")


if __name__ == "__main__":
    main()
