"""Which Triton templates were executed by the interpreter, as a record: a kernel is never called checked for text that has changed since.

`tests/targets/test_triton_interpreted.py` runs every variant named here and compares the digests.
"""

from __future__ import annotations

import hashlib

from mlsdc.targets.protocol import KernelSpec
from mlsdc.targets.triton_build import TEMPLATES

DIGESTS = {
    "attend_split": "75898a896b3495f858f727b3beed1118056892378b86138636683da3e3982d2f",
    "attend_combine": "5601aca69c362f643a5e1de4dffd0fb397e9b9d293d2abb03f08923b9b84f271",
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
