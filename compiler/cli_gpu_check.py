"""What a card says of an artifact: numerics of every kernel against the reference interpreter (where torch is), of the whole model against
a CPU artifact of it, needles in long caches, bandwidth of every kernel, step times, and what torch and FlashInfer take for the same work.

One command, minutes; driver and base install are enough for all but the comparisons with torch. Kernels come prebuilt: no triton is used.
Until it has run on a card, nothing about GPUs in this project was measured.
"""

from __future__ import annotations

import ctypes as C
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlsdc.compiler.cli_gpu_drafts import Drafts, check_drafts
from mlsdc.compiler.cli_gpu_needle import Needle, find_needle
from mlsdc.compiler.cli_gpu_numerics import CHAIN, KernelNumerics, kernel_numerics
from mlsdc.compiler.gpu_peers import PeerTime, peer_times
from mlsdc.compiler.graph import Graph
from mlsdc.compiler.roofline import MACHINES, Load, step_costs, step_seconds
from mlsdc.compiler.view.stages import read_graphs
from mlsdc.runtime.bench.rig import Rig
from mlsdc.runtime.device.cuda import CudaDevice
from mlsdc.runtime.errors import DeviceError
from mlsdc.runtime.step import Array
from mlsdc.targets.nvidia_values import bearers

COPY_BYTES = 256 << 20
COPIES = 10
STEPS = 50
CLOSE = 0.02  # of the spread of a row's logits: what rounding of activations may do
PROMPT = 32  # rows of the first of the two steps whose logits are compared; the other one has CHAIN
NEEDLES = (32768, 131072)  # tokens


@dataclass(frozen=True)
class Numerics:
    """Rows of both devices: `worst` is the largest difference of a logit, in spreads of its row; `same` rows chose the same token."""

    rows: int
    same: int
    worst: float

    @property
    def passed(self) -> bool:
        return self.worst < CLOSE


@dataclass(frozen=True)
class StepTime:
    """A step of one sequence: through its CUDA graph and the host, and as the sum of its kernels."""

    rows: int
    context: int
    graph_us: float
    kernels_us: float
    predicted_us: float


@dataclass(frozen=True)
class KernelTime:
    """A kernel in a step of one row: all its launches together. `of_copy`: its bytes per second over a copy's, 0 if unknown."""

    kernel: str
    launches: int
    us: float
    bytes: float
    of_copy: float


