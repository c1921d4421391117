"""Errors of the compile side; the tree's root lives in the runtime, which must not import the compiler."""

from __future__ import annotations

from mlsdc.runtime.errors import MlsdcError

__all__ = ["CaptureError", "CompileError", "ConfigError", "HeadError", "IrError", "MlsdcError", "PassError"]


class ConfigError(MlsdcError):
    """model.yaml or --set: names the YAML path, what was found and what is allowed."""


class CaptureError(MlsdcError):
    """A model that cannot be read or raised: names the file, tensor or nodes."""


class IrError(MlsdcError):
    """A graph that does not verify or a text that does not parse: names the node or the line."""


class PassError(MlsdcError):
    """A pass that broke the graph or changed its numbers: names the pass and the node."""


class CompileError(MlsdcError):
    """No kernel for a node on a target, or a kernel that does not build: names node, target and reason."""


class HeadError(MlsdcError):
    """A checkpoint of trained heads, or their training data, that does not fit: names the file, the tensor or the line."""
