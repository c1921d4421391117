"""The OpenAPI document, made from the models that requests are checked with."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from mlsdc.runtime.server import requests as R
from mlsdc.runtime.server import responses as A

REFUSALS = {
    400: "A field is wrong, missing or unknown; the message names it.", 401: "No API key, or a wrong one.",
    404: "No such model.", 408: "The body did not come, or the deadline passed.", 413: "The body is too large.",
    429: "Too many requests wait; `Retry-After` says when to come again.", 503: "The engine has stopped, or the server shuts down.",
}


@cache
def document() -> dict[str, Any]:
    posts: dict[str, tuple[str, type[BaseModel], type[BaseModel], bool]] = {
        "/v1/completions": ("Continue a text", R.CompletionRequest, A.CompletionResponse, True),
        "/v1/chat/completions": ("Continue a conversation", R.ChatRequest, A.ChatResponse, True),
        "/tokenize": ("Text or a chat to token ids", R.TokenizeRequest, A.Tokens, False),
        "/detokenize": ("Token ids to text", R.DetokenizeRequest, A.Text, False),
    }
    gets: dict[str, tuple[str, type[BaseModel]]] = {
        "/v1/models": ("What is served", A.ModelList), "/health": ("Whether the engine lives", A.Health),
        "/ready": ("Whether requests are taken", A.Health), "/version": ("Versions", A.Version),
    }
    models: list[tuple[type[BaseModel], Any]] = [(A.ErrorResponse, "validation"), (A.Model, "validation")]
    for _, body, answer, _ in posts.values():
        models += [(body, "validation"), (answer, "validation")]
    models += [(answer, "validation") for _, answer in gets.values()]
    names, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")

    def content(model: type[BaseModel]) -> dict[str, Any]:
        return {"application/json": {"schema": names[model, "validation"]}}

    def refusals(*statuses: int) -> dict[str, Any]:
        return {str(status): {"description": REFUSALS[status], "content": content(A.ErrorResponse)} for status in statuses}

    paths: dict[str, Any] = {}
    for path, (summary, answer) in gets.items():
        statuses = (401,) if path.startswith("/v1/") else (503,) if path in ("/health", "/ready") else ()
        paths[path] = {"get": {"summary": summary, "responses": {
            "200": {"description": "Yes", "content": content(answer)}, **refusals(*statuses)}}}
    named = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths["/v1/models/{model}"] = {"get": {
        "summary": "One model", "parameters": [named],
        "responses": {"200": {"description": "The model", "content": content(A.Model)}, **refusals(401, 404)}}}
    paths["/metrics"] = {"get": {"summary": "Prometheus metrics", "responses": {
        "200": {"description": "Text", "content": {"text/plain": {"schema": {"type": "string"}}}}}}}
    for path, (summary, body, answer, streams) in posts.items():
        found = content(answer) | ({"text/event-stream": {"schema": {"type": "string"}}} if streams else {})
        paths[path] = {"post": {
            "summary": summary, "requestBody": {"required": True, "content": content(body)},
            "responses": {"200": {"description": "The answer", "content": found}, **refusals(*REFUSALS)}}}
    return {
        "openapi": "3.1.0", "info": {"title": "mlsdc", "version": "1", "description": "An OpenAI-compatible server of one artifact."},
        "paths": paths, "components": {
            "schemas": definitions["$defs"], "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }
