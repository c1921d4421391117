"""Compare what an artifact computes with what it should, and name the first layer that is wrong.

    mlsdc diff m.mlsdc --prompt "The capital of France is"            # node by node with the reference interpreter
    mlsdc diff m.mlsdc --ref hf --prompt "..."                        # layer by layer with transformers in f32

`own` is a node's error on the values the artifact itself fed it, so the first bad one is where to look; `total` is what has piled up. The
weights in the artifact are compared byte by byte with what the checkpoint packs to. Exit code 1 when something is bad.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlsdc.runtime.errors import MlsdcError

if TYPE_CHECKING:
    from mlsdc.compiler.capture import ModelSource
    from mlsdc.compiler.diff import Logits
    from mlsdc.compiler.graph import Graph, Node
    from mlsdc.runtime.artifact import Artifact
    from mlsdc.runtime.step import Array


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="as it is, no chat template")
    parser.add_argument("--ref", choices=("interpreter", "hf"), default="interpreter")
    parser.add_argument("--model", metavar="PATH", help="the checkpoint, where the artifact's own note of it does not lead there")
    parser.add_argument("--nodes", action="store_true", help="a line a node, not a layer")


def main(args: argparse.Namespace) -> int:
    from mlsdc.runtime.artifact import Artifact

    artifact = Artifact.open(args.artifact)
    report = diff(artifact, args.prompt, args.ref, args.model)
    for line in report.lines(args.nodes):
        print(line)
    return 1 if report.first_bad else 0


@dataclass(frozen=True)
class Entry:
    """A compared value: a node, or a layer's output against transformers."""

    name: str
    own: float
    total: float
    bad: bool


@dataclass(frozen=True)
class Report:
    """What `diff` found. `weights` are the names of weights whose bytes are not what the checkpoint packs to, with how many differ."""

    reference: str
    tokens: int
    entries: tuple[Entry, ...]
    weights: dict[str, int]
    logits: Logits

    @property
    def first_bad(self) -> str:
        """The first layer (or node outside of layers) that is wrong, "" if none is."""
        bad = [layer_of(entry.name) for entry in self.entries if entry.bad]
        bad += [layer_of(name.removeprefix("w.")) for name in self.weights]
        order = {layer_of(entry.name): i for i, entry in reversed(list(enumerate(self.entries)))}
        return min(bad, key=lambda layer: order.get(layer, len(order))) if bad else ""

    def lines(self, each_node: bool = False) -> Iterator[str]:
        layers = self.reference != "interpreter"
        units = "own relative to what a layer adds to its input" if layers else "errors relative to the largest element"
        yield f"{self.tokens} tokens against {self.reference}; {units}"
        yield f"{'node' if each_node else 'layer':36} {'own':>10} {'total':>10}"
        for entry in self.entries if each_node else by_layer(self.entries):
            yield f"{entry.name:36} {entry.own:10.2e} {entry.total:10.2e}{'  <- wrong' if entry.bad else ''}"
        for name, count in self.weights.items():
            yield f"weight {name}: {count} byte{'s' if count > 1 else ''} not what the checkpoint packs to"
        yield f"logits  KL {self.logits.kl:.2e} nats, the same first choice in {self.logits.top1:.1%} of {self.logits.rows} rows"
        yield f"first bad layer: {self.first_bad}" if self.first_bad else "nothing is wrong"


def layer_of(name: str) -> str:
    found = re.match(r"layers\.\d+", name)
    return found[0] if found else name


