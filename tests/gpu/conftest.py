"""The tiny model's artifacts for a GPU and for this CPU, compiled once for all workers. No GPU is needed, and none is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.tiny import config, write_model
from tests.once import once


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "gpu-tiny-model", write_model)


@pytest.fixture(scope="session")
def tiny_gpu(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """For h100 and a100; read only."""
    pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")
    from mlsdc.compiler import compile_model

    def make(folder: Path) -> None:
        compile_model(config(tiny_model, "h100,a100"), folder / "tiny.mlsdc")

    return once(tmp_path_factory, "gpu-tiny", make) / "tiny.mlsdc"


@pytest.fixture(scope="session")
def tiny_tunable(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """For h100, with other builds of its kernels for `mlsdc tune`. The defaults' cubins are those of `tiny_gpu`."""
    pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")
    from mlsdc.compiler import compile_model

    def make(folder: Path) -> None:
        compile_model(config(tiny_model, "h100") | {"kernels": {"variants": True}}, folder / "tiny.mlsdc")

    return once(tmp_path_factory, "gpu-tiny-tunable", make) / "tiny.mlsdc"


@pytest.fixture(scope="session")
def tiny_fat(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """For h100 and this CPU, in one artifact. Its cubins are those of `tiny_gpu`: whoever is second finds them in the cache."""
    pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")
    from mlsdc.compiler import compile_model

    def make(folder: Path) -> None:
        compile_model(config(tiny_model, "h100,cpu"), folder / "tiny.mlsdc")

    return once(tmp_path_factory, "gpu-tiny-fat", make) / "tiny.mlsdc"


@pytest.fixture(scope="session")
def levels_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`levels.mlsdc`, for h100: counts, a medusa and an eagle merged, over a grouped cache (int4); its model.yaml; and what that names."""
    pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")
    from mlsdc.compiler import compile_model
    from tests.gpu.interpret_levels import cascade, write_checkpoints

    def make(folder: Path) -> None:
        write_checkpoints(folder)
        raw = config(folder / "model", "h100", kv={"dtype": "int4", "page_size": 32})
        raw |= {"cascade": cascade("merged", folder), "memory": {"kv_pool": "4MiB"}}
        (folder / "model.yaml").write_text(json.dumps(raw).replace(str(folder), "."))
        compile_model(folder / "model.yaml", folder / "levels.mlsdc")

    return once(tmp_path_factory, "gpu-levels-built", make)


@pytest.fixture(scope="session")
def tiny_cpu(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    from mlsdc.compiler import compile_model

    def make(folder: Path) -> None:
        compile_model(config(tiny_model, "cpu-native"), folder / "tiny.mlsdc")

    return once(tmp_path_factory, "gpu-tiny-cpu", make) / "tiny.mlsdc"
