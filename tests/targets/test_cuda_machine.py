"""The machine that CUDA C++ kernels are tested on (cuda_host/machine.h), held against what the PTX ISA says in words, tables and examples.

Sources, all of the PTX ISA: "Matrix Fragments for mma.m16n8k16" and "for mma.m16n8k32" (formulas; a warp of wgmma has the fragments of its
16 rows so, figures 148, 149, 152), "Canonical Layouts" of wgmma (figures 166, 168), "Matrix descriptor" (bits).
"""

from __future__ import annotations

import ctypes as C
from typing import Any

import numpy as np
import pytest

from mlsdc.runtime.kv_numbers import from_e4m3, to_bf16, to_e4m3
from tests.targets.cuda_machine import HEADERS, compile_host


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    source = tmp_path_factory.mktemp("machine") / "layouts.cc"
    source.write_text((HEADERS / "layouts.cc").read_text())
    library = C.CDLL(str(compile_host(source)))
    library.operand_place.argtypes = [C.c_uint64, C.c_int, C.c_int, C.c_int, C.c_int]
    library.described.restype = C.c_uint64
    for name, result, given in (("rounded_bf16", C.c_uint32, C.c_float), ("rounded_e4m3", C.c_uint32, C.c_float),
                                ("read_e4m3", C.c_float, C.c_uint32), ("read_f16", C.c_float, C.c_uint32)):
        getattr(library, name).restype, getattr(library, name).argtypes = result, [given]
    return library


def found(function: Any, count: int, *args: int) -> tuple[int, ...]:
    out = (C.c_int * count)()
    function(*args, out)
    return tuple(out)


def a16(lane: int, i: int) -> tuple[int, int]:
    """mma.m16n8k16: row = groupID for 0 <= i < 2 || 4 <= i < 6, else groupID + 8; col = 2 threadID_in_group + (i & 1), + 8 for i >= 4."""
    group, thread = lane >> 2, lane % 4
    return (group if 0 <= i < 2 or 4 <= i < 6 else group + 8), thread * 2 + (i & 1) + (8 if i >= 4 else 0)


def a8(lane: int, i: int) -> tuple[int, int]:
    """mma.m16n8k32: row = groupID for 0 <= i < 4 || 8 <= i < 12, else groupID + 8; col = 4 threadID_in_group + (i & 3), + 16 for i >= 8."""
    group, thread = lane >> 2, lane % 4
    return (group if 0 <= i < 4 or 8 <= i < 12 else group + 8), thread * 4 + (i & 3) + (16 if i >= 8 else 0)


@pytest.mark.parametrize(("formula", "elements", "size"), [(a16, 8, 2), (a8, 16, 1)])
def test_the_first_operands_fragments_are_those_of_the_isa(machine: Any, formula: Any, elements: int, size: int) -> None:
    each = 4 // size
    wanted = {formula(lane, i): (lane, i // each, i % each) for lane in range(32) for i in range(elements)}
    assert len(wanted) == 16 * (32 // size)
    assert {at: found(machine.place_of_a, 3, *at, size) for at in wanted} == wanted


def test_the_results_fragments_are_those_of_the_isa(machine: Any) -> None:
    """row = groupID for i < 2, else + 8; col = 2 threadID_in_group + (i & 1), and so on: thread 0 has (0,0) (0,1) (8,0) (8,1)."""
    wanted = {}
    for lane in range(32):
        for i in range(4 * 4):
            tile, part = divmod(i, 4)
            wanted[(lane >> 2) + (8 if part >= 2 else 0), tile * 8 + lane % 4 * 2 + (part & 1)] = (lane, i)
    assert {at: found(machine.place_of_d, 2, *at) for at in wanted} == wanted
    assert [wanted[at] for at in ((0, 0), (0, 1), (8, 0), (8, 1), (0, 8))] == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4)]


def cute(shape: Any, stride: Any, index: int) -> int:
    """Offset of a CuTe layout's mode at an index: the first of its parts runs fastest."""
    if isinstance(shape, int):
        return index * int(stride)
    total = 0
    for part, step in zip(shape, stride, strict=True):
        size = int(np.prod(np.array(part).ravel())) if not isinstance(part, int) else part
        total += cute(part, step, index % size)
        index //= size
    return total


def test_an_operand_along_k_lies_as_in_figure_166(machine: Any) -> None:
    """K-major, no swizzling, tf32: ((8,2),(4,4)):((4,32),(1,64)) elements of 4 bytes, LBO 64 and SBO 32 of them, encoded 16 and 8."""
    descriptor = machine.described(0, 64 * 4, 32 * 4)
    assert (descriptor >> 16 & 0x3FFF, descriptor >> 32 & 0x3FFF, descriptor >> 49) == (16, 8, 0)
    for row in range(16):
        for k in range(16):
            wanted = 4 * (cute((8, 2), (4, 32), row) + cute((4, 4), (1, 64), k))
            assert machine.operand_place(descriptor, row, k, 4, 0) == (descriptor & 0x3FFF) * 16 + wanted


def test_an_operand_along_n_lies_as_in_figure_168(machine: Any) -> None:
    """MN-major, no swizzling, bf16: ((8,1,2),(8,2)):((1,8,64),(8,128)), LBO 128 and SBO 64 elements, encoded 16 and 8."""
    descriptor = machine.described(0, 128 * 2, 64 * 2)
    assert (descriptor >> 16 & 0x3FFF, descriptor >> 32 & 0x3FFF) == (16, 8)
    for row in range(16):
        for k in range(16):
            wanted = 2 * (cute((8, 1, 2), (1, 8, 64), row) + cute((8, 2), (8, 128), k))
            assert machine.operand_place(descriptor, row, k, 2, 1) == (descriptor & 0x3FFF) * 16 + wanted


def test_numbers_are_rounded_as_they_should_be(machine: Any) -> None:
    values = np.random.default_rng(0).standard_normal(500).astype(np.float32) * np.float32(100)
    assert [machine.rounded_bf16(float(x)) for x in values] == to_bf16(values).tolist()
    assert [machine.rounded_e4m3(float(x)) for x in values] == to_e4m3(values).tolist()
    codes = np.arange(256, dtype=np.uint8)
    assert np.array_equal([machine.read_e4m3(int(code)) for code in codes], from_e4m3(codes), equal_nan=True)
    halves = np.arange(0, 65536, 97, dtype=np.uint16)
    assert np.array_equal([machine.read_f16(int(half)) for half in halves], halves.view(np.float16).astype(np.float32), equal_nan=True)
