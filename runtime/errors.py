"""The one error tree. A user's mistake is always one of these: one line, never a traceback (law L7)."""

from __future__ import annotations


class MlsdcError(Exception):
    """Base of every error a user can cause; its text is one line: where, what was found, what was expected, what to do."""

    exit_code = 2


class RequestError(MlsdcError, ValueError):
    """A request or a sampling parameter that cannot be served (raised before anything runs)."""


class ArtifactError(MlsdcError):
    """An artifact that is truncated, edited, of another format, or built for another machine."""


class DeviceError(MlsdcError):
    """A device that is missing, too old, or out of memory."""


class CapacityError(MlsdcError):
    """A pool or a limit that is too small for what was asked of it."""
