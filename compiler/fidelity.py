"""How close an artifact is to the model it was compiled from: perplexity, KL divergence of the logits, top-1 agreement.

The reference is transformers in f32 with the checkpoint's own (dequantised) weights. Text is scored in windows from an empty cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mlsdc.compiler.capture import ModelSource
from mlsdc.runtime.device.base import LevelMemory
from mlsdc.runtime.step import Array, Header

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Fidelity:
    """Means over `tokens` positions. `kl` is KL(reference || artifact) in nats; perplexities are of the text's next tokens."""

    tokens: int
    kl: float
    top1: float
    perplexity: float
    reference_perplexity: float


def reference_model(source: ModelSource) -> nn.Module:
    """The Hugging Face module in f32 with the checkpoint's weights, one tensor in memory at a time beside the module."""
    import transformers

    config = dict(source.config)
    module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(config.pop("model_type"), **config)).eval()
    names = set(source.weights.names())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in names:
                parameter.copy_(torch.from_numpy(np.array(source.weights.read(name), np.float32)))
    return module  # type: ignore[no-any-return]


def score(memory: LevelMemory, tokens: Sequence[int], chunk: int) -> Iterator[tuple[int, Array]]:
    """Teacher-forced logits f32[rows, vocab] of one sequence, `chunk` rows at a time, as (first row, logits); each is valid until the next.

    Uses pages 0 .. of the level; nothing else may run on it meanwhile.
    """
    buffers, program = memory.buffers, memory.programs["forward"]
    buffers.page_table[0, :] = np.arange(buffers.page_table.shape[1])
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        rows = len(part)
        buffers.tokens[:rows] = part
        buffers.positions[:rows] = np.arange(start, start + rows)
        buffers.row_seq[:rows] = 0
        buffers.row_slot[:rows] = -1
        buffers.ancestors[:rows] = 0
        buffers.out_rows[:rows] = np.arange(rows)
        buffers.seq_ctx[0], buffers.seq_row[0], buffers.seq_rows[0] = start, 0, rows
        buffers.header[[Header.ROWS, Header.SEQS, Header.OUT, Header.COMMITS]] = rows, 1, rows, 0
        program.run()
        yield start, program.tap("logits")[:rows]


def fidelity(memory: LevelMemory, reference: Any, tokens: Sequence[int], vocab_size: int, window: int, chunk: int = 64) -> Fidelity:
    """Score `tokens` with both in windows of `window` tokens. `chunk` is at most the artifact's max_logit_rows."""
    sums = np.zeros(4)
    scored = 0
    for first in range(0, len(tokens), window):
        part = list(tokens[first : first + window])
        with torch.no_grad():
            hidden = reference.model(torch.tensor([part])).last_hidden_state[0]
        for start, found in score(memory, part, chunk):
            rows = len(found)
            with torch.no_grad():
                wanted = torch.log_softmax(reference.lm_head(hidden[start : start + rows])[:, :vocab_size].float(), -1)
            given = torch.log_softmax(torch.from_numpy(found[:, :vocab_size].copy()), -1)
            sums[0] += float((wanted.exp() * (wanted - given)).sum())
            sums[1] += int((wanted.argmax(-1) == given.argmax(-1)).sum())
            following = part[start + 1 : start + rows + 1]
            index = torch.tensor(following, dtype=torch.int64)[:, None]
            sums[2] -= float(given[: len(following)].gather(1, index).sum())
            sums[3] -= float(wanted[: len(following)].gather(1, index).sum())
            scored += len(following)
    count = len(tokens)
    kl, hits, given_nats, wanted_nats = (float(x) for x in sums)
    return Fidelity(count, kl / count, hits / count, math.exp(given_nats / scored), math.exp(wanted_nats / scored))
