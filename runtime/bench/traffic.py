"""What a step has to read from memory, counted from its launch list: packed weights, and the pages of its sequence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.program import InputArg, PoolArg, ProgramSpec, WeightArg

# kernels that read only the experts hit; their names say how many there are, and how many a row chooses
EXPERTS = re.compile(r"expert_(linear|rows|tiles)_.*_e(?P<experts>\d+)_s(?P<slots>\d+)_")
WRITERS = ("append_kv", "commit", "quantise_kv", "settle_kv")  # kernels that are given the pool to write to


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step."""

    weights: int
    pages: int

    @property
    def total(self) -> int:
        return self.weights + self.pages


def traffic(program: ProgramSpec, sizes: Mapping[str, int], vocab_size: int, geometry: KvGeometry, *, rows: int, positions: int) -> Traffic:
    """Of a step of `rows` rows of one sequence that attends to `positions` positions. `sizes` are the packed bytes of the weights.

    A launch reads each of its weights whole, once, but of a table that is looked up by token it reads `rows` rows, and of experts those
    that rows choose: as many as one row's slots for one row, for more rows at most as many as they have slots. Attention reads a
    layer's keys and values of every position once (its rows share them in cache). Activations stay in cache and are not counted. Of a
    node's launches for few and for many rows one counts; of rows that want logits there are taken to be `rows`.
    """
    weights = 0
    layers = set()
    for launch in program.launches:
        if launch.count in ("ROWS", "OUT") and not launch.runs(rows):
            continue
        read = sum(sizes[name] for name in {arg.weight for arg in launch.args if isinstance(arg, WeightArg)})
        by_token = any(isinstance(arg, InputArg) and arg.input == "tokens" for arg in launch.args)
        experts = EXPERTS.match(launch.kernel)
        if experts:
            count, slots = int(experts["experts"]), int(experts["slots"])
            read = read * min(count, rows * slots) // count
        weights += read * min(rows, vocab_size) // vocab_size if by_token else read
        if not launch.kernel.startswith(WRITERS):
            pools = [arg.pool for arg in launch.args if isinstance(arg, PoolArg)]  # of a grouped format, its wide pages come second
            layers.update(pools[:1])
    return Traffic(weights, round(len(layers) * positions * geometry.bytes_per_token / geometry.num_layers))
