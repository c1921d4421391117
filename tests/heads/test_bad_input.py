"""What cannot be a cascade is refused before anything is compiled, in one line that says where and why (law L7)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlsdc.compiler import compile_model
from mlsdc.compiler.capture import load_source
from mlsdc.compiler.config import parse_config
from mlsdc.compiler.errors import ConfigError, HeadError, MlsdcError
from mlsdc.compiler.heads.checkpoint import read_own
from mlsdc.compiler.heads.train_cli import frequent, parse_taps
from mlsdc.compiler.vocabulary import check_vocabulary
from tests.heads.tiny import EAGLE, EXIT, MEDUSA, with_heads, write_heads, write_small

NGRAM = {"kind": "ngram", "name": "counts"}


def refused(tmp_path: Path, config: dict[str, Any]) -> str:
    """The one line of the error; nothing is left behind."""
    with pytest.raises(MlsdcError) as caught:
        compile_model(config, tmp_path / "out.mlsdc")
    assert not (tmp_path / "out.mlsdc").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def eagle(path: Path, **more: Any) -> dict[str, Any]:
    return {"kind": "eagle", "heads": str(path), **more}


def changed(config: Any, **fields: Any) -> Any:
    from dataclasses import replace

    return replace(config, **fields)


@pytest.mark.parametrize(("fields", "message"), [
    ({"target_hidden": 128}, "made for a model with hidden size 128, model has 96: these are another model's heads"),
    ({"vocab_size": 300}, "made for a model with vocabulary 300, model has 272: these are another model's heads"),
    ({"taps": (5,)}, "reads the hidden state after layer 5, model has 2 layers: these are another model's heads"),
])
def test_heads_of_another_model(tmp_path: Path, tiny_model: Path, fields: dict[str, Any], message: str) -> None:
    model = tmp_path / "model"
    model.symlink_to(tiny_model)
    heads = write_heads(tmp_path / "h.safetensors", changed(EAGLE, **fields))
    assert f"cascade[0].heads: h.safetensors: {message}" in refused(tmp_path, with_heads(model, eagle(heads)))


def test_heads_of_another_kind(tmp_path: Path, tiny_model: Path) -> None:
    heads = write_heads(tmp_path / "h.safetensors", MEDUSA)
    assert "h.safetensors: is a head of kind 'medusa', the level wants one of kind 'eagle'" in refused(
        tmp_path, with_heads(tiny_model, eagle(heads)))


def test_heads_that_do_not_exist(tmp_path: Path, tiny_model: Path) -> None:
    assert "none.safetensors: does not exist" in refused(tmp_path, with_heads(tiny_model, eagle(tmp_path / "none.safetensors")))


def test_weights_that_are_no_numbers(tmp_path: Path, tiny_model: Path) -> None:
    heads = write_heads(tmp_path / "h.safetensors", EAGLE)
    data = bytearray(heads.read_bytes())
    at = data.index(b'"embed_norm"')
    start = 8 + int.from_bytes(data[:8], "little")
    offset = json.loads(b"{" + bytes(data[at:]).split(b"},")[0] + b"}}")["embed_norm"]["data_offsets"][0]
    data[start + offset : start + offset + 4] = np.float32("nan").tobytes()
    heads.write_bytes(data)
    assert "h.safetensors: tensor 'embed_norm' has values that are not finite" in refused(tmp_path, with_heads(tiny_model, eagle(heads)))


def test_a_file_cut_short(tmp_path: Path, tiny_model: Path) -> None:
    heads = write_heads(tmp_path / "h.safetensors", EAGLE)
    heads.write_bytes(heads.read_bytes()[:-1000])
    assert "h.safetensors" in refused(tmp_path, with_heads(tiny_model, eagle(heads)))


def test_two_levels_of_one_name(tmp_path: Path, tiny_model: Path) -> None:
    heads = str(tmp_path / "h.safetensors")
    for second in ({"kind": "eagle", "name": "counts", "heads": heads}, {"kind": "eagle", "name": "target", "heads": heads}):
        message = refused(tmp_path, with_heads(tiny_model, NGRAM, second))
        assert f"cascade[0].merge[1].name: '{second['name']}' is" in message
        assert "give the level another name" in message


@pytest.mark.parametrize(("cascade", "message"), [
    ([{"merge": []}], "cascade[0].merge: expected a list of two levels or more"),
    ([{"merge": [NGRAM]}], "cascade[0].merge: expected a list of two levels or more"),
    ([{"merge": [NGRAM, {"kind": "medussa"}]}], "cascade[0].merge[1].kind: 'medussa' is not a level kind (did you mean 'medusa'?)"),
    ([NGRAM, {"kind": "eagle", "heads": "x"}], "cascade[1]: a 'eagle' level cannot verify the level below it, only 'model' and 'self' can"),
    ([{"kind": "eagle"}], "cascade[0].heads: is missing; a 'eagle' level needs it"),
    ([{"kind": "model"}], "cascade[0].model: is missing; a 'model' level needs it"),
    ([{"kind": "self"}], "cascade[0].layers: is missing; a 'self' level needs it"),
    ([{"kind": "eagle", "heads": "x", "layers": 2}], "cascade[0].layers: unknown key"),
    ([{"kind": "eagle", "heads": "x", "max_nodes": 64}], "cascade[0].max_nodes: 64 is out of range; 1 to 63 is allowed"),
    ("ngram", "cascade: expected a list of levels"),
    ([{"kind": "ngram", "name": "grammar"}], "cascade[0].name: 'grammar' is the name of tokens that a grammar forces"),
    ([{"kind": "ngram", "name": "target.rank1"}], "cascade[0].name: 'target.rank1' ends as the file of another rank's weights does"),
    *(([{"kind": "ngram", "name": name}], "is no name of a level; letters, digits, _, - and . are allowed")
      for name in ("../../x", "a/b", "a+b", "a>b", "a\nb", "", ".x", "é")),
])
def test_a_cascade_that_is_none(cascade: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"target": {"model": "x"}, "cascade": cascade})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_self_level_of_all_layers(tmp_path: Path, tiny_model: Path) -> None:
    assert "cascade[0].layers: 2, but" in refused(tmp_path, with_heads(tiny_model, {"kind": "self", "layers": 2}))


def test_an_exit_of_another_layer(tmp_path: Path, tiny_model: Path) -> None:
    exit_file = write_heads(tmp_path / "x.safetensors", changed(EXIT, taps=(2,)))
    assert "cascade[0].exit: x.safetensors: is an exit after layer 2, the level has 1 layers" in refused(
        tmp_path, with_heads(tiny_model, {"kind": "self", "layers": 1, "exit": str(exit_file)}))


def test_a_draft_vocabulary_with_a_token_twice(tmp_path: Path) -> None:
    heads = write_heads(tmp_path / "h.safetensors", EAGLE, d2t=np.zeros(64))
    with pytest.raises(HeadError, match="h.safetensors: d2t names a token twice"):
        read_own(heads)


def test_a_file_is_the_same_bytes_twice(tmp_path: Path) -> None:
    first, second = (write_heads(tmp_path / f"{i}.safetensors", MEDUSA) for i in range(2))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("text", ["", "3,2", "0", "9", "a,b", "2,2"])
def test_taps_that_are_no_layers(text: str) -> None:
    with pytest.raises(HeadError, match="expected rising numbers of layers from 1 to 8"):
        parse_taps(text, 8)


def test_a_draft_vocabulary_larger_than_the_targets() -> None:
    with pytest.raises(HeadError, match="--draft-vocab: 500, expected 32 to 256"):
        frequent([], 500, 256)


# --- a smaller model's tokens ---


def with_token(folder: Path, text: str, change: str) -> Path:
    tokenizer = folder / "tokenizer.json"
    raw = json.loads(tokenizer.read_text(encoding="utf-8"))
    raw["model"]["vocab"][change] = raw["model"]["vocab"].pop(text)
    tokenizer.write_text(json.dumps(raw), encoding="utf-8")
    return folder


def test_a_changed_token_is_listed_and_a_map_makes_it_pass(tmp_path: Path, tiny_model: Path) -> None:
    target = load_source(str(tiny_model))
    same = load_source(str(write_small(tmp_path / "same")))
    assert check_vocabulary(target, same, {}) is None
    small = load_source(str(with_token(write_small(tmp_path / "small"), "a", "<special>")))
    number = json.loads(small.tokenizer_json)["model"]["vocab"]["<special>"]
    with pytest.raises(HeadError, match=f"small: its tokens are not {tiny_model.name}'s: {number} is '<special>', the target's is 'a'; "):
        check_vocabulary(target, small, {})
    ids = check_vocabulary(target, small, {number: number})
    assert ids is not None
    assert ids[number] == number


def test_another_end_token_is_named(tmp_path: Path, tiny_model: Path) -> None:
    small = load_source(str(write_small(tmp_path / "small", eos_token_id=5)))
    with pytest.raises(HeadError, match="small: ends with token 5"):
        check_vocabulary(load_source(str(tiny_model)), small, {})


def test_a_padded_vocabulary_passes(tmp_path: Path, tiny_model: Path) -> None:
    small = load_source(str(write_small(tmp_path / "small", vocab_size=288)))
    assert check_vocabulary(load_source(str(tiny_model)), small, {}) is None


def test_a_map_to_nowhere_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    small = load_source(str(write_small(tmp_path / "small")))
    with pytest.raises(HeadError, match="the map says 3 -> 9999, but small has ids below 256"):
        check_vocabulary(load_source(str(tiny_model)), small, {3: 9999})


def test_a_smaller_model_skips_only_layers_that_it_has(tmp_path: Path, tiny_model: Path) -> None:
    small = write_small(tmp_path / "small")
    level = {"kind": "model", "model": str(small), "kv": {"dtype": "int8", "skip_layers": [7]}}
    assert "cascade[0].kv.skip_layers: there is no layer 7: the model has" in refused(tmp_path, with_heads(tiny_model, level))
