"""Families whose graphs compute what transformers computes, before and after raising."""

from __future__ import annotations

import pytest
import torch

from mlsdc.compiler.graph import Graph
from mlsdc.compiler.interpret import interpret
from tests.models.tiny import after, captured, hf_model, proven_by, tokens_for, weights_of

TOLERANCE = 1e-4
LENGTH = 80  # beyond the tiny windows and original contexts


def logits(name: str, graph: Graph, tokens: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(tokens), dtype=torch.int32)
    by_row = {"tokens": tokens.int(), "positions": rows, "out_rows": rows}
    found = interpret(graph, by_row if "out_rows" in graph.by_name else {"tokens": tokens[None].int()}, weights_of(name))["logits"]
    assert isinstance(found, torch.Tensor)
    return found.reshape(len(tokens), -1)


@pytest.mark.parametrize("name", proven_by("logits"))
@torch.no_grad()
def test_captured_and_raised_graphs_give_transformers_logits(name: str) -> None:
    tokens = tokens_for(name, LENGTH)
    wanted = hf_model(name)(tokens[None]).logits[0]
    assert wanted.std() > 0.1  # not all alike: the comparison says something
    assert (logits(name, captured(name).graph, tokens) - wanted).abs().max() < TOLERANCE
    assert (logits(name, after(name, "gather-early"), tokens) - wanted).abs().max() < TOLERANCE
