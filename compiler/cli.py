"""`mlsdc VERB ...`: parse the verb first, then import what it needs. `--help` is instant and works on the base install.

Exit codes: 0 done, 2 a user's mistake (one line on stderr), 130 interrupted. Anything else is a bug, with its traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from typing import NoReturn

from mlsdc.runtime.errors import MlsdcError

# verb -> what it does; its code is mlsdc.compiler.cli_<verb>, with add_arguments(parser) and main(args) -> exit code
VERBS = {
    "compile": "compile a model.yaml into one artifact",
    "train": "train heads or count n-grams for a model's cascade",
    "run": "answer a prompt with an artifact",
    "chat": "talk to an artifact in the terminal",
    "serve": "serve an artifact with an OpenAI-compatible API",
    "bench": "measure an artifact on this machine",
    "eval": "measure what a KV-cache format costs in quality",
    "inspect": "show what is in an artifact",
    "roofline": "predict a step's time on a GPU",
    "verify": "check every byte of an artifact",
    "targets": "list what can be compiled for",
    "passes": "list the passes, in order",
    "export": "write a model's graph as ONNX",
    "models": "list the model families and what each was proven by",
    "opt": "run passes on a graph given as text",
    "view": "show a compile as one HTML page",
    "diff": "compare an artifact with the interpreter or transformers",
    "trace": "serve one prompt and write a trace of it",
    "explain": "say why an artifact is what it is",
    "tune": "measure an artifact on this machine and plan its cascade",
    "plan": "say which cascade and cache would pay, without weights",
    "env": "show this machine and what is installed",
}

# top-level module -> the extra that brings it
EXTRAS = {
    **dict.fromkeys(("gguf", "networkx", "onnx", "safetensors", "torch", "transformers", "tvm", "yaml"), "compile"),
    "triton": "nvidia",
    **dict.fromkeys(("llguidance", "prometheus_client", "pydantic", "starlette", "uvicorn"), "server"),
    "matplotlib": "plot",
}


class Parser(argparse.ArgumentParser):
    """Mistakes on the command line are one line, too."""

    def error(self, message: str) -> NoReturn:
        raise MlsdcError(f"{message} (see `{self.prog} --help`)")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    try:
        code = dispatch(argv)
        sys.stdout.flush()
        return code
    except MlsdcError as error:
        print(f"mlsdc: error: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        root = (error.name or "").partition(".")[0]
        if root not in EXTRAS:
            raise
        print(f"mlsdc: error: `mlsdc {argv[0]}` needs {root}: pip install 'mlsdc[{EXTRAS[root]}]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mlsdc: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `mlsdc inspect x | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        from importlib.metadata import version

        print(f"mlsdc {version('mlsdc')}")
        return 0
    verb, *rest = argv
    if verb not in VERBS:
        import difflib

        close = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f" (did you mean '{close[0]}'?)" if close else ""
        raise MlsdcError(f"'{verb}' is not a verb{hint}; verbs are {', '.join(VERBS)}")
    module = importlib.import_module(f"mlsdc.compiler.cli_{verb}")
    parser = Parser(prog=f"mlsdc {verb}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    module.add_arguments(parser)
    code: int = module.main(parser.parse_args(rest))
    return code


def usage() -> str:
    head = ["usage: mlsdc VERB ...    (mlsdc VERB --help tells more)", "", "A compiler for cascades: a model with its guessers.", ""]
    return "\n".join([*head, *(f"  {verb:8}  {what}" for verb, what in VERBS.items())])


def _terminate(signum: int, frame: object) -> None:
    """SIGTERM unwinds like Ctrl-C, so that nothing half-written stays behind."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
