"""One request, from submission to its last token.

The life of a request: validated and tokenised in the caller's thread -> waiting -> admitted (its pages allocated, known prefixes
reused) -> prompt rows, chunk by chunk -> the last one's choice is the first token -> drafted, verified, committed, step by step ->
at the first stop finished, its pages freed. Preemption sends it back to waiting with its tokens; they are computed again.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from mlsdc.runtime.detokenize import Detokenizer
from mlsdc.runtime.kv_pool import PageTable
from mlsdc.runtime.levels.base import LevelState
from mlsdc.runtime.sampling.noise import SEED_MASK, choice_seed
from mlsdc.runtime.sampling.record import Sampler
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.statistics import Statistics
from mlsdc.runtime.tree import EMPTY, Tree

if TYPE_CHECKING:
    from mlsdc.runtime.grammar import Matcher

FinishReason = Literal["stop", "length", "abort", "error"]
_ids = itertools.count()


@dataclass
class Timings:
    """Seconds on the monotonic clock; None until it has happened."""

    submitted: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.submitted

    @property
    def total_s(self) -> float | None:
        return None if self.finished is None else self.finished - self.submitted


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probability of a token by the raw model, and of the most probable tokens there: (id, log probability), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Delta:
    """What one step brought a request. `text` may be empty while a character or a stop string is unfinished."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    choice: int = 0  # of the request's `n`
    logprobs: list[TokenLogprobs] | None = None  # of token_ids, if asked for


