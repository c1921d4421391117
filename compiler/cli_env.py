"""Show this machine and what is installed: put it into a bug report."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from importlib import metadata

from mlsdc.runtime.device.cpu_features import cpu_features, machine_name

PACKAGES = {
    "base": ("apache-tvm-ffi", "numpy", "tokenizers", "jinja2"),
    "compile": ("apache-tvm", "torch", "transformers", "networkx", "onnx", "gguf", "safetensors", "pyyaml"),
    "nvidia": ("triton",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--features", action="store_true", help="every CPU feature, as targets require them")


def main(args: argparse.Namespace) -> int:
    features = cpu_features()
    print(f"mlsdc      {metadata.version('mlsdc')}")
    print(f"python     {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"cpu        {machine_name(features)}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable")
    print(f"memory     {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB")
    if args.features:
        print(f"features   {' '.join(sorted(features))}")
    for extra, names in PACKAGES.items():
        print(f"{extra:9}  {', '.join(installed(names))}")
    return 0


def installed(names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"{name} -"
