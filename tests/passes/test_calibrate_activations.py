"""calibrate-activations: marks the groups of large values, and changes no number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mlsdc.compiler.calibrate import Calibration
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.ops_quant import Calibrated, LinearQ, NormQuantise
from mlsdc.passes.calibrate_activations import CalibrateActivations
from tests.passes.graphs import Llama, Weights, row_program
from tests.passes.steps import apply, golden_of, middle, ops, results

SHAPE = Llama(hidden=512, heads=8, kv_heads=4, head_dim=64, mlp=128, layers=2)  # sixteen groups


def calibration(shape: Llama, outliers: tuple[int, ...] = ()) -> Calibration:
    """Random weights; norms that scale the channels of the `outliers` groups up."""
    plain = Weights(row_program(shape))

    def weights(node: Node) -> np.ndarray:
        value = np.asarray(plain(node)).copy()
        if node.name.endswith("norm") and value.ndim == 1:
            for group in outliers:
                value[group * 32 + 7] *= 50
        return value

    return Calibration(tuple(range(20)), weights)


def seen(graph: Graph) -> dict[str, tuple[int, ...]]:
    return {node.inputs[0]: node.op.fine for node in graph if isinstance(node.op, Calibrated)}


def test_the_groups_with_the_largest_values_are_marked_at_every_norm() -> None:
    graph = apply(row_program(SHAPE), CalibrateActivations(calibration(SHAPE, (3, 11))))
    assert seen(graph) == dict.fromkeys(("layers.0.attn_norm", "layers.0.mlp_norm", "layers.1.attn_norm", "layers.1.mlp_norm"), (3, 11))


def test_golden() -> None:
    shape = replace(SHAPE, layers=1)
    golden_of("calibrate-activations", row_program(shape), CalibrateActivations(calibration(shape, (3, 11))))


def test_marking_changes_no_number() -> None:
    graph = row_program(SHAPE)
    marked = apply(graph, CalibrateActivations(calibration(SHAPE)))
    (before,), (after,) = results(graph, SHAPE), results(marked, SHAPE)
    assert np.array_equal(before["logits"], after["logits"])


def test_marks_become_second_planes_of_the_norms_and_vanish() -> None:
    passes = [replace(p, calibration=calibration(SHAPE, (3, 11))) if isinstance(p, CalibrateActivations) else p for p in middle()]
    graph = apply(row_program(SHAPE), *passes)
    assert not seen(graph)
    norms = {node.name: node.op.fine for node in graph if isinstance(node.op, NormQuantise)}
    assert set(norms.values()) == {(3, 11)}
    assert len(norms) == 2 * SHAPE.layers + 1  # the head's norm too
    assert ops(graph)["linear_q"] == sum(isinstance(node.op, LinearQ) for node in graph)


def test_without_a_calibration_and_on_small_rows_it_leaves_the_graph_alone() -> None:
    graph, small = row_program(SHAPE), row_program(Llama())
    assert apply(graph, CalibrateActivations()) == graph
    assert apply(small, CalibrateActivations(calibration(Llama()))) == small
