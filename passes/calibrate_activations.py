"""calibrate-activations: run the model on a few tokens and mark the groups of columns whose large values would spoil int8."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mlsdc.compiler.calibrate import Calibration
from mlsdc.compiler.graph import Editor, Graph, Node
from mlsdc.compiler.module import Module
from mlsdc.compiler.ops_nn import Linear, RmsNorm
from mlsdc.compiler.ops_quant import Calibrated
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.compiler.rewrite import note
from mlsdc.compiler.types import GROUP, DType, TensorType


@dataclass(frozen=True)
class CalibrateActivations(GraphPass):
    """linear(x) => linear(calibrated(x)) where x is a norm's output.

    Before::

        %q = linear(%attn_norm, %w.q)

    After::

        %attn_norm.seen = calibrated(%attn_norm, fine=(0, 7, 9, 15))    %q = linear(%attn_norm.seen, %w.q)

    A norm scales a few channels up by far (SmolLM2: 2 of 18 groups of 32 columns make 50-85 % of the squared rounding error of int8), so
    a second int8 plane for those groups removes most of the error for a ninth of the dots. The groups are those with the largest mean of
    max|x|^2.

    Declines: no calibration given; drafting levels; rows of fewer than 4 * `groups` groups; values that are not a norm's output.
    """

    name: ClassVar[str] = "calibrate-activations"
    calibration: Calibration | None = None
    groups: int = 2

    def run(self, module: Module) -> Module:
        """The target's graphs only: it is the target's weights that the calibration reads."""
        target = module.target
        graphs = {name: self.rewrite(graph) for name, graph in target.graphs.items()}
        return replace(module, levels=(*module.levels[:-1], replace(target, graphs=graphs)))

    def rewrite(self, graph: Graph) -> Graph:
        values = [node.name for node in graph if self.wanted(graph, node)]
        if self.calibration is None or not values:
            return graph
        editor = Editor(graph)
        for name, fine in largest_groups(graph, self.calibration, values, self.groups).items():
            users = [user for user in editor.users(name) if isinstance(user.op, Linear) and user.inputs[0] == name]
            seen = editor.add(f"{name}.seen", Calibrated(fine), name, origin=editor[name].origin)
            for user in users:
                editor.replace(user.name, user.op, seen, *user.inputs[1:])
            note("linear(x) -> linear(calibrated(x))", graph.name, name)
        return editor.finish()

    def wanted(self, graph: Graph, node: Node) -> bool:
        type_ = node.type
        if not isinstance(node.op, RmsNorm) or not isinstance(type_, TensorType) or type_.rank != 2 or type_.dtype is not DType.F32:
            return False
        columns = type_.shape[1]
        if not isinstance(columns, int) or columns % GROUP or columns // GROUP < 4 * self.groups:
            return False
        return any(isinstance(graph[user].op, Linear) and graph[user].inputs[0] == node.name for user in graph.users[node.name])


class Only(dict[str, Any]):
    """A dict of these keys, that lets others go: the interpreter's values, without a whole model's weights among them."""

    def __init__(self, keys: list[str]) -> None:
        super().__init__()
        self.keys_kept = frozenset(keys)

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self.keys_kept:
            super().__setitem__(key, value)


def largest_groups(graph: Graph, calibration: Calibration, values: list[str], groups: int) -> dict[str, tuple[int, ...]]:
    """For each value, its `groups` groups with the largest mean of max|x|^2 over the tokens, in order of index.

    Means are compared to three digits, so that another machine's rounding hardly ever changes the choice.
    """
    import numpy as np

    from mlsdc.compiler.interpret import interpret

    count = len(calibration.tokens)
    rows = np.arange(count, dtype=np.int32)
    taps = Only(values)
    step = {"tokens": np.array(calibration.tokens, np.int32), "positions": rows, "out_rows": rows}
    interpret(graph, step, calibration.weights, taps=taps)
    chosen = {}
    for name in values:
        x = np.asarray(taps[name], np.float64).reshape(count, -1, GROUP)
        energy = (np.abs(x).max(-1) ** 2).mean(0)
        coarse = [float(f"{e:.3g}") for e in energy]
        best = sorted(range(len(coarse)), key=lambda g: (-coarse[g], g))[:groups]
        chosen[name] = tuple(sorted(best))
    return chosen
