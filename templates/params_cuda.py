"""Parameters of the CUDA C++ templates (templates/cuda), which take the place of Triton ones for sm_90a."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.step import BLOCK
from mlsdc.templates.params_triton import power_of_two
from mlsdc.templates.params_triton_kv import AttendSplit

CUDA_FORMATS = ("bf16", "int8", "fp8", "int4-token")
CUDA_HEAD_DIMS = (64, 128)
MOST_COLUMNS = {64: 64, 128: 32}  # of a consumer, by head_dim: more spill
MOST_STAGES = 4
WIDTHS = (8, 16, 32, 64)  # columns that wgmma computes at once: a step of few rows takes the narrowest that holds it
ALIGNED = 128
RUN = 16  # tokens whose keys are interleaved
SKEW = {"keys": 16, "row": 16, "quad": 32}  # bytes between copies, so that lanes that read of several copies meet other banks


@dataclass(frozen=True)
class Copy:
    """Bulk copies of a block: `count` of them, by the producer's lanes from `lane` on, each of `bytes` for `tokens` tokens that lie at
    `offset` in a head's page, to `at` of a stage and `pitch` further each time."""

    what: str
    lane: int
    count: int
    tokens: int
    bytes: int
    at: int
    pitch: int
    offset: int


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def misfits(geometry: KvGeometry, format: str, group: int) -> str | None:
    """Why CUDA C++ attention does not do layers of this format; None if it does."""
    known = ", ".join(CUDA_FORMATS)
    parts = format.split("/")
    if wrong := [part for part in parts if part not in CUDA_FORMATS]:
        return f"kv format '{wrong[0]}'; it does {known}"
    if geometry.grouped:
        return f"kv format '{geometry.format}', whose recent tokens lie in 16 bits; it does {known}, in all layers"
    if geometry.head_dim not in CUDA_HEAD_DIMS:
        return f"head_dim {geometry.head_dim}; it does {' and '.join(map(str, CUDA_HEAD_DIMS))}"
    most = MOST_COLUMNS[geometry.head_dim]
    if group > most:
        return f"{group} query heads of a kv head; it does up to {most} with head_dim {geometry.head_dim}"
    return None


