"""Which nodes of a growing tree become rows."""

from __future__ import annotations

from math import log

import numpy as np

from mlsdc.runtime.kv_pool import PageTable
from mlsdc.runtime.levels.growing import NEVER, Growth


def grown() -> Growth:
    """Children of the last token with probabilities 0.6, 0.35 and 0.05; of the first one 0.5 and 0.1: paths of 0.3 and 0.06."""
    growth = Growth(PageTable(), 0, budget=8)
    growth.add(-1, np.log([0.6, 0.35, 0.05]), np.array([1, 2, 3]), None, 0, NEVER)
    growth.add(0, np.log([0.5, 0.1]), np.array([4, 5]), None, 1, NEVER)
    return growth


def test_the_likeliest_nodes_become_rows_first() -> None:
    assert grown().wanted(1, NEVER) == [1]
    assert grown().wanted(8, NEVER) == [1, 2, 3, 4]


def test_what_is_hardly_ever_right_gets_no_children() -> None:
    assert grown().wanted(8, log(0.08)) == [1, 3]


def test_it_stays_in_the_tree() -> None:
    assert grown().tree(0).tokens == (1, 2, 3, 4, 5)
