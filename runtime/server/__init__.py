"""The OpenAI-compatible server: one engine behind an ASGI app.

    app = create_app(AsyncEngine.load("smollm2.mlsdc"), ServerSettings(served_model_name="smollm2"))

Needs `mlsdc[server]` (starlette, pydantic, prometheus-client; uvicorn to run it). Nothing else of the runtime imports this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlsdc.runtime.server.app import create_app
    from mlsdc.runtime.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]

_HOME = {"create_app": "app", "ServerSettings": "settings"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mlsdc.runtime.server' has no attribute '{name}'")
    return getattr(import_module(f"mlsdc.runtime.server.{_HOME[name]}"), name)