@dataclass(frozen=True)
class Result:
    """A finished request. `stop_reason` is the token id or the string that ended it, if one did.

    It is choice 0 of the request's `n`; `others` are choices 1 and on. With the same `seed`, prompt and parameters the text comes again.
    `logprobs` are of token_ids, `prompt_logprobs` of the prompt's tokens but the first, if asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_token_ids: list[int]
    statistics: Statistics
    timings: Timings
    seed: int
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    others: tuple[Result, ...] = ()


class Request:
    """State the engine's step owns. Other threads see what `publish` showed them, after the step that made it."""

    def __init__(self, prompt: list[int], params: SamplingParams, *, max_length: int, stop_ids: frozenset[int], budget: int,
                 detokenizer: Detokenizer | None = None, listener: deque[Request] | None = None, priority: int = 0,
                 parent: Request | None = None) -> None:
        self.id = next(_ids)
        self.priority = priority  # the lower is served first
        self.parent = parent  # of whose prompt's pages this one takes a copy (`n`)
        self.forks: list[Request] = []  # those that wait for this one's prompt
        self.choices: list[Request] = [self]  # of `n`, this one first; a fork knows itself only
        self.choice = len(parent.choices) if parent else 0  # its place among its parent's
        self.params = params
        drawn = secrets.randbits(64) if params.seed is None else params.seed & SEED_MASK
        self.seed: int = parent.seed if parent else drawn  # of choice 0
        self.num_prompt = len(prompt)
        self.tokens = prompt  # prompt and committed tokens
        self.max_length = max_length  # of `tokens`
        self.stop_ids = stop_ids
        self.sampler = Sampler(params, choice_seed(self.seed, self.choice), self.num_prompt, stop_ids)
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        reported = parent.prompt_logprobs if parent else []  # a prompt has one list, whatever `n` is
        self.prompt_logprobs: list[TokenLogprobs] | None = None if params.prompt_logprobs is None else reported
        self.grammar: Matcher | None = None  # where its output stands in the grammar it asked for
        self.budget = budget  # most nodes a step may draft for it; 0: no speculation, no scratch slab
        self.wish = budget  # how many the next step is to make room for, by the controller
        self.detokenizer = detokenizer
        self.table = PageTable()
        self.num_computed = 0  # leading tokens whose keys lie in pages
        self.drafter: LevelState | None = None
        self.num_observed = 0  # leading tokens the drafter has seen
        self.text: list[str] = []  # pieces that may be shown
        self.held = ""  # text that may be the beginning of a stop string
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: Exception | None = None
        self.statistics = Statistics()
        self.timings = Timings()
        self.listener = listener  # told of every step that brought something
        self._shown: tuple[int, int, FinishReason | None] = (0, 0, None)  # output tokens and pieces of text that may be taken
        self._taken: tuple[int, int, FinishReason | None] = (0, 0, None)

    def turn(self) -> tuple[int, int]:
        """Its place in the order of service, the lower first: by priority, then by arrival."""
        return self.priority, self.id

    def publish(self) -> None:
        """Show consumers what is committed. The engine calls it, under its lock."""
        self._shown = (self.num_output, len(self.text), self.finish_reason)
        if self.listener is not None:
            self.listener.append(self)

    def take(self) -> Delta:
        """What was published and not yet taken; the finish reason comes once, with the last of it. One consumer calls it."""
        (tokens, pieces, reason), (last_tokens, last_pieces, last_reason) = self._shown, self._taken
        self._taken = (tokens, pieces, reason)
        start = self.num_prompt
        text = "".join(self.text[last_pieces:pieces])
        return Delta(text, self.tokens[start + last_tokens : start + tokens], None if last_reason else reason, self.choice,
                     None if self.logprobs is None else self.logprobs[last_tokens:tokens])

    def fork(self, detokenizer: Detokenizer | None) -> None:
        """Add one choice more. It waits until this one's prompt is computed, and shares the prompt's pages then."""
        other = Request(
            list(self.tokens), self.params, max_length=self.max_length, stop_ids=self.stop_ids, budget=self.budget, detokenizer=detokenizer,
            listener=self.listener, priority=self.priority, parent=self)
        other.grammar = self.grammar and self.grammar.copy()
        self.choices.append(other)
        self.forks.append(other)

    def result(self) -> Result:
        """Everything so far."""
        text, prompt = "".join(self.text), self.tokens[: self.num_prompt]
        others = tuple(other.result() for other in self.choices[1:])
        return Result(text, self.output, self.finish_reason, self.stop_reason, prompt, self.statistics, self.timings, self.seed,
                      self.logprobs, self.prompt_logprobs, others)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Rows of its prompt are still to be reported: each of them wants logits, so none may come from cached pages."""
        return self.prompt_logprobs is not None and self.parent is None and len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def decoding(self) -> bool:
        """All but the last committed token lie in pages: the next step may draft."""
        return self.num_computed == len(self.tokens) - 1

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.num_prompt}+{self.num_output} tokens, {self.num_computed} computed, {self.finish_reason})"


class StepItem:
    """What one sequence does in one step. `rows` committed rows, or the last committed token and `tree`."""

    __slots__ = ("budget", "decodes", "out", "outs", "request", "rows", "seq", "tree")

    def __init__(self, request: Request, rows: int, *, decodes: bool) -> None:
        self.request = request
        self.rows = rows  # tokens from num_computed on that are computed as committed rows
        self.decodes = decodes  # only the last committed token is left to compute: this is a step of the statistics
        self.budget = 0  # nodes it may draft; 0 unless it decodes
        self.tree: Tree = EMPTY
        self.seq = -1  # its place in the step
        self.out = -1  # its first entry in `choices`
        self.outs = 0  # how many entries it has; the last 1 + len(tree) of them are choices it may follow, if it wants one

    @property
    def wants_choice(self) -> bool:
        """Its last committed row is the sequence's last token: the choice after it is a new one."""
        return self.request.num_computed + self.rows == len(self.request.tokens)

    @property
    def logit_rows(self) -> int:
        """Rows that want logits: its last one, the tree's, or all of a prompt whose log probabilities are asked for."""
        if self.decodes:
            return 1 + len(self.tree)
        return self.rows if self.request.wants_prompt_logprobs else int(self.wants_choice)
