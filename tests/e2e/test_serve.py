"""`mlsdc serve` as a process over a compiled artifact, and grammars through the native kernels."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.sampling_params import Grammar, SamplingParams, Speculation

for package in ("starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance"):
    pytest.importorskip(package)
openai = pytest.importorskip("openai")

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["kind", "count"],
    "properties": {"kind": {"enum": ["apple", "pear"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlsdc.compiler.cli", "serve", str(tiny), "--port", str(port), "--threads", "1", "--api-key", "secret",
               "--served-model-name", "tiny", "--log-level", "info"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert process.stderr is not None
    line = json.loads(process.stderr.readline())
    assert line["message"] == f"serving tiny at http://127.0.0.1:{port}"
    yield f"http://127.0.0.1:{port}", process
    if process.poll() is None:
        process.kill()
    process.wait()


def client(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)


def test_the_official_client_gets_the_same_text_with_and_without_speculation(server: tuple[str, Any]) -> None:
    with client(server[0]) as api:
        texts = set()
        for enabled in (True, False):
            body = {"speculation": {"enabled": enabled}}
            whole = api.completions.create(model="tiny", prompt="abcabcabc", max_tokens=40, temperature=0.7, seed=3, extra_body=body)
            stream = api.completions.create(
                model="tiny", prompt="abcabcabc", max_tokens=40, temperature=0.7, seed=3, extra_body=body, stream=True)
            texts |= {whole.choices[0].text, "".join(chunk.choices[0].text for chunk in stream)}
        assert len(texts) == 1
        with pytest.raises(openai.BadRequestError, match="this model has no chat template"):
            api.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.AuthenticationError):
            api.with_options(api_key="wrong").models.list()


def test_a_schema_is_kept_over_http(server: tuple[str, Any]) -> None:
    with client(server[0]) as api:
        answer = api.completions.create(
            model="tiny", prompt="x", max_tokens=60, temperature=1, seed=1,
            extra_body={"response_format": {"type": "json_schema", "json_schema": {"name": "fruit", "schema": SCHEMA}}})
        found = json.loads(answer.choices[0].text)
        assert found["kind"] in ("apple", "pear")
        assert answer.usage.speculation["levels"]["grammar"]["accepted"] > 0


def test_sigterm_lets_a_running_answer_end_and_exits_with_0(server: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, process = server
    got: list[str] = []
    started = threading.Event()

    def read() -> None:
        with client(url) as api:
            for chunk in api.completions.create(model="tiny", prompt="abc", max_tokens=110, temperature=0, stream=True):
                got.append(chunk.choices[0].finish_reason)
                started.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert started.wait(60)
    process.send_signal(signal.SIGTERM)
    reader.join(60)
    assert got[-1] in ("length", "stop")
    assert process.wait(60) == 0
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/health", timeout=5)


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine.load(tiny, threads=1) as engine:
        yield engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_holds_and_the_text_does_not_depend_on_drafts(engine: Engine, temperature: float) -> None:
    prompts = ["a", '{"kind": "apple", "count": 1}', "zzzz"]
    texts = []
    for speculation in (Speculation(), Speculation(enabled=False), Speculation(max_draft_tokens=1)):
        params = SamplingParams(grammar=JSON, temperature=temperature, seed=4, max_tokens=60, speculation=speculation)
        together = [result.text for result in engine.generate(prompts, params)]
        alone = [engine.generate([prompt], params)[0].text for prompt in prompts]
        texts += [together, alone]
    assert all(text == texts[0] for text in texts)
    for text in texts[0]:
        found = json.loads(text)
        assert list(found) == ["kind", "count"]
        assert 0 <= found["count"] <= 99


def test_rows_without_a_grammar_beside_one_with_are_left_alone(engine: Engine) -> None:
    free = SamplingParams(max_tokens=30)
    alone = engine.generate(["abcabc"], free)[0].text
    request = engine.submit("abcabc", free)
    masked = engine.submit("x", SamplingParams(grammar=JSON, max_tokens=60))
    assert (engine.wait(request).text, bool(json.loads(engine.wait(masked).text))) == (alone, True)
