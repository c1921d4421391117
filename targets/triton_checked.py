"""Which Triton templates were executed by the interpreter, as a record: a kernel is never called checked for text that has changed since.

`tests/targets/test_triton_interpreted.py` runs every variant named here and compares the digests.
"""

from __future__ import annotations

import hashlib

from mlsdc.targets.protocol import KernelSpec
from mlsdc.targets.triton_build import TEMPLATES

DIGESTS = {
    "attend_split": "",
    "attend_combine": "",
}


def digest(template: str) -> str:
    """sha256 of the template and of every KV fragment it may include."""
    parts = sorted([*TEMPLATES.glob("kv_*.py.jinja"), TEMPLATES / f"{template}.py.jinja"])
    return hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()


def checked_by(spec: KernelSpec) -> str:
    """`interpreted` if this text of the template passed the interpreter's tests (for other sizes, maybe), else `compiled`. Nothing ran on a card."""
    return "interpreted" if DIGESTS.get(spec.template) == digest(spec.template) else "compiled"
