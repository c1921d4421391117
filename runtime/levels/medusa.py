"""Medusa heads: one run of their program guesses several places ahead of each request, whatever is guessed in between."""

from __future__ import annotations

from collections.abc import Sequence

from mlsdc.runtime.device.base import BoundProgram, LevelMemory
from mlsdc.runtime.kv_pool import KvPool
from mlsdc.runtime.levels.base import LevelState, Rounds
from mlsdc.runtime.levels.coupling import Draw, coupled
from mlsdc.runtime.levels.growing import log_guesses
from mlsdc.runtime.levels.grown import Growing
from mlsdc.runtime.levels.heads import HeadLevel, HeadState, best_first
from mlsdc.runtime.step import Array, Header
from mlsdc.runtime.tree import EMPTY, Tree

Heads = list[tuple[Array, Array]]  # of each head log probabilities and tokens, best first


class MedusaState(HeadState):
    """`made`: guesses that were made ahead: for so many hidden states, after this token."""

    made: tuple[int, int, Heads] | None = None

    def rollback(self, num_tokens: int) -> None:
        super().rollback(num_tokens)
        self.made = None

    def restart(self) -> None:
        super().restart()
        self.made = None


class MedusaLevel(HeadLevel):
    """Row: the hidden state before the last committed token, and that token. Head i's guesses are the tree's nodes at depth i + 1."""

    def bind(self, memory: LevelMemory, target: LevelMemory, pool: KvPool | None) -> None:
        super().bind(memory, target, pool)
        self.program = memory.programs["draft"]

    def start(self) -> LevelState:
        return MedusaState(self)

    def ahead(self, states: Sequence[LevelState | None]) -> None:
        self.collect()
        behind = self.behind
        if behind is None or self.draws.watch is not None:
            return
        work = [(seq, state) for seq, state in enumerate(states)
                if isinstance(state, MedusaState) and state.ready() and behind.rows_of(seq, state)][: behind.most_rows]
        for at, (seq, state) in enumerate(work):
            behind.write(at, seq, state, at, 1, {Growing.COMMITTED: state.kept_to, Growing.TURN: 0})
        if work:
            behind.start([state for _, state in work], len(work), 0)

    def collect(self) -> None:
        if self.behind is None or not self.behind.started:
            return
        seqs = {id(state): seq for seq, state in enumerate(self.behind.started)}
        found = self.behind.found()
        rows = [seqs[id(state)] for state, _, _, _ in found]
        heads = self._heads(self.behind.program, rows, [state.drawn for state, _, _, _ in found], [end + 1 for _, end, _, _ in found])
        for at, (state, end, last, _) in enumerate(found):
            state.made = end, last, [(logp[at], tokens[at]) for logp, tokens in heads]

    def _heads(self, program: BoundProgram, rows: Sequence[int], owners: Sequence[Draw | None], ends: Sequence[int]) -> Heads:
        """Of each head the guesses of these rows; `ends`: how many tokens their sequences have."""
        return [coupled(*log_guesses(program.tap(f"top.{i}")[list(rows)], self.d2t), owners, [end + i for end in ends], self.draws)
                for i in range(self.depth)]

    def draft(self, states: Sequence[HeadState], budgets: Sequence[int]) -> Rounds[list[Tree]]:
        self.collect()
        buffers, limits = self.buffers, self.buffers.limits
        most = min(limits.max_num_batched_tokens, limits.max_logit_rows)
        trees = [EMPTY] * len(states)
        left = []
        for i, (state, budget) in enumerate(zip(states, budgets, strict=True)):
            assert isinstance(state, MedusaState)
            made, state.made = state.made, None
            if made is not None and made[:2] == (state.kept_to, state.tokens[-1]):
                trees[i] = self._tree(made[2], budget)
            else:
                left.append(i)
        for start in range(0, len(left), most):
            which = left[start : start + most]
            part = [states[i] for i in which]
            for row, state in enumerate(part):
                buffers.tokens[row] = state.tokens[-1]
                buffers.positions[row] = state.kept_to - 1
                buffers.features[row] = state.hidden(state.kept_to - 1, state.kept_to)[0]
                buffers.out_rows[row] = row
            header = buffers.header
            header[Header.ROWS] = header[Header.OUT] = header[Header.SEQS] = len(part)
            self.program.start()
            yield
            self.program.finish()
            heads = self._heads(self.program, range(len(part)), [state.drawn for state in part], [len(state.tokens) for state in part])
            for row, i in enumerate(which):
                trees[i] = self._tree([(logp[row], tokens[row]) for logp, tokens in heads], budgets[i])
        return trees

    def _tree(self, heads: Heads, budget: int) -> Tree:
        """Of each head a row's log probabilities f32[k] and tokens."""
        logp = [of_head[0] for of_head in heads]
        ranks, parents, logq = best_first(budget, self.floor, logp[0], lambda depth: logp[depth] if depth < len(logp) else None)
        if not ranks:
            return EMPTY
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        tokens = tuple(int(heads[depth][1][rank]) for rank, depth in zip(ranks, depths, strict=True))
        return Tree(tokens, tuple(parents), tuple(logq), (self.index,) * len(tokens))
