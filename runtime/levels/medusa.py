"""Medusa heads: one run of their program guesses several places ahead of each request, whatever is guessed in between."""

from __future__ import annotations

from collections.abc import Sequence

from mlsdc.runtime.device.base import BoundProgram, LevelMemory
from mlsdc.runtime.kv_pool import KvPool
from mlsdc.runtime.levels.ahead import Ahead
from mlsdc.runtime.levels.base import LevelState, Rounds
from mlsdc.runtime.levels.coupling import Draw, coupled
from mlsdc.runtime.levels.growing import log_guesses
from mlsdc.runtime.levels.grown import Growing
from mlsdc.runtime.levels.heads import HeadLevel, HeadState, best_first
from mlsdc.runtime.step import Array, Header
from mlsdc.runtime.tree import EMPTY, Tree

Heads = list[tuple[Array, Array]]  # of each head log probabilities and tokens, best first


class MedusaLevel(HeadLevel):
    """Row: the hidden state before the last committed token, and that token. Head i's guesses are the tree's nodes at depth i + 1."""

    def bind(self, memory: LevelMemory, target: LevelMemory, pool: KvPool | None) -> None:
        super().bind(memory, target, pool)
        self.program = memory.programs["draft"]

    def start(self) -> LevelState:
        return HeadState(self)

    def follow(self, behind: Ahead[HeadState], states: Sequence[LevelState | None]) -> None:
        work = behind.chosen(states, HeadState, lambda state, room: state.ready(), last_only=True)
        if work:
            behind.start(work, [{Growing.COMMITTED: one.state.kept_to, Growing.TURN: 0} for one in work])

    def collect(self) -> None:
        found = self.behind.found() if self.behind is not None else []
        if self.behind is None or not found:
            return
        heads = self._heads(self.behind.program, [one.at for one in found], [one.state.drawn for one in found],
                            [one.end + 1 for one in found])
        for row, one in enumerate(found):
            one.state.made = one.end, one.last, [(logp[row], tokens[row]) for logp, tokens in heads]

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
            heads: Heads | None = state.take(state.kept_to)
            if heads is None:
                left.append(i)
            else:
                trees[i] = self._tree(heads, budget)
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
