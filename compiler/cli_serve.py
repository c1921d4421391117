"""Serve an artifact with an OpenAI-compatible API. SIGTERM lets running requests end.

docs/serve.md says what is served. The API key may also come from the environment: MLSDC_API_KEY.
"""

from __future__ import annotations

import argparse
import os
import sys

from mlsdc.runtime.errors import MlsdcError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", metavar="NAME", help="default: the model's name in the artifact")
    parser.add_argument("--api-key", action="append", default=[], metavar="KEY", help="ask for one of these keys; may be given again")
    parser.add_argument("--threads", type=int, metavar="N", help="default: all cores this process may use")
    parser.add_argument("--device", default="auto", metavar="NAME", help="a target of the artifact (default: the best that fits)")
    parser.add_argument("--kv-pool-bytes", type=int, metavar="N", help="KV memory (default: what the artifact says)")
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="choices that run at once; at most what was compiled")
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="rows of a step; at most what was compiled")
    parser.add_argument("--max-stretch", type=float, default=1.5, metavar="X",
                        help="plain steps that one with prompt rows may take while others decode (1.5); 0: no limit, prompts go fastest")
    parser.add_argument("--max-queue", type=int, default=64, metavar="N", help="choices that may wait beside those that run (64), then 429")
    parser.add_argument("--max-body-bytes", type=int, default=4 << 20, metavar="N", help="of a request (4 MiB)")
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="for requests that name no deadline_s of their own (none)")
    parser.add_argument("--step-timeout", type=float, default=60.0, metavar="SECONDS", help="a step that takes longer hangs (60)")
    parser.add_argument("--drain-timeout", type=float, default=30.0, metavar="SECONDS", help="for running requests after SIGTERM (30)")
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True,
                        help="reuse the KV pages of known prompt beginnings")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")


def main(args: argparse.Namespace) -> int:
    from mlsdc.runtime.async_engine import AsyncEngine
    from mlsdc.runtime.engine import Engine
    from mlsdc.runtime.server.run import serve
    from mlsdc.runtime.server.settings import ServerSettings

    if not 0 <= args.port < 1 << 16:
        raise MlsdcError(f"--port: {args.port}, expected 0 to 65535")
    keys = tuple(args.api_key) or tuple(key for key in (os.environ.get("MLSDC_API_KEY"),) if key)
    settings = ServerSettings(
        served_model_name=args.served_model_name, api_keys=keys, max_queue=args.max_queue, max_body_bytes=args.max_body_bytes,
        deadline_s=args.deadline, step_timeout_s=args.step_timeout, drain_timeout_s=args.drain_timeout)
    engine = Engine.load(args.artifact, threads=args.threads, device=args.device, kv_pool_bytes=args.kv_pool_bytes)
    try:
        engine.scheduler.restrict(
            max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens, max_stretch=args.max_stretch or None)
        if not args.enable_prefix_caching:
            engine.pool.reuse = False
        return serve(AsyncEngine(engine), settings, host=args.host, port=args.port, log_level=args.log_level)
    finally:
        sys.stderr.flush()
        engine.close()
