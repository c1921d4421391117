"""What a plan counts, what it refuses, and that an engine allocates what was planned."""

from __future__ import annotations

import pytest

from mlsdc.runtime.errors import CapacityError
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.kv_pool import KvPool
from mlsdc.runtime.memory_plan import LevelNeed, buffer_bytes, context_bytes, default_pool_bytes, effective_bits, plan_memory
from mlsdc.runtime.slabs import SlabPool
from mlsdc.runtime.step import Limits, StepBuffers
from mlsdc.runtime.wide_pages import WidePages

LIMITS = Limits(max_model_len=2048, max_num_seqs=8, max_num_batched_tokens=256, max_logit_rows=64, max_tree_nodes=16)
KV = KvGeometry("bf16", 32, 30, 3, 64)
SMALL = KvGeometry("bf16", 16, 4, 2, 64)
TARGET = LevelNeed("target", KV, weights=1_000_000, arena=200_000, logits=50_000)
DRAFT = LevelNeed("draft", SMALL, weights=100_000, arena=20_000)


def test_a_sequence_costs_whole_pages_and_its_scratch_slab() -> None:
    plan = plan_memory([TARGET], LIMITS, pool_bytes=100 * KV.page_bytes)
    assert plan.sequence_bytes(1) == 2 * KV.page_bytes  # 17 rows of the worst tree take one scratch page
    assert plan.sequence_bytes(33, drafts=False) == 2 * KV.page_bytes
    assert plan.levels[0].scratch_pages == 1
    assert context_bytes(KV, 33) == 2 * KV.page_bytes


def test_effective_bits_count_the_unfilled_part_of_a_page() -> None:
    assert effective_bits(KV, 32) == 16
    assert effective_bits(KV, 33) == pytest.approx(16 * 64 / 33)


def test_the_pool_is_what_the_budget_leaves() -> None:
    plan = plan_memory([TARGET, DRAFT], LIMITS, budget=100_000_000)
    assert plan.pool_bytes == 100_000_000 - plan.fixed
    assert plan.fixed == 1_320_000 + buffer_bytes(LIMITS, 32) + buffer_bytes(LIMITS, 16)
    assert plan.total == 100_000_000


def test_planned_buffers_are_those_that_are_allocated() -> None:
    buffers = StepBuffers(LIMITS, 32)
    assert buffer_bytes(LIMITS, 32) == sum(array.nbytes for array in vars(buffers).values() if hasattr(array, "nbytes"))


def test_one_byte_less_than_needed_is_refused_with_the_table() -> None:
    need = plan_memory([TARGET], LIMITS, pool_bytes=0).sequence_bytes(2048)
    plan_memory([TARGET], LIMITS, pool_bytes=need).check(2048)
    with pytest.raises(CapacityError, match=f"kv pool: {need - 1} bytes; one sequence of 2048 tokens needs {need}") as caught:
        plan_memory([TARGET], LIMITS, pool_bytes=need - 1).check(2048)
    table = str(caught.value).splitlines()[1:]
    assert [line.split("  ")[0] for line in table] == ["", "target weights", "target arena", "target buffers", "kv pool", "total"]


def test_a_budget_that_weights_and_pool_exceed_is_refused() -> None:
    plan = plan_memory([TARGET], LIMITS, pool_bytes=50_000_000, budget=50_000_000)
    with pytest.raises(CapacityError, match=f"memory: {plan.total} bytes are needed, the budget is 50000000"):
        plan.check(2048)


def test_a_budget_without_room_for_a_pool_is_refused() -> None:
    with pytest.raises(CapacityError, match="memory: .* bytes are needed, the budget is 1000"):
        plan_memory([TARGET], LIMITS, budget=1000).check(1)


def test_a_draft_level_takes_what_its_own_pages_take() -> None:
    plan = plan_memory([DRAFT, TARGET], LIMITS, pool_bytes=1 << 28)
    of_draft, of_target = (level.sequence_bytes(1024, drafts=False) for level in plan.levels)
    assert of_draft / of_target == pytest.approx(SMALL.bytes_per_token / KV.bytes_per_token)


