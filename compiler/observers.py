"""Watching a pipeline from outside: dumps, times, explanations, translation validation. No pass prints; these do the telling."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsdc.compiler.errors import IrError, PassError
from mlsdc.compiler.graph import Graph
from mlsdc.compiler.module import Module
from mlsdc.compiler.pipeline import Observer, Pass
from mlsdc.compiler.rewrite import Record, start_recording, stop_recording
from mlsdc.compiler.text import print_module

if TYPE_CHECKING:
    from mlsdc.compiler.interpret_core import Value
    from mlsdc.compiler.validate import RandomWeights, Step


def options(pass_: Pass) -> dict[str, Any]:
    """The pass's options: its dataclass fields."""
    return {field.name: getattr(pass_, field.name) for field in dataclasses.fields(pass_)}


def programs(module: Module) -> Iterator[tuple[str, Graph]]:
    """(`level/program`, graph) of all graphs of a module."""
    for level in module.levels:
        for program, graph in level.graphs.items():
            yield f"{level.name}/{program}", graph


@dataclasses.dataclass(frozen=True)
class Change:
    """What a pass did to a graph, in nodes. A node is replaced when its name stayed and its op, inputs or type did not."""

    before: int
    after: int
    added: int
    removed: int
    replaced: int


def changes(before: Module, after: Module) -> dict[str, Change]:
    """By `level/program`, for graphs that are not the same as before."""
    old = dict(programs(before))
    result = {}
    for where, graph in programs(after):
        was = old[where].by_name if where in old else {}
        if where in old and old[where] == graph:
            continue
        kept = [node for node in graph if node.name in was]
        replaced = sum(node != was[node.name] for node in kept)
        result[where] = Change(len(was), len(graph), len(graph) - len(kept), len(was) - len(kept), replaced)
    return result


class DumpObserver(Observer):
    """`00-captured.ir`, `01-<pass>.ir`, ... and `index.md` in a folder: `diff 03-* 04-*` is the pass. Same input, same bytes."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.record = Record()
        self.index: list[str] = []

    def start(self, module: Module) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if re.fullmatch(r"\d\d-[\w-]+\.ir", path.name):  # of an earlier run with other passes
                path.unlink()
        self.index = ["| file | options | nodes | rules |", "|---|---|---|---|"]
        self._write("00-captured.ir", [], module, ["", "", ""])

    def before(self, index: int, pass_: Pass, module: Module) -> None:
        self.record = start_recording()

    def after(self, index: int, pass_: Pass, before: Module, after: Module) -> None:
        stop_recording(self.record)
        given = ", ".join(f"{key}={value!r}" for key, value in options(pass_).items())
        changed = [f"{where}: {c.before} -> {c.after}" for where, c in changes(before, after).items()] or ["unchanged"]
        fired = [f"{count} x {equation}" for equation, count in self.record.counts().items()]
        head = [f"{pass_.name}({given})", *changed, *fired]
        self._write(f"{index:02}-{pass_.name}.ir", head, after, [given, "; ".join(changed), "; ".join(fired)])

    def finish(self, module: Module) -> None:
        (self.folder / "index.md").write_text("\n".join(self.index) + "\n", encoding="utf-8")

    def _write(self, file: str, head: list[str], module: Module, row: list[str]) -> None:
        text = "".join(f"// {line}\n" for line in head) + print_module(module)
        (self.folder / file).write_text(text, encoding="utf-8")
        cells = [f"[{file}]({file})", *(cell.replace("|", "\\|") for cell in row)]
        self.index.append(f"| {' | '.join(cells)} |")


class TimingObserver(Observer):
    """`seconds[pass name]`, in order, after the run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = 0.0

    def before(self, index: int, pass_: Pass, module: Module) -> None:
        self._started = time.perf_counter()

    def after(self, index: int, pass_: Pass, before: Module, after: Module) -> None:
        self.seconds[pass_.name] = self.seconds.get(pass_.name, 0.0) + time.perf_counter() - self._started


