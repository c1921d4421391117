"""Which Triton templates were executed by the interpreter, as a record: a kernel is never called checked for text that has changed since.

`tests/targets/test_triton_interpreted.py` runs every variant named here and compares the digests.
"""

from __future__ import annotations

import hashlib

from mlsdc.targets.protocol import KernelSpec
from mlsdc.targets.triton_build import TEMPLATES

DIGESTS = {
    "attend_split": "77af4671993cda3d2d536c90ee77a77f616b089faec4b2313faca9b1af09829c",
    "attend_combine": "cb0ba4b90fc1a7251cfc9d8f655a13d4480b3ad49e5e457725c299bf23f392ad",
}


def digest(template: str) -> str:
    """sha256 of the template and of every KV fragment it may include."""
    parts = sorted([*TEMPLATES.glob("kv_*.py.jinja"), TEMPLATES / f"{template}.py.jinja"])
    return hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()


def checked_by(spec: KernelSpec) -> str:
    """`interpreted` if this text of the template passed the interpreter's tests (maybe at other sizes), else `compiled`.

    Nothing here ran on a card, so `ran` is never said.
    """
    return "interpreted" if DIGESTS.get(spec.template) == digest(spec.template) else "compiled"
