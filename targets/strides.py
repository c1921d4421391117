"""How elementwise kernels step through their operands: strides of broadcast, transposed and sliced values, and the powers they have."""

from __future__ import annotations

from math import prod

from mlsdc.compiler.types import TensorType

POWERS = {2.0: "square", 3.0: "cube", 1.0: "copy", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}
Strides = tuple[int, ...]


def strides_of(type_: TensorType) -> Strides:
    """Row-major, in elements; all axes but the first are static."""
    sizes = [size if isinstance(size, int) else 0 for size in type_.shape]
    return tuple(prod(sizes[axis + 1 :]) for axis in range(type_.rank))


def broadcast(type_: TensorType, out: TensorType) -> Strides:
    """Strides that read a value in the shape of `out`: 0 along axes it lacks or has once."""
    missing = out.rank - type_.rank
    return (0,) * missing + tuple(0 if size == 1 else step for size, step in zip(type_.shape, strides_of(type_), strict=True))


def collapsed(dims: tuple[int, ...], strides: list[Strides]) -> tuple[tuple[int, ...], list[Strides]]:
    """The axes behind the rows, neighbours merged where every operand steps through them as through one."""
    kept: list[int] = []
    steps: list[list[int]] = [[s[0]] for s in strides]
    for axis, size in enumerate(dims, 1):
        if size == 1 and len(dims) > 1:
            continue
        if kept and all(own[-1] == s[axis] * size for own, s in zip(steps, strides, strict=True)):
            kept[-1] *= size
            for own, s in zip(steps, strides, strict=True):
                own[-1] = s[axis]
            continue
        kept.append(size)
        for own, s in zip(steps, strides, strict=True):
            own.append(s[axis])
    if not kept:
        return (1,), [(own[0], 0) for own in steps]
    return tuple(kept), [tuple(own) for own in steps]
