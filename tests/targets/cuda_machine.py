"""CUDA C++ kernels on a CPU: their own source against tests/targets/cuda_host/machine.h, built by the C++ compiler that is there."""

from __future__ import annotations

import ctypes as C
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlsdc.targets.nvrtc_build import render
from mlsdc.targets.protocol import KernelSpec, Lowering
from tests.targets.attention_vectors import POISON, Case

HEADERS = Path(__file__).parent / "cuda_host"
SCORED = {"f32.e4m3.e4m3": "'f'", "s32.u8.s8": "'u'"}  # by an instruction of the source; else bf16
TYPES = {"*f32": "const float *", "*i32": "const int *", "*i64": "const i64 *", "*u8": "const u8 *"}
RESULTS = ("m_ptr", "l_ptr", "acc_ptr")
Array = npt.NDArray[Any]


def cxx() -> list[str]:
    """A command that compiles C++: g++, clang++, or the one that ziglang brings. There must be one: these tests are no tests without."""
    for name in ("g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    assert importlib.util.find_spec("ziglang") is not None, "no C++ compiler: install g++ or clang++, or `pip install ziglang`"
    return [sys.executable, "-m", "ziglang", "c++"]


def compile_host(source: Path) -> Path:
    """A shared library of a C++ file. -ffp-contract=off: a product and a sum are rounded as they stand."""
    library = source.with_suffix(".so")
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", "-DMLSDC_HOST", f"-I{HEADERS}"]
    command = [*cxx(), *options, source, "-o", library]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return library


class HostKernel:
    """A kernel's source as a function over arrays. `abi` names its arguments as the manifest does."""

    def __init__(self, spec: KernelSpec, folder: Path) -> None:
        self.spec = spec
        params: Any = spec.params
        self._run = host_function(spec.key, render(spec), spec.abi, params.threads, params.shared_bytes, folder)

    def __call__(self, programs: int, pool: Array, args: Sequence[Array], *, backwards: bool = False, late: bool = True) -> None:
        """Raises AssertionError with what the machine found wrong."""
        pointers = (C.c_void_p * len(args))(*(array.ctypes.data for array in args))
        said = self._run(programs, int(backwards), int(late), C.c_void_p(pool.ctypes.data), C.c_ulonglong(pool.nbytes), pointers)
        assert said == b"", said.decode()


def host_function(key: str, text: str, abi: Sequence[str], threads: int, shared_bytes: int, folder: Path) -> Any:
    """run(grid, backwards, late, pool, bytes of the pool, arguments): a kernel's source, built for this machine; what it found wrong."""
    scored = next((type_ for part, type_ in SCORED.items() if part in text.partition("#else")[2]), "'b'")
    args = []
    for i, entry in enumerate(abi):
        name, type_ = entry.split(": ")
        if type_ == "null":
            continue
        args.append(f"({'float *' if name in RESULTS else TYPES[type_]})args[{i}]")
    source = folder / f"{key}.cc"
    source.write_text(
        f"#define HOST_SCORED {scored}\n{text}\n"
        'extern "C" const char *run(unsigned grid, int order, int late, const void *pool, u64 pool_bytes, void **args) {\n'
        "    host::late = late;\n    host::pool = (const u8 *)pool;\n    host::pool_bytes = pool_bytes;\n"
        f"    return host::launch(grid, {threads}, {shared_bytes}, order, [=] {{ {key}({', '.join(args)}, nullptr, nullptr); }});\n}}\n")
    run = C.CDLL(str(compile_host(source))).run
    run.restype = C.c_char_p
    return run


def run_split(kernel: HostKernel, lowering: Lowering, case: Case, **how: bool) -> tuple[Array, Array, Array]:
    """(m, l, acc) of the split launch of a case, poisoned where nothing was written."""
    from mlsdc.runtime.program import InputArg, PoolArg
    from mlsdc.targets.protocol import TempRef, ValueRef

    params: Any = kernel.spec.params
    call = next(call for call in lowering.calls if call.spec == kernel.spec)
    made = {name: np.full(size + 64, POISON, np.uint8)[:size] for name, size in lowering.temps.items()}
    if "turned" in made:
        from mlsdc.runtime.kv_numbers import rotate

        rows = made["turned"].view(np.float32).reshape(case.q.shape)
        rows[: case.num_rows] = rotate(case.q[: case.num_rows])
    arrays: list[Array] = []
    for arg in call.args:
        match arg:
            case ValueRef():
                arrays.append(case.q)
            case TempRef(temp):
                arrays.append(made[temp])
            case InputArg(name):
                arrays.append(getattr(case.buffers, name))
            case PoolArg(offset):
                arrays.append(case.pool.reshape(-1)[offset:])
            case _:
                raise ValueError(f"unexpected argument {arg}")
    before = [array.copy() for array in arrays]
    programs = min(call.grid * case.buffers.limits.max_num_batched_tokens, params.most_programs)
    kernel(programs, case.pool, arrays, **how)
    for entry, old, new in zip(kernel.spec.abi, before, arrays, strict=True):
        assert entry.split(": ")[0] in RESULTS or np.array_equal(old.view(np.uint8), new.view(np.uint8)), f"{entry} was written"
    shape = (params.splits, params.limits.max_num_batched_tokens, params.heads)
    m, l, acc = (made[name].view(np.float32) for name in ("m", "l", "acc"))
    return m.reshape(shape), l.reshape(shape), acc.reshape(*shape, params.geometry.head_dim)


def combined(kernel: HostKernel, case: Case, states: tuple[Array, Array, Array]) -> Array:
    """f64[rows, heads, d]: what attend_combine makes of the states, reading the splits that it reads."""
    params: Any = kernel.spec.params
    m, l, acc = states
    out = np.zeros((case.num_rows, params.heads, params.geometry.head_dim))
    span = params.blocks_per_split * 64
    for row in range(case.num_rows):
        position = int(case.buffers.positions[row])
        first = 0 if params.sinks or not params.window else max(position - (params.window - 1), 0) // span
        splits = slice(first, position // span + 1)
        top = m[splits, row].max(axis=0)
        weight = np.exp2(m[splits, row].astype(np.float64) - top)
        total = (weight * l[splits, row]).sum(axis=0)
        out[row] = (weight[..., None] * acc[splits, row]).sum(axis=0) / total[:, None]
    return out
