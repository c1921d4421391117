"""Schemathesis on the served OpenAPI document: what it allows is served or refused as it says, and never breaks the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from rig import TOKENIZER, VOCAB
from starlette.applications import Starlette
from starlette.routing import Mount

from mlsdc.runtime.async_engine import AsyncEngine
from mlsdc.runtime.server import create_app

schemathesis = pytest.importorskip("schemathesis")
from fake_device import make_engine  # noqa: E402
from proposers import LEVELS  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)


def make() -> tuple[Any, AsyncEngine]:
    """The app, mounted in another one: schemathesis would shut it down after each request, and a mounted app does not see that."""
    inner = make_engine(LEVELS["ngram_tree"](), vocab=VOCAB, tokenizer=TOKENIZER, max_model_len=60, num_pages=400)
    engine = AsyncEngine(inner)
    return Starlette(routes=[Mount("/", create_app(engine))]), engine


APP, ENGINE = make()


@pytest.fixture(scope="module", autouse=True)
def closed_afterwards() -> Iterator[None]:
    yield
    ENGINE.engine.check_integrity()
    ENGINE.close()


SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)


@SCHEMA.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_the_document_allows_is_answered_as_it_says(case: Any) -> None:
    if isinstance(case.body, dict):
        case.body.pop("stream", None)  # a stream's 200 has another content type than the schema that is checked here
    response = case.call()
    case.validate_response(response, checks=[
        not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance])