@dataclass(frozen=True)
class AttendCuda(AttendSplit):
    """`cuda/attend_split`: what AttendSplit computes, by wgmma and bulk copies. A tile is the rows of one or two consumers of four warps;
    a column is a row and one of its query heads. Where packed keys meet queries of 8 bits (int8, fp8), those are two or three terms."""

    language: ClassVar[str] = "cuda"

    @property
    def key(self) -> str:
        return self.named(f"h{self.heads}", f"cuda{self.columns}x{self.consumers}", f"w{self.window}" if self.window else "",
                          "softcap" if self.softcap else "", f"s{self.sinks}" if self.sinks else "")

    @property
    def columns(self) -> int:
        """Of a consumer: eight rows of a sequence where so many fit."""
        return min(self.most_tile, power_of_two(8 * self.group))

    @property
    def widths(self) -> tuple[int, ...]:
        return (*(n for n in WIDTHS if n < self.columns), self.columns)

    @property
    def rows_per_consumer(self) -> int:
        return self.columns // self.group

    @property
    def consumers(self) -> int:
        return 2 if self.limits.max_num_batched_tokens > self.rows_per_consumer else 1

    @property
    def tile_rows(self) -> int:
        return self.columns * self.consumers

    @property
    def rows_per_tile(self) -> int:
        return self.rows_per_consumer * self.consumers

    @property
    def threads(self) -> int:
        """Consumers, and the producing warp; beside two consumers with three idle ones: four warps give registers away."""
        return 384 if self.consumers == 2 else 160

    @property
    def scored(self) -> str:
        """Type of keys as tensor cores meet them."""
        return {"int8": "u8", "fp8": "e4m3"}.get(self.key_codes, "bf16") if self.keys == "packed" else "bf16"

    @property
    def key_codes(self) -> str:
        return "bf16" if self.keys == "bf16" else super().key_codes

    @property
    def value_codes(self) -> str:
        return "bf16" if self.values == "bf16" else super().value_codes

    @property
    def values_by(self) -> str:
        """Whether a page has values by token (`row`) or by 4 tokens (`quad`): that decides which position is which row of a block."""
        return "quad" if self.value_codes in ("int8", "levels") else "row"

    @property
    def value_tokens(self) -> int:
        """Tokens of a copy of values."""
        return RUN if self.values_by == "quad" else 8

    @property
    def key_steps(self) -> int:
        return self.geometry.head_dim // (16 if self.scored == "bf16" else 32)

    # Shared memory

    @property
    def key_bytes(self) -> int:
        """Of 16 tokens."""
        return RUN * self.geometry.head_dim * self.key_bits // 8

    @property
    def key_pitch(self) -> int:
        return self.key_bytes + SKEW["keys"]

    @property
    def value_bytes(self) -> int:
        """Of `value_tokens` tokens."""
        return self.value_tokens * self.value_run * (2 if self.value_codes == "bf16" else 1)

    @property
    def value_pitch(self) -> int:
        return self.value_bytes + SKEW[self.values_by]

    @property
    def values_at(self) -> int:
        return aligned(BLOCK // RUN * self.key_pitch)

    @property
    def key_numbers_at(self) -> int:
        """f16[number][64 positions]."""
        return aligned(self.values_at + BLOCK // self.value_tokens * self.value_pitch)

    @property
    def value_numbers_at(self) -> int:
        return self.key_numbers_at + 2 * BLOCK * self.key_numbers

    @property
    def stage_bytes(self) -> int:
        return aligned(self.value_numbers_at + 2 * BLOCK * self.value_numbers)

    @property
    def copies(self) -> tuple[Copy, ...]:
        page, dim = self.geometry.page_size, self.geometry.head_dim
        found: list[Copy] = []

        def add(what: str, tokens: int, size: int, at: int, pitch: int, offset: int) -> None:
            lane = found[-1].lane + found[-1].count if found else 0
            found.append(Copy(what, lane, BLOCK // tokens, tokens, size, at, pitch, offset))

        add("keys", RUN, self.key_bytes, 0, self.key_pitch, 0)
        add("values", self.value_tokens, self.value_bytes, self.values_at, self.value_pitch, self.k_bytes)
        for i in range(self.key_numbers):
            add("the keys' numbers", RUN, 2 * RUN, self.key_numbers_at + 2 * BLOCK * i, 2 * RUN,
                page * dim * self.key_bits // 8 + 2 * page * i)
        for i in range(self.value_numbers):
            add("the values' numbers", RUN, 2 * RUN, self.value_numbers_at + 2 * BLOCK * i, 2 * RUN,
                self.k_bytes + page * self.value_run + 2 * page * i)
        assert found[-1].lane + found[-1].count <= 32
        return tuple(found)

    @property
    def query_terms(self) -> int:
        return 3 if self.scored == "e4m3" else 2

    @property
    def query_tile_bytes(self) -> int:
        """Of 8 columns of a term."""
        return 8 * self.geometry.head_dim * (2 if self.scored == "bf16" else 1)

    @property
    def query_term_bytes(self) -> int:
        return self.columns // 8 * self.query_tile_bytes

    @property
    def query_bytes(self) -> int:
        return self.query_terms * self.query_term_bytes

    @property
    def column_numbers(self) -> int:
        """Words of a column beside its queries: their scale, their sum."""
        return {"u8": 2, "e4m3": 1}.get(self.scored, 1 if self.key_numbers == 2 else 0)

    @property
    def queries_at(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def probabilities_at(self) -> int:
        return self.queries_at + self.consumers * self.query_bytes

    @property
    def maxima_at(self) -> int:
        return self.probabilities_at + self.consumers * self.columns * 2 * 2 * BLOCK

    @property
    def positions_at(self) -> int:
        return self.maxima_at + self.consumers * 4 * 4 * self.columns

    @property
    def words_at(self) -> int:
        return self.positions_at + 4 * self.consumers * self.columns

    @property
    def column_numbers_at(self) -> int:
        return self.words_at + 8 * self.consumers * self.columns

    @property
    def barriers_at(self) -> int:
        return self.column_numbers_at + 4 * self.column_numbers * self.consumers * self.columns

    @property
    def stages(self) -> int:
        """Blocks under way: as many as are left room for."""
        columns = self.consumers * self.columns
        fixed = self.consumers * self.query_bytes + columns * (4 * BLOCK + 16 + 4 + 8 + 4 * self.column_numbers) + 16 * MOST_STAGES
        return min(MOST_STAGES, (self.most_shared - fixed) // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        return self.barriers_at + 16 * self.stages

    most_shared: ClassVar[int] = 227 * 1024
