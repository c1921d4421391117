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
    "argmax_join": "150b58019f82cf691b0f67c1cdbf75df349ba1e70371f0a6413e52f02e0ad877",
    "argmax_part": "ff21092b79beaf7b60fa9e13534b37281538eeb95d26662d222ec1c811d3cfb1",
    "attend_combine": "cfd86f09b64ec518f9ff182d9cc0a5a446b1c21a6bf3ec5f16888d1f21b84d71",
    "attend_split": "6be6a7bf9147f000a0fdda85bf393b228b7a08d8cd5054b4db3fda98606896fe",
    "commit": "e2362824b9cc9a3a0dc4e392fad536678a94ba94463a516b9d07afa329575828",
    "elementwise": "3117296f7769dcafd9011ba262faedf357a4075425263d3c925b89295e44e2f8",
    "embed": "83b0f75d3726078bb985ca4783d041942eaad363e8236f94c7494caba0e1544d",
    "embed_q": "eb4d982ccb7561c6010b7980a6a39f34cf8977b47bfd7fb4b7e833d0ebf502b8",
    "gated_q": "27b0d926935f585d989a6115cc1e8b260775eeda1d6fd1c04b487bcfacca56ec",
    "gather_rows": "361895e454f7b868f68c00a9d34dd9e531208bbaa56e7218f4edf62b0dfbe380",
    "linear": "11f38efe366158508e836f571c83130fe60b740948c037ea55b49adf34ddd418",
    "linear_q": "096f256c7a931466895668b06e7dcba6d9fa00e480f28af381522d59ea9b87eb",
    "quantise": "2545d8ced677356650bb3676eab90107c19a0125c049b22cf5a46a6f6ac9a9ea",
    "rms_norm": "85471cd394489a493cb27b671355d9cd4aad0c1ddb97aea93c2218449eba0e70",
    "rope": "118ef80b369e2942385f09d3a6d4620fc5b517002740f34e5b5fd4b37c1ddf13",
    "rope_table": "18f3a000b393f65968884cfc26e2944196b1f3f43b870660fb56db27beb87234",
    "sample_bound": "53a30cb17487ef37a4295bf521278b7b5b21b6cdbbbb486e92ebe6e141a8b384",
    "sample_edit": "d1a6ed5e50e4a96e2194873d3227f43bfc6ea7165adb7337dd78d649e7efb0a3",
    "sample_join": "5a6558080eb058b1011e3f235e7f9e7d43793c81bdc8029b19c48c996c7c1627",
    "sample_logprobs": "58d7fcfe6405e4c5dcb7de76ac7d0391676a6fd616fe103837589173cfaef859",
    "sample_part": "5bd3bacc2f30136b53117d89d38ba1107baf8768d9b92ec1fce3460c2ec04b4d",
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
