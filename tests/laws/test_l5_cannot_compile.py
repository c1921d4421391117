"""Law L5 on a compiled artifact: it serves where nothing can be compiled, and loads nothing that compiles."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HEAVY = ("torch", "triton", "tvm", "transformers", "onnx", "networkx", "gguf", "safetensors", "yaml", "mlsdc.compiler", "mlsdc.targets")

SERVE = """
import os, sys
FORBIDDEN = ("os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "os.system", "os.fork", "os.forkpty", "pty.spawn",
             "socket.connect", "socket.bind")
def audit(event, args):
    if event in FORBIDDEN:
        raise RuntimeError("forbidden: " + event)
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        raise RuntimeError(f"writes {args[0]}")
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        raise RuntimeError(f"opens {args[0]} for writing")
sys.addaudithook(audit)
sys.dont_write_bytecode = True
from mlsdc.runtime import Engine, SamplingParams
with Engine.load(sys.argv[1], threads=2) as engine:
    results = engine.generate([[5, 6, 7], [9] * 40], SamplingParams(max_tokens=20, ignore_eos=True))
    print(*results[0].token_ids)
print(*[name for name in sys.argv[2].split(",") if name in sys.modules])
print(sorted(sys.modules).count("torch"))
"""


@pytest.fixture
def open_copy(tiny: Path) -> Iterator[Path]:
    """The artifact where any user may read it and nobody may write."""
    folder = Path(tempfile.mkdtemp(prefix="mlsdc-open-"))
    shutil.copytree(tiny, folder / "tiny.mlsdc")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield folder / "tiny.mlsdc"
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | stat.S_IWUSR)
    shutil.rmtree(folder)


def serve(artifact: Path, **how: Any) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": ""}
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    command = [sys.executable, "-c", SERVE, str(artifact), ",".join(HEAVY)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=artifact, check=False, **how)


def test_it_serves_without_a_path_or_home_and_starts_nothing(open_copy: Path) -> None:
    done = serve(open_copy)
    assert done.returncode == 0, done.stderr
    ids, heavy, torch = done.stdout.split("\n")[:3]
    assert len(ids.split()) == 20
    assert heavy == ""
    assert torch == "0"


def test_tvm_ffi_alone_would_import_torch_here() -> None:
    """The guard is needed: without it the test above could not fail."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    code = "import tvm_ffi, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "True"


def test_an_application_that_has_torch_keeps_it(tiny: Path) -> None:
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    code = ("import torch, sys\nfrom mlsdc.runtime import Engine, SamplingParams\n"
            "with Engine.load(sys.argv[1], threads=1) as engine:\n    engine.generate([[1]], SamplingParams(max_tokens=2))\n"
            "assert sys.modules['torch'] is torch\nprint(torch.ones(2).sum().item())")
    done = subprocess.run([sys.executable, "-c", code, str(tiny)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "2.0", done.stderr


def test_torch_can_still_be_imported_after_an_engine_was_loaded(tiny: Path) -> None:
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    code = ("import sys\nfrom mlsdc.runtime import Engine\nEngine.load(sys.argv[1], threads=1).close()\n"
            "assert 'torch' not in sys.modules\nimport torch\nprint(torch.ones(2).sum().item())")
    done = subprocess.run([sys.executable, "-c", code, str(tiny)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "2.0", done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_any_user_can_serve(open_copy: Path) -> None:
    try:
        subprocess.run([sys.executable, "-c", "import mlsdc.runtime"], user=12345, capture_output=True, check=True, cwd="/")
    except (PermissionError, subprocess.CalledProcessError):
        pytest.skip("user 12345 cannot read this installation")
    done = serve(open_copy, user=12345, group=12345, extra_groups=[])
    assert done.returncode == 0, done.stderr


def test_eight_processes_serve_one_artifact_at_once(open_copy: Path) -> None:
    command = [sys.executable, "-c", SERVE, str(open_copy), ",".join(HEAVY)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(8)]
    outputs = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0] * 8, outputs
    assert len({out for out, _ in outputs}) == 1
