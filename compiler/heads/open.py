"""Opening heads of any layout: our own file, a checkpoint of somebody else's trainer (foreign.py), or an ONNX file."""

from __future__ import annotations

from pathlib import Path

from mlsdc.compiler.capture import ModelSource
from mlsdc.compiler.errors import HeadError
from mlsdc.compiler.heads.checkpoint import HeadFile, is_own, read_own


def open_heads(path: Path, kind: str, source: ModelSource) -> HeadFile:
    """Raises HeadError, CaptureError, naming the file."""
    if not path.exists():
        raise HeadError(f"{path}: does not exist; expected a file of `mlsdc train --level heads`, or a folder with {kind} heads")
    if path.suffix == ".onnx":
        from mlsdc.compiler.heads.onnx_heads import read_onnx

        return read_onnx(path, kind, source)
    if path.is_file() and is_own(path):
        return read_own(path)
    from mlsdc.compiler.heads.foreign import read_foreign

    return read_foreign(path, kind, source)
