"""Which Triton templates were executed by the interpreter, as a record: a kernel is never called checked for text that has changed since.

`tests/targets/test_triton_interpreted.py` runs every variant named here and compares the digests.
"""

from __future__ import annotations

import hashlib
import re

from mlsdc.targets.protocol import KernelSpec
from mlsdc.targets.triton_build import TEMPLATES

INCLUDE = re.compile(r'include "triton/([^"]+\.jinja)"')
FORMAT = re.compile(r'include "triton/kv_" ~ [^"]+ ~ "([^"]+)"')

DIGESTS = {
    "append_kv": "b9132462b4755dc8e259bdc72169163fc1fff586e9e891aa13c029b5c23572ef",
    "attend_combine": "cfd86f09b64ec518f9ff182d9cc0a5a446b1c21a6bf3ec5f16888d1f21b84d71",
    "attend_split": "6be6a7bf9147f000a0fdda85bf393b228b7a08d8cd5054b4db3fda98606896fe",
    "rope": "118ef80b369e2942385f09d3a6d4620fc5b517002740f34e5b5fd4b37c1ddf13",
}


def digest(template: str) -> str:
    """sha256 of the template and of every fragment it includes: those of all KV formats, where the format chooses."""
    names, todo = set(), [f"{template}.py.jinja"]
    while todo:
        name = todo.pop()
        if name not in names:
            names.add(name)
            text = (TEMPLATES / name).read_text(encoding="utf-8")
            todo += INCLUDE.findall(text)
            todo += [part.name for end in FORMAT.findall(text) for part in TEMPLATES.glob(f"kv_*{end}")]
    return hashlib.sha256(b"".join((TEMPLATES / name).read_bytes() for name in sorted(names))).hexdigest()


def checked_by(spec: KernelSpec) -> str:
    """`interpreted` if this text of the template passed the interpreter's tests (maybe at other sizes), else `compiled`.

    Nothing here ran on a card, so `ran` is never said.
    """
    return "interpreted" if DIGESTS.get(spec.template) == digest(spec.template) else "compiled"
