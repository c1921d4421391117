"""What a client is told when something is not served: OpenAI's shape, one line."""

from __future__ import annotations

import re
from typing import Any

from mlsdc.runtime.errors import MlsdcError, RequestError

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    408: "timeout_error", 413: "invalid_request_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error",
}
FIELD = re.compile(r"([A-Za-z_][\w.]*(?:\[[^\]]*\][\w.]*)*)(?: key)?: ")


class ApiError(Exception):
    """`param` is the field at fault, `retry_after` the seconds after which another try makes sense."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = None
                 ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": TYPES[self.status], "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


class ClientGone(Exception):
    """The client hung up: nobody is there to answer."""


def api_error(error: MlsdcError) -> ApiError:
    """A RequestError is the client's mistake and names its field first; anything else is ours."""
    if not isinstance(error, RequestError):
        return ApiError(503, str(error), code="engine_unavailable")
    found = FIELD.match(str(error))
    return ApiError(400, str(error), param=found[1] if found else None)
