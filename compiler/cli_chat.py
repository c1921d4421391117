"""Talk to an artifact in the terminal. Answers come as they are made; Ctrl-C ends an answer, Ctrl-D the conversation.

/stats says what speculation did, in the last answer and in all.
Commands: /stats, /system TEXT, /reset, /speculation on|off, /temperature X, /help, /quit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mlsdc.runtime.errors import MlsdcError, RequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of an answer (default: the rest of the context)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0, the default, is greedy")
    parser.add_argument("--no-speculation", action="store_true", help="plain decoding; the text is the same, only slower")
    parser.add_argument("--threads", type=int, metavar="N", help="default: all cores this process may use")


def main(args: argparse.Namespace) -> int:
    from mlsdc.runtime.engine import Engine

    with Engine.load(args.artifact, threads=args.threads) as engine:
        if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
            raise MlsdcError(f"{args.artifact}: this model has no chat template: use `mlsdc run --raw`")
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  line editing and history in input()
            print(f"{engine.manifest.model.name}: /help lists the commands, Ctrl-D ends", file=sys.stderr)
        Chat(engine, args).run()
    return 0


class Chat:
    """One conversation."""

    def __init__(self, engine: Any, args: argparse.Namespace, *, read: Callable[[str], str] = input) -> None:
        from mlsdc.runtime.statistics import Statistics

        self.engine = engine
        self.read = read
        self.system: str | None = args.system
        self.max_tokens: int | None = args.max_tokens
        self.temperature: float = args.temperature
        self.speculation = not args.no_speculation
        self.messages: list[dict[str, str]] = []
        self.last: list[str] = []  # the lines of /stats
        self.total = Statistics()

    def run(self) -> None:
        """Until the end of the input."""
        prompt = "> " if sys.stdin.isatty() else ""
        while True:
            try:
                line = self.read(prompt).strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                continue
            if not line:
                continue
            if not line.startswith("/"):
                self.answer(line)
            elif not self.command(*line[1:].partition(" ")[::2]):
                return

    def command(self, name: str, value: str) -> bool:
        """Carry out one command; False ends the conversation."""
        value = value.strip()
        if name in ("quit", "exit"):
            return False
        if name == "stats":
            self.say(*self.last or ("no answer yet",), f"all        {self.total.tokens} tokens in {self.total.steps} steps, "
                     f"{self.total.acceptance_length:.2f} tokens a step")
        elif name == "reset":
            self.messages = []
        elif name == "system":
            self.system, self.messages = value or None, []
        elif name == "speculation" and value in ("on", "off"):
            self.speculation = value == "on"
        elif name == "temperature" and _is_number(value):
            self.temperature = float(value)
        else:
            self.say(*([] if name == "help" else [f"/{name} {value}: not a command"]), (__doc__ or "").strip().splitlines()[-1])
        return True

    def answer(self, text: str) -> None:
        from mlsdc.compiler.cli_run import report
        from mlsdc.runtime.sampling_params import SamplingParams, Speculation

        asked = [*self.messages, {"role": "user", "content": text}]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        shown: list[str] = []

        def show(_: int, delta: Any) -> None:
            shown.append(delta.text)
            print(delta.text, end="", flush=True)

        try:
            params = SamplingParams(
                temperature=self.temperature, max_tokens=self.max_tokens, speculation=Speculation(self.speculation))
            (result,) = self.engine.generate([[*system, *asked]], params, on_token=show)
        except RequestError as error:
            self.say(str(error))
            return
        except KeyboardInterrupt:  # what was said so far counts
            self.last = []
        else:
            self.total.merge(result.statistics)
            first, total = result.timings.time_to_first_token_s or 0.0, result.timings.total_s or 0.0
            self.last = report(result.statistics, len(result.prompt_token_ids), len(result.token_ids), first, total)
        print()
        self.messages = [*asked, {"role": "assistant", "content": "".join(shown)}]

    def say(self, *lines: str) -> None:
        """What is not the model's goes to stderr."""
        print("\n".join(lines), file=sys.stderr)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
