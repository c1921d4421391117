"""Native functions of the CPU target, built once per test session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest

from mlsdc.runtime.device.base import NativeFunction
from tests.once import once

if TYPE_CHECKING:
    from mlsdc.targets.protocol import KernelSpec


def native_functions(factory: pytest.TempPathFactory, name: str, specs: Sequence[KernelSpec]) -> Callable[[str], NativeFunction | None]:
    """Finds the functions of `specs` by key; skips where this machine cannot run them."""
    pytest.importorskip("tvm")
    from mlsdc.runtime.device.cpu import import_tvm_ffi
    from mlsdc.runtime.device.cpu_features import cpu_features
    from mlsdc.targets.cpu_build import build
    from mlsdc.targets.cpu_isa import ISAS

    isa = ISAS["cpu-x86-64-v4"]
    if not cpu_features().issuperset(isa.requires):
        pytest.skip(f"this machine does not run {isa.name}")
    folder = once(factory, name, lambda path: build(isa, specs, path) and None)
    module = import_tvm_ffi().load_module(str(folder / "kernels" / isa.name / "kernels.so"))
    keys = {spec.key for spec in specs}
    return lambda key: module.get_function(key) if key in keys else None
