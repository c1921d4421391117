"""Law L5: the runtime imports nothing that compiles, and importing it is cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "triton", "tvm", "transformers", "onnx", "networkx", "gguf", "yaml", "mlsdc.compiler")
LAZY = (*HEAVY, "tokenizers", "jinja2", "tvm_ffi")


def loaded(statement: str, names: tuple[str, ...]) -> str:
    code = f"{statement}\nimport sys\nprint(*[n for n in {names!r} if n in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_package_loads_almost_nothing() -> None:
    assert loaded("import mlsdc.runtime", (*LAZY, "numpy")) == ""


@pytest.mark.parametrize("statement", [
    "from mlsdc.runtime import Engine, SamplingParams",
    "import mlsdc.runtime.tokenizer, mlsdc.runtime.detokenize, mlsdc.runtime.levels.ngram",
])
def test_the_engine_loads_nothing_that_compiles(statement: str) -> None:
    assert loaded(statement, LAZY) == ""


def test_every_exported_name_is_there() -> None:
    import mlsdc.runtime as runtime

    assert [name for name in runtime.__all__ if getattr(runtime, name) is None] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    import mlsdc.runtime as runtime

    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        runtime.Enigne  # noqa: B018
