"""Medusa heads: one run of their program guesses several places ahead of each request, whatever is guessed in between."""

from __future__ import annotations

from collections.abc import Sequence

from mlsdc.runtime.device.base import LevelMemory
from mlsdc.runtime.kv_pool import KvPool
from mlsdc.runtime.levels.base import LevelState, Rounds
from mlsdc.runtime.levels.coupling import coupled
from mlsdc.runtime.levels.growing import log_guesses
from mlsdc.runtime.levels.heads import HeadLevel, HeadState, best_first
from mlsdc.runtime.step import Array, Header
from mlsdc.runtime.tree import EMPTY, Tree


class MedusaLevel(HeadLevel):
    """Row: the hidden state before the last committed token, and that token. Head i's guesses are the tree's nodes at depth i + 1."""

    def bind(self, memory: LevelMemory, target: LevelMemory, pool: KvPool | None) -> None:
        super().bind(memory, target, pool)
        self.program = memory.programs["draft"]

    def start(self) -> LevelState:
        return HeadState(self)

    def draft(self, states: Sequence[HeadState], budgets: Sequence[int]) -> Rounds[list[Tree]]:
        buffers, limits = self.buffers, self.buffers.limits
        most = min(limits.max_num_batched_tokens, limits.max_logit_rows)
        trees: list[Tree] = []
        for start in range(0, len(states), most):
            part = states[start : start + most]
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
            owners, ends = [state.drawn for state in part], [len(state.tokens) for state in part]
            heads = [
                coupled(*log_guesses(self.program.tap(f"top.{i}")[: len(part)], self.d2t), owners, [end + i for end in ends], self.draws)
                for i in range(self.depth)]
            trees += (self._tree(heads, row, budget) for row, budget in enumerate(budgets[start : start + most]))
        return trees

    def _tree(self, heads: Sequence[tuple[Array, Array]], row: int, budget: int) -> Tree:
        logp = [of_head[0][row] for of_head in heads]
        ranks, parents, logq = best_first(budget, self.floor, logp[0], lambda depth: logp[depth] if depth < len(logp) else None)
        if not ranks:
            return EMPTY
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        tokens = tuple(int(heads[depth][1][row][rank]) for rank, depth in zip(ranks, depths, strict=True))
        return Tree(tokens, tuple(parents), tuple(logq), (self.index,) * len(tokens))
