"""Which other builds of a kernel are shipped: none that could change a bit of a result. Nothing is compiled here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.step import Limits
from mlsdc.targets.hardware import GPUS
from mlsdc.targets.nvidia_variants import Alternative, alternatives
from mlsdc.targets.protocol import KernelSpec, TemplateParams
from mlsdc.targets.triton_build import Variant
from mlsdc.templates.params_triton_kv import AttendSplit
from mlsdc.templates.params_triton_rows import Gated, GatedA16, GatedQ, Linear, LinearA16, LinearQ, Quantise

H100 = GPUS["h100"]
DEFAULT = Variant(4, 3)
LIMITS = Limits(max_model_len=2048, max_num_seqs=8, max_num_batched_tokens=256, max_logit_rows=64, max_tree_nodes=16)
FLOATS = (Linear(0, 256, 4096, 4096, "bf16"), Gated(0, 256, 4096, 4096, "bf16"), LinearA16(0, 256, 4096, 4096, 4),
          GatedA16(0, 256, 4096, 4096, 4), Linear(0, 256, 576, 576, "f32"))
INTEGERS = (LinearQ(0, 256, 4096, 4096, 8), GatedQ(0, 256, 14336, 4096, 8), LinearQ(0, 256, 576, 576, 4))


def found(params: TemplateParams, default: Variant = DEFAULT) -> tuple[Alternative, ...]:
    return alternatives(KernelSpec(params.template, params, ()), H100, default)  # type: ignore[attr-defined]


@pytest.mark.parametrize("params", [*FLOATS, *(replace(params, block_m=64, block_n=64) for params in FLOATS)])
def test_float_dots_keep_the_rows_of_a_tile_and_the_order_of_k(params: Linear | LinearQ) -> None:
    others = found(params)
    assert others
    for other in others:
        assert replace(other.spec.params, block_n=params.block_n) == params  # type: ignore[type-var]


@pytest.mark.parametrize("params", INTEGERS)
def test_integer_dots_take_taller_tiles_too(params: LinearQ) -> None:
    (tall,) = (other for other in found(params) if other.grain == 32)
    assert tall.grid == params.grid
    assert replace(tall.spec.params, block_m=16) == params  # type: ignore[type-var]


def test_of_few_rows_no_tile_is_taller() -> None:
    assert all(other.grain in (0, 16) for other in found(replace(INTEGERS[0], max_rows=16)))


@pytest.mark.parametrize(("params", "narrow"), [(INTEGERS[2], True), (LinearQ(0, 256, 128256, 4096, 8), False), (FLOATS[0], True)])
def test_few_tiles_become_more_and_many_fewer(params: LinearQ | Linear, narrow: bool) -> None:
    (other,) = (other for other in found(params) if other.grain == 16)
    assert other.grid == -(-params.n // (16 if narrow else 64))


def test_what_is_quantised_in_groups_keeps_whole_groups() -> None:
    for params in (GatedQ(0, 256, 1536, 576, 8), GatedQ(0, 256, 14336, 4096, 8), GatedQ(0, 256, 14368, 4096, 8)):
        others = [other.spec.params for other in found(params)]
        assert all(isinstance(other, GatedQ) and other.block_n % 32 == 0 and params.n % other.block_n == 0 for other in others)


def test_tiles_for_prompts_are_halved_and_stay_as_many() -> None:
    many = replace(INTEGERS[0], block_m=64, block_n=128, most_programs=264)
    (half,) = found(many, Variant(8, 3))
    assert (half.name, half.grid, half.grain) == ("m64n64w4s3", 64, 64)
    assert replace(half.spec.params, block_n=128) == many  # type: ignore[type-var]


@pytest.mark.parametrize("default", [Variant(4, 5), Variant(8, 3)])
def test_attention_keeps_its_warps_for_they_order_its_sums(default: Variant) -> None:
    params = AttendSplit(KvGeometry("bf16", 32, 30, 3, 64), LIMITS, "bf16", 9, 0.125, 32)
    others = found(params, default)
    assert {other.how.num_stages for other in others} == {3, 7} - {default.num_stages}
    assert all(other.how.num_warps == default.num_warps and other.spec.params == params and not other.grid for other in others)


def test_a_name_says_what_is_different() -> None:
    assert [other.name for other in found(INTEGERS[2])] == ["w4s5", "m16n16w4s4", "m32n32w4s3"]


def test_other_kernels_have_none() -> None:
    assert found(Quantise(0, 256, 576)) == ()
