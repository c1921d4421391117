"""`mlsdc bench serve --peer llama-server=PATH`: the user's server gets our threads and a slot for each client, and is ended again."""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

import pytest

from mlsdc.compiler import cli
from mlsdc.runtime.bench.peer import LlamaServer
from mlsdc.runtime.errors import MlsdcError

SERVE = f'''#!{sys.executable}
import http.server, pathlib, sys
pathlib.Path(__file__).with_name("args").write_text(" ".join(sys.argv[1:]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
'''


def server_program(folder: Path, text: str) -> tuple[str, str]:
    """What --peer and --peer-model take: a program of this text, and a model."""
    program, model = folder / "llama-server", folder / "m.gguf"
    program.write_text(text)
    program.chmod(0o755)
    model.touch()
    return f"llama-server={program}", str(model)


def test_a_peer_server_gets_our_threads_and_a_slot_for_each_client_and_ends_with_the_benchmark(tmp_path: Path) -> None:
    peer = LlamaServer.parse(*server_program(tmp_path, SERVE), threads=3, slots=8)
    with peer.served() as (url, seconds):
        assert urllib.request.urlopen(f"{url}/health").status == 200
        assert seconds > 0
    port = url.rsplit(":", 1)[1]
    assert (tmp_path / "args").read_text() == f"-m {tmp_path}/m.gguf -t 3 -tb 3 -np 8 -c 16384 --host 127.0.0.1 --no-webui --port {port}"
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/health")


def test_a_peer_server_that_ends_is_one_line_with_what_it_said_last(tmp_path: Path) -> None:
    peer = LlamaServer.parse(*server_program(tmp_path, "#!/bin/sh\necho first >&2; echo 'no such model' >&2; exit 3\n"), 1, 1)
    with pytest.raises(MlsdcError, match="^--peer: llama-server ended: no such model$"), peer.served():
        pass


def test_a_server_is_compared_with_one_peer_of_its_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer, model = server_program(tmp_path, SERVE)
    serve = ["bench", "serve", "--url", "http://127.0.0.1:9", "--peer", peer, "--peer-model", model]
    for args, message in (
        ([*serve, "--peer-url", "http://127.0.0.1:8"], "expected either --peer or --peer-url"),
        ([*serve[:4], "--peer", "llama-bench=x", "--peer-model", model], "'llama-bench=x', expected llama-server=PATH"),
        (["bench", "latency", "x.mlsdc", *serve[4:]], "`mlsdc bench latency` has nothing to compare with it"),
    ):
        assert cli.main(args) != 0
        assert message in capsys.readouterr().err
