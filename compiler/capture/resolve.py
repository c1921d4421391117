"""From what model.yaml names to a model source: a GGUF or ONNX file, a directory, `package:NAME` (inside an installed package), or
`random:SHAPE` (random_source.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mlsdc.compiler.capture.gguf_source import gguf_source
from mlsdc.compiler.capture.hf_source import hf_source
from mlsdc.compiler.capture.onnx_source import onnx_model, onnx_source
from mlsdc.compiler.capture.random_source import RANDOM, random_source
from mlsdc.compiler.capture.source import ModelSource
from mlsdc.compiler.errors import CaptureError

PACKAGE = "package:"
EVERYWHERE = (PACKAGE, RANDOM)  # what follows these is no file of this machine: it says the same on every one


def load_source(ref: str, base: Path | None = None) -> ModelSource:
    """Open and check the checkpoint `ref` names; relative paths start at `base` (the folder of model.yaml). Raises CaptureError."""
    if ref.startswith(RANDOM):
        return random_source(ref)
    path = package_file(ref.removeprefix(PACKAGE)) if ref.startswith(PACKAGE) else (base or Path()) / Path(ref).expanduser()
    label = ref if ref.startswith(PACKAGE) else path.name
    if path.is_dir():
        model = onnx_model(path)
        return hf_source(path.resolve(), label) if model is None else onnx_source(model.resolve(), label)
    if not path.exists():
        raise CaptureError(f"'{ref}' does not exist; a model is a .gguf or .onnx file, a Hugging Face directory, {PACKAGE}NAME, "
                           f"or {RANDOM}SHAPE")
    return onnx_source(path.resolve(), label) if path.suffix == ".onnx" else gguf_source(path, label)


def package_file(name: str) -> Path:
    """The one model inside an installed package, found without importing it; `NAME/file.gguf` picks one of several."""
    package, _, wanted = name.partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise CaptureError(f"package '{package}' is not installed: pip install {package.replace('_', '-')}")
    found = [path for folder in spec.submodule_search_locations for path in sorted(Path(folder).rglob("*.gguf"))]
    found = [path for path in found if not wanted or path.as_posix().endswith("/" + wanted)]
    if not found:
        raise CaptureError(f"package '{package}' holds no {wanted or '.gguf file'}")
    if len(found) > 1:
        raise CaptureError(f"package '{package}' holds {', '.join(path.name for path in found)}; name one: {PACKAGE}{package}/FILE")
    return found[0]
