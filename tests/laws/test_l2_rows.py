"""Law L2 on whole forward passes: a row's logits and key bytes depend on the tokens before it, and on nothing else, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.step import Array
from mlsdc.runtime.tree import Tree
from tests.laws.rows import Item, Steps
from tests.laws.tiny import TREE_NODES, VOCAB

LENGTH = 390
rng = np.random.default_rng(0)
TEXTS = [tuple(int(t) for t in rng.integers(0, VOCAB, LENGTH)) for _ in range(3)]


@pytest.fixture(scope="module", params=[1, 2, 3], ids="{} threads".format)
def steps(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Steps]:
    with Engine.load(tiny, threads=request.param, num_pages=160) as engine:
        yield Steps(engine, seed=request.param)


@pytest.fixture(scope="module")
def plain(tiny: Path) -> tuple[list[Array], list[Array]]:
    """Logits and key bytes of every position of TEXTS: one thread, one sequence, one row a step."""
    logits, data = [], []
    with Engine.load(tiny, threads=1, num_pages=160) as engine:
        for text in TEXTS:
            steps = Steps(engine, seed=9)
            at = steps.pages(LENGTH)
            logits.append(steps.chunks(at, text, [1]))
            data.append(steps.bytes_of(at, LENGTH))
    return logits, data


def equal(found: Array, wanted: Array) -> bool:
    return found.shape == wanted.shape and found.tobytes() == wanted.tobytes()


def test_logits_are_numbers_and_rows_differ(plain: tuple[list[Array], list[Array]]) -> None:
    for logits in plain[0]:
        assert np.isfinite(logits).all()
        assert len({row.tobytes() for row in logits}) == LENGTH


@settings(max_examples=15)
@given(text=st.integers(0, 2), sizes=st.lists(st.integers(1, 56), min_size=1, max_size=6))
def test_a_prompt_in_any_chunks_is_the_prompt_in_single_rows(
        steps: Steps, plain: tuple[list[Array], list[Array]], text: int, sizes: list[int]) -> None:
    steps.reset()
    at = steps.pages(LENGTH)
    assert equal(steps.chunks(at, TEXTS[text], sizes), plain[0][text])
    assert equal(steps.bytes_of(at, LENGTH), plain[1][text])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 17])
def test_every_number_of_rows_gives_the_same_rows(steps: Steps, plain: tuple[list[Array], list[Array]], rows: int) -> None:
    steps.reset()
    at = steps.pages(LENGTH)
    assert equal(steps.chunks(at, TEXTS[0], [rows]), plain[0][0])


@settings(max_examples=25)
@given(data=st.data())
def test_neighbours_order_and_pages_change_no_bit(steps: Steps, plain: tuple[list[Array], list[Array]], data: st.DataObject) -> None:
    """Chunks of several sequences mixed in a step, at different depths, beside a tree."""
    steps.reset()
    order = data.draw(st.permutations(range(3)))
    left, items, wanted = 56, [], []
    for i, text in enumerate(order):
        start = data.draw(st.sampled_from([0, 1, 15, 16, 63, 64, 200, 255, 256, 257, 320]))
        count = data.draw(st.integers(1, min(left - 2 + i, LENGTH - start, 30)))
        left -= count
        at = steps.pages(LENGTH)
        if start:
            steps.chunks(at, TEXTS[text][:start], [56])
        items.append(Item(at, start, TEXTS[text][start : start + count]))
        wanted.append(plain[0][text][start : start + count])
    for found, logits in zip(steps.run(items), wanted, strict=True):
        assert equal(found, logits)


@st.composite
def trees(draw: st.DrawFn, text: tuple[int, ...] = ()) -> Tree:
    """Any tree of up to TREE_NODES nodes, some chains, some stars; equal siblings happen."""
    count = draw(st.integers(1, TREE_NODES))
    kind = draw(st.sampled_from(["chain", "star", "any", "any"]))
    parents = tuple(i - 1 if kind == "chain" else -1 if kind == "star" else draw(st.integers(-1, i - 1)) for i in range(count))
    tokens = tuple(draw(st.integers(0, VOCAB - 1)) for _ in range(count))
    return Tree(tokens, parents, (0.0,) * count, (0,) * count)


@settings(max_examples=25)
@given(tree=trees(), text=st.integers(0, 2), last=st.sampled_from([0, 1, 14, 15, 16, 50, 62, 63, 64, 120, 240, 254, 255, 256, 300, 374]))
def test_a_tree_nodes_logits_are_those_of_its_path_decoded_plainly(
        steps: Steps, plain: tuple[list[Array], list[Array]], tree: Tree, text: int, last: int) -> None:
    """And committing a path leaves the bytes of plain decoding."""
    steps.reset()
    at, other = steps.pages(LENGTH), steps.pages(LENGTH)
    prefix = TEXTS[text][:last]
    if last:
        steps.chunks(at, prefix, [56])
    (found,) = steps.run([Item(at, last, (TEXTS[text][last],), tree)])
    assert equal(found[0], plain[0][text][last])
    before = steps.bytes_of(at, last)
    assert equal(before, plain[1][text][:last])  # drafted rows touch no page
    children = set(tree.parents)
    leaves = [node for node in range(len(tree)) if node not in children]
    if last:
        steps.chunks(other, prefix, [37])
    for leaf in leaves[:4]:
        path = path_to(tree, leaf)
        tokens = (*TEXTS[text][: last + 1], *(tree.tokens[node] for node in path))
        decoded = steps.chunks(other, tokens, [1], start=last)
        for depth, node in enumerate(path, 1):
            assert equal(found[1 + node], decoded[depth]), f"node {node} at depth {depth}"
        steps.commit(at, last, [0, *(node + 1 for node in path)])
        assert equal(steps.bytes_of(at, len(tokens)), steps.bytes_of(other, len(tokens)))


def path_to(tree: Tree, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = tree.parents[node]
    return path


@settings(max_examples=15)
@given(data=st.data())
def test_trees_of_several_sequences_and_a_prompt_share_a_step(steps: Steps, data: st.DataObject) -> None:
    steps.reset()
    left, items = 56, list[Item]()
    for text in data.draw(st.permutations(range(3))):
        start = data.draw(st.sampled_from([0, 5, 63, 64, 130, 255, 256]))
        at = steps.pages(LENGTH)
        if start:
            steps.chunks(at, TEXTS[text][:start], [56])
        if data.draw(st.booleans()):
            items.append(Item(at, start, (TEXTS[text][start],), data.draw(trees())))
        else:
            items.append(Item(at, start, TEXTS[text][start : start + data.draw(st.integers(1, 8))]))
        left -= items[-1].num_rows
    together = steps.run(items)
    for item, found in zip(items, together, strict=True):
        (alone,) = steps.run([item])
        assert equal(found, alone)
