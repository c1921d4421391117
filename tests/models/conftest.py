"""Many small compiles in one process: a kernel that two families share is parsed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlsdc.targets import cpu_build
from mlsdc.targets.protocol import KernelSpec


@pytest.fixture(scope="session", autouse=True)
def parsed_once() -> Any:
    """TVM takes most of a second to parse a kernel; the generated source says all there is to it."""
    load, parsed = cpu_build.load_function, dict[str, Any]()

    def load_function(source: Path, spec: KernelSpec) -> Any:
        text = source.read_text(encoding="utf-8")
        if text not in parsed:
            parsed[text] = load(source, spec)
        return parsed[text]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_build, "load_function", load_function)
        yield