@dataclass(frozen=True)
class GpuCheck:
    gpu: str
    target: str
    cuda: int
    copy_bytes_s: float
    steps: list[StepTime]
    kernels: list[KernelTime]
    numerics: Numerics | None = None
    by_kernel: list[KernelNumerics] = field(default_factory=list)
    needles: list[Needle] = field(default_factory=list)
    drafts: list[Drafts] = field(default_factory=list)
    peers: list[PeerTime] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        parts = all(one.passed for found in (self.by_kernel, self.needles, self.drafts) for one in found)
        return parts and (self.numerics is None or self.numerics.passed)

    def to_json(self) -> dict[str, Any]:
        """An error of what is no number is null: JSON has no infinity."""
        found = asdict(self) | {"passed": self.passed}
        for name in ("by_kernel", "needles", "drafts"):
            for entry, one in zip(found[name], getattr(self, name), strict=True):
                entry["passed"] = one.passed
        numbers: dict[str, Any] = finite(found)
        return numbers

    def lines(self) -> Iterator[str]:
        driver = f"driver for CUDA {self.cuda // 1000}.{self.cuda % 1000 // 10}"
        yield f"{self.gpu}, {driver}, kernels of {self.target}; copy {self.copy_bytes_s / 1e9:,.0f} GB/s"
        if self.numerics is None:
            yield "numerics    not compared: give a CPU artifact of the same model with --reference"
        else:
            n = self.numerics
            yield (f"numerics    {'ok' if n.passed else 'WRONG'}: {n.same} of {n.rows} rows choose what the CPU chooses, logits differ "
                   f"by at most {n.worst:.2%} of their spread")
        wrong = [kernel for kernel in self.by_kernel if not kernel.passed]
        if self.by_kernel:
            yield f"by kernel   {len(self.by_kernel) - len(wrong)} of {len(self.by_kernel)} kernels as the reference interpreter has them"
        for one in wrong:
            yield f"  WRONG     {one.kernel}: {one.error:.1e} off at %{one.worst}, {one.allowed:.1e} allowed"
        for needle in self.needles:
            found = "found" if needle.passed else "NOT FOUND"
            yield (f"needle      {found} in {needle.context:,} tokens of {needle.kv}: {needle.error:.1e} off; "
                   f"attention of a row in a layer takes {needle.us:.1f} us")
        for drafts in self.drafts:
            texts = drafts.why or ("texts the same with and without" if drafts.texts else "TEXTS DIFFER")
            yield (f"drafts      {'ok' if drafts.passed else 'WRONG'}: {drafts.same} of {drafts.trees} trees of '{drafts.level}' are those "
                   f"that the host grows, {texts}")
        for peer in self.peers:
            yield f"{peer.peer:11} {peer.us:9.1f} us  {peer.what}"
        yield f"{'rows':>6}{'context':>9}{'graph us':>10}{'kernels':>9}{'predicted':>11}"
        for step in self.steps:
            yield f"{step.rows:6}{step.context:9,}{step.graph_us:10.1f}{step.kernels_us:9.1f}{step.predicted_us:11.1f}"
        yield f"{'us':>9}{'launches':>10}{'MB':>9}{'of copy':>9}  kernel"
        for kernel in self.kernels:
            share = f"{kernel.of_copy:.0%}" if kernel.of_copy else ""
            yield f"{kernel.us:9.1f}{kernel.launches:10}{kernel.bytes / 1e6:9.1f}{share:>9}  {kernel.kernel}"
        yield from self.notes


def finite(value: Any) -> Any:
    """The same with None for every float that is no number."""
    match value:
        case float():
            return value if np.isfinite(value) else None
        case dict():
            return {key: finite(one) for key, one in value.items()}
        case list():
            return [finite(one) for one in value]
    return value


class GpuRig(Rig):
    """A rig without the CPU's streaming read."""

    def open_stream(self) -> Any:
        if not isinstance(self.device, CudaDevice):
            raise DeviceError(f"device '{self.device.name}': gpu-check is for NVIDIA GPUs")
        return None


def gpu_check(path: Path, reference: Path | None = None, device: str = "cuda") -> GpuCheck:
    """Raises ArtifactError, DeviceError."""
    with GpuRig(path, device=device) as rig:
        card = rig.device
        assert isinstance(card, CudaDevice)
        copy = copy_rate(card)
        file = f"graph/{rig.manifest.target_level.name}.ir"
        graph = read_graphs(rig.artifact.path(file).read_text(encoding="utf-8"), file)["forward"]
        longest = rig.limits.max_model_len - rig.limits.max_tree_nodes - 1
        most = min(rig.limits.max_tree_nodes + 1, rig.limits.max_logit_rows)
        shapes = [(1, 128), *((rows, longest) for rows in sorted({1, min(CHAIN, most), most}))]
        steps = [step_time(rig, graph, rows, min(context, longest)) for rows, context in shapes]
        rig.set_rows(longest, 1, drafted=False)
        kernels = kernel_times(rig, graph, longest, copy)
        notes = ["no kernel of this artifact had run on a card before: keep this output in docs/gpu-results.md"]
        by_kernel = kernel_numerics(rig, graph, notes)
        needles = [find_needle(rig, graph, context) for context in sorted({min(most, longest) for most in NEEDLES})]
        peers = peer_times(graph, longest, notes)
        numerics = None
        if reference is not None:
            with Rig(reference, device="cpu") as cpu:
                numerics = compare(logits(rig), logits(cpu), rig.manifest.model.vocab_size)
        found = GpuCheck(card.gpu, card.target.name, card.driver.cuda_version, copy, steps, kernels, numerics, by_kernel,
                         [needle for needle in needles if needle is not None], [], peers, notes)
    return replace(found, drafts=check_drafts(path, device))


