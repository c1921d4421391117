"""share-tree-mask: which positions a row sees depends on the tree and the window, not on the layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.graph import Editor, Graph
from mlsdc.compiler.ops_kv import TreeMask
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.passes.names import free


@dataclass(frozen=True)
class ShareTreeMask(GraphPass):
    """One mask for all layers with the same window.

    Before::

        %layers.0.attn.mask = tree_mask(%tree)
        %layers.1.attn.mask = tree_mask(%tree)
        %layers.2.attn.mask = tree_mask(%tree, window=128)

    After, used by layers 0 and 1, and by layer 2::

        %tree_mask = tree_mask(%tree)
        %tree_mask.window128 = tree_mask(%tree, window=128)

    Declines: nothing to decline; a mask that no other equals only gets its new name.
    """

    name: ClassVar[str] = "share-tree-mask"

    def rewrite(self, graph: Graph) -> Graph:
        editor = Editor(graph)
        shared: dict[tuple[TreeMask, tuple[str, ...]], str] = {}
        for node in graph:
            if not isinstance(node.op, TreeMask):
                continue
            first = shared.setdefault((node.op, node.inputs), node.name)
            if first != node.name:
                editor.redirect(node.name, first)
        for (mask, _), name in shared.items():
            wanted = f"tree_mask.window{mask.window}" if mask.window else "tree_mask"
            if name != wanted:
                editor.rename(name, free(editor, wanted))
        return editor.finish()
