"""The whole list: what it makes of SmolLM2, and that every part of it can be left out."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsdc.compiler.errors import ConfigError
from mlsdc.compiler.interpret import Value
from mlsdc.compiler.pipeline import run_pipeline
from mlsdc.passes import PassOptions, default_pipeline
from mlsdc.runtime.tree import Tree
from tests.passes.graphs import SMOLLM2, Llama, Weights, module_of, prefill, random_tokens, row_program, run
from tests.passes.steps import FUSIONS, TREE, apply, assert_same, compiled, middle, pipeline, relative_error, results

LAYER = ("norm_quantise", "linear_q", "rope_slice", "append_kv_slice", "paged_attention", "linear_q", "norm_quantise", "gated_quantise",
         "linear_q")  # fmt: skip


VERBS = ("fold", "eliminate", "raise", "rowify", "gather", "guess", "tap", "calibrate", "even", "check", "insert", "share", "shard",
         "quantise", "fuse", "plan")


def test_names_are_unique_and_verb_first() -> None:
    names = [pass_.name for pass_ in pipeline()]
    assert len(set(names)) == len(names)
    assert all(name.split("-")[0] in VERBS for name in names)


def test_every_pass_shows_before_and_after() -> None:
    for pass_ in pipeline():
        doc = (type(pass_).__doc__ or "").lower()
        assert "before:" in doc, pass_.name
        assert "after" in doc, pass_.name


def test_a_disabled_pass_is_left_out() -> None:
    assert {p.name for p in pipeline()} - {p.name for p in pipeline(disable=("fuse-qkv",))} == {"fuse-qkv"}


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    wanted = r"^passes.disable: 'fuse-qkw' is not a pass \(did you mean 'fuse-qkv'\?\); passes are fold-constants, .*, plan-cascade$"
    with pytest.raises(ConfigError, match=wanted):
        pipeline(disable=("fuse-qkw",))


def test_a_layer_of_smollm2_becomes_nine_launches() -> None:
    module = run_pipeline(module_of(row_program(SMOLLM2)), default_pipeline(PassOptions()))
    graph = module.target.graphs["forward"]
    for i in range(SMOLLM2.layers):
        assert tuple(node.op.opname for node in graph if node.name.startswith(f"layers.{i}.")) == LAYER
    outside = Counter(node.op.opname for node in graph if not node.name.startswith(("layers.", "w.")) and node.inputs)
    assert outside == Counter(["embed", "rope_table", "gather_rows", "norm_quantise", "linear_q", "argmax"])


def test_a_row_program_keeps_its_names_through_raising() -> None:
    graph = row_program(Llama(biases=True, qk_norm=True, tied=False))
    raised = apply(graph, *(pass_ for pass_ in pipeline() if pass_ not in middle()))
    assert set(raised.nodes) == set(graph.nodes)


def test_running_the_list_twice_changes_nothing_more() -> None:
    once = run_pipeline(module_of(row_program(Llama())), pipeline())
    assert run_pipeline(once, pipeline()) == once


@cache
def unfused(shape: Llama, tree: Tree = TREE) -> list[dict[str, Value]]:
    return results(compiled(shape, disable=FUSIONS), shape, tree)


SUBSETS = [subset for size in range(len(FUSIONS) + 1) for subset in combinations(FUSIONS, size)]


@pytest.mark.parametrize("disable", SUBSETS, ids=lambda subset: "+".join(subset) or "none")
def test_any_set_of_fusions_may_be_left_out(disable: tuple[str, ...]) -> None:
    shape = Llama(biases=True, windows=(0, 5))
    assert_same(unfused(shape), results(compiled(shape, disable=disable), shape))


@pytest.mark.parametrize("weights", ["int4", "none"])
def test_other_weights_fuse_to_the_same_numbers(weights: str) -> None:
    shape = Llama()
    plain = compiled(shape, weights=weights, disable=FUSIONS)
    assert_same(results(plain, shape), results(compiled(shape, weights=weights), shape))


@st.composite
def shapes(draw: st.DrawFn) -> Llama:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return Llama(
        vocab=draw(st.sampled_from([50, 96])),
        hidden=draw(st.sampled_from([32, 48, 64, 96])),
        heads=kv_heads * draw(st.sampled_from([1, 2, 3])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 32, 48, 64])),
        mlp=draw(st.sampled_from([32, 40, 96])),
        layers=draw(st.integers(1, 3)),
        biases=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        tied=draw(st.booleans()),
        act=draw(st.sampled_from(["silu", "gelu_tanh", "gelu"])),
        windows=draw(st.sampled_from([(), (0, 3), (3, 0, 7)])),
    )


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    size = draw(st.integers(0, 8))
    return Tree(tuple(draw(st.integers(0, 49)) for _ in range(size)), tuple(draw(st.integers(-1, i - 1)) for i in range(size)))


@settings(max_examples=40, deadline=None)
@given(shapes(), trees())
def test_fusing_changes_no_bit_whatever_the_model_and_the_tree(shape: Llama, tree: Tree) -> None:
    assert_same(unfused(shape, tree), results(compiled(shape), shape, tree))


@settings(max_examples=20, deadline=None)
@given(shapes())
def test_the_whole_list_stays_close_to_the_row_program(shape: Llama) -> None:
    (wanted,), found = results(row_program(shape), shape), results(compiled(shape), shape)[0]
    assert relative_error(found["logits"], wanted["logits"]) < 0.08


@settings(max_examples=20, deadline=None)
@given(trees(), st.booleans())
def test_a_node_gets_the_logits_of_the_prompt_with_its_path(tree: Tree, fuse: bool) -> None:
    """Unquantised, so that a difference in the last bit stays one."""
    shape = Llama(windows=(0, 5))
    graph = compiled(shape, weights="none", disable=() if fuse else FUSIONS)
    _, step = results(graph, shape, tree, num_tokens=6)
    node = len(tree) - 1
    path = []
    while node >= 0:
        path.insert(0, tree.tokens[node])
        node = tree.parents[node]
    whole = run(graph, Weights(row_program(shape)), prefill([*random_tokens(7, shape.vocab), *path]))
    assert relative_error(row(step, -1), row(whole, -1)) < 1e-3


def row(values: dict[str, Value], index: int) -> torch.Tensor:
    logits = values["logits"]
    assert isinstance(logits, torch.Tensor)
    return logits[index]
