"""Law L6 on a compiled artifact: no edited file is ever used. (The same bytes twice: tests/e2e.)"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import ArtifactError

Edit = Callable[[Path], None]


def flip(path: Path, at: int) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def one(root: Path, pattern: str) -> Path:
    return sorted(root.glob(pattern))[0]


EDITS: dict[str, Edit] = {
    "library": lambda root: flip(one(root, "kernels/*/*.so"), -100),
    "kernel source": lambda root: flip(one(root, "kernels/*/linear*.py"), 50),
    "program": lambda root: flip(one(root, "program/*/*forward.json"), -30),
    "commit program": lambda root: flip(one(root, "program/*/*commit.json"), 9),
    "weights header": lambda root: flip(one(root, "weights/*"), 12),
    "weights cut short": lambda root: os.truncate(one(root, "weights/*"), one(root, "weights/*").stat().st_size - 64),
    "tokenizer": lambda root: flip(root / "tokenizer.json", 40),
    "manifest that is no JSON": lambda root: flip(root / "manifest.json", 0),
    "manifest of another format": lambda root: edit_manifest(root, format=99),
    "manifest without limits": lambda root: edit_manifest(root, limits=None),
    "manifest with other limits": lambda root: edit_manifest(root, limits={"max_model_len": -1}),
    "library missing": lambda root: one(root, "kernels/*/*.so").unlink(),
    "weights missing": lambda root: one(root, "weights/*").unlink(),
}


def edit_manifest(root: Path, **changes: object) -> None:
    raw = json.loads((root / "manifest.json").read_text())
    (root / "manifest.json").write_text(json.dumps(raw | changes))


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "tiny.mlsdc"))


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_artifact_is_refused_in_one_line(copy: Path, name: str) -> None:
    EDITS[name](copy)
    with pytest.raises(ArtifactError) as caught:
        Engine.load(copy)
    assert "\n" not in str(caught.value)
    assert "tiny.mlsdc" in str(caught.value) or "manifest" in str(caught.value)


def test_flipped_weights_are_found_by_verify(copy: Path) -> None:
    flip(one(copy, "weights/*"), -200)
    Engine.load(copy, threads=1).close()  # weights are not hashed at load
    with pytest.raises(ArtifactError, match="it was edited"):
        Artifact.open(copy).verify()


def test_the_command_line_says_it_in_one_line(copy: Path) -> None:
    EDITS["library"](copy)
    command = [sys.executable, "-c", "from mlsdc.compiler.cli import main; import sys; sys.exit(main())", "run", str(copy), "--prompt", "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "kernels.so" in done.stderr
