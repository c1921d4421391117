"""llama.cpp's llama-bench and llama-server as peers: the user's own binaries, run in turn with ours."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from mlsdc.runtime.bench.process import serving
from mlsdc.runtime.errors import MlsdcError

TIMEOUT_S = 600


@dataclass(frozen=True)
class LlamaBench:
    """`binary` on a GGUF file. One call is one process: it loads, warms up and runs the test once."""

    binary: Path
    model: Path
    threads: int

    @staticmethod
    def parse(peer: str, model: str | None, threads: int) -> LlamaBench:
        """From `--peer llama-bench=PATH` and `--peer-model GGUF`. Raises MlsdcError."""
        return LlamaBench(*_files("llama-bench", peer, model), threads)

    @property
    def name(self) -> str:
        return f"llama-bench on {self.model.name}"

    def tokens_per_second(self, prompt: int = 0, generate: int = 0) -> float:
        """Of its pp (`prompt`) or tg (`generate`) test. Raises MlsdcError with what the program said last."""
        options = {"-m": self.model, "-t": self.threads, "-p": prompt, "-n": generate, "-r": 1, "-o": "json"}
        command = [str(self.binary), *(str(part) for option in options.items() for part in option)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MlsdcError(f"--peer: {self.binary.name} did not finish: {error}") from None
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["nothing"]
            raise MlsdcError(f"--peer: {self.binary.name} ended with {done.returncode} and said: {said[-1]}")
        return parse_speed(done.stdout)


@dataclass(frozen=True)
class LlamaServer:
    """`binary` on a GGUF file, with a slot of `context` tokens for each of `slots` requests at once."""

    binary: Path
    model: Path
    threads: int
    slots: int
    context: int = 2048

    @staticmethod
    def parse(peer: str, model: str | None, threads: int, slots: int) -> LlamaServer:
        """From `--peer llama-server=PATH` and `--peer-model GGUF`. Raises MlsdcError."""
        return LlamaServer(*_files("llama-server", peer, model), threads, slots)

    @property
    def name(self) -> str:
        return f"llama-server on {self.model.name}, {self.slots} slots"

    def served(self) -> AbstractContextManager[tuple[str, float]]:
        """Started on a free port, until it is left: (URL, seconds until it served). Raises MlsdcError."""
        options = {"-m": self.model, "-t": self.threads, "-tb": self.threads, "-np": self.slots, "-c": self.slots * self.context}
        command = [str(self.binary), *(str(part) for option in options.items() for part in option), "--host", "127.0.0.1", "--no-webui"]
        return serving(command, name=f"--peer: {self.binary.name}", ready="/health")


def _files(kind: str, peer: str, model: str | None) -> tuple[Path, Path]:
    """Program and model of `--peer kind=PATH --peer-model GGUF`. Raises MlsdcError."""
    found, equals, path = peer.partition("=")
    if found != kind or not equals:
        raise MlsdcError(f"--peer: '{peer}', expected {kind}=PATH")
    if not os.access(path, os.X_OK) or not Path(path).is_file():
        raise MlsdcError(f"--peer: '{path}' is not a program")
    if model is None:
        raise MlsdcError("--peer: --peer-model GGUF says which model it runs")
    if not Path(model).is_file():
        raise MlsdcError(f"--peer-model: '{model}' is not a file")
    return Path(path), Path(model)


def parse_speed(text: str) -> float:
    """avg_ts of the one test in llama-bench's JSON. Raises MlsdcError."""
    try:
        (test,) = json.loads(text)
        return float(test["avg_ts"])
    except (ValueError, KeyError, TypeError) as error:
        raise MlsdcError(f"--peer: not llama-bench's JSON ({type(error).__name__}: {error})") from None
