"""The compile side: `compile_model("model.yaml", "model.mlsdc")`. Importing this package loads nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlsdc.compiler.driver import compile_model

__all__ = ["compile_model"]


def __getattr__(name: str) -> Any:
    if name == "compile_model":
        from mlsdc.compiler.driver import compile_model

        return compile_model
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
