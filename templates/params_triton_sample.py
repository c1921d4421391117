"""Parameters of the Triton sampling templates (law L1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.runtime.sampling import record
from mlsdc.runtime.step import LOGPROB_COLUMNS, MAX_BANS, MAX_BIAS, SAMPLING_WORDS, mask_words
from mlsdc.templates.params_triton import digest, power_of_two
from mlsdc.templates.params_triton_rows import PART


@dataclass(frozen=True)
class Sample:
    """Choices over logits[out, n], ids below `limit`; `template` is the kernel: sample_edit, _bound, _part, _join or _logprobs."""

    template: str
    n: int
    limit: int
    max_seen: int

    record: ClassVar[object] = record
    words: ClassVar[int] = SAMPLING_WORDS
    max_bias: ClassVar[int] = MAX_BIAS
    max_bans: ClassVar[int] = MAX_BANS
    logprobs: ClassVar[int] = LOGPROB_COLUMNS
    part: ClassVar[int] = PART
    block: ClassVar[int] = 1024  # columns at a time

    @property
    def key(self) -> str:
        return f"{self.template}_n{self.n}_of{self.limit}_{digest(self)}"

    @property
    def mask_words(self) -> int:
        return mask_words(self.limit)

    @property
    def parts(self) -> int:
        return -(-self.limit // self.part)

    @property
    def parts_block(self) -> int:
        return power_of_two(self.parts)
