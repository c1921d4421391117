"""Our own file of trained heads: safetensors, matrices as int8 codes with a 16-bit scale for each group of 32, vectors as f32.

Matrix NAME is two tensors, `NAME` i8[n, k] and `NAME.scale` f16[n, k / 32]. `d2t` u16 or i32[draft_vocab] holds the target's id of each
draft id, rising. The header's metadata: `mlsdc_heads` (format number), `config` (config.py as JSON), and what the trainer says of the run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.capture.source import Blocks, checked
from mlsdc.compiler.errors import CaptureError, HeadError
from mlsdc.compiler.heads.config import HeadConfig, from_json, to_json
from mlsdc.compiler.quantise import Q8, Q8_0_BYTES, quantise_q8
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.safetensors import SafetensorsFile

FORMAT = "1"
SCALE = ".scale"
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class HeadFile:
    """A head of any layout, under canonical names. `tensors` are f32, or q8 where the file says so; `d2t` i32[draft_vocab]."""

    label: str
    config: HeadConfig
    tensors: Mapping[str, Array | Q8]
    d2t: Array

    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        tensor = self._tensor(name)
        return tensor.codes.shape if isinstance(tensor, Q8) else tensor.shape

    def read(self, name: str) -> Array:
        tensor = self._tensor(name)
        values: Array = tensor.dequantise() if isinstance(tensor, Q8) else np.ascontiguousarray(tensor, np.float32)
        return checked(values, self.label, name)

    def block(self, name: str) -> Blocks | None:
        """Codes and scales as Q8_0 blocks, so that packing keeps them."""
        tensor = self._tensor(name)
        if not isinstance(tensor, Q8):
            return None
        n, k = tensor.codes.shape
        rows = np.empty((n, k // 32, Q8_0_BYTES), np.uint8)
        rows[..., :2] = np.ascontiguousarray(tensor.scales).view(np.uint8).reshape(n, -1, 2)
        rows[..., 2:] = np.ascontiguousarray(tensor.codes).view(np.uint8).reshape(n, -1, 32)
        return Blocks("Q8_0", (n, k), rows.reshape(n, -1))

    def _tensor(self, name: str) -> Array | Q8:
        if name not in self.tensors:
            raise CaptureError(f"{self.label}: has no tensor '{name}'")
        return self.tensors[name]


def check_tensors(label: str, config: HeadConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises HeadError for tensors that are missing, of another shape, or that nothing reads: all of them, by name."""
    wanted = config.shapes()
    missing, extra = [name for name in wanted if name not in shapes], [name for name in shapes if name not in wanted]
    if missing:
        raise HeadError(f"{label}: has no tensor {', '.join(map(repr, missing[:8]))}{_more(missing)}, which a head of kind "
                        f"'{config.kind}' needs")
    if extra:
        raise HeadError(f"{label}: has tensor {', '.join(map(repr, extra[:8]))}{_more(extra)}, which a head of kind "
                        f"'{config.kind}' does not read")
    for name, shape in wanted.items():
        if tuple(shapes[name]) != shape:
            raise HeadError(f"{label}: tensor '{name}' has shape {list(shapes[name])}, its config says {list(shape)}")


def _more(names: list[str]) -> str:
    return f" and {len(names) - 8} more" if len(names) > 8 else ""


def is_own(path: Path) -> bool:
    """Whether the file is one of ours."""
    try:
        return "mlsdc_heads" in SafetensorsFile(path).metadata
    except (ArtifactError, OSError):
        return False


def read_own(path: Path) -> HeadFile:
    """Raises HeadError, CaptureError."""
    try:
        file = SafetensorsFile(path)
    except (ArtifactError, OSError) as error:
        raise HeadError(f"{path.name}: cannot be read ({error})") from None
    if file.metadata.get("mlsdc_heads") != FORMAT:
        raise HeadError(f"{path.name}: heads of format {file.metadata.get('mlsdc_heads')}, this version reads {FORMAT}")
    config = from_json(file.metadata.get("config", ""), path.name)
    tensors: dict[str, Array | Q8] = {}
    for name in file.tensors:
        if name == "d2t" or name.endswith(SCALE):
            continue
        stored = file.tensor(name)
        if stored.dtype == np.int8:
            if name + SCALE not in file.tensors:
                raise HeadError(f"{path.name}: tensor '{name}' is int8 and has no '{name + SCALE}'")
            scales = file.tensor(name + SCALE)
            checked(scales.astype(np.float32), path.name, name + SCALE)
            tensors[name] = Q8(stored, scales)
        else:
            tensors[name] = checked(stored.astype(np.float32), path.name, name)
    check_tensors(path.name, config, {name: t.codes.shape if isinstance(t, Q8) else t.shape for name, t in tensors.items()})
    if "d2t" not in file.tensors:
        raise HeadError(f"{path.name}: has no tensor 'd2t' (the target's ids of the draft vocabulary)")
    return HeadFile(path.name, config, tensors, check_d2t(path.name, np.array(file.tensor("d2t"), np.int32), config))


def check_d2t(label: str, d2t: Array, config: HeadConfig) -> Array:
    """Raises HeadError unless `d2t` names `draft_vocab` ids of the target, each once."""
    if d2t.shape != (config.draft_vocab,):
        raise HeadError(f"{label}: d2t has {d2t.size} entries, draft_vocab is {config.draft_vocab}")
    if d2t.size and (d2t.min() < 0 or d2t.max() >= config.vocab_size):
        bad = int(d2t[(d2t < 0) | (d2t >= config.vocab_size)][0])
        raise HeadError(f"{label}: d2t names token {bad}, the target has ids below {config.vocab_size}")
    if np.unique(d2t).size != d2t.size:
        raise HeadError(f"{label}: d2t names a token twice")
    return d2t


def write_own(path: Path, config: HeadConfig, tensors: Mapping[str, Array], d2t: Array, notes: Mapping[str, str]) -> None:
    """Quantise and write; the file is renamed into place. Same input, same bytes. Raises HeadError."""
    from safetensors.numpy import save

    stored: dict[str, Array] = {"d2t": np.ascontiguousarray(d2t, np.uint16 if config.vocab_size <= 1 << 16 else np.int32)}
    for name, value in tensors.items():
        value = checked(np.ascontiguousarray(value, np.float32), path.name, name)
        if value.ndim == 2 and value.shape[1] % 32 == 0:
            packed = quantise_q8(value)
            stored[name], stored[name + SCALE] = packed.codes, packed.scales
        else:
            stored[name] = value
    metadata = {**notes, "mlsdc_heads": FORMAT, "config": to_json(config)}
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(_sorted_metadata(save(stored, metadata), metadata))
        os.replace(partial, path)
    except OSError as error:
        raise HeadError(f"{path}: cannot be written: {error.strerror}") from None


def _sorted_metadata(data: bytes, metadata: Mapping[str, str]) -> bytes:
    """The library writes the metadata in the order of a hash that changes from run to run."""
    import json

    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    ordered = {"__metadata__": dict(sorted(metadata.items()))} | {name: value for name, value in header.items() if name != "__metadata__"}
    text = json.dumps(ordered, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]
