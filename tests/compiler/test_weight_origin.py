"""What is said of a packed tensor is what the packing did with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlsdc.compiler.capture.source import Blocks
from mlsdc.compiler.graph import Node, Weight
from mlsdc.compiler.types import DType, TensorType
from mlsdc.compiler.weight_origin import origin, origins


class Stored:
    """A source whose tensors `KIND.name` are stored in blocks of KIND; others are plain numbers."""

    def block(self, name: str) -> Blocks | None:
        kind, dot, _ = name.partition(".")
        return Blocks(kind, (1, 32), np.zeros((1, 1), np.uint8)) if dot else None


@pytest.mark.parametrize(("dtype", "sources", "said"), [
    (DType.Q8, ("Q8_0.a",), "q8 from Q8_0: repacked as stored"),
    (DType.Q8, ("Q4_1.a", "Q4_1.b"), "q8 from Q4_1: repacked on its own grid"),
    (DType.Q4, ("Q4_1.a",), "q4 from Q4_1: repacked as stored"),
    (DType.Q4, ("Q6_K.a",), "q4 from Q6_K: quantised anew"),
    (DType.Q8, ("plain",), "q8 from numbers: quantised anew"),
    (DType.F32, ("plain",), "f32 from numbers: left as numbers"),
    (DType.BF16, ("plain",), "bf16 from numbers: rounded"),
    (DType.Q8, ("Q8_0.a", "Q6_K.b"), "q8 from Q6_K, Q8_0: quantised anew, repacked as stored"),
])  # fmt: skip
def test_a_tensors_way_is_named(dtype: DType, sources: tuple[str, ...], said: str) -> None:
    stored: Any = Stored()
    assert origin(dtype, sources, stored) == said


def test_tensors_are_listed_by_what_became_of_them() -> None:
    stored: Any = Stored()
    nodes = [Node(f"w.{i}", Weight((f"Q8_0.{i}",)), (), TensorType(DType.Q8, (1, 32))) for i in range(2)]
    assert origins(nodes, stored) == {"q8 from Q8_0: repacked as stored": ["w.0", "w.1"]}
