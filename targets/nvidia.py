"""NVIDIA GPUs: kernels in Triton, compiled ahead of time without a GPU. Importing this imports neither triton nor torch.

Launches are made for CUDA graphs: a launch has `grid * ceil(count / grain)` programs for the most rows of a graph's bucket, and programs
beyond the step's own counts return at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.module import LevelModule
from mlsdc.compiler.ops import Op
from mlsdc.compiler.quantise import F8, Q4, Q8
from mlsdc.compiler.types import GROUP, Dim, DType, TensorType, Type
from mlsdc.runtime.kv_format import KvGeometry, to_bf16
from mlsdc.runtime.levels.ngram_ahead import device_bytes
from mlsdc.runtime.manifest import TargetInfo
from mlsdc.runtime.program import ProgramSpec, Tap
from mlsdc.runtime.step import Limits
from mlsdc.targets.hardware import GPUS, Gpu
from mlsdc.targets.nvidia_layout import f8_bytes, pack_f8, pack_q4, pack_q8, packed_bytes
from mlsdc.targets.protocol import Call, Declined, KernelSpec, Lowering, Target
from mlsdc.targets.values import whole

T = TypeVar("T", bound=Op)
LOWER: dict[type[Op], Callable[[NvidiaTarget, Node, Any, Graph], Lowering | Declined]] = {}
ELEMENT = {DType.BOOL: 1, DType.I8: 1, DType.U8: 1, DType.BF16: 2, DType.F16: 2, DType.I64: 8}
PLAIN = {DType.F32: np.float32, DType.F16: np.float16}


def lowers(kind: type[T]) -> Callable[[Callable[[NvidiaTarget, Node, T, Graph], Lowering | Declined]], Callable[..., Lowering | Declined]]:
    """Register how nodes of an op are lowered."""

    def register(function: Callable[[NvidiaTarget, Node, T, Graph], Lowering | Declined]) -> Callable[..., Lowering | Declined]:
        LOWER[kind] = function
        return function

    return register


class NvidiaTarget(Target):
    """Lowers for one GPU of `targets.hardware.GPUS` at an artifact's limits. `exact`: a drafted row has its committed self's bits (L2)."""

    device = "cuda"
    family = "gpu"  # AMD's, too
    tunable = False  # builds ship the kernels of nvidia_variants, too
    tma = False  # whether linears for many rows copy their operands by TMA
    attention = "triton"  # or "nvrtc": which compiler's kernels do attention

    def __init__(self, name: str, limits: Limits, exact: bool = True) -> None:
        self.name = name
        self.exact = exact
        self.gpu: Gpu = GPUS[name]
        self.requires = (f"sm_{self.gpu.sm}",)
        self.limits = limits

    def lower(self, node: Node, graph: Graph) -> Lowering | Declined:
        rule = LOWER.get(type(node.op))
        return Declined(f"'{node.op.opname}' has no Triton template yet") if rule is None else rule(self, node, node.op, graph)

    def prologue(self, graph: Graph) -> Sequence[Lowering]:
        """No launches: a tile of attention finds its sequence by itself, so that a CUDA graph can hold the grid."""
        from mlsdc.targets.nvidia_kv import prologue

        return prologue(graph, self.limits)

    def choose_attention(self, compiler: str) -> str | None:
        from mlsdc.targets.nvrtc_build import refused

        if compiler == "nvrtc" and (why := refused(self)):
            return why
        self.attention = compiler
        return None

    def ship_variants(self) -> None:
        self.tunable = True

    def choose_linear(self, how: str) -> str | None:
        from mlsdc.targets.nvidia_tma import refused

        self.tma = refused(self) is None
        return refused(self)

    def commit(self, geometry: KvGeometry) -> Lowering:
        from mlsdc.targets.nvidia_kv import commit_lowering

        return commit_lowering(geometry, self.limits)

    def sample(self, logits: Tap, vocab_size: int, base: int) -> tuple[Lowering, int]:
        from mlsdc.targets.nvidia_sample import sample_lowering

        return sample_lowering(logits, vocab_size, self.limits, base)

    def follow(self) -> Lowering:
        from mlsdc.targets.nvidia_ahead import follow_lowering

        return follow_lowering(self.limits)

    def grow(self, level: LevelModule, draft: ProgramSpec, vocab_size: int) -> Call | None:
        from mlsdc.targets.nvidia_grow import grow_call

        return grow_call(level, draft, self.limits, vocab_size)

    def ahead(self, level: LevelModule, programs: Mapping[str, ProgramSpec], target: Mapping[str, ProgramSpec]
              ) -> Sequence[Call | str] | None:
        from mlsdc.targets.nvidia_grow import ahead_calls

        return ahead_calls(level, programs, target, self.limits)

    def level_functions(self, kind: str, params: Mapping[str, Any]) -> Sequence[KernelSpec]:
        from mlsdc.targets.nvidia_ahead import ngram_specs

        return ngram_specs(int(params["order"])) if kind == "ngram" else super().level_functions(kind, params)

    def level_bytes(self, kind: str, params: Mapping[str, Any], limits: Limits, counts_bytes: int) -> int:
        return device_bytes(params, limits, counts_bytes) if kind == "ngram" else 0

    def packed_bytes(self, type_: Type) -> int:
        tensor = self._weight(type_)
        shape = whole(tensor)
        if tensor.dtype in (DType.Q8, DType.Q4):
            n, k = shape
            return packed_bytes(n, k, 8 if tensor.dtype is DType.Q8 else 4)
        if tensor.dtype is DType.F8:
            return f8_bytes(*shape)
        return int(np.prod(shape)) * (4 if tensor.dtype == DType.F32 else 2)

    def layout(self, type_: Type) -> str:
        """f32 lies as it is on every device; the rest is the same for all GPUs."""
        return "f32" if self._weight(type_).dtype is DType.F32 else self.family

    def pack(self, type_: Type, rows: npt.NDArray[Any] | Q8 | Q4 | F8) -> npt.NDArray[np.uint8]:
        tensor = self._weight(type_)
        if isinstance(rows, Q8):
            return pack_q8(rows)
        if isinstance(rows, Q4):
            return pack_q4(rows)
        if isinstance(rows, F8):
            return pack_f8(rows)
        values = np.asarray(rows)
        if tensor.dtype == DType.BF16:
            data = values if values.dtype == np.uint16 else to_bf16(np.ascontiguousarray(values, np.float32))
        else:
            data = np.ascontiguousarray(values, PLAIN[tensor.dtype])
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)

    def build(self, specs: Sequence[KernelSpec], directory: Path) -> TargetInfo:
        from mlsdc.targets.nvidia_build import build

        return build(self.name, self.gpu, self.requires, specs, directory, self.tunable)

    @property
    def max_rows(self) -> int:
        return self.limits.max_num_batched_tokens

    def _weight(self, type_: Type) -> TensorType:
        if not isinstance(type_, TensorType) or type_.dtype not in (*PLAIN, DType.BF16, DType.Q8, DType.Q4, DType.F8):
            raise CompileError(f"{self.name}: no layout for a weight of type {type_} yet")
        return type_


def sizes(type_: Type) -> list[int]:
    """Shape of a row-wise tensor, at the limit where it is symbolic."""
    assert isinstance(type_, TensorType)
    return [size.hi if isinstance(size, Dim) else size for size in type_.shape]


def columns_of(type_: Type) -> int:
    return sizes(type_)[1]


def storage(type_: Type) -> int:
    """Bytes of a plain value in the arena."""
    if not isinstance(type_, TensorType):
        return 0
    return int(np.prod(sizes(type_))) * ELEMENT.get(type_.dtype, 4)


def a8_bytes(max_rows: int, columns: int) -> int:
    """Bytes of an a8 or a16 value: codes, then scales."""
    return max_rows * columns + 4 * max_rows * (columns // GROUP)


from mlsdc.targets import nvidia_attention, nvidia_experts, nvidia_f8, nvidia_kv, nvidia_levels, nvidia_plain, nvidia_rows  # noqa: E402, F401  (they register; they need what stands above)
