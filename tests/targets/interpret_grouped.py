"""Law L3 through Triton's interpreter, by the sequences of test_cpu_grouped:
`python -m tests.targets.interpret_grouped UNTIL NAME[:fast]...`, `fast` for kernels that read a tree's slots as one block. The name
`commits` stands for commits of the other formats: tokens copied within and between pages.

Raises AssertionError where bytes of pages, bits of rows or rows' numbers are not as they must be.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.step import Header, StepBuffers
from tests.targets import test_cpu_grouped as grouped
from tests.targets.attention_vectors import Shape
from tests.targets.triton_machine import TritonMachine

SHAPES = {
    "int4": Shape(3, 1, 64, page_size=32, format="int4"),
    "int2": Shape(4, 2, 64, page_size=16, num_layers=1, layer=0, format="int2", window=50),
    "int3": Shape(2, 1, 32, page_size=16, num_layers=1, layer=0, format="int3"),
    "int3 wide": Shape(2, 1, 128, page_size=32, format="int3"),
    "nested": Shape(2, 1, 64, page_size=32, format="int8n/int4@0=int8n"),
    "mixed": Shape(2, 1, 32, page_size=64, format="int8/int4@0=bf16", softcap=2.0),
    "sinks": Shape(2, 1, 32, page_size=16, format="int4", window=70, sinks=5),
    "skipped": Shape(2, 1, 64, page_size=64, layer=0, format="int8/int4@0=bf16"),
}


def check(name: str, until: int, folder: Path, exact: bool) -> None:
    """A sequence that grew by drafts, beside another one, has the bits of one that grew by chunks; if not `exact`, its numbers."""
    shape = SHAPES[name]
    tail = shape.geometry.tail
    assert tail is not None
    grouped.SHAPES[name], grouped.GRAPHS[name] = shape, grouped.graph_of(shape)
    machine = TritonMachine(grouped.LIMITS, folder, exact=exact)
    plain = grouped.Life(machine, name, [grouped.content(3, shape)])  # type: ignore[arg-type]
    while plain.sequences[0].length < until:
        plain.step([(0, None, [], min(70, until - plain.sequences[0].length))], None)  # type: ignore[arg-type]
    rng = np.random.default_rng(3)
    life = grouped.Life(machine, name, [grouped.content(3, shape), grouped.content(4, shape)])  # type: ignore[arg-type]
    while any(sequence.length < until for sequence in life.sequences):
        going = [i for i in rng.permutation(2) if life.sequences[i].length < until]
        life.step([grouped.grow(life, int(i), rng, until, 40) for i in going], grouped.one_by_one_backwards if rng.random() < 0.3 else None)
    same, alone = life.sequences[0], plain.sequences[0]
    different = [p for p in range(until) if not np.array_equal(same.results[p], alone.results[p])]
    assert not exact or not different, f"rows {different} have other bits when drafted"
    for sequence, of in ((same, life), (life.sequences[1], life), (alone, plain)):
        for page in range(until // tail.group):
            for head in range(shape.kv_heads):
                found = shape.geometry.blocks(of.page(sequence.pages[page]), shape.layer, head)
                wanted = grouped.wanted_page(shape, sequence, page, head)
                assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True)), f"bytes of page {page}, head {head}"
    some = sorted({*range(0, until, 23), until - 1})
    rows = grouped.expected(shape, alone, some)
    error = max(np.abs(same.results[p] - rows[p]).max() for p in some)
    assert error < 1e-4, f"rows are off by {error}"
    print(name, "rows are off by", error)


def check_commits(format: str, folder: Path) -> None:
    """Tokens 3 and 18 of page 1 and 5 of page 0 go to others' places: numbers are theirs, and those of no other token change."""
    geometry = KvGeometry(format, 32, 3, 2, 64)
    rng = np.random.default_rng(0)
    pool = np.zeros((3, geometry.page_bytes), np.uint8)
    for page in pool:
        for slot in range(32):
            for layer, head in np.ndindex(3, 2):
                geometry.write(page, layer, head, slot, *rng.standard_normal((2, 64), np.float32))
    buffers = StepBuffers(grouped.LIMITS, 32)
    copies = {32 + 3: 2 * 32 + 17, 32 + 18: 19, 5: 2 * 32}
    buffers.commit_src[:3], buffers.commit_dst[:3] = list(copies), list(copies.values())
    buffers.header[Header.COMMITS] = 3
    machine, before = TritonMachine(grouped.LIMITS, folder), pool.copy()
    machine.launch(machine.target.commit(geometry), buffers, pool)
    for layer, head in np.ndindex(3, 2):
        was, now = (np.concatenate([np.stack(geometry.read(page, layer, head)) for page in of], axis=1) for of in (before, pool))
        for source, target in copies.items():
            was[:, target] = was[:, source]
        assert np.array_equal(now, was), f"{format}: layer {layer}, head {head}"
    print("commits of", format)


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    with tempfile.TemporaryDirectory() as folder:
        for format in ("int8n", "int8/int8n@1=bf16", "fp8", "int4-token") if "commits" in sys.argv else ():
            check_commits(format, Path(folder))
        for name in [name for name in sys.argv[2:] if name != "commits"]:
            check(name.removesuffix(":fast"), int(sys.argv[1]), Path(folder), exact=not name.endswith(":fast"))


if __name__ == "__main__":
    main()
