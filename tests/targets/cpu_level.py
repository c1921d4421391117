"""A graph of the tests, compiled for this machine's CPU and loaded as a level: all that an artifact does, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.pack import hash_files, write_text, write_weights
from mlsdc.compiler.quantise import quantise_f8, quantise_q4, quantise_q8
from mlsdc.compiler.types import DType, TensorType
from mlsdc.passes.emit_program import emit_program, merge_specs
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device.cpu import CpuDevice, CpuLevel, CpuProgram
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.manifest import LevelInfo, Manifest, ModelInfo, Plan
from mlsdc.runtime.step import Header, Limits
from mlsdc.targets import native_target
from mlsdc.targets.cpu import CpuTarget, cpu_target, kv_geometry

try:
    NATIVE = native_target()
except CompileError as error:
    pytest.skip(str(error), allow_module_level=True)

WEIGHTS = "weights/target.safetensors"


def cpu(limits: Limits) -> CpuTarget:
    return cpu_target(NATIVE, limits)


@contextmanager
def loaded(
    graphs: Mapping[str, Graph], weights: Callable[[Node], Any], folder: Path, limits: Limits, num_pages: int = 8
) -> Iterator[CpuLevel]:
    """The graphs as programs of one level whose weights are `weights(node)` (quantised here where the type says so).

    Weights of one name must be the same in all graphs.
    """
    target = cpu(limits)
    emitted = {name: emit_program(graph, target, name, "target") for name, graph in graphs.items()}
    built = target.build(merge_specs(specs for _, specs in emitted.values()), folder)
    nodes = {node.name: node for graph in graphs.values() for node in graph.weights()}

    def pack(name: str) -> Any:
        node = nodes[name]
        plain = np.asarray(weights(node), np.float32)
        assert isinstance(node.type, TensorType)
        quantise = {DType.Q8: quantise_q8, DType.Q4: quantise_q4, DType.F8: quantise_f8}.get(node.type.dtype)
        return target.pack(node.type, quantise(plain) if quantise else plain)

    file = write_weights(folder / WEIGHTS, [(name, target.packed_bytes(node.type)) for name, node in nodes.items()], pack)
    programs = {name: write_text(folder, f"program/{name}.json", program.to_json()) for name, (program, _) in emitted.items()}
    geometry = kv_geometry(next(iter(graphs.values()))) or KvGeometry("bf16", 16, 1, 1, 16)
    manifest = Manifest(
        model=ModelInfo("test", "Test", 1, 1, 1, None, (), "int8", "test"),
        limits=limits,
        levels=(LevelInfo("target", "model", {}, geometry, WEIGHTS, {target.name: programs}),),
        targets=(built,),
        plan=Plan(0, 0),
        files=hash_files(folder, leave_out=frozenset([WEIGHTS])),
        weights={WEIGHTS: (file.num_bytes, file.sha256)},
        weight_headers={WEIGHTS: file.header_sha256},
        tools={},
    )
    write_text(folder, "manifest.json", manifest.to_json())
    device = CpuDevice(Artifact.open(folder), built, threads=2)
    try:
        yield CpuLevel(device, "target", num_pages)
    finally:
        device.close()


def run(level: CpuLevel, name: str, step: Mapping[str, Any]) -> dict[str, Any]:
    """One step (tests.passes.graphs.prefill or verify) of a program on the device: every named result's rows, copied."""
    buffers, tree = level.buffers, step["tree"]
    rows, out = len(step["tokens"]), len(step["out_rows"])
    buffers.header[[Header.ROWS, Header.SEQS, Header.OUT]] = rows, len(tree.seq_ctx), out
    for key, values in (("tokens", step["tokens"]), ("out_rows", step["out_rows"]), ("positions", step["positions"]),
                         ("row_seq", tree.row_seq), ("row_slot", tree.row_slot), ("ancestors", tree.ancestors), ("seq_ctx", tree.seq_ctx)):
        getattr(buffers, key)[: len(values)] = values
    for key, table in (("page_table", tree.page_table), ("scratch_table", tree.scratch_table)):
        place = getattr(buffers, key)[: len(table)]
        width = min(place.shape[1], table.shape[1])
        place[:, :width] = table[:, :width]
    for seq in range(len(tree.seq_ctx)):
        of_seq = np.flatnonzero(tree.row_seq == seq)
        buffers.seq_row[seq], buffers.seq_rows[seq] = of_seq[0], len(of_seq)
    program = level.programs[name]
    assert isinstance(program, CpuProgram)
    program.run()
    results = {tap: program.tap(tap)[: out if tap == "logits" else rows].copy() for tap in program.spec.taps}
    return {**results, "choices": buffers.choices[:out].copy()}
