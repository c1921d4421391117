"""guess-top: the row program of a drafting decoder reports its best guesses, not a choice; a `self` level ends after its layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.graph import Editor, Graph, Node, Weight
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.ops_core import Binary, GatherRows, Unary
from mlsdc.compiler.ops_heads import TopK
from mlsdc.compiler.ops_nn import Linear, RmsNorm
from mlsdc.compiler.pipeline import Pass
from mlsdc.compiler.rewrite import note
from mlsdc.compiler.types import DType, TensorType
from mlsdc.passes.tap_hidden import stream

CHILDREN = 8


@dataclass(frozen=True)
class GuessTop(Pass):
    """For drafting levels of kind `model` and `self` whose program is a captured decoder.

    Before::

        output logits = %lm_head, choices = %choices

    After::

        %top = top_k(%lm_head, k=8)    output top = %top

    A `self` level of k layers gathers its rows from the residual stream after k layers. With an exit, the norm is the exit's, and
    `z = h + silu(h @ w.exit)` goes to the rows of its draft vocabulary.

    Declines every other level, and a graph without `logits`.
    """

    name: ClassVar[str] = "guess-top"

    def run(self, module: Module) -> Module:
        return replace(module, levels=(*(self._level(level) for level in module.levels[:-1]), module.target))

    def _level(self, level: LevelModule) -> LevelModule:
        graph = level.graphs.get("draft")
        if level.kind not in ("model", "self") or graph is None or "logits" not in dict(graph.outputs):
            return level
        return level.with_graph("draft", self._rewrite(graph, level))

    def _rewrite(self, graph: Graph, level: LevelModule) -> Graph:
        editor = Editor(graph)
        logits = dict(graph.outputs)["logits"]
        if level.kind == "self":
            logits = self._cut(editor, graph, level, logits)
        width = editor[logits].type
        assert isinstance(width, TensorType) and isinstance(width.shape[1], int)
        editor.outputs = [("top", editor.add("top", TopK(min(CHILDREN, width.shape[1])), logits))]
        note("logits => top_k(logits)", graph.name, logits)
        return editor.finish()

    def _cut(self, editor: Editor, graph: Graph, level: LevelModule, logits: str) -> str:
        """The layers behind `layers` go; what makes logits then."""
        inner = stream(graph, int(level.params["layers"]))
        gathers = [node for node in graph if isinstance(node.op, GatherRows)]
        head = graph[logits]
        norm = graph[head.inputs[0]] if isinstance(head.op, Linear) else None
        if len(gathers) != 1 or norm is None or not isinstance(norm.op, RmsNorm) or norm.inputs[0] != gathers[0].name:
            raise CompileError(f"level '{level.name}': the target does not end in gathered rows, a norm and a head, for an exit to replace")
        editor.replace(gathers[0].name, GatherRows(), inner, gathers[0].inputs[1])
        draft_vocab = level.params.get("draft_vocab")
        return logits if draft_vocab is None else self._exit(editor, norm, head, int(draft_vocab))

    def _exit(self, editor: Editor, norm: Node, head: Node, draft_vocab: int) -> str:
        """A trained exit behind the gathered rows."""
        width = norm.type
        assert isinstance(width, TensorType) and isinstance(width.shape[1], int) and isinstance(norm.op, RmsNorm)
        h = width.shape[1]
        source = editor[head.inputs[1]].op
        assert isinstance(source, Weight)
        scale = editor.weight("w.exit.norm", TensorType(DType.F32, (h,)), "head/hidden_norm")
        hidden = editor.add("exit.norm", RmsNorm(norm.op.eps), norm.inputs[0], scale)
        inner = editor.add("exit.inner", Linear(), hidden, editor.weight("w.exit", TensorType(DType.F32, (h, h)), "head/heads.0.0"))
        added = editor.add("exit", Binary("add"), hidden, editor.add("exit.act", Unary("silu"), inner))
        rows = editor.weight("w.exit.head", TensorType(DType.F32, (draft_vocab, h)), f"target-rows/{source.sources[0]}")
        return editor.add("exit.logits", Linear(), added, rows)
