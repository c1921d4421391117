"""Give a decoder's row program its names, from what each value does and not from what the model's author called it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mlsdc.compiler.graph import Editor, Graph, Node, Weight
from mlsdc.compiler.ops_core import Binary, GatherRows, Reshape, Slice, Unary
from mlsdc.compiler.ops_nn import Attention, Embed, Linear, RmsNorm, Rope, RopeTable
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.compiler.rewrite import note
from mlsdc.passes.raise_match import binary, first


@dataclass(frozen=True)
class RaiseNames(GraphPass):
    """
    before: %model.layers.3.self_attn.q_proj = linear(%n, %w.model.layers.3.self_attn.q_proj.weight)
            ... attention(%..., %..., %...)
    after:  %layers.3.attn.q = linear(%layers.3.attn_norm, %w.layers.3.attn.q)
            ... %layers.3.attn.attend = attention(%layers.3.attn.q_rope, %layers.3.attn.k_rope, %layers.3.attn.v_heads)

    The i-th attention makes layer i; its neighbours are named by their part in it, weights after the node that reads them
    (one that two nodes share after the first). Names only: no op and no input changes. Values without a known part keep their name.
    Declines for a graph without attention.
    """

    name: ClassVar[str] = "raise-names"

    def rewrite(self, graph: Graph) -> Graph:
        attentions = [node.name for node in graph if isinstance(node.op, Attention)]
        if not attentions:
            return graph
        names = _Names(Editor(graph))
        for index, name in enumerate(attentions):
            names.layer(index, name)
            note("attention and its neighbours => layers.i", graph.name, f"layers.{index}.attn.attend")
        names.ends(graph)
        names.weights(graph)
        return names.apply(graph)


class _Names:
    """Collects old name -> new name, then renames at once: old and new names may overlap."""

    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        self.new: dict[str, str] = {}

    def put(self, node: Node | None, name: str) -> None:
        if node is not None and name not in self.new.values():
            self.new.setdefault(node.name, name)

    def layer(self, index: int, attention: str) -> None:
        attend = self.editor[attention]
        base = f"layers.{index}"
        self.put(attend, f"{base}.attn.attend")
        for value, part in zip(attend.inputs, "qkv", strict=True):
            self._projection(self.editor[value], f"{base}.attn.{part}", f"{base}.attn_norm")
        merged = self._next(attend, Reshape)
        self.put(merged, f"{base}.attn.merged")
        out = self._next(merged, Linear)
        self.put(out, f"{base}.attn.out")
        residual = self._next(out, Binary)
        if residual is None or not binary(residual, "add"):
            return
        self.put(residual, f"{base}.attn.residual")
        self._mlp(residual, base)

    def _projection(self, node: Node, base: str, norm: str) -> None:
        """Back from an operand of attention: rope, norm of the heads, heads, (slice of q, k and v in one,) linear, norm of the layer."""
        fused = False
        while not isinstance(node.op, Linear):
            kinds = {Rope: "rope", Reshape: "heads", RmsNorm: "norm", Slice: "slice"}
            if type(node.op) not in kinds:
                return
            fused |= isinstance(node.op, Slice)
            self.put(node, f"{base}_{kinds[type(node.op)]}")
            node = first(self.editor, node)
        self.put(node, base.rpartition(".")[0] + ".qkv" if fused else base)
        before = first(self.editor, node)
        if isinstance(before.op, RmsNorm):
            self.put(before, norm)

    def _mlp(self, residual: Node, base: str) -> None:
        norm = next((user for user in self.editor.users(residual.name) if isinstance(user.op, RmsNorm)), None)
        if norm is None:
            return
        linears = [user for user in self.editor.users(norm.name) if isinstance(user.op, Linear)]
        act = next((act for linear in linears for act in self.editor.users(linear.name) if isinstance(act.op, Unary)), None)
        if act is None:
            return
        self.put(norm, f"{base}.mlp_norm")
        gate = first(self.editor, act)
        gated = self._next(act, Binary)
        self.put(gate, f"{base}.mlp.gate")
        self.put(act, f"{base}.mlp.act")
        self.put(gated, f"{base}.mlp.gated")
        for linear in linears:
            if linear.name != gate.name and gated is not None and linear.name in gated.inputs:
                self.put(linear, f"{base}.mlp.up")
        down = self._next(gated, Linear)
        self.put(down, f"{base}.mlp.down")
        added = self._next(down, Binary)
        if added is not None and binary(added, "add"):
            self.put(added, f"{base}.mlp.residual")

    def ends(self, graph: Graph) -> None:
        """The embedding, the table of angles, and what stands around the rows that get logits."""
        for node in graph:
            if isinstance(node.op, Embed):
                self.put(node, "embed")
            elif isinstance(node.op, RopeTable):
                self.put(node, "rope_table")
                self.put(self.editor[node.inputs[1]], "w.inv_freq")
            elif isinstance(node.op, GatherRows):
                before = first(self.editor, node)
                self.put(before if isinstance(before.op, RmsNorm) else None, "final_norm")
                self.put(self._next(node, Linear), "lm_head")

    def weights(self, graph: Graph) -> None:
        """`w.` and the name of the first reader, `.bias` behind it for a bias."""
        for node in graph:
            path = self.new.get(node.name)
            if path is None:
                continue
            for at, value in enumerate(node.inputs):
                weight = self.editor[value]
                if isinstance(weight.op, Weight) and len(node.inputs) > 1:
                    self.put(weight, f"w.{path}.bias" if at == 2 else f"w.{path}")

    def apply(self, graph: Graph) -> Graph:
        """The graph under its new names; a name that another node keeps gets a number."""
        taken = {node.name for node in graph if node.name not in self.new}
        names = {node.name: node.name for node in graph}
        for old, new in self.new.items():
            free, count = new, 1
            while free in taken:
                count += 1
                free = f"{new}.{count}"
            taken.add(free)
            names[old] = free
        nodes = tuple(replace(node, name=names[node.name], inputs=tuple(names[value] for value in node.inputs)) for node in graph)
        renamed = Graph(graph.name, nodes, tuple((result, names[value]) for result, value in graph.outputs))
        renamed.verify()
        return renamed

    def _next(self, node: Node | None, kind: type) -> Node | None:
        """The one user of `node`, if it is of that kind."""
        user = None if node is None else self.editor.only_user(node.name)
        return user if user is not None and isinstance(user.op, kind) else None
