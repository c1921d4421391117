"""Checkpoints that were quantised by others, as a weight source: FP8 and int4 of compressed-tensors, AWQ, GPTQ, and Hugging Face's `fp8`.

`config.json`'s quantization_config says how. A linear's tensors (`X.qweight`, `X.scales`, ...) appear as the one tensor `X.weight`, which
can be read as numbers, exactly, or as stored blocks of kind `int4` or `fp8` that packers take over without quantising again
(compiler/weights.py). Scales of activations are not read: a CPU's linears quantise rows by themselves, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mlsdc.compiler.capture import int4_layouts
from mlsdc.compiler.capture.int4_layouts import Int4
from mlsdc.compiler.capture.source import Blocks, WeightSource, checked, not_finite
from mlsdc.compiler.errors import CaptureError
from mlsdc.compiler.quantise import f8_blocks, int4_blocks
from mlsdc.compiler.types import GROUP
from mlsdc.runtime.kv_numbers import from_e4m3

Array = NDArray[Any]
METHODS = ("awq", "gptq", "compressed-tensors", "fp8")
E4M3 = "F8_E4M3"


class Stored(WeightSource, Protocol):
    """A weight source that also gives tensors as they are stored."""

    def dtype(self, name: str) -> str:
        """safetensors' name of the element type."""

    def stored(self, name: str) -> Array:
        """The elements without conversion; bf16 as u16, F8_E4M3 as u8."""


@dataclass(frozen=True)
class Int4Scheme:
    """`marker` is the tensor that every quantised linear has; `parts` are needed, `optional` may be there."""

    marker: str
    parts: tuple[str, ...]
    optional: tuple[str, ...]
    unpack: Callable[[Mapping[str, Array]], Int4]


@dataclass(frozen=True)
class Fp8Scheme:
    """`X.weight` of e4m3 with `X.<scale>`: one for all, one a row, or one a block of `block` rows and columns."""

    scale: str
    block: tuple[int, int] | None = None


_BESIDE = ("input_scale", "output_scale", "input_zero_point", "weight_zero_point", "g_idx", "weight_g_idx", "weight_shape")


