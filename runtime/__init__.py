"""The lean runtime: it serves an artifact and cannot compile (law L5). Names load when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlsdc.runtime.artifact import Artifact
    from mlsdc.runtime.async_engine import AsyncEngine
    from mlsdc.runtime.engine import Engine
    from mlsdc.runtime.errors import ArtifactError, CapacityError, DeviceError, MlsdcError, RequestError
    from mlsdc.runtime.request import Delta, Result
    from mlsdc.runtime.sampling_params import Grammar, SamplingParams, Speculation
    from mlsdc.runtime.statistics import Statistics

__all__ = [
    "Artifact", "ArtifactError", "AsyncEngine", "CapacityError", "Delta", "DeviceError", "Engine", "Grammar", "MlsdcError", "RequestError",
    "Result", "SamplingParams", "Speculation", "Statistics",
]

_HOME = {
    "Artifact": "artifact", "AsyncEngine": "async_engine", "Engine": "engine", "Grammar": "sampling_params",
    "SamplingParams": "sampling_params",
    "Speculation": "sampling_params", "Delta": "request", "Result": "request", "Statistics": "statistics", "ArtifactError": "errors",
    "CapacityError": "errors", "DeviceError": "errors", "MlsdcError": "errors", "RequestError": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mlsdc.runtime' has no attribute '{name}'")
    return getattr(import_module(f"mlsdc.runtime.{_HOME[name]}"), name)