def test_users_are_counted_in_whole_slabs() -> None:
    plan = plan_memory([DRAFT, TARGET], LIMITS, pool_bytes=1 << 28)
    users = plan.users(512)
    for count, fits in ((users, True), (users + 1, False)):
        slabs = sum(-(-count * level.sequence_bytes(512) // plan.slab_bytes) for level in plan.levels)
        assert (slabs <= plan.num_slabs) is fits


GROUPED = KvGeometry("int4", 32, 30, 3, 64)


def test_a_grouped_format_pays_for_its_tail_and_its_wide_scratch() -> None:
    level = plan_memory([LevelNeed("target", GROUPED, arena=1)], LIMITS, pool_bytes=1 << 28).levels[0]
    wide = KV.page_bytes // 2  # 16 tokens in 16 bits
    assert level.pages(2048) == [(GROUPED.page_bytes, 64), (wide, 1 + 4 + 2)]
    assert level.pages(20, drafts=False) == [(GROUPED.page_bytes, 1), (wide, 2)]
    assert context_bytes(GROUPED, 2048) == 64 * GROUPED.page_bytes + 5 * wide


@pytest.mark.parametrize(("format", "page_size", "bar"), [
    ("int8", 32, 0.52), ("int4", 32, 0.33), ("int4", 64, 0.31), ("int3", 32, 0.26), ("int2", 32, 0.22), ("int2", 64, 0.22)])
def test_bytes_at_4k_tail_included_are_within_the_bars(format: str, page_size: int, bar: float) -> None:
    assert effective_bits(KvGeometry(format, page_size, 30, 3, 64), 4096) / 16 <= bar


def test_at_least_three_times_as_many_int4_sequences_fit_at_2k() -> None:
    bf16, int4 = (plan_memory([LevelNeed("target", KvGeometry(name, 64, 30, 3, 64), arena=1)], LIMITS, pool_bytes=256 << 20)
                  for name in ("bf16", "int4"))
    assert int4.users(2048, drafts=False) >= 3 * bf16.users(2048, drafts=False)


def test_what_is_planned_for_users_is_what_the_pool_holds() -> None:
    plan = plan_memory([LevelNeed("target", GROUPED, arena=1)], LIMITS, pool_bytes=1 << 28)
    tail = GROUPED.tail
    assert tail is not None
    assert GROUPED.wide is not None
    slabs = SlabPool(plan.num_slabs, plan.slab_bytes)
    pool = KvPool(slabs, 32, GROUPED.page_bytes, wide=WidePages(slabs, GROUPED.wide.page_bytes, tail))
    count = 0
    while pool.can_allocate([count], 2048, 1):
        pool.allocate([count], 2048, 1)
        count += 1
    assert plan.users(2048) <= count <= plan.users(2048) + 1

def test_without_a_size_the_pool_holds_full_contexts_of_all_within_a_quarter_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlsdc.runtime import memory_plan

    monkeypatch.setattr(memory_plan, "machine_bytes", lambda: 1000)
    assert default_pool_bytes(20, LIMITS) == 8 * 20
    assert default_pool_bytes(100, LIMITS) == 250
    assert default_pool_bytes(400, LIMITS) == 400


@pytest.mark.parametrize("answer", [{"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": -1}, {"SC_PAGE_SIZE": 0, "SC_PHYS_PAGES": 1 << 20}, {}])
def test_a_machine_that_cannot_say_its_memory_has_8_gib(monkeypatch: pytest.MonkeyPatch, answer: dict[str, int]) -> None:
    from mlsdc.runtime import memory_plan

    def sysconf(name: str) -> int:
        if name not in answer:
            raise ValueError(name)
        return answer[name]

    monkeypatch.setattr(memory_plan.os, "sysconf", sysconf)
    assert memory_plan.machine_bytes() == 8 << 30