def by_layer(entries: tuple[Entry, ...]) -> Iterator[Entry]:
    """The worst own error of each layer, and the total error of its last value."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(layer_of(entry.name), []).append(entry)
    for layer, group in groups.items():
        yield Entry(layer, max(entry.own for entry in group), group[-1].total, any(entry.bad for entry in group))


def diff(artifact: Artifact, prompt: str, reference: str = "interpreter", model: str | None = None) -> Report:
    """Run the prompt (its first tokens, as many as one step takes) on the artifact and on the reference. Raises MlsdcError."""
    from mlsdc.compiler.diff import compare_layers, compare_logits, compare_nodes
    from mlsdc.compiler.fidelity import reference_model
    from mlsdc.compiler.interpret_state import StepTree
    from mlsdc.compiler.view.stages import read_graphs
    from mlsdc.runtime.device import open_device
    from mlsdc.runtime.device.cpu import CpuLevel, CpuProgram
    from mlsdc.targets.cpu_values import pages_of, run_launches

    level, ranks = artifact.manifest.target_level, artifact.manifest.world_size
    if ranks > 1:
        raise MlsdcError(f"{artifact.root.name}: is split over {ranks} ranks, which meet between launches; diff runs them one by one: "
                         "compile without tensor_parallel to compare")
    source = open_source(artifact, model)
    graph = read_graphs(artifact.path(f"graph/{level.name}.ir").read_text(encoding="utf-8"), f"graph/{level.name}.ir")["forward"]
    tokens = prompt_tokens(artifact, prompt)
    assert level.kv is not None
    device = open_device(artifact, artifact.pick_target("cpu"), threads=1)
    try:
        memory = device.load_level(level.name, level_pages(artifact, len(tokens)))
        assert isinstance(memory, CpuLevel)
        buffers, program = memory.buffers, memory.programs["forward"]
        assert isinstance(program, CpuProgram)
        out = fill_step(memory, tokens)
        read = weight_reader(artifact, memory, source)
        weights = changed_weights(artifact, memory, graph, read)
        inputs = {"tokens": buffers.tokens[: len(tokens)].copy(), "positions": buffers.positions[: len(tokens)].copy(),
                  "out_rows": np.array(out), "kv": pages_of(memory), "tree": StepTree.from_buffers(buffers)}
        native = list(run_launches(program, graph))
        found = program.tap("logits")[: len(out)].copy()
    finally:
        device.close()
    size = artifact.manifest.model.vocab_size
    if reference == "hf":
        import torch

        huggingface = reference_model(source)
        lines = compare_layers(huggingface, tokens, {node: value for node, _, value in native if isinstance(value, np.ndarray)}, out)
        entries = tuple(Entry(line.layer, line.own, line.total, line.bad) for line in lines)
        with torch.no_grad():
            wanted = huggingface(torch.tensor([tokens]), use_cache=False).logits[0, out].numpy()
        return Report("transformers in f32", len(tokens), entries, weights, compare_logits(found[:, :size], wanted[:, :size]))
    nodes, values = compare_nodes(graph, inputs, read, native)
    entries = tuple(Entry(line.node, line.own, line.total, line.bad) for line in nodes)
    wanted = np.asarray(values[dict(graph.outputs)["logits"]])
    return Report("interpreter", len(tokens), entries, weights, compare_logits(found[:, :size], wanted[:, :size]))


def open_source(artifact: Artifact, model: str | None) -> ModelSource:
    from mlsdc.compiler.capture import load_source
    from mlsdc.compiler.errors import CaptureError

    label = artifact.manifest.model.source
    try:
        return load_source(model or label, artifact.root.parent if model is None else None)
    except CaptureError as error:
        if model is not None:
            raise
        raise MlsdcError(f"the checkpoint '{label}' is not there ({error}); name it with --model PATH") from None


def prompt_tokens(artifact: Artifact, prompt: str) -> list[int]:
    from mlsdc.runtime.tokenizer import Tokenizer

    tokens = Tokenizer.open(artifact.path("tokenizer.json")).encode(prompt)
    if not tokens:
        raise MlsdcError("--prompt: empty, expected at least one token")
    return tokens[: artifact.manifest.limits.max_num_batched_tokens]


def level_pages(artifact: Artifact, num_tokens: int) -> int:
    kv = artifact.manifest.target_level.kv
    assert kv is not None
    count = -(-num_tokens // kv.page_size) + artifact.manifest.limits.scratch_pages(kv.page_size)
    if kv.tail is None or kv.wide is None:
        return count
    wide = -(-count * kv.page_bytes // kv.wide.page_bytes) + kv.tail.num_pages  # the ring lies behind them
    return -(-wide * kv.wide.page_bytes // kv.page_bytes)


def fill_step(memory: Any, tokens: list[int]) -> list[int]:
    """One sequence's first tokens, all of them prompt; returns the rows that get logits, the last ones the artifact has room for."""
    from mlsdc.runtime.step import Header

    buffers, count = memory.buffers, len(tokens)
    out = list(range(max(0, count - len(buffers.out_rows)), count))
    buffers.tokens[:count], buffers.positions[:count] = tokens, np.arange(count)
    buffers.row_seq[:count], buffers.row_slot[:count], buffers.ancestors[:count] = 0, -1, 0
    buffers.seq_ctx[0], buffers.seq_row[0], buffers.seq_rows[0] = 0, 0, count
    pages = min(memory.num_pages, buffers.page_table.shape[1])
    buffers.page_table[0, :pages] = np.arange(pages)
    if buffers.tail is not None:
        last = memory.num_pages * memory.page_bytes // memory.wide_bytes
        buffers.tail_table[0, : buffers.tail.num_pages] = range(last - buffers.tail.num_pages, last)
    buffers.out_rows[: len(out)] = out
    buffers.header[[Header.ROWS, Header.SEQS, Header.OUT, Header.COMMITS]] = count, 1, len(out), 0
    return out


def weight_reader(artifact: Artifact, memory: Any, source: ModelSource) -> Any:
    """A weight node's value from the checkpoint; constants that the capture computed (`w.inv_freq`) are the artifact's own."""
    from mlsdc.compiler.graph import Weight
    from mlsdc.compiler.weights import read_weight

    names, cache = set(source.weights.names()), dict[str, Any]()

    def read(node: Node) -> Any:
        if node.name not in cache:
            assert isinstance(node.op, Weight)
            known = names.issuperset(node.op.sources)
            cache[node.name] = read_weight(node, source.weights) if known else stored_constant(memory, node)
        return cache[node.name]

    return read


def stored_constant(memory: Any, node: Node) -> Array:
    from mlsdc.compiler.validate import static_shape

    shape = static_shape(node)
    return np.array(memory.weights[node.name][: 4 * int(np.prod(shape))].view(np.float32).reshape(shape))


def changed_weights(artifact: Artifact, memory: Any, graph: Graph, read: Any) -> dict[str, int]:
    """Weights whose bytes in the artifact are not what the target packs from the checkpoint, and in how many bytes."""
    from mlsdc.targets import make_target

    target = make_target(artifact.pick_target("cpu").name, artifact.manifest.limits)
    changed = {}
    for node in graph.weights():
        packed = target.pack(node.type, read(node))
        count = int((packed != memory.weights[node.name][: len(packed)]).sum())
        if count:
            changed[node.name] = count
    return changed
