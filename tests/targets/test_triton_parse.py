"""Threads that compile GPU kernels at once parse them one at a time."""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("triton")

from mlsdc.targets.triton_build import parsing_in_turn

SOURCE = "def kernel(x):\n" + "".join(f"    y{i} = ((x + {i}) * (x - {i})) / (x + ({i} + (x * {i})))\n" for i in range(400))


class Kernel:
    """As much of a JITFunction as its `parse` asks for."""

    _src = SOURCE


def test_threads_that_a_collection_lets_in_break_no_tree() -> None:
    """CPython 3.11 counts the depth of all threads' trees together; a Python callback of the collector lets others in."""
    from triton.runtime.jit import JITFunction

    def yields(phase: str, info: dict[str, Any]) -> None:
        for _ in range(200):
            pass

    before, switch, thresholds = JITFunction.parse, sys.getswitchinterval(), gc.get_threshold()
    gc.callbacks.append(yields)
    gc.set_threshold(50)
    sys.setswitchinterval(1e-6)
    try:
        with parsing_in_turn(), ThreadPoolExecutor(4) as pool:
            trees = list(pool.map(lambda _: JITFunction.parse(Kernel()), range(24)))
    finally:
        sys.setswitchinterval(switch)
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(yields)
    assert {len(tree.body[0].body) for tree in trees} == {400}
    assert JITFunction.parse is before
