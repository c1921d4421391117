"""Kernels that work behind a step's choices, executed by Triton's interpreter on a CPU and compared with the host's code."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mlsdc.compiler.cli_gpu_ahead import full_trees
from mlsdc.runtime.step import Limits, StepBuffers
from mlsdc.runtime.verify import write_rows
from mlsdc.targets.hardware import GPUS
from mlsdc.targets.nvidia_ahead import ngram_specs
from mlsdc.targets.nvidia_build import build_one
from mlsdc.targets.triton_build import reproducible
from tests.runtime.once_native import library, ngram_library
from tests.targets.in_interpreter import interpreted

pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")

SAME = "all as the host has them"


def test_choices_are_followed_as_the_host_follows_them(root: Path) -> None:
    """Steps of trees, of full ones, of plain rows and of prompts, with choices down long paths and off them."""
    assert SAME in interpreted(root, "interpret_ahead", "follow:40")


def test_counts_are_kept_and_trees_proposed_as_the_host_does(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Random texts, static tables and draws: trees are the plain state's; blocks and chances, bit for bit, those of the CPU's code."""
    native = library(tmp_path_factory, *ngram_library())
    assert SAME in interpreted(root, "interpret_ahead", str(native), "ngram:4")


@pytest.mark.parametrize(("seqs", "outs", "trees"), [(4, 64, 4), (64, 16, 1), (64, 64, 4), (256, 40, 2)])
def test_trees_that_a_card_follows_have_rows_and_choices_within_the_limits(seqs: int, outs: int, trees: int) -> None:
    """An artifact may have fewer choices a step than sequences."""
    limits = Limits(max_model_len=64, max_num_seqs=seqs, max_num_batched_tokens=256, max_logit_rows=outs, max_tree_nodes=15)
    items = full_trees(limits, random.Random(0))
    assert [len(item.tree) for item in items] == [15] * trees
    write_rows(StepBuffers(limits, 16), items)


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_kernels_of_every_order_fit_into_registers(gpu: str, tmp_path: Path) -> None:
    """A build refuses what spills; short contexts and long ones take different sizes."""
    (tmp_path / "kernels").mkdir()
    with reproducible(GPUS[gpu]):
        for spec in {spec for order in (1, 8) for spec in ngram_specs(order)}:
            assert build_one(spec, GPUS[gpu], tmp_path, Path("kernels")).checked_by == "interpreted"