def copy_rate(device: CudaDevice) -> float:
    """Bytes per second of a copy on the card, read and written bytes together."""
    driver = device.driver
    size = min(COPY_BYTES, driver.free_bytes()[0] // 4)
    source, target, ms = driver.allocate(size), driver.allocate(size), C.c_float()
    with driver.events() as (begin, end):
        for turn in range(2):  # the first warms up
            driver.cuEventRecord(begin, device.stream)
            for _ in range(COPIES):
                driver.cuMemcpyDtoDAsync_v2(C.c_uint64(target), C.c_uint64(source), C.c_size_t(size), device.stream)
            driver.cuEventRecord(end, device.stream)
            driver.cuEventSynchronize(end)
            if turn:
                driver.cuEventElapsedTime(C.byref(ms), begin, end)
    for address in (source, target):
        driver.cuMemFree_v2(C.c_uint64(address))
    return 2 * size * COPIES / (ms.value / 1e3)


def step_time(rig: Rig, graph: Graph, rows: int, context: int) -> StepTime:
    rig.set_rows(context, rows, drafted=rows > 1)
    rig.seconds(3)
    seconds = rig.seconds(STEPS)
    kernels = sum(us for _, _, us in rig.forward.profile())
    machine = MACHINES[rig.device.target.name]  # type: ignore[attr-defined]
    predicted = step_seconds(step_costs(graph, Load(rows, 1, context, out=rows if rows > 1 else 1)), machine)
    return StepTime(rows, context, seconds * 1e6, kernels, predicted * 1e6)


def kernel_times(rig: Rig, graph: Graph, context: int, copy: float) -> list[KernelTime]:
    """The step that is set, kernel by kernel, the slowest first. A node's bytes count for one of its launches (nvidia_values.bearers)."""
    times = rig.forward.profile()
    ran = {(node, kernel) for node, kernel, _ in times}
    launches = rig.artifact.programs(rig.manifest.target_level.name, rig.device.target)["forward"].launches  # type: ignore[attr-defined]
    bearer = bearers(launch for launch in launches if (launch.node, launch.kernel) in ran)
    us: dict[str, list[float]] = defaultdict(list)
    bytes_: dict[str, float] = defaultdict(float)
    for _, kernel, time in times:
        us[kernel].append(time)
    for cost in step_costs(graph, Load(1, 1, context, out=1)):
        if cost.node in bearer:
            bytes_[bearer[cost.node]] += cost.bytes
    found = [
        KernelTime(kernel, len(mine), sum(mine), bytes_[kernel], bytes_[kernel] / (sum(mine) * 1e-6) / copy if sum(mine) else 0.0)
        for kernel, mine in us.items()]
    return sorted(found, key=lambda kernel: -kernel.us)


def logits(rig: Rig) -> Array:
    """Logits of a prompt's last row and of a chain behind it. The same tokens for every rig of one seed."""
    rig._rng = np.random.default_rng(1)
    prompt = min(PROMPT, rig.limits.max_num_batched_tokens)
    rows = []
    for context, count, drafted in ((0, prompt, False), (prompt, min(CHAIN, rig.limits.max_tree_nodes + 1), True)):
        rig.set_rows(context, count, drafted=drafted)
        rig.forward.run()
        rows.append(rig.forward.tap("logits")[: count if drafted else 1].copy())
    return np.concatenate(rows)


def compare(found: Array, expected: Array, vocab_size: int) -> Numerics:
    found, expected = found[:, :vocab_size], expected[:, :vocab_size]
    spread = expected.max(1, keepdims=True) - expected.min(1, keepdims=True)
    worst = np.nan_to_num(np.abs(found - expected) / spread, nan=np.inf).max()
    return Numerics(len(found), int((found.argmax(1) == expected.argmax(1)).sum()), float(worst))
