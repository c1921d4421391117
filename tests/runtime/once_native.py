"""Native functions of the CPU target, built once per test session."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mlsdc.runtime.device.base import NativeFunction
from mlsdc.runtime.device.cpu import ENTRY, THREADS, import_tvm_ffi
from mlsdc.runtime.device.host_list import HostList
from mlsdc.runtime.step import aligned
from tests.once import once

if TYPE_CHECKING:
    from mlsdc.targets.protocol import KernelSpec


def native_functions(factory: pytest.TempPathFactory, name: str, specs: Sequence[KernelSpec]) -> Callable[[str], NativeFunction | None]:
    """Finds the functions of `specs` by key; skips where this machine cannot run them."""
    module = import_tvm_ffi().load_module(str(library(factory, name, specs)))
    keys = {spec.key for spec in specs}
    return lambda key: module.get_function(key) if key in keys else None


def library(factory: pytest.TempPathFactory, name: str, specs: Sequence[KernelSpec]) -> Path:
    """The built file; skips where this machine cannot run it."""
    pytest.importorskip("tvm")
    from mlsdc.runtime.device.cpu_features import cpu_features
    from mlsdc.targets.cpu_build import build
    from mlsdc.targets.cpu_isa import ISAS

    isa = ISAS["cpu-x86-64-v4"]
    if not cpu_features().issuperset(isa.requires):
        pytest.skip(f"this machine does not run {isa.name}")
    folder = once(factory, name, lambda path: build(isa, specs, path) and None)
    return folder / "kernels" / isa.name / "kernels.so"


def native_lists(factory: pytest.TempPathFactory, name: str, specs: Sequence[KernelSpec]
                 ) -> Callable[[Sequence[tuple[str, Sequence[Any]]]], HostList]:
    """Makes host lists of the functions of `specs`; skips where this machine cannot run them."""
    path = str(library(factory, name, specs))
    run, symbols, pool = import_tvm_ffi().load_module(path).get_function("mlsdc_run"), ctypes.CDLL(path), aligned((64,), "i8")
    pool[THREADS] = 1

    def address(key: str) -> int:
        return ctypes.cast(getattr(symbols, f"{ENTRY}{key}"), ctypes.c_void_p).value or 0

    return lambda calls: HostList(run, pool, address, calls)


def ngram_library() -> tuple[str, list[KernelSpec]]:
    """Name and functions of the one library that all tests of drafts use: n-grams of orders 1 and 4, and what levels with programs use."""
    pytest.importorskip("tvm")
    from mlsdc.targets.cpu_sample import guess_specs, ngram_specs

    return "ngram", [*(spec for order in (1, 4) for spec in ngram_specs(order)), *guess_specs()]
