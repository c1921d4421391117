"""Names of the nodes a pass adds: path-like, beside the node they stand for, and free."""

from __future__ import annotations

from mlsdc.compiler.graph import Editor


def beside(name: str, leaf: str) -> str:
    """`leaf` in the folder of `name`: ("layers.3.attn.attend", "scores") -> "layers.3.attn.scores"."""
    folder, dot, _ = name.rpartition(".")
    return folder + dot + leaf


def free(editor: Editor, name: str) -> str:
    """`name`, or the first of `name.2`, `name.3`, ... that no node has."""
    found, count = name, 1
    while found in editor.nodes:
        count += 1
        found = f"{name}.{count}"
    return found
