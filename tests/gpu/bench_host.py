"""Microseconds of the host in a step on a GPU, on the fake driver: `python -m tests.gpu.bench_host ARTIFACT [STEPS]`, one with counts.

Time in driver calls is not counted (the fake driver works in Python, inside of them); how many a step makes is. Plain steps, steps whose
counts lie on the host, and steps whose counts lie on the device, in turn; of steps that decode the median, the tenth and the ninetieth
of a hundred. The controller decides as it is shipped, by costs that do not move.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from mlsdc.runtime import loading
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device import cuda_driver
from mlsdc.runtime.device.cuda import CudaLevel
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from tests.function_level import steady
from tests.gpu.fake_ahead import Speaker
from tests.gpu.fake_cuda import FakeCuda

WAYS = ("plain", "counts on the host", "counts on the device")


class Driver(FakeCuda):
    """Knows how long it was inside of its own calls."""

    inside = 0.0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cu"):
            return found

        def call(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return found(*args)
            finally:
                self.inside += time.perf_counter() - start

        return call


def opened(path: Path, way: str) -> tuple[Engine, Driver]:
    driver = Driver(free=1 << 36)
    driver.execute = speaker = Speaker(Artifact.open(path), driver)
    cuda_driver.load_library = lambda: driver  # type: ignore[assignment]
    on_device = loading.on_device
    if way == "counts on the host":
        loading.on_device = lambda level, *others: level  # type: ignore[assignment]
    try:
        engine = Engine.load(path, device="cuda", kv_pool_bytes=64 << 20)
    finally:
        loading.on_device = on_device
    assert isinstance(engine._memory, CudaLevel)
    speaker.level = engine._memory
    return steady(engine), driver


def measured(engine: Engine, driver: Driver, requests: int, params: SamplingParams) -> tuple[list[float], list[int], int]:
    """Of each step that decodes: microseconds outside the driver, driver calls; and how many nodes were accepted."""
    waiting = [engine.submit([3 + i, 4, 5, 6] * 6, params) for i in range(requests)]
    times, calls = [], []
    while engine.has_work:
        driver.inside, before, start = 0.0, len(driver.calls), time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - start - driver.inside) * 1e6)
        calls.append(len(driver.calls) - before)
    return times[3:-2], calls[3:-2], sum(request.statistics.accepted for request in waiting)


def main() -> None:
    path, tokens = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 80
    rigs = {way: opened(path, way) for way in WAYS}
    for requests in (1, 4):
        found: dict[str, tuple[list[float], list[int], int]] = {way: ([], [], 0) for way in WAYS}
        for _ in range(5):
            for way, (engine, driver) in rigs.items():
                params = SamplingParams(max_tokens=tokens, ignore_eos=True, speculation=Speculation(enabled=way != "plain"))
                times, calls, accepted = measured(engine, driver, requests, params)
                found[way] = found[way][0] + times, found[way][1] + calls, found[way][2] + accepted
        for way, (times, calls, accepted) in found.items():
            cuts = quantiles(times, n=10)
            print(f"{requests} requests, {way:22} {median(times):7.0f} us ({cuts[0]:.0f} to {cuts[-1]:.0f}), {median(calls):.0f} driver "
                  f"calls, {accepted / len(times):.2f} nodes accepted a step")
    for engine, _ in rigs.values():
        engine.close()


if __name__ == "__main__":
    main()
