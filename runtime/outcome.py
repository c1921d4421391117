"""What a step brought: the target's choices are followed down every tree; tokens, log probabilities and statistics come of it."""

from __future__ import annotations

from collections.abc import Sequence

from mlsdc.runtime.commit import commit_tokens
from mlsdc.runtime.drafting import Drafting
from mlsdc.runtime.errors import DeviceError
from mlsdc.runtime.request import Request, StepItem, TokenLogprobs
from mlsdc.runtime.step import OUT, StepBuffers
from mlsdc.runtime.tree import walk
from mlsdc.runtime.verify import CommitList


class Outcome:
    """Of every step of one engine. The step owns it: not thread-safe."""

    def __init__(self, buffers: StepBuffers, drafting: Drafting) -> None:
        self._buffers = buffers
        self._drafting = drafting

    def follow(self, items: Sequence[StepItem]) -> bool:
        """Hand out tokens and end requests that have ended. True if accepted keys lie in scratch: `commit` is to run.

        Raises DeviceError for a choice that is no token: a device that computes nonsense must not go on.
        """
        buffers, drafting = self._buffers, self._drafting
        cells = buffers.cells
        choices = cells.choices[: cells.header[OUT]].tolist()
        if choices and not 0 <= min(choices) <= max(choices) < drafting.vocab_size:
            wrong = next(token for token in choices if not 0 <= token < drafting.vocab_size)
            raise DeviceError(f"the device chose token {wrong}, the vocabulary has {drafting.vocab_size:,}")
        copies: CommitList | None = None
        read = drafting.reads_target
        firsts: list[int] = []  # of each item: its first position in this step
        committed: list[Sequence[int]] = []  # and its rows that are committed
        for seq, item in enumerate(items):
            request, tree = item.request, item.tree
            if read:
                row = cells.seq_row[seq]
                firsts.append(request.num_computed)
                committed.append(range(row, row + item.rows))
            if request.prompt_logprobs is not None and item.outs and request.wants_prompt_logprobs:
                self._report_prompt(item)
            if not item.decodes and not item.wants_choice:
                request.num_computed += item.rows
                request.statistics.prefill_rows += item.rows
                continue
            first = item.out + item.outs - 1 - len(tree)
            nodes, tokens = walk(tree, choices[first : first + 1 + len(tree)])
            kept = commit_tokens(request, tokens)
            if request.logprobs is not None and request.params.logprobs is not None:
                rows = (0, *(node + 1 for node in nodes[: kept - 1]))
                request.logprobs += (self._logprobs(first + row, request.params.logprobs) for row in rows)
            if tree:
                copies = CommitList(buffers) if copies is None else copies
                copies.add(item, nodes[: kept - 1])
                if read:
                    committed[-1] = (row, *(row + node + 1 for node in nodes[: kept - 1]))
            if item.decodes:
                drafting.committed(item, nodes[:kept])
            else:
                request.statistics.prefill_rows += item.rows
            request.num_computed += item.rows + kept - 1
        drafting.learned()
        if read:
            drafting.stepped(items, firsts, committed)
        return copies is not None and copies.write()

    def _logprobs(self, out: int, count: int) -> TokenLogprobs:
        """What the row of entry `out` reports: its token and the `count` most probable ones."""
        buffers = self._buffers
        (token, *ids), (value, *values) = buffers.logprob_ids[out, : 1 + count].tolist(), buffers.logprobs[out, : 1 + count].tolist()
        return TokenLogprobs(token, value, tuple(zip(ids, values, strict=True)))

    def _report_prompt(self, item: StepItem) -> None:
        """Keep the log probabilities of the prompt's tokens that follow this item's rows."""
        request: Request = item.request
        params = request.params
        assert request.prompt_logprobs is not None
        assert params.prompt_logprobs is not None
        done = len(request.prompt_logprobs)  # token done + 1 is the next one, and row `done` reports it
        for position in range(max(done, request.num_computed), min(request.num_computed + item.outs, request.num_prompt - 1)):
            request.prompt_logprobs.append(self._logprobs(item.out + position - request.num_computed, params.prompt_logprobs))
