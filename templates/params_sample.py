"""Parameters of the sampling and n-gram templates."""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.runtime.step import LOGPROB_COLUMNS, MAX_BANS, MAX_BIAS, mask_words
from mlsdc.templates.params import TirParams, named


@dataclass(frozen=True)
class Ngram(TirParams):
    """Counts over contexts of 0..order tokens. `stem` is the function: observe, rollback or propose."""

    stem: str = named("", default="ngram_observe")  # type: ignore[assignment]
    order: int = 4

    waiting = 128
    drawn = 0.004  # tokens less likely than this are not looked up among the draws
    passed = 64  # room in front of the waiting ones for those that were taken
    followers = 6

    @property
    def candidates(self) -> int:
        """Tokens one node may choose its children from: every slot of every context, live and fixed."""
        return 2 * self.followers * (self.order + 1)


@dataclass(frozen=True)
class Sample(TirParams):
    """Choices over logits[out, n], ids below `limit`; sizes of the step's sampling inputs. `stem` is the kernel."""

    stem: str = named("", default="sample_part")  # type: ignore[assignment]
    rows_padded: int = named("m", default=8)  # type: ignore[assignment]
    n: int = 0
    limit: int = named("of", default=0)  # type: ignore[assignment]
    step_rows: int = named("", default=0)  # type: ignore[assignment]
    seqs: int = named("", default=0)  # type: ignore[assignment]
    max_seen: int = named("", default=0)  # type: ignore[assignment]

    max_bias = MAX_BIAS
    max_bans = MAX_BANS
    logprobs = LOGPROB_COLUMNS
    part_size = 4096

    @property
    def mask_words(self) -> int:
        return mask_words(self.limit)

    @property
    def parts(self) -> int:
        return -(-self.limit // self.part_size)
