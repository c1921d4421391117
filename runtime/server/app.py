"""`create_app(engine)`: the ASGI app. Mount it in another app, or let `mlsdc serve` run it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache, wraps
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlsdc.runtime.async_engine import AsyncEngine
from mlsdc.runtime.errors import MlsdcError, RequestError
from mlsdc.runtime.server import requests as R
from mlsdc.runtime.server.chat import Chat, template_messages
from mlsdc.runtime.server.completions import Completion
from mlsdc.runtime.server.errors import ApiError, ClientGone, api_error
from mlsdc.runtime.server.log import LOGGER
from mlsdc.runtime.server.metrics import CONTENT_TYPE
from mlsdc.runtime.server.openapi import document
from mlsdc.runtime.server.overview import overview
from mlsdc.runtime.server.protect import Protect, error_response, read_body
from mlsdc.runtime.server.settings import ServerSettings
from mlsdc.runtime.server.sse import EventStream, unless_hung_up
from mlsdc.runtime.server.state import Server

PAGE_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
Handler = Callable[[Server, Request], Awaitable[Response]]


def create_app(engine: AsyncEngine, settings: ServerSettings | None = None) -> Starlette:
    """The app serves `engine` and closes it when it shuts down; mounted in another app, whose shutdown it does not see, the other must.

    `app.state.server` is the `Server`. Raises RequestError for settings that make no sense.
    """
    server = Server(engine, settings or ServerSettings())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        server.watchdog.start()
        filling = asyncio.create_task(asyncio.to_thread(server.fill_vocabulary))  # while the first request is still on its way
        try:
            yield
        finally:
            await filling
            await server.close()

    def route(path: str, handler: Handler, method: str = "GET") -> Route:
        return Route(path, answers(server, handler), methods=[method])

    app = Starlette(
        routes=[
            route("/v1/models", models), route("/v1/models/{model:path}", model),
            route("/v1/completions", completions, "POST"), route("/v1/chat/completions", chat, "POST"),
            route("/tokenize", tokenize, "POST"), route("/detokenize", detokenize, "POST"),
            route("/health", health), route("/ready", ready), route("/version", versions), route("/metrics", metrics),
            route("/openapi.json", openapi), route("/", page), route("/status.json", status),
        ],
        middleware=[Middleware(Protect, server=server)],
        exception_handlers={HTTPException: not_routed, Exception: broken},
        lifespan=lifespan,
    )
    app.state.server = server
    return app


def answers(server: Server, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """A route's endpoint: errors become answers in OpenAI's shape."""

    @wraps(handler)
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(server, request)
        except ApiError as error:
            return error_response(error)
        except MlsdcError as error:
            return error_response(api_error(error))
        except (ClientGone, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it

    return endpoint


async def not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        headers = error.headers or {}
        response = error_response(ApiError(405, f"{request.url.path}: expected {headers.get('Allow', 'another method')}"))
        response.headers.update(headers)
        return response
    return error_response(ApiError(404, f"{request.url.path}: nothing is served here"))


async def broken(request: Request, error: Exception) -> Response:
    LOGGER.error("unexpected error", exc_info=error)
    return error_response(ApiError(500, "an error of the server's own; its log says more", code="internal_error"))


# --- endpoints ---


async def completions(server: Server, request: Request) -> Response:
    return await generate(server, request, Completion(server, R.parse(R.CompletionRequest, await read_body(request, server))))


async def chat(server: Server, request: Request) -> Response:
    return await generate(server, request, Chat(server, R.parse(R.ChatRequest, await read_body(request, server))))


async def generate(server: Server, request: Request, work: Completion | Chat) -> Response:
    generation = await work.start()
    request.state.log.update({"id": work.id, **({"user": work.body.user} if work.body.user else {})})
    server.log_at_end(request.state.log, generation)
    if work.body.stream:
        return EventStream(work.events(generation), write_timeout_s=server.settings.write_timeout_s, close=generation.close)
    try:
        return JSONResponse(await unless_hung_up(request, work.whole(generation)))
    finally:
        generation.close()


async def models(server: Server, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [describe(server)]})


async def model(server: Server, request: Request) -> Response:
    server.check_model(request.path_params["model"])
    return JSONResponse(describe(server))


def describe(server: Server) -> dict[str, Any]:
    return {"id": server.model, "object": "model", "created": server.created, "owned_by": "mlsdc",
            "max_model_len": server.max_model_len, "levels": [level.name for level in server.manifest.levels]}


async def tokenize(server: Server, request: Request) -> Response:
    body = R.parse(R.TokenizeRequest, await read_body(request, server))
    server.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt: expected either prompt or messages")

    def tokens() -> list[int]:
        if body.prompt is not None:
            return server.encode(body.prompt, "prompt", add_special_tokens=body.add_special_tokens, bounded=False)
        text = server.tokenizer.render_chat(template_messages(body.messages or []), add_generation_prompt=body.add_generation_prompt)
        return server.encode(text, "messages", add_special_tokens=False, bounded=False)

    found = await asyncio.to_thread(tokens)
    return JSONResponse({"tokens": found, "count": len(found), "max_model_len": server.max_model_len})


async def detokenize(server: Server, request: Request) -> Response:
    body = R.parse(R.DetokenizeRequest, await read_body(request, server))
    server.check_model(body.model)
    for i, token in enumerate(body.tokens):
        if token >= server.manifest.model.vocab_size:
            raise RequestError(f"tokens[{i}]: {token}, expected a token id below {server.manifest.model.vocab_size}")
    text = await asyncio.to_thread(server.tokenizer.decode, body.tokens, skip_special_tokens=body.skip_special_tokens)
    return JSONResponse({"prompt": text})


async def health(server: Server, request: Request) -> Response:
    """Alive: restart the process if this fails."""
    wrong = server.health()
    if wrong is not None:
        raise ApiError(503, wrong, code="not_alive")
    return JSONResponse({"status": "ok"})


async def ready(server: Server, request: Request) -> Response:
    """Serving: send no requests while this fails."""
    wrong = server.health() or ("the server is shutting down" if server.draining else None)
    if wrong is not None:
        raise ApiError(503, wrong, code="not_ready")
    return JSONResponse({"status": "ready"})


async def versions(server: Server, request: Request) -> Response:
    try:
        found = version("mlsdc")
    except PackageNotFoundError:
        found = "unknown"
    return JSONResponse({"version": found, "model": server.model, "fingerprint": server.fingerprint})


async def metrics(server: Server, request: Request) -> Response:
    return Response(server.metrics.page(), headers={"content-type": CONTENT_TYPE})


async def page(server: Server, request: Request) -> Response:
    return Response(_page(), headers={"content-type": "text/html; charset=utf-8", "content-security-policy": PAGE_POLICY})


@cache
def _page() -> bytes:
    return files("mlsdc.runtime.server").joinpath("status.html").read_bytes()


async def status(server: Server, request: Request) -> Response:
    return JSONResponse(overview(server))


async def openapi(server: Server, request: Request) -> Response:
    return JSONResponse(document())
