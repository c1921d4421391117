"""Which Triton templates were executed by the interpreter, as a record: a kernel is never called checked for text that has changed since.

`tests/targets/test_triton_interpreted.py` runs every variant named here and compares the digests.
"""

from __future__ import annotations

import hashlib

from mlsdc.targets.protocol import KernelSpec
from mlsdc.targets.triton_build import TEMPLATES

DIGESTS = {
    "attend_split": "dfafaa359fdaab6172f732e525f62edcfe2009b93cf9387bbe476dba6684b194",
    "append_kv": "88253d8f2d0f186def7624ca430fbcaadbfa31a8d6bb9363d4a2961c19366de5",
    "rope": "882d4012481eb28a8af6fe1689e299e9cbe97f8df64f6d95f52fe8926d977871",
    "attend_combine": "ee6b91134c556cc31eaa6581c7798fdbadca18bd73781c4667d84fb5c86bed97",
}


def digest(template: str) -> str:
    """sha256 of the template and of every fragment it may include."""
    parts = sorted([*TEMPLATES.glob("kv_*.py.jinja"), TEMPLATES / "turn.py.jinja", TEMPLATES / f"{template}.py.jinja"])
    return hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()


def checked_by(spec: KernelSpec) -> str:
    """`interpreted` if this text of the template passed the interpreter's tests (maybe at other sizes), else `compiled`.

    Nothing here ran on a card, so `ran` is never said.
    """
    return "interpreted" if DIGESTS.get(spec.template) == digest(spec.template) else "compiled"
