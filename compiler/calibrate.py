"""The tokens a compile runs through the captured model to see which activations have large values.

Only the largest groups of columns are looked for, which are the model's and hardly the text's: a paragraph of each kind of text is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mlsdc.compiler.capture import ModelSource, WeightSource
from mlsdc.compiler.graph import Node
from mlsdc.compiler.weights import read_weight

MAX_TOKENS = 128
TEXT = """The ferry left the island at nine, an hour late, with eleven passengers and a crate of oranges. "We will be in town by noon,"
said the captain, and nobody believed him.

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

| year | visitors | change |
| 2021 | 4,310 | -12% |

Solve 3x + 7 = 25. Subtract 7 from both sides: 3x = 18, so x = 6. In French: "Le train part à 8 h 15."
"""


@dataclass(frozen=True)
class Calibration:
    """Token ids to run, and the checkpoint's values of a weight node."""

    tokens: tuple[int, ...] = field(repr=False)
    weights: Callable[[Node], Any] = field(repr=False, compare=False)


def calibration(source: ModelSource, weights: WeightSource) -> Calibration:
    """The built-in text in the model's own tokens, its weights read as the compile reads them."""
    from tokenizers import Tokenizer

    tokens: list[int] = Tokenizer.from_str(source.tokenizer_json).encode(TEXT).ids
    return Calibration(tuple(tokens[:MAX_TOKENS]), lambda node: read_weight(node, weights))
