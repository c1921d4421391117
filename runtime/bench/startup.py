"""Start-up, measured from outside: a fresh process imports the runtime, opens the artifact and answers with one token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from mlsdc.runtime.errors import MlsdcError

PROGRAM = """
import json, sys, time
start = time.perf_counter()
import mlsdc.runtime
imported = time.perf_counter()
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.sampling_params import SamplingParams
path, threads = sys.argv[1], int(sys.argv[2])
opening = time.perf_counter()
engine = Engine.load(path, threads=threads)
opened = time.perf_counter()
engine.generate([[1, 2, 3, 4, 5, 6, 7, 8]], SamplingParams(max_tokens=1, ignore_eos=True))
first = time.perf_counter()
engine.close()
print(json.dumps({"import": imported - start, "open": opened - opening, "first token": first - opening, "all": first - start}))
"""


def start_up(artifact: Path, threads: int) -> dict[str, float]:
    """Seconds by part. Raises MlsdcError if the process fails."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(artifact), str(threads)], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing"]
        raise MlsdcError(f"start-up failed: {said[-1]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found
