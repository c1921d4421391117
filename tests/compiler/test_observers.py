"""Observers: dumps that a person diffs, times, explanations, and passes caught lying."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from mlsdc.compiler.errors import IrError, PassError
from mlsdc.compiler.graph import Editor, Graph, Node, Weight
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.observers import DumpObserver, ExplainObserver, TimingObserver, ValidateObserver
from mlsdc.compiler.ops_core import Scalar
from mlsdc.compiler.ops_nn import Linear, RmsNorm
from mlsdc.compiler.pipeline import GraphPass, Observer, run_pipeline
from mlsdc.compiler.rewrite import Rule, apply_rules
from mlsdc.compiler.text import parse_graph, parse_module
from mlsdc.compiler.types import TensorType
from mlsdc.compiler.validate import RandomWeights, verify_step
from mlsdc.runtime.kv_format import KvGeometry

GRAPH = parse_graph(
    'graph forward\ndims rows in 1..8\n'
    '%x = input() : f32[rows, 64]\n%w.norm = weight(sources=["norm"]) : f32[64]\n'
    '%w.q = weight(sources=["q"]) : f32[32, 64]\n%w.k = weight(sources=["k"]) : f32[16, 64]\n'
    '%h = rms_norm(%x, %w.norm, eps=1e-05)\n%q = linear(%h, %w.q)\n%k = linear(%h, %w.k)\n%y = cat(%q, %k)\n'
    '%z = scalar(%y, fn="mul", value=2.0)\nreturn y=%y, z=%z')
MODULE = Module("m", (LevelModule("target", "model", {}, {"forward": GRAPH}),))


@dataclass(frozen=True)
class Rescale(GraphPass):
    """Doubles twice where it should double once, when `factor` is not 2."""

    name: ClassVar[str] = "rescale"
    factor: float = 2.0

    def rewrite(self, graph: Graph) -> Graph:
        def double(editor: Editor, node: Node) -> bool:
            if node.op == Scalar("add", 0.0) or "half" in editor.nodes:
                return False
            editor.add("half", Scalar("mul", self.factor), *node.inputs)
            editor.replace(node.name, Scalar("add", 0.0), "half")
            return True

        return apply_rules(graph, [Rule("x * 2 => x * factor + 0", Scalar, double)])[0]


@dataclass(frozen=True)
class Stack(GraphPass):
    """One linear over stacked weights; `swapped` stacks them in the wrong order."""

    name: ClassVar[str] = "stack"
    swapped: bool = False

    def rewrite(self, graph: Graph) -> Graph:
        editor = Editor(graph)
        weight = graph["w.q"].type
        assert isinstance(weight, TensorType)
        sources = ("k", "q") if self.swapped else ("q", "k")
        editor.replace("y", Linear(), "h", editor.weight("w.qk", weight.with_shape(48, 64), *sources))
        return editor.finish()


@dataclass(frozen=True)
class Nothing(GraphPass):
    name: ClassVar[str] = "nothing"

    def rewrite(self, graph: Graph) -> Graph:
        return graph


def run(*passes: GraphPass, observer: Observer, module: Module = MODULE) -> Module:
    return run_pipeline(module, passes, [observer])


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def test_a_dump_is_one_numbered_file_a_pass_and_an_index(tmp_path: Path) -> None:
    after = run(Rescale(), Nothing(), observer=DumpObserver(tmp_path))
    dumped = files(tmp_path)
    assert list(dumped) == ["00-captured.ir", "01-rescale.ir", "02-nothing.ir", "index.md"]
    assert parse_module(dumped["00-captured.ir"]) == MODULE
    assert parse_module(dumped["01-rescale.ir"]) == after
    head = "// rescale(factor=2.0)\n// target/forward: 9 -> 10\n// 1 x x * 2 => x * factor + 0\nmodule m\n"
    assert dumped["01-rescale.ir"].startswith(head)
    assert dumped["02-nothing.ir"].startswith("// nothing()\n// unchanged\nmodule m\n")
    row = "| [01-rescale.ir](01-rescale.ir) | factor=2.0 | target/forward: 9 -> 10 | 1 x x * 2 => x * factor + 0 |"
    assert row in dumped["index.md"].splitlines()


def test_dumping_twice_gives_the_same_bytes_and_no_leftovers(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    run(Rescale(), Nothing(), Stack(), observer=DumpObserver(tmp_path))
    run(Rescale(), observer=DumpObserver(tmp_path))
    first = files(tmp_path)
    assert list(first) == ["00-captured.ir", "01-rescale.ir", "index.md", "mine.txt"]
    run(Rescale(), observer=DumpObserver(tmp_path))
    assert files(tmp_path) == first


def test_explain_says_what_fired_where_and_what_changed() -> None:
    explain = ExplainObserver()
    run(Rescale(), Nothing(), observer=explain)
    first, second = json.loads(json.dumps(explain.passes))
    assert first["pass"] == "rescale"
    assert first["options"] == {"factor": 2.0}
    assert first["fired"] == {"x * 2 => x * factor + 0": ["forward: z"]}
    assert first["graphs"] == {"target/forward": {"before": 9, "after": 10, "added": 1, "removed": 0, "replaced": 1}}
    assert second == {"pass": "nothing", "options": {}, "graphs": {}, "fired": {}, "declined": {}}


def test_timing_has_one_entry_a_pass() -> None:
    timing = TimingObserver()
    run(Rescale(), Nothing(), observer=timing)
    assert list(timing.seconds) == ["rescale", "nothing"]


def test_validation_accepts_passes_that_keep_their_word() -> None:
    run(Rescale(), Stack(), Nothing(), observer=ValidateObserver())


def test_validation_names_the_pass_the_output_and_the_error() -> None:
    with pytest.raises(PassError, match=r"output 'z': largest error .* first at \[0, 0\]: .* before, .* after") as error:
        run(Nothing(), Rescale(3.0), observer=ValidateObserver())
    assert str(error.value).startswith("after 'rescale': target/forward: ")


def test_validation_sees_weights_stacked_in_the_wrong_order() -> None:
    with pytest.raises(PassError, match="after 'stack': target/forward: output 'y'"):
        run(Stack(swapped=True), observer=ValidateObserver())


def test_validation_compares_with_the_pass_before_not_with_the_start() -> None:
    with pytest.raises(PassError, match="after 'stack'"):
        run(Rescale(), Stack(swapped=True), observer=ValidateObserver())


def test_validation_allows_what_a_pass_declares() -> None:
    class Rough(Rescale):
        tolerance: ClassVar[float] = 0.1

    run(Rough(2.1), observer=ValidateObserver())
    with pytest.raises(PassError, match="allowed 0.1 of that"):
        run(Rough(2.3), observer=ValidateObserver())


def test_validation_misses_no_output() -> None:
    class Forget(Nothing):
        name: ClassVar[str] = "forget"

        def rewrite(self, graph: Graph) -> Graph:
            return Editor(replace(graph, outputs=graph.outputs[:1])).finish()

    with pytest.raises(PassError, match="after 'forget': target/forward: output 'z' is gone"):
        run(Forget(), observer=ValidateObserver())


def test_a_pass_that_breaks_the_graph_is_named() -> None:
    class Break(Nothing):
        name: ClassVar[str] = "break"

        def rewrite(self, graph: Graph) -> Graph:
            return replace(graph, nodes=graph.nodes[1:])

    with pytest.raises(PassError, match="after 'break': %h uses %x before it is defined"):
        run(Break(), observer=TimingObserver())


PAGED = parse_graph(
    "graph forward\ndims rows in 1..16\n%q = input() : f32[rows, 2, 16]\n%k = input() : f32[rows, 1, 16]\n"
    "%kv = input() : kv<bf16, page=16, layers=1, heads=1, dim=16>\n%tree = input() : tree\n"
    "%kv.0 = append_kv(%kv, %k, %k, %tree, layer=0)\n%y = paged_attention(%q, %kv.0, %tree, layer=0, scale=0.25)\nreturn y=%y, kv=%kv.0")
PAGED_MODULE = Module("m", (LevelModule("target", "model", {}, {"forward": PAGED}, KvGeometry("bf16", 16, 1, 1, 16)),))


@pytest.mark.parametrize(("break_", "output"), [("read_before_write", "y"), ("no_write", "kv"), ("window", "y")])
def test_validation_of_a_cache_sees_reads_and_writes(break_: str, output: str) -> None:
    class Wrong(Nothing):
        name: ClassVar[str] = "wrong"

        def rewrite(self, graph: Graph) -> Graph:
            editor = Editor(graph)
            if break_ == "read_before_write":
                editor.replace("y", graph["y"].op, "q", "kv", "tree")
            elif break_ == "no_write":
                editor.outputs = [("y", "y"), ("kv", "kv")]
            else:
                editor.replace("y", replace(graph["y"].op, window=4), "q", "kv.0", "tree")  # type: ignore[call-arg]
            return editor.finish()

    with pytest.raises(PassError, match=f"after 'wrong': target/forward: output '{output}'"):
        run(Wrong(), observer=ValidateObserver(), module=PAGED_MODULE)


def test_the_step_that_validates_a_cache_has_a_tree_and_a_prompt() -> None:
    tree = verify_step().tree
    assert tree.row_slot.tolist() == [0, 1, 2, 3, -1, -1, -1]
    assert tree.positions.tolist() == [5, 6, 6, 7, 0, 1, 2]
    assert [tree.slots(row) for row in range(4)] == [[0], [0, 1], [0, 2], [0, 2, 3]]


def test_random_weights_go_by_source() -> None:
    weights = RandomWeights()
    weights.learn(GRAPH)
    both = Node("w.qk", Weight(("q", "k")), (), TensorType(GRAPH["w.q"].type.dtype, (48, 64)))  # type: ignore[union-attr]
    stacked = weights(both)
    assert (stacked[:32] == weights(GRAPH["w.q"])).all()
    assert (stacked[32:] == weights(GRAPH["w.k"])).all()
    with pytest.raises(IrError, match=r"%w.qk: has 47 rows, its sources q, k have 32 \+ 16"):
        weights(replace(both, type=TensorType(GRAPH["w.q"].type.dtype, (47, 64))))  # type: ignore[union-attr]


def test_a_norm_without_its_offset_is_caught() -> None:
    class Offset(Nothing):
        def rewrite(self, graph: Graph) -> Graph:
            editor = Editor(graph)
            editor.replace("h", RmsNorm(1e-5, 1.0), "x", "w.norm")
            return editor.finish()

    with pytest.raises(PassError, match="output 'y'"):
        run(Offset(), observer=ValidateObserver())
