"""Seconds from nothing to the first launch on the fake driver: `python -m tests.gpu.bench_start ARTIFACT [ROUNDS]`, a process a round.

Imports, reading and hashing the artifact, modules, memory, graphs and one step up to its launch are counted; the fake driver's own work is,
too (it is in Python, and reads every cubin's parameter table), a real driver's is not.
"""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

ONCE = """
import sys, time
start = time.perf_counter()
from tests.gpu.fake_cuda import FakeCuda
from mlsdc.runtime.device import cuda_driver
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.sampling_params import SamplingParams
fake = FakeCuda(free=1 << 36)
cuda_driver.load_library = lambda: fake
imported = time.perf_counter()
engine = Engine.load(sys.argv[1], device="cuda", kv_pool_bytes=64 << 20)
loaded = time.perf_counter()
before = len(fake.calls)
class Launched(Exception): pass
def launch(*args):
    raise Launched
fake.cuGraphLaunch = launch
try:
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True))
except Launched:
    counts = [fake.calls.count(name) for name in ("cuStreamBeginCapture_v2", "cuModuleLoadData")]
    print(imported - start, loaded - imported, time.perf_counter() - loaded, *counts)
"""


def main() -> None:
    rounds = []
    for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", ONCE, sys.argv[1]], capture_output=True, text=True, check=True)
        rounds.append((time.perf_counter() - start, *map(float, done.stdout.split())))
    names = ("whole process", "imports", "load", "first step to its launch", "graphs", "modules")
    for name, *values in zip(names, *rounds, strict=True):
        print(f"{name:26} {median(values):8.3f}   {min(values):.3f} to {max(values):.3f}")


if __name__ == "__main__":
    main()
