"""What became of each tensor of the checkpoint: repacked as it was stored, kept on its grid, quantised anew, or left as numbers."""

from __future__ import annotations

from collections.abc import Iterable

from mlsdc.compiler.capture.source import WeightSource
from mlsdc.compiler.graph import Node, Weight
from mlsdc.compiler.types import DType, TensorType

# what compiler.weights does with blocks of the source, by the packed type; all others are read as numbers and quantised
KEPT = {
    (DType.Q8, "Q8_0"): "repacked as stored", (DType.Q8, "Q4_0"): "repacked as stored", (DType.Q8, "Q4_1"): "repacked on its own grid",
    (DType.Q4, "Q4_0"): "repacked as stored", (DType.Q4, "Q4_1"): "repacked as stored",
    (DType.Q8, "int4"): "repacked as stored", (DType.Q4, "int4"): "repacked as stored",
    (DType.Q8, "int4 with zero points"): "repacked as stored",
    (DType.Q4, "int4 with zero points"): "codes and scales as stored, zero points rounded to f16",
    (DType.F8, "fp8"): "repacked as stored",
}  # fmt: skip


def origins(nodes: Iterable[Node], weights: WeightSource) -> dict[str, list[str]]:
    """`q8 from Q4_1: repacked on its own grid` -> names of the weights that it is true of, in the order given."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        if isinstance(node.op, Weight) and isinstance(node.type, TensorType):
            found.setdefault(origin(node.type.dtype, node.op.sources, weights), []).append(node.name)
    return found


def origin(dtype: DType, sources: tuple[str, ...], weights: WeightSource) -> str:
    kinds = sorted({block.kind if (block := weights.block(name)) is not None else "numbers" for name in sources})
    what = {KEPT.get((dtype, kind), "quantised anew" if dtype.packed else "left as numbers") for kind in kinds}
    if dtype is DType.BF16:
        what = {"rounded"}
    return f"{dtype} from {', '.join(kinds)}: {', '.join(sorted(what))}"