class QuantisedWeights:
    """`base`'s tensors with those of quantised linears put together. Raises CaptureError for a linear that lacks a part."""

    def __init__(self, base: Stored, scheme: Int4Scheme | Fp8Scheme, where: str) -> None:
        self._base, self._scheme, self._where = base, scheme, where
        names = base.names()
        marker = scheme.marker if isinstance(scheme, Int4Scheme) else "weight"
        self._linears = {name.removesuffix(marker) + "weight": name.removesuffix(marker) for name in names
                         if name.endswith("." + marker) and (isinstance(scheme, Int4Scheme) or base.dtype(name) == E4M3)}
        if not self._linears:
            raise CaptureError(f"{where}: config.json says it is quantised, but no tensor '*.{marker}'"
                               f"{'' if isinstance(scheme, Int4Scheme) else ' is ' + E4M3} is there")
        needed = scheme.parts if isinstance(scheme, Int4Scheme) else ("weight", scheme.scale)
        self._held = held = frozenset(names)
        for prefix in self._linears.values():
            if len(shape := base.shape(prefix + marker)) != 2:
                raise CaptureError(f"{where}: tensor '{prefix}{marker}' has shape {list(shape)}, expected the two sizes of a linear's")
            for part in needed:
                if prefix + part not in held:
                    raise CaptureError(f"{where}: has '{prefix}{marker}' but no '{prefix}{part}'")
        parts = {*needed, *(scheme.optional if isinstance(scheme, Int4Scheme) else ()), *_BESIDE} - {"weight"}
        hidden = {prefix + part for prefix in self._linears.values() for part in parts}
        self._names = tuple(dict.fromkeys((*(name for name in names if name not in hidden), *self._linears)))

    def names(self) -> tuple[str, ...]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._linears or isinstance(self._scheme, Fp8Scheme):
            return self._base.shape(name)
        prefix, marker = self._linears[name], self._scheme.marker
        rows, columns = self._base.shape(prefix + marker)
        if marker == "weight_packed":
            return tuple(int(size) for size in self._base.stored(prefix + "weight_shape"))
        return (columns, rows * 8) if "g_idx" in self._scheme.optional else (columns * 8, rows)

    def read(self, name: str) -> NDArray[np.float32]:
        if name not in self._linears:
            return self._base.read(name)
        if isinstance(self._scheme, Int4Scheme):
            return checked(self._int4(name, self._scheme).dequantise(), self._where, name)
        values = from_e4m3(self._base.stored(name))
        return checked(values * self._scales(name, self._scheme), self._where, name)

    def block(self, name: str) -> Blocks | None:
        if name not in self._linears:
            return self._base.block(name)
        if isinstance(self._scheme, Int4Scheme):
            return self._int4_block(name, self._int4(name, self._scheme))
        codes, scales = self._base.stored(name), self._scales(name, self._scheme)
        if self._scheme.block is not None or codes.shape[1] % GROUP:
            return None
        if not np.isfinite(scales).all() or (codes & 0x7F == 0x7F).any():
            raise not_finite(self._where, name)
        return Blocks("fp8", codes.shape, f8_blocks(codes, np.broadcast_to(scales[:, 0], len(codes))))

    def _int4_block(self, name: str, weight: Int4) -> Blocks | None:
        found = weight.by_32()
        if found is None:
            return None
        codes, zeros, scales = found
        if not np.isfinite(scales).all():
            raise not_finite(self._where, name)
        wide = scales.astype(np.float32) * zeros.astype(np.float32)
        with np.errstate(over="ignore"):
            exact = np.array_equal(wide.astype(np.float16).astype(np.float32), wide)
        return Blocks("int4" if exact else "int4 with zero points", codes.shape, int4_blocks(codes, zeros, scales))

    def _int4(self, name: str, scheme: Int4Scheme) -> Int4:
        prefix = self._linears[name]
        parts = {part: self._part(prefix + part) for part in (*scheme.parts, *scheme.optional) if prefix + part in self._held}
        try:
            return scheme.unpack(parts)
        except ValueError as error:
            raise CaptureError(f"{self._where}: '{prefix.removesuffix('.')}': {error}") from None

    def _part(self, name: str) -> Array:
        kind, is_scale = self._base.dtype(name), name.endswith(("scales", "scale"))
        known = ("F16", "BF16", "F32") if is_scale else ("I32", "I64")
        if kind not in known:
            raise CaptureError(f"{self._where}: tensor '{name}' has dtype {kind}, expected {' or '.join(known)}")
        return self._base.read(name) if is_scale else self._base.stored(name)

    def _scales(self, name: str, scheme: Fp8Scheme) -> NDArray[np.float32]:
        """f32[n, 1] or f32[n, k]."""
        n, k = self._base.shape(name)
        scale = self._linears[name] + scheme.scale
        values = self._base.read(scale)
        if scheme.block is not None:
            blocks = -(-n // scheme.block[0]), -(-k // scheme.block[1])
            if values.shape != blocks:
                raise CaptureError(f"{self._where}: tensor '{scale}' has shape {list(values.shape)}, expected {list(blocks)}: one a block "
                                   f"of {scheme.block[0]} x {scheme.block[1]}")
            return np.repeat(np.repeat(values, scheme.block[0], 0)[:n], scheme.block[1], 1)[:, :k]
        if values.size not in (1, n) or values.shape not in ((), (1,), (n,), (n, 1), (1, 1)):
            raise CaptureError(f"{self._where}: tensor '{scale}' has shape {list(values.shape)}, expected [{n}, 1] or [1]: one a row or "
                               "one for all")
        return np.ascontiguousarray(np.broadcast_to(values.reshape(-1, 1), (n, 1)))


def quantised_weights(config: Mapping[str, Any], base: Stored, where: str) -> WeightSource:
    """`base`, or what its quantization_config makes of it. Raises CaptureError for a way of quantising that is not known, by name."""
    facts = config.get("quantization_config") or config.get("compression_config")
    if facts is None:
        odd = next((name for name in base.names() if name.endswith((".qweight", ".weight_packed"))), None)
        if odd is not None:
            raise CaptureError(f"{where}: has '{odd}', but config.json has no 'quantization_config' to say what it means")
        return base
    if not isinstance(facts, Mapping):
        raise CaptureError(f"{where}/config.json: 'quantization_config' is {type(facts).__name__}, expected an object")
    return QuantisedWeights(base, scheme_of(facts, f"{where}/config.json: quantization_config"), where)


def scheme_of(facts: Mapping[str, Any], at: str) -> Int4Scheme | Fp8Scheme:
    method = facts.get("quant_method")
    if method == "awq":
        size = _four_bits(facts, at)
        if str(facts.get("version", "gemm")).lower() != "gemm":
            raise CaptureError(f"{at}: version '{facts['version']}'; known is gemm")
        return Int4Scheme("qweight", ("qweight", "qzeros", "scales"), (), lambda parts: int4_layouts.awq(parts, size))
    if method == "gptq":
        size, form = _four_bits(facts, at), facts.get("checkpoint_format", "gptq")
        if form not in ("gptq", "gptq_v2"):
            raise CaptureError(f"{at}: checkpoint_format '{form}'; known are gptq, gptq_v2")
        offset = int(form == "gptq")
        return Int4Scheme("qweight", ("qweight", "qzeros", "scales"), ("g_idx",), lambda parts: int4_layouts.gptq(parts, size, offset))
    if method == "compressed-tensors":
        return _compressed(facts, at)
    if method == "fp8":
        block = facts.get("weight_block_size")
        if block is None:
            return Fp8Scheme("weight_scale")
        if not isinstance(block, list) or len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
            raise CaptureError(f"{at}: weight_block_size is {block!r}, expected two sizes, e.g. [128, 128]")
        return Fp8Scheme("weight_scale_inv", (block[0], block[1]))
    raise CaptureError(f"{at}: quant_method '{method}' is not known; known are {', '.join(METHODS)}")


def _four_bits(facts: Mapping[str, Any], at: str) -> int:
    """The group size. Raises CaptureError for other bits."""
    bits = facts.get("bits", facts.get("w_bit"))
    if bits != 4:
        raise CaptureError(f"{at}: bits is {bits!r}; known is 4")
    return _group_size(facts.get("group_size", facts.get("q_group_size")), at)


def _group_size(size: Any, at: str) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise CaptureError(f"{at}: group_size is {size!r}, expected a number of columns, or -1 for a whole row")
    return size


def _compressed(facts: Mapping[str, Any], at: str) -> Int4Scheme | Fp8Scheme:
    groups = facts.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CaptureError(f"{at}: has no 'config_groups'")
    if len(groups) > 1:
        raise CaptureError(f"{at}: config_groups has {len(groups)} schemes ({', '.join(groups)}), expected one for all linears")
    ((name, group),) = groups.items()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise CaptureError(f"{at}: config_groups.{name} has no 'weights'")
    kind = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    form = group.get("format") or facts.get("format")
    if kind in (("float", 8, "tensor"), ("float", 8, "channel")):
        return Fp8Scheme("weight_scale")
    if kind[:2] == ("int", 4) and kind[2] in ("group", "channel") and form == "pack-quantized":
        size = _group_size(weights.get("group_size") if kind[2] == "group" else -1, f"{at}: config_groups.{name}.weights")
        needed = ("weight_packed", "weight_scale", "weight_shape", *(() if weights.get("symmetric", True) else ("weight_zero_point",)))
        return Int4Scheme("weight_packed", needed, ("weight_g_idx",), lambda parts: int4_layouts.packed(parts, size))
    raise CaptureError(f"{at}: config_groups.{name}: {kind[1]}-bit {kind[0]} weights by {kind[2]} in format '{form}'; known are 8-bit "
                       "float by tensor or channel, and 4-bit int by group or channel in format pack-quantized")
