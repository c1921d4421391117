"""Which Triton templates were executed by the interpreter, as a record: a kernel is never called checked for text that has changed since.

`tests/targets/test_triton_interpreted.py` runs every variant named here and compares the digests.
"""

from __future__ import annotations

import hashlib
import re

from mlsdc.targets.protocol import KernelSpec
from mlsdc.targets.triton_build import TEMPLATES

INCLUDE = re.compile(r'(?:include|from) "triton/([^"]+\.jinja)"')
FORMAT = re.compile(r'include "triton/(\w+_)" ~ [^"]+ ~ "([^"]+)"')

DIGESTS = {
    "ahead_rows": "7a10be98fac411142f59271620729b8db28cd5b107c187d154f3cd0a3e25c572",
    "append_kv": "e43880931eb4c735ad51d7dd259420a694f98e912f3e1d572719fa68c985ff36",
    "argmax_join": "150b58019f82cf691b0f67c1cdbf75df349ba1e70371f0a6413e52f02e0ad877",
    "argmax_part": "ff21092b79beaf7b60fa9e13534b37281538eeb95d26662d222ec1c811d3cfb1",
    "attend_combine": "76c59e1b1853c9f590caafbba350951e0dd7e6fe234e0765cec3980a235c6bf6",
    "attend_split": "98e67a6237fd9695a36e077a8bc5f2c2cc15cd56b0c2586b75200217ebbb4eb4",
    "bring_rows": "e17015ea91d72b78937151dfbfa4c242d03b27b62ddb5d182c9effa95f4b5333",
    "commit": "8b87eff5e4c97df2eb25216084d25d3cf7c92830431e3f08e3a167546e0119fe",
    "elementwise": "3117296f7769dcafd9011ba262faedf357a4075425263d3c925b89295e44e2f8",
    "embed": "83b0f75d3726078bb985ca4783d041942eaad363e8236f94c7494caba0e1544d",
    "embed_q": "eb4d982ccb7561c6010b7980a6a39f34cf8977b47bfd7fb4b7e833d0ebf502b8",
    "expert_linear": "87fec24a3d50a2ba55df0df5eaa900d7b3be6631054f028597ea0edd21b6600b",
    "expert_linear_q": "c66496df77fc202e4272f70f1ea128aae490cf5085015f4879a813f54c243d35",
    "expert_plan": "6f290998bbe609af94efdf639b2c4e55e40f50dbc1db6195c455bf0485367f69",
    "expert_rows": "d0278c9d86cf9164d67959e8678697b19565d954d537b5ce5cf3a007f2566df6",
    "expert_tiles": "1d4bce9c17878073bf25ca1e45a804271ed48e9943435db5a6af8f7e3f85baa7",
    "expert_tiles_q": "54957e3dfbbf4dd100e51555b8e770ec10c3ed3f57a03431e2dde6722c38271c",
    "follow": "c4be5d4c7c295a8d9056de535aa9dc54a159195276480168bb8a95d04980c33d",
    "gated": "2d060b9471dcac04ec67bf1765fcbaa860c2aefa66317b5e8ab900b42316e618",
    "gated_a16": "e85707dd411f439b3f940de1dc3a57897a4c1eb490d7b3ba039d6de5c050b268",
    "gated_f8": "88215bb64645b10cde9b8d29b41249bc0eff0e1ddb92aea0ed4ea84fdcf48528",
    "gated_q": "5cd075f405542f45749cebefd7bd2073639b7e28f4d62fd8a43ce83a81b91287",
    "gated_q_tma": "db79993f9a422d955320eb4a9074df23327b292ff5d0d616ca14608208258ca1",
    "gated_tma": "8346631fb197ba90a1017cac5d477f619d6252d6d4d38e1c13aa0f32926ef60d",
    "gather_rows": "361895e454f7b868f68c00a9d34dd9e531208bbaa56e7218f4edf62b0dfbe380",
    "grow": "baf36fba6c6cc30ce34a588bebd5f7986b3d78d678fa47fbdd42647a254778e5",
    "linear": "ad441efd71dfe01b448d70b9b1f06d211a14abfa5f1f2dbb564d20a1c663199b",
    "linear_a16": "ec1ad5f76295701902cc07db84b27d669507d8dc6790408d157b47249e90c8d8",
    "linear_f8": "854f7204e780067999cf52a51f1c6a460d7ffc8e400e09ab4586f2e0b4983fa5",
    "linear_q": "d8eb3b9e75170aab070e3247677553a39581997d4c29b419bf060985c2735f8d",
    "linear_q_tma": "1bfba2c7322d2c90558128bbb8a7211e979a8a832b268593046a3871236b62a0",
    "linear_tma": "40b4f5c834fb80a8f10278e2212c94db68023c9c280d3047ca81af0d714dff2d",
    "ngram_clear": "c063bf7b88f34007f4e64d9818a2c54f0d5b89163821cde7b4eb1ecdb0a9dd27",
    "ngram_observe": "a5a8a3808b7d48b6f1f383fca808b18411557155fac5d3be762b65829a343d82",
    "ngram_propose": "47337408a3a8725fceacd8af74aafa9063729d8aa5f74f19d8172db7ee20e259",
    "pad_heads": "96c8b3c3d5abda3ae824678e12b4e1e3de0e29fbd79845c2b2de6ed558822845",
    "quantise": "2545d8ced677356650bb3676eab90107c19a0125c049b22cf5a46a6f6ac9a9ea",
    "quantise_f8": "e7016a4b6dd8e419b87504e759dd9c66a665d9f91dd858cbbe5ed3a1b7a854a7",
    "quantise_kv": "d6099ffa295488bb049d618f2a786ad06663e6adfd38f9c6943085a0f82455a8",
    "reduce": "7a33f5f881919a7244a68f39c579b6b5257b9b1568e5cb7a88037f3fceb43033",
    "rms_norm": "85471cd394489a493cb27b671355d9cd4aad0c1ddb97aea93c2218449eba0e70",
    "rope": "d10ed2f35e62005dfb854be1b9fbcd96968074363745fc03ecaf3a2a3cb09271",
    "rope_table": "18f3a000b393f65968884cfc26e2944196b1f3f43b870660fb56db27beb87234",
    "rotate": "2a5926ee13b4b0b4af1cf9b1c5e019f381959bf8e27380f609918b18172fba0f",
    "sample_bound": "53a30cb17487ef37a4295bf521278b7b5b21b6cdbbbb486e92ebe6e141a8b384",
    "sample_edit": "d1a6ed5e50e4a96e2194873d3227f43bfc6ea7165adb7337dd78d649e7efb0a3",
    "sample_join": "5a6558080eb058b1011e3f235e7f9e7d43793c81bdc8029b19c48c996c7c1627",
    "sample_logprobs": "58d7fcfe6405e4c5dcb7de76ac7d0391676a6fd616fe103837589173cfaef859",
    "sample_part": "5bd3bacc2f30136b53117d89d38ba1107baf8768d9b92ec1fce3460c2ec04b4d",
    "settle_kv": "471af3c839dc36b590fb2f43819997522cf9a8e247d58ca7b1a9d40e914f67f2",
    "softmax": "9641a299dc29142243509b3e0b6484c1ef6c210f8eb6d5928e88e1de64241abe",
    "take": "021323952be1ee96ec7401f7b01262d1c93db105456a73e150e88279abdeecf3",
    "top_index": "be622eef3c42f5b4b2d9289d8fc5ed271195371253b929561ab521c8cd6a33ae",
    "top_k_join": "f9ed26cc6eefc9015b2a6bd3bb97ae92b2a056c3132abb8ee50569a18fc5aec4",
    "top_k_part": "2083f8b42b3d8ce1c863d13e72d7747d89d7ff1ea30147fa05a8544ae19361e4",
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
            todo += [part.name for start, end in FORMAT.findall(text) for part in TEMPLATES.glob(f"{start}*{end}")]
    return hashlib.sha256(b"".join((TEMPLATES / name).read_bytes() for name in sorted(names))).hexdigest()


def checked_by(spec: KernelSpec) -> str:
    """`interpreted` if this text of the template passed the interpreter's tests (maybe at other sizes), else `compiled`.

    Nothing here ran on a card, so `ran` is never said.
    """
    return "interpreted" if DIGESTS.get(spec.template) == digest(spec.template) else "compiled"
