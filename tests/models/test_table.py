"""The table of families: what `mlsdc models` prints is what docs and tests say."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsdc.compiler.capture.gguf_source import MODEL_TYPES, WITH_EXPERTS
from mlsdc.compiler.cli import main
from mlsdc.compiler.cli_models import markdown
from mlsdc.compiler.families import FAMILIES, PROOFS, SOURCES
from mlsdc.compiler.weight_origin import KEPT


@pytest.mark.parametrize("file", ["README.md", "docs/models.md"])
def test_the_docs_have_the_table(root: Path, file: str) -> None:
    """`mlsdc models --markdown` prints what stands between the marks."""
    text = (root / file).read_text(encoding="utf-8")
    _, _, rest = text.partition("<!-- mlsdc models --markdown -->\n")
    assert rest.partition("\n<!-- end -->")[0] == markdown()


def test_every_proof_is_explained_and_claimed_by_someone() -> None:
    claimed = {proof for family in FAMILIES for proof in family.proofs} | {source.proof for source in SOURCES}
    assert claimed == set(PROOFS)


def test_names_are_unique() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_every_gguf_architecture_is_proven_and_no_other_is_claimed() -> None:
    proven = {(family.gguf, family.model_type) for family in FAMILIES if "gguf" in family.proofs}
    assert proven == set(MODEL_TYPES.items()) | set(WITH_EXPERTS.items())
    assert all(bool(family.gguf) == ("gguf" in family.proofs) for family in FAMILIES)


def test_blocks_that_are_repacked_are_said_to_be() -> None:
    """With the packed types that take them over."""
    blocks = {source.block: source.what for source in SOURCES if source.block}
    assert {(dtype, kind) for kind, what in blocks.items() for dtype, _ in KEPT if dtype in what} == {at for at in KEPT if at[1] in blocks}


def test_the_verb_prints_every_row(capsys: object) -> None:
    assert main(["models"]) == 0
    printed = capsys.readouterr().out  # type: ignore[attr-defined]
    assert all(family.name in printed and family.traits in printed for family in FAMILIES)
