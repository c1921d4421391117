"""Everything the page shows, as one JSON value: every node once, stages as lists of node numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlsdc.compiler.graph import Graph, Node, Weight
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.text import print_value
from mlsdc.compiler.types import Dim, TensorType
from mlsdc.compiler.view.changes import graph_changes
from mlsdc.compiler.view.stages import Stage, read_dump, read_graphs, read_stage
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.kv_format import KvGeometry

VIEW_FORMAT = 1


@dataclass
class Interned:
    """Strings and nodes, each once; the page's tables."""

    strings: dict[str, int] = field(default_factory=dict)
    nodes: dict[Node, int] = field(default_factory=dict)
    rows: list[list[Any]] = field(default_factory=list)

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings))

    def node(self, node: Node) -> int:
        if node not in self.nodes:
            self.nodes[node] = len(self.rows)
            self.rows.append([
                self.string(node.name), self.string(node.op.opname), self.string(attributes(node)), [self.string(i) for i in node.inputs],
                self.string(str(node.type)), self.string(node.origin), size(node)])
        return self.nodes[node]


def attributes(node: Node) -> str:
    return ", ".join(f"{key}={print_value(value)}" for key, value in node.op.attrs().items())


def size(node: Node) -> int:
    """Elements of a weight, else 0."""
    if not isinstance(node.op, Weight) or not isinstance(node.type, TensorType):
        return 0
    total = 1
    for length in node.type.shape:
        total *= length.hi if isinstance(length, Dim) else length
    return total


def page_data(paths: Sequence[Path]) -> dict[str, Any]:
    """What the page is made of, from dump folders, artifacts, .ir files and traces, any of them.

    Raises MlsdcError naming a path that is none of these.
    """
    data: dict[str, Any] = {"format": VIEW_FORMAT, "sources": [path.name for path in paths]}
    stages: list[Stage] = []
    final: Stage | None = None
    for path in paths:
        if (path / "manifest.json").is_file():
            artifact = Artifact.open(path)
            data |= artifact_data(artifact)
            final = final_stage(artifact)
        elif path.is_dir():
            stages = read_dump(path)
        elif path.suffix == ".json":
            data["trace"] = trace_summary(path)
        elif path.is_file():
            stages = [*stages, read_stage(path)]
        else:
            raise MlsdcError(f"{path}: does not exist; expected a folder of `--dump-ir`, an artifact, a .ir file or a trace")
    stages = stages or ([final] if final else [])
    if not stages:
        raise MlsdcError("nothing to show: give a folder of `--dump-ir`, an artifact or a .ir file beside the trace")
    return data | stages_data(stages) | module_data(stages[-1].module, data)


def stages_data(stages: Sequence[Stage]) -> dict[str, Any]:
    table = Interned()
    rows: list[dict[str, Any]] = []
    before: dict[str, Graph] = {}
    for stage in stages:
        graphs = {f"{level.name}/{name}": graph for level in stage.module.levels for name, graph in level.graphs.items()}
        programs = {where: program_data(graph, before.get(where) if rows else graph, table) for where, graph in graphs.items()}
        rows.append({"title": stage.title, "options": stage.options, "rules": stage.rules, "programs": programs})
        before = graphs
    return {"strings": list(table.strings), "nodes": table.rows, "stages": rows}


def program_data(graph: Graph, before: Graph | None, table: Interned) -> dict[str, Any]:
    """A graph at a stage. `before` None: the pass made the program, everything in it is new."""
    row: dict[str, Any] = {"nodes": [table.node(node) for node in graph], "outputs": [list(output) for output in graph.outputs]}
    changes = graph_changes(before or Graph(graph.name, (), ()), graph)
    row |= {kind: [table.string(name) for name in getattr(changes, kind)] for kind in ("added", "changed", "removed")}
    row["renamed"] = {table.string(name): table.string(was) for name, was in changes.renamed.items()}
    row["heirs"] = {table.string(heir): [table.string(name) for name in gone] for heir, gone in changes.heirs.items()}
    return row


def module_data(module: Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """Title, levels and cache, as far as an artifact has not said them better."""
    levels = [level_data(level) for level in module.levels]
    plan = asdict(module.plan) if module.plan else None
    return {"title": given.get("title", module.name), "levels": given.get("levels", levels), "plan": given.get("plan", plan)}


def level_data(level: LevelModule) -> dict[str, Any]:
    return {"name": level.name, "kind": level.kind, "params": dict(level.params), "kv": kv_data(level.kv)}


def kv_data(kv: KvGeometry | None) -> dict[str, Any] | None:
    if kv is None:
        return None
    return asdict(kv) | {"page_bytes": kv.page_bytes, "bytes_per_token": kv.bytes_per_token, "k_block_bytes": kv.k_block_bytes,
                         "v_block_bytes": kv.v_block_bytes, "bits": kv.kv.bits_per_element(kv.page_size, kv.head_dim)}


def artifact_data(artifact: Artifact) -> dict[str, Any]:
    manifest = artifact.manifest
    target = manifest.targets[0]
    kernels = {
        key: {"file": kernel.source, "abi": list(kernel.abi), "checked_by": kernel.checked_by, "resources": dict(kernel.resources),
              "source": artifact.path(kernel.source).read_text(encoding="utf-8")}
        for key, kernel in target.kernels.items()
    }
    launches = {
        f"{level.name}/{name}": [
            [launch.node, launch.kernel, str(launch.grid) if launch.count is None else f"{launch.grid} × {launch.count.lower()}",
             [":".join(map(str, next(iter(vars(arg).items())))) for arg in launch.args]]
            for launch in program.launches]
        for level in manifest.levels if target.name in level.programs for name, program in artifact.programs(level.name, target).items()
    }
    explain = json.loads(artifact.path("explain.json").read_text(encoding="utf-8")) if "explain.json" in manifest.files else {}
    return {
        "title": manifest.model.name, "model": asdict(manifest.model), "limits": asdict(manifest.limits), "plan": asdict(manifest.plan),
        "levels": [{"name": level.name, "kind": level.kind, "params": dict(level.params), "kv": kv_data(level.kv),
                    "weight_bytes": manifest.weights[level.weights][0] if level.weights else 0} for level in manifest.levels],
        "target": {"name": target.name, "device": target.device, "requires": list(target.requires)},
        "kernels": kernels, "launches": launches, "explain": explain.get("passes", []), "sha256": artifact.sha256,
    }


def final_stage(artifact: Artifact) -> Stage:
    """The artifact's own graphs: what was left after the last pass."""
    levels = tuple(
        LevelModule(level.name, level.kind, level.params,
                    read_graphs(artifact.path(f"graph/{level.name}.ir").read_text(encoding="utf-8"), f"graph/{level.name}.ir")
                    if f"graph/{level.name}.ir" in artifact.manifest.files else {}, level.kv)
        for level in artifact.manifest.levels)
    return Stage("compiled", "", (), Module(artifact.manifest.model.name, levels))


def trace_summary(path: Path) -> dict[str, Any]:
    """What a trace of `mlsdc trace` measured. Raises MlsdcError for any other JSON."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))["otherData"]["summary"]
    except (OSError, ValueError, KeyError, TypeError):
        raise MlsdcError(f"{path}: not a trace; `mlsdc trace ARTIFACT --prompt ... -o {path.name}` makes one") from None
    return dict(summary)


