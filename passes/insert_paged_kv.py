"""insert-paged-kv: attention over the rows of a step becomes attention over a paged cache, spelled out op by op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mlsdc.compiler.graph import Editor, Graph, Node
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.ops_core import Softmax
from mlsdc.compiler.ops_kv import AppendKv, Dequantise, Mask, MatMulPV, MatMulQK, ReadKv, TreeMask
from mlsdc.compiler.ops_nn import Attention
from mlsdc.compiler.pipeline import Pass
from mlsdc.compiler.types import Dim, KvType, Size, TensorType, TreeType
from mlsdc.passes.names import beside, free
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.kv_window import KvWindow, narrower, window_of

DRAFTS = "bf16"  # format of drafting levels' own pages: they are few


@dataclass(frozen=True)
class InsertPagedKv(Pass):
    """Give a level its KV cache: attention i reads and writes layer i, in order of appearance.

    Before::

        %a.attend = attention(%q, %k, %v, scale=0.125)

    After, with new inputs `kv` and `tree` and the last cache as output `kv`::

        %a.kv = append_kv(%kv, %k, %v, %tree, layer=0)
        %a.keys = read_kv(%a.kv, %tree, layer=0, which="keys")        %a.keys_f32 = dequantise(%a.keys)
        %a.values = read_kv(%a.kv, %tree, layer=0, which="values")    %a.values_f32 = dequantise(%a.values)
        %a.scores = matmul_qk(%q, %a.keys_f32, scale=0.125)
        %a.mask = tree_mask(%tree)
        %a.masked = mask(%a.scores, %a.mask)
        %a.probs = softmax(%a.masked)
        %a.attend = matmul_pv(%a.probs, %a.values_f32)

    A level's param `kv_window` narrows the mask of every layer to a window with sinks (runtime/kv_window.py); with
    `kv_coarse` the high plane of a nested format is all it reads.

    Declines, level by level: no attention; layers or graphs whose kv heads or head_dim differ (one page shape serves a level);
    a graph that already has a value named `kv` or `tree`. Raises MlsdcError for a geometry that no page can have.
    """

    name: ClassVar[str] = "insert-paged-kv"
    tolerance: ClassVar[float] = 0.02  # keys and values are stored in bf16; seen on SmolLM2's shape: 0.005
    max_model_len: int
    format: str = "bf16"
    page_size: int = 32

    def run(self, module: Module) -> Module:
        target = self._page(module.target, module.target.params.get("kv_format", self.format))
        drafts = (self._page(level, level.params.get("kv_format", DRAFTS), target) for level in module.levels[:-1])
        return replace(module, levels=(*drafts, target))

    def _page(self, level: LevelModule, format: str, target: LevelModule | None = None) -> LevelModule:
        """A level whose param `kv_of` names the target reads the target's own pages, of which it knows the first layers only."""
        shapes = {name: cache_shape(graph) for name, graph in level.graphs.items() if attentions(graph)}
        found = set(shapes.values())
        if len(found) != 1 or any(name in graph.by_name for graph in level.graphs.values() for name in ("kv", "tree")):
            return level
        (shape,) = found
        if shape is None:
            return level
        geometry = KvGeometry(format, int(level.params.get("kv_page_size", self.page_size)), *shape)
        windows = [window_of(level.params)]
        if target is not None and target.kv is not None and "kv_of" in level.params:
            geometry = target.kv
            windows.append(window_of(target.params))
        coarse = bool(level.params.get("kv_coarse"))
        graphs = {name: self._rewrite(graph, geometry, windows, coarse) if name in shapes else graph
                  for name, graph in level.graphs.items()}
        return replace(level, graphs=graphs, kv=geometry)

    def _rewrite(self, graph: Graph, geometry: KvGeometry, windows: Sequence[KvWindow | None], coarse: bool) -> Graph:
        editor = Editor(graph)
        kv = editor.input("kv", KvType(geometry.format, geometry.page_size, geometry.num_layers, geometry.num_kv_heads, geometry.head_dim))
        editor.input("tree", TreeType())
        for layer, node in enumerate(attentions(graph)):
            kv = self._expand(editor, node, layer, kv, windows, coarse)
        editor.outputs.append(("kv", kv))
        return editor.finish()

    def _expand(self, editor: Editor, node: Node, layer: int, kv: str, windows: Sequence[KvWindow | None], coarse: bool) -> str:
        """The ops of one layer; returns the cache with the rows' keys and values in it."""
        attention = node.op
        assert isinstance(attention, Attention)
        assert isinstance(node.type, TensorType)
        rows, ctx = node.type.shape[0], Dim("ctx", 1, self.max_model_len)
        q, k, v = node.inputs
        window, sinks = attention.window, 0
        for other in windows:
            window, sinks = narrower(window, sinks, other)

        def name(leaf: str) -> str:
            return free(editor, beside(node.name, leaf))

        kv = editor.add(name("kv"), AppendKv(layer), kv, k, v, "tree", origin=node.origin)
        keys = editor.add(name("keys"), ReadKv(layer, "keys", rows, ctx, coarse), kv, "tree", origin=node.origin)
        keys = editor.add(name("keys_f32"), Dequantise(), keys, origin=node.origin)
        values = editor.add(name("values"), ReadKv(layer, "values", rows, ctx, coarse), kv, "tree", origin=node.origin)
        values = editor.add(name("values_f32"), Dequantise(), values, origin=node.origin)
        scores = editor.add(name("scores"), MatMulQK(attention.scale, attention.softcap), q, keys, origin=node.origin)
        mask = editor.add(name("mask"), TreeMask(rows, ctx, window, sinks), "tree", origin=node.origin)
        masked = editor.add(name("masked"), Mask(), scores, mask, origin=node.origin)
        probs = editor.add(name("probs"), Softmax(), masked, origin=node.origin)
        editor.replace(node.name, MatMulPV(), probs, values)
        return kv


def attentions(graph: Graph) -> list[Node]:
    return [node for node in graph if isinstance(node.op, Attention)]


def cache_shape(graph: Graph) -> tuple[int, int, int] | None:
    """(layers, kv heads, head_dim) that all attentions of a graph agree on, else None."""
    nodes = attentions(graph)
    shapes = {key_shape(graph, node) for node in nodes}
    if len(shapes) != 1:
        return None
    (shape,) = shapes
    heads, dim = shape
    return (len(nodes), heads, dim) if isinstance(heads, int) and isinstance(dim, int) else None


def key_shape(graph: Graph, node: Node) -> tuple[Size, ...]:
    key = graph[node.inputs[1]].type
    assert isinstance(key, TensorType)
    return key.shape[1:]
