"""model.yaml: what it gives, and the one line that a mistake gives."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlsdc.compiler.config import Config, LimitsConfig, NgramConfig, load_config, parse_config
from mlsdc.compiler.errors import ConfigError
from mlsdc.compiler.schema import parse_bytes

MINIMAL = "target: {model: m.gguf}\n"


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "model.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    """The error's text, with the folder cut off."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{tmp_path}/", "")


def test_example_reads(root: Path) -> None:
    config = load_config(root / "examples" / "smollm2.yaml")
    assert config.target.kv.dtype == "bf16"
    assert config.cascade == (NgramConfig("ngram", "counts", 5, 16, counts="heads/smollm2.counts"),)
    assert config.memory.kv_pool == 256 * 2**20


def test_only_the_model_is_required(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL)
    assert config.limits == LimitsConfig()
    assert config.cascade == ()


def test_kv_as_a_name_is_its_dtype(tmp_path: Path) -> None:
    short = load(tmp_path, "target: {model: m, kv: bf16}")
    assert short == load(tmp_path, "target: {model: m, kv: {dtype: bf16}}")


@pytest.mark.parametrize(("kv", "format_"), [
    ("int8", "int8"), ("{keys: int8, values: fp8}", "int8/fp8"), ("{dtype: fp8, keys: int8}", "int8/fp8"),
    ("{keys: fp8, values: fp8}", "fp8"),
    ("{dtype: int8, skip_layers: [3, 0]}", "int8@0.3=bf16"), ("{dtype: bf16, skip_layers: [0]}", "bf16"),
])
def test_kv_formats_are_one_text(tmp_path: Path, kv: str, format_: str) -> None:
    assert load(tmp_path, f"target: {{model: m, kv: {kv}}}").target.kv.format == format_


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "model.yaml: target: is missing; it names the model, e.g. target: {model: model.gguf}"),
        ("- a", "model.yaml: expected keys target, cascade, memory, limits, hardware, passes, quality_gate, tensor_parallel, "
                "kernels, found ['a'] (a list)"),
        ("target: {}", "model.yaml: target.model: is missing"),
        ("target: {model: 5}", "model.yaml: target.model: expected a text, found 5 (a whole number)"),
        ("target: {modl: x}", "model.yaml: target.modl: unknown key (did you mean 'model'?); keys are model, name, weights, exact, kv"),
        ("target: {model: m, kv: int5}", "model.yaml: target.kv.dtype: 'int5' is not allowed (did you mean 'int8'?); "
         "allowed are bf16, int8, fp8, int8n, int4-token, int4, int3, int2"),
        ("target: {model: m, kv: {keys: int}}", "model.yaml: target.kv.keys: 'int' is not allowed (did you mean 'int8'?); "
         "allowed are bf16, int8, fp8, int8n, int4-token, int4, int3, int2"),
        ("target: {model: m, kv: {skip_layers: [-1]}}", "model.yaml: target.kv.skip_layers[0]: -1 is out of range; at least 0 is allowed"),
        ("target: {model: m, kv: {page_size: 8}}",
         "model.yaml: target.kv.page_size: 8 (a whole number) is not allowed; allowed are 16, 32, 64"),
        (MINIMAL + "cascade: [{kind: medussa}]",
         "model.yaml: cascade[0].kind: 'medussa' is not a level kind (did you mean 'medusa'?); "
         "kinds are ngram, medusa, eagle, model, self"),
        (MINIMAL + "cascade: [{kind: medusa}]",
         "model.yaml: cascade[0].heads: is missing; a 'medusa' level needs it"),
        (MINIMAL + "cascade: [{merge: []}]", "model.yaml: cascade[0].merge: expected a list of two levels or more, found [] (a list)"),
        (MINIMAL + "cascade: {kind: ngram}", "model.yaml: cascade: expected a list of levels, found {'kind': 'ngram'} (a mapping)"),
        (MINIMAL + "cascade: [{kind: ngram, width: 99}]", "model.yaml: cascade[0].width: 99 is out of range; 1 to 8 is allowed"),
        (MINIMAL + "limits: {max_num_seqs: true}", "model.yaml: limits.max_num_seqs: expected a whole number, found True (true or false)"),
        (MINIMAL + "memory: {kv_pool: lots}",
         "model.yaml: memory.kv_pool: expected a size such as 256MiB or 1.5GiB, found 'lots'"),
        (MINIMAL + "passes: {disable: x}", "model.yaml: passes.disable: expected a list, found 'x'"),
        (MINIMAL + "target: {model: n}", "model.yaml: line 2: 'target' is given twice"),
        ("target: [", "model.yaml: line 1: not YAML (expected the node content, but found '<stream end>')"),
    ],
)
def test_mistake_names_place_found_and_allowed(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text) == message


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no.yaml: cannot be read"):
        load_config(tmp_path / "no.yaml")


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("limits.max_num_seqs=16", "limits", "max_num_seqs", 16),
        ("memory.kv_pool=1GiB", "memory", "kv_pool", 2**30),
        ("passes.disable=[a, b]", "passes", "disable", ("a", "b")),
        ("target.model=other.gguf", "target", "model", "other.gguf"),
    ],
)
def test_set_changes_one_key(tmp_path: Path, override: str, section: str, key: str, value: object) -> None:
    base, changed = load(tmp_path, MINIMAL), load(tmp_path, MINIMAL, override)
    wanted = dataclasses.replace(getattr(base, section), **{key: value})
    assert changed == dataclasses.replace(base, **{section: wanted})


