"""Counting texts into a static table, and reading it: the table says what plain counting says."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsdc.compiler.counts import write_counts
from mlsdc.compiler.errors import CompileError
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.levels.counts import MAX_TOP, Counts, decoded, open_file

VOCAB = 50
TEXTS = st.lists(st.tuples(st.lists(st.integers(0, VOCAB - 1), max_size=40), st.integers(0, 5)), min_size=1, max_size=8)


def write(path: Path, texts: list[tuple[list[int], int]], *, order: int = 3, max_bytes: int = 100_000) -> Any:
    return write_counts(path, texts, order=order, vocab_size=VOCAB, max_bytes=max_bytes, tokenizer="t", source="a test")


def counted(texts: list[tuple[list[int], int]], order: int) -> dict[tuple[int, ...], Counter[int]]:
    found: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for tokens, start in texts:
        for i in range(start, len(tokens)):
            for k in range(min(order, i) + 1):
                found[tuple(tokens[i - k : i])][tokens[i]] += 1
    return found


@settings(max_examples=50, deadline=None)
@given(TEXTS, st.integers(0, 4))
def test_a_table_with_room_for_all_says_what_was_counted(tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[list[int], int]],
                                                         order: int) -> None:
    expected = counted(texts, order)
    path = tmp_path_factory.mktemp("counts") / "x.counts"
    if not expected:
        with pytest.raises(CompileError, match="no token to count"):
            write(path, texts, order=order)
        return
    write(path, texts, order=order)
    counts = Counts.open(path, VOCAB)
    for context, after in expected.items():
        found = counts.find(context)
        assert found is not None
        best = after.most_common()
        assert (found.total, found.distinct) == (sum(after.values()), len(after)) or found.total > 16 or max(after.values()) > 16
        assert len(found.top) == min(MAX_TOP, len(best))
        exact = [count for _, count in sorted(best, key=lambda x: (-x[1], x[0]))[:MAX_TOP]]
        assert [count for _, count in found.top] == [decoded_down(count) for count in exact]
    assert counts.find((VOCAB, VOCAB)) is None


def decoded_down(count: int) -> int:
    return max(decoded(code, 3) for code in range(128) if decoded(code, 3) <= count)


def test_codes_count_up_and_small_ones_are_exact() -> None:
    for bits, codes in ((3, 128), (4, 256)):
        values = [decoded(code, bits) for code in range(codes)]
        assert values == sorted(set(values))
        assert values[: 2 ** (bits + 1)] == list(range(2 ** (bits + 1)))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3000)), min_size=1, max_size=12))
@settings(max_examples=30, deadline=None)
def test_counts_of_a_context_add_up_to_its_total_at_most(tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[int, int]]) -> None:
    path = tmp_path_factory.mktemp("counts") / "x.counts"
    write(path, [([token for token, times in runs for _ in range(times)], 0)], order=1)
    counts = Counts.open(path, VOCAB)
    for context in ((), *((token,) for token, _ in runs)):
        found = counts.find(context)
        assert found is None or sum(count for _, count in found.top) <= found.total


def test_the_same_texts_give_the_same_bytes(tmp_path: Path) -> None:
    texts = [(np.random.default_rng(i).integers(0, VOCAB, 200).tolist(), 3) for i in range(4)]
    write(tmp_path / "a.counts", texts)
    write(tmp_path / "b.counts", texts)
    assert (tmp_path / "a.counts").read_bytes() == (tmp_path / "b.counts").read_bytes()


def test_a_small_file_keeps_what_was_seen_often(tmp_path: Path) -> None:
    noise = [(np.random.default_rng(i).integers(3, VOCAB, 40).tolist(), 0) for i in range(50)]
    write(tmp_path / "x.counts", [*noise, ([1, 2] * 100, 0)], max_bytes=6000)
    assert (tmp_path / "x.counts").stat().st_size <= 6000
    found = Counts.open(tmp_path / "x.counts", VOCAB).find((1,))
    assert found is not None
    assert found.top[0][0] == 2


def test_what_lies_before_the_start_is_context_only(tmp_path: Path) -> None:
    write(tmp_path / "x.counts", [([1, 2, 3, 4, 5], 4)])
    counts = Counts.open(tmp_path / "x.counts", VOCAB)
    assert counts.find((4,)) == (1, 1, [(5, 1)])
    assert counts.find((2, 3, 4)) == (1, 1, [(5, 1)])
    assert counts.find((3,)) is None


def test_token_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="counts: token id 50 is not one of the model's 50"):
        write(tmp_path / "x.counts", [([1, 50], 0)])


def test_too_few_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="counts: 2100 bytes are too few for a table; expected at least"):
        write(tmp_path / "x.counts", [([1, 2], 0)], max_bytes=2100)


def corrupt(path: Path, **changes: Any) -> None:
    file = open_file(path)
    tables = {name: file.tensor(name).copy() for name in ("entries", "vocab", "kinds")}
    for name, change in changes.items():
        change(tables[name])
    from mlsdc.compiler.counts import _write

    _write(path, tables, file.metadata)


def fill(value: int) -> Any:
    return lambda table: table.__setitem__(slice(None), value)


@pytest.mark.parametrize(("changes", "message"), [
    ({"kinds": fill(1)}, "no slot is empty"),
    ({"kinds": lambda kinds: kinds.__setitem__(0, 200)}, "an entry of kind 200"),
    ({"vocab": fill(VOCAB)}, f"token ids, expected 1 to 65536 of them below {VOCAB}"),
    ({"vocab": fill(-1)}, "token ids, expected 1 to"),
    ({"entries": fill(0xFFFF)}, "an entry names token 65535 of"),
])
def test_tables_that_would_lead_a_search_astray_are_refused(tmp_path: Path, changes: Any, message: str) -> None:
    write(tmp_path / "x.counts", [([1, 2, 3, 1, 2, 4], 0)])
    corrupt(tmp_path / "x.counts", **changes)
    with pytest.raises(ArtifactError, match=f"x.counts: corrupt counts: .*{message}"):
        Counts.open(tmp_path / "x.counts", VOCAB)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x.counts", [([1, 2, 3], 0)])
    with pytest.raises(ArtifactError, match="x.counts: counts over a vocabulary of 50 tokens, the model has 60"):
        Counts.open(tmp_path / "x.counts", 60)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.counts"
    write(path, [([1, 2, 3], 0)])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="x.counts: .* it is cut short"):
        Counts.open(path, VOCAB)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.counts").write_bytes(b"no safetensors file at all")
    with pytest.raises(ArtifactError, match="x.counts: "):
        Counts.open(tmp_path / "x.counts", VOCAB)
    with pytest.raises(ArtifactError, match=r"y.counts: no such file; `mlsdc train --level counts` makes it"):
        Counts.open(tmp_path / "y.counts", VOCAB)
