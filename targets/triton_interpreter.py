"""Generated Triton kernels executed on a CPU by Triton's interpreter, with its bf16 and fp8 put right. For tests; far too slow to serve.

Triton 3.9's interpreter multiplies raw bf16 bit patterns, truncates f32 -> bf16 and loses carries rounding to fp8, all silently.
`patch` replaces those operations. Dots add their products one by one in index order, so that a term of zero changes no bit
whatever its place, and a row's result does not depend on the shape of the tile.

Start the process with TRITON_INTERPRET=1: triton decides at import. A kernel that reads out of bounds may kill the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime import interpreter

from mlsdc.compiler.errors import CompileError
from mlsdc.runtime.tensor_map import Tiles, strides
from mlsdc.targets.triton_build import load_source

Array = npt.NDArray[Any]
Handle: TypeAlias = Any  # interpreter.TensorHandle: a numpy array and its Triton type
TensorHandle = interpreter.TensorHandle

# Formats that the interpreter keeps as raw bits: torch's type, and the largest number where conversion saturates as on the GPU.
RAW = {
    tl.bfloat16: (torch.bfloat16, np.inf),
    tl.float8e4nv: (torch.float8_e4m3fn, 448.0),
    tl.float8e5: (torch.float8_e5m2, 57344.0),
}
BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


def is_raw(*handles: Handle) -> bool:
    return any(handle.dtype.scalar in RAW for handle in handles)


def decode(handle: Handle) -> Array:
    """A handle's numbers: f32 for raw formats, its own array for all others."""
    if handle.dtype.scalar not in RAW:
        return np.asarray(handle.data)
    bits = torch.from_numpy(np.ascontiguousarray(handle.data))
    return bits.view(RAW[handle.dtype.scalar][0]).to(torch.float32).numpy()


def encode(values: Array, dtype: Any) -> Handle:
    """Numbers as a handle of `dtype`; raw formats are rounded to nearest even."""
    if dtype not in RAW:
        return TensorHandle(np.asarray(values).astype(interpreter._get_np_dtype(dtype)), dtype)
    torch_dtype, largest = RAW[dtype]
    clipped = np.clip(np.asarray(values, np.float32), -largest, largest)
    rounded = torch.from_numpy(np.array(clipped)).to(torch_dtype)
    bits = rounded.view(torch.int16 if rounded.itemsize == 2 else torch.uint8).numpy()
    return TensorHandle(bits.view(interpreter._get_np_dtype(dtype)), dtype)


def dot(a: Array, b: Array, start: Array) -> Array:
    """start + a b, products added in order of k in the type of `start`."""
    total = np.array(start)
    if total.dtype == np.int32:  # exact in any order
        return np.asarray((a.astype(np.float64) @ b.astype(np.float64)).astype(np.int32) + total)
    a, b = a.astype(total.dtype), b.astype(total.dtype)
    for k in range(a.shape[-1]):
        total += a[..., :, k, None] * b[..., k, None, :]
    return total


def patch(builder: type[Any] = interpreter.InterpreterBuilder) -> None:
    """Replace what is wrong in the interpreter. Calling it twice changes nothing more."""
    if getattr(builder, "mlsdc_patched", False):
        return
    cast, fp_to_fp, binary, unary, fma = builder.cast_impl, builder.create_fp_to_fp, builder.binary_op, builder.unary_op, builder.create_fma

    def cast_impl(self: Any, source: Handle, dtype: Any) -> Handle:
        if is_raw(source) or dtype.scalar in RAW:
            return encode(decode(source), dtype.scalar)
        return cast(self, source, dtype)

    def create_fp_to_fp(self: Any, source: Handle, dtype: Any, rounding: Any) -> Handle:
        if (is_raw(source) or dtype.scalar in RAW) and rounding in (None, interpreter._ir.ROUNDING_MODE.RTNE):
            return encode(decode(source), dtype.scalar)
        return fp_to_fp(self, source, dtype, rounding)

    def binary_op(self: Any, left: Handle, right: Handle, op: Callable[..., Array]) -> Handle:
        if not is_raw(left) or op in BITWISE:
            return binary(self, left, right, op)
        result = op(decode(left), decode(right))
        return TensorHandle(result, tl.int1) if result.dtype == np.bool_ else encode(result, left.dtype.scalar)

    def unary_op(self: Any, source: Handle, op: Callable[..., Array]) -> Handle:
        return encode(op(decode(source)), source.dtype.scalar) if is_raw(source) else unary(self, source, op)

    def create_fma(self: Any, x: Handle, y: Handle, z: Handle) -> Handle:
        if is_raw(z):
            return encode(decode(x).astype(np.float64) * decode(y) + decode(z), z.dtype.scalar)
        return fma(self, x, y, z)

    def create_dot(self: Any, a: Handle, b: Handle, start: Handle, precision: Any, imprecise: Any) -> Handle:
        return TensorHandle(dot(decode(a), decode(b), start.data), start.dtype.scalar)

    for method in (cast_impl, create_fp_to_fp, binary_op, unary_op, create_fma, create_dot):
        setattr(builder, method.__name__, method)
    builder.mlsdc_patched = True


@contextmanager
def backwards(grid: int) -> Iterator[None]:
    """Run the programs of 1-D grids last to first: on a GPU their order is anybody's guess."""
    builder = interpreter.interpreter_builder
    forwards = builder.set_grid_idx
    builder.set_grid_idx = lambda x, y, z: forwards(grid - 1 - x, y, z)
    try:
        yield
    finally:
        builder.set_grid_idx = forwards


def launch(source: Path, entry: str, grid: int, args: Sequence[Array | int | float], *, reverse: bool = False) -> None:
    """Run a generated kernel over its 1-D grid, one program after the other. Arrays are passed as they lie and written in place."""
    interpret(load_source(source, entry), grid, [as_torch(arg) if isinstance(arg, np.ndarray) else arg for arg in args], reverse=reverse)


def interpret(kernel: Any, grid: int, args: Sequence[torch.Tensor | int | float], *, reverse: bool = False) -> None:
    """Run a loaded kernel, as `launch` does."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise CompileError("the Triton interpreter needs TRITON_INTERPRET=1 in the environment before triton is imported")
    patch()
    with np.errstate(all="ignore"), backwards(grid) if reverse else nullcontext():
        if grid:
            kernel[(grid,)](*args)


def descriptor(data: torch.Tensor, shape: Sequence[int], tiles: Tiles) -> Any:
    """A dense tensor at the beginning of `data` as an argument `map f32[64, 64]`. Raises ValueError where no tensor map could be made."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if why := tiles.unfit(shape, data.data_ptr()):
        raise ValueError(f"a map of {list(shape)} by {tiles}: {why}")
    return TensorDescriptor(data[: prod(shape)].view(tuple(shape)), list(shape), list(strides(shape)), list(tiles.shape))


def as_torch(array: Array) -> torch.Tensor:
    """The same memory as a tensor; torch has no arithmetic on u64, and the kernels read words, so they are passed as i64."""
    return torch.from_numpy(array.view(np.int64) if array.dtype == np.uint64 else array)