def test_set_reaches_into_the_cascade(tmp_path: Path) -> None:
    text = MINIMAL + "cascade: [{kind: ngram}]"
    assert load(tmp_path, text, "cascade[0].order=5").cascade[0].order == 5
    assert load(tmp_path, text, "cascade.0.order=5") == load(tmp_path, text, "cascade[0].order=5")


def test_set_goes_below_a_short_kv(tmp_path: Path) -> None:
    assert load(tmp_path, "target: {model: m, kv: bf16}", "target.kv.page_size=64").target.kv.page_size == 64


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("foo", "--set: 'foo' is not key=value, e.g. --set limits.max_num_seqs=16"),
        ("limits.max_num_seqs=0", "--set: limits.max_num_seqs: 0 is out of range; 1 to 256 is allowed"),
        ("cascade[3].order=5", "--set: cascade[3].order: there is no item 3 in cascade"),
        ("hardware.x=3", "--set: hardware.x: hardware is 'cpu-native', it has no keys"),
    ],
)
def test_mistake_in_set_is_blamed_on_set(tmp_path: Path, override: str, message: str) -> None:
    assert refusal(tmp_path, MINIMAL + "hardware: cpu-native", override) == message


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ("{max_model_len: 9999}", "limits.max_model_len: 9999, but the model was trained for at most 8192 tokens"),
        ("{max_num_batched_tokens: 4}",
         "limits.max_num_batched_tokens: 4 is less than a verify of 8 rows (cascade max_nodes + 1); at least 8 is allowed"),
        ("{max_logit_rows: 7}",
         "limits.max_logit_rows: 7 is out of range; 8 (cascade max_nodes + 1) to 256 (limits.max_num_batched_tokens) is allowed"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(tmp_path: Path, limits: str, message: str) -> None:
    config = load(tmp_path, MINIMAL + f"cascade: [{{kind: ngram}}]\nlimits: {limits}")
    with pytest.raises(ConfigError) as caught:
        config.resolve_limits(8192)
    assert str(caught.value).endswith(message)


def test_limits_default_to_the_models_length(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL).resolve_limits(8192).max_model_len == 8192


@given(st.integers(1, 2**20), st.sampled_from([("", 1), ("KiB", 2**10), ("MiB", 2**20), (" GiB", 2**30), ("MB", 10**6)]))
def test_sizes_count_their_unit(count: int, unit: tuple[str, int]) -> None:
    assert parse_bytes(f"{count}{unit[0]}") == count * unit[1]


_YAML = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["model", "kind", "kv", "order", "x"]), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["target", "cascade", "memory", "limits", "hardware", "passes"]), _YAML))
def test_any_tree_is_read_or_refused_with_a_config_error(raw: dict[str, object]) -> None:
    with contextlib.suppress(ConfigError):
        parse_config(raw)
