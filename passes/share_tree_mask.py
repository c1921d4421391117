"""share-tree-mask: which positions a row sees depends on the tree and the window, not on the layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.graph import Editor, Graph, Node
from mlsdc.compiler.ops_kv import TreeMask
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.compiler.rewrite import Rule, apply_rules


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

    Declines: a mask of another tree or other rows than the one that has the name.
    """

    name: ClassVar[str] = "share-tree-mask"

    def rewrite(self, graph: Graph) -> Graph:
        return apply_rules(graph, RULES)[0]


def share(editor: Editor, mask: Node) -> bool:
    assert isinstance(mask.op, TreeMask)
    sinks = f".sinks{mask.op.sinks}" if mask.op.sinks else ""
    name = f"tree_mask.window{mask.op.window}{sinks}" if mask.op.window else "tree_mask"
    shared = editor.nodes.get(name)
    if shared is None:
        editor.rename(mask.name, name)
        return True
    if shared is mask or (shared.op, shared.inputs) != (mask.op, mask.inputs) or not editor.users(mask.name):
        return False
    editor.redirect(mask.name, name)
    return True


RULES = (Rule("tree_mask(tree) in each layer -> one tree_mask(tree)", TreeMask, share),)
