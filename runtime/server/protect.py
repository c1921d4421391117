"""What stands before every route: request ids, API keys, the size of bodies, and errors in one shape; and one log line after it."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlsdc.runtime.server.errors import ApiError
from mlsdc.runtime.server.log import LOGGER, request_id
from mlsdc.runtime.server.state import Server

GUARDED = ("/v1/", "/tokenize", "/detokenize")


class Protect:
    """The outermost ASGI layer of the app."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app = app
        self.server = server
        self._keys = [key.encode() for key in server.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        headers = Headers(scope=scope)
        name = request_id(headers.get("x-request-id"))
        scope.setdefault("state", {})
        fields: dict[str, Any] = {}
        scope["state"]["log"] = fields
        status = 499  # the client hung up before an answer began

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", name.encode())]}
            await send(message)

        try:
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if self._keys and path.startswith(GUARDED):
                self._check_key(headers.get("authorization"))
            await self.app(scope, receive, named)
        except ApiError as error:
            await error_response(error)(scope, receive, named)
        finally:
            if status in (401, 429, 503, 413):
                self.server.metrics.refused.labels(self.server.model, str(status)).inc()
            LOGGER.log(
                logging.DEBUG if scope["method"] == "GET" else logging.INFO, "request",
                extra={"fields": {"request_id": name, "method": scope["method"], "path": scope["path"], "status": status,
                                  "ms": round(1000 * (time.perf_counter() - started), 2), **fields}})

    def _check_key(self, authorization: str | None) -> None:
        """Every key is compared, in constant time. Raises ApiError 401."""
        scheme, _, given = (authorization or "").partition(" ")
        key = given.strip().encode()
        matches = [hmac.compare_digest(key, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(401, "authorization: expected 'Bearer' and an API key of this server", code="invalid_api_key")


async def read_body(request: Request, server: Server) -> bytes:
    """A request's body. Raises ApiError: too large, too slow."""
    most = server.settings.max_body_bytes
    too_large = ApiError(413, f"body: more than {most} bytes", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(server.settings.read_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"body: not there after {server.settings.read_timeout_s:g} s") from None
    return b"".join(parts)


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers())
