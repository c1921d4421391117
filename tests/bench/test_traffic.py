"""Bytes of a step: the sum of what its launches read, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlsdc.runtime.bench.traffic import traffic
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.program import ArenaArg, Arg, InputArg, Launch, PoolArg, ProgramSpec, WeightArg

GEOMETRY = KvGeometry("bf16", 16, 2, 3, 64)
TOKEN_BYTES = 2 * 3 * 64 * 2 * 2  # layers, heads, dim, keys and values, bf16
VOCAB = 1000


def launch(kernel: str, *args: Arg) -> Launch:
    return Launch("node", kernel, 1, None, args)


def program(*launches: Launch) -> ProgramSpec:
    return ProgramSpec("forward", "target", 0, launches, {})


def layer(index: int) -> PoolArg:
    return PoolArg(GEOMETRY.k_offset(index, 0))


@given(sizes=st.lists(st.integers(1, 10**9), max_size=9), rows=st.integers(1, 64))
def test_weights_are_the_sum_of_the_sizes_whatever_the_rows(sizes: list[int], rows: int) -> None:
    names = {f"w{i}": size for i, size in enumerate(sizes)}
    step = traffic(program(*(launch("linear", WeightArg(name)) for name in names)), names, VOCAB, GEOMETRY, rows=rows, positions=9)
    assert (step.weights, step.pages, step.total) == (sum(sizes), 0, sum(sizes))


def test_a_launch_that_is_given_a_weight_twice_reads_it_once() -> None:
    found = program(launch("linear", WeightArg("w"), ArenaArg(0), WeightArg("w")))
    assert traffic(found, {"w": 640}, VOCAB, GEOMETRY, rows=1, positions=1).weights == 640


def test_two_launches_that_read_a_weight_read_it_twice() -> None:
    found = program(launch("linear", WeightArg("w")), launch("linear", WeightArg("w")))
    assert traffic(found, {"w": 640}, VOCAB, GEOMETRY, rows=1, positions=1).weights == 1280


def test_of_a_table_looked_up_by_token_only_the_rows_are_read() -> None:
    found = program(launch("embed", WeightArg("w"), InputArg("tokens")), launch("head", WeightArg("w")))
    for rows in (1, 7, 1000, 5000):
        assert traffic(found, {"w": 640_000}, VOCAB, GEOMETRY, rows=rows, positions=1).weights == 640_000 + 640 * min(rows, VOCAB)


@given(positions=st.integers(0, 5000), rows=st.integers(1, 8))
def test_pages_are_every_positions_keys_and_values_of_the_layers_attended_to(positions: int, rows: int) -> None:
    both = program(launch("append_kv_x", layer(0)), launch("attend", layer(0)), launch("append_kv_x", layer(1)), launch("attend", layer(1)))
    assert traffic(both, {}, VOCAB, GEOMETRY, rows=rows, positions=positions).pages == positions * TOKEN_BYTES
    one = program(launch("read_keys", layer(1)), launch("read_values", layer(1)))
    assert traffic(one, {}, VOCAB, GEOMETRY, rows=rows, positions=positions).pages == positions * TOKEN_BYTES // 2


def test_writing_to_the_pool_reads_no_pages() -> None:
    found = program(launch("append_kv_bf16", layer(0)), launch("commit_bf16", layer(0)))
    assert traffic(found, {}, VOCAB, GEOMETRY, rows=1, positions=100).pages == 0


def test_of_a_nodes_launches_for_few_and_for_many_rows_one_reads_the_weight() -> None:
    few, many = (Launch("node", "linear", 1, "ROWS", (WeightArg("w"),), over=over, upto=upto) for over, upto in ((0, 64), (64, 0)))
    for rows in (1, 64, 65, 512):
        assert traffic(program(few, many), {"w": 640}, VOCAB, GEOMETRY, rows=rows, positions=1).weights == 640


def test_pairs_sorted_by_expert_read_each_expert_once_at_most() -> None:
    found = program(launch("expert_tiles_q_w8_e8_s2_n64_k64_0", WeightArg("w")))
    read = [traffic(found, {"w": 800}, VOCAB, GEOMETRY, rows=rows, positions=1).weights for rows in (1, 3, 4, 512)]
    assert read == [200, 600, 800, 800]