class ExplainObserver(Observer):
    """`passes`, one JSON-able entry a pass: options, what it did to each graph, rules that fired (with nodes) or declined (count)."""

    def __init__(self) -> None:
        self.passes: list[dict[str, Any]] = []
        self.record = Record()

    def before(self, index: int, pass_: Pass, module: Module) -> None:
        self.record = start_recording()

    def after(self, index: int, pass_: Pass, before: Module, after: Module) -> None:
        stop_recording(self.record)
        fired: dict[str, list[str]] = {}
        for firing in self.record.fired:
            fired.setdefault(firing.equation, []).append(f"{firing.graph}: {firing.node}")
        self.passes.append({
            "pass": pass_.name,
            "options": options(pass_),
            "graphs": {where: dataclasses.asdict(change) for where, change in changes(before, after).items()},
            "fired": fired,
            "declined": {equation: count for equation, count in self.record.declined.items() if equation not in fired},
        })


class ValidateObserver(Observer):
    """`--verify-each`: every graph that a pass changed is executed before and after it; see `validate` for on what.

    Raises PassError naming the pass, the first output that differs and by how much, and the first value inside the graph that does.
    """

    def __init__(self) -> None:
        self.weights: RandomWeights | None = None
        self.record = Record()
        self._ran: list[tuple[Graph, Step, dict[str, Value]]] = []  # of the last pass: its results are what the next one starts from

    def start(self, module: Module) -> None:
        from mlsdc.compiler.validate import RandomWeights

        self.weights = RandomWeights()

    def before(self, index: int, pass_: Pass, module: Module) -> None:
        self.record = start_recording()

    def after(self, index: int, pass_: Pass, before: Module, after: Module) -> None:
        stop_recording(self.record)
        old, ran = dict(programs(before)), self._ran
        self._ran = []
        for where, graph in programs(after):
            if where in old and old[where] == graph:
                self._ran += [run for run in ran if run[0] is old[where] or run[0] == graph]
            elif where in old:
                try:
                    message = self._compare(old[where], graph, pass_.tolerance, ran)
                except IrError as error:
                    message = f"cannot be executed: {error}"
                if message is not None:
                    raise PassError(f"after '{pass_.name}': {where}: {message}")

    def _compare(self, before: Graph, after: Graph, tolerance: float, ran: list[tuple[Graph, Step, dict[str, Value]]]) -> str | None:
        from mlsdc.compiler.validate import difference, step_for

        step = step_for(before, after)
        known = [values for graph, of, values in ran if graph is before and of is step]
        expected = known[0] if known else self._run(before, step)
        found = self._run(after, step)
        self._ran.append((after, step, found))
        for result, value in expected.items():
            if result not in found:
                return f"output '{result}' is gone"
            message = difference(value, found[result], tolerance)
            if message is not None:
                return f"output '{result}': {message}{self._where(before, after, tolerance, step)}"
        return None

    def _where(self, before: Graph, after: Graph, tolerance: float, step: Step) -> str:
        """The first value of the new graph that is not what it was, and the rules that fired there or at what it is made of."""
        from mlsdc.compiler.validate import difference

        old: dict[str, Value] = {}
        new: dict[str, Value] = {}
        self._run(before, step, old)
        self._run(after, step, new)
        for node in after:
            was, now = old.get(node.name), new[node.name]  # a value of another kind (f32, now a8) means something else
            if type(was) is not type(now) or node.op.opname in ("input", "weight"):
                continue
            if was is not None and difference(was, now, tolerance):
                near = made_by_pass(after, before, node.name)
                all_rules = dict.fromkeys(fired.equation for fired in self.record.fired)
                rules = dict.fromkeys(fired.equation for fired in self.record.fired if fired.node in near) or all_rules
                told = "".join(f"; '{rule}' fired {'there' if rules is not all_rules else 'in this pass'}" for rule in rules)
                return f"; the first value that differs is %{node.name} ({node.op.opname}){told}"
        return ""

    def _run(self, graph: Graph, step: Step, taps: dict[str, Value] | None = None) -> dict[str, Value]:
        from mlsdc.compiler.interpret import interpret
        from mlsdc.compiler.validate import feed

        assert self.weights is not None
        self.weights.learn(graph)
        return interpret(graph, feed(graph, step), self.weights, taps=taps)


def made_by_pass(after: Graph, before: Graph, name: str) -> set[str]:
    """The node, and the nodes it is made of as far as they are new."""
    near, pending = {name}, [name]
    while pending:
        for value in after[pending.pop()].inputs:
            if value not in near and value not in before.by_name:
                near.add(value)
                pending.append(value)
    return near
