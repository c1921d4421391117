"""Row programs of heads, built from what their files say; from here on they go through the same passes as the target.

Inputs: `tokens` i32[rows] (of row t the token at t + 1), `positions`, `features` f32[rows, hidden] (the target's hidden state at t, or the
head's own last output), `out_rows`. Outputs: `top` (top_k of the draft vocabulary's logits, one row for each of out_rows) and, of an
eagle, `hidden` f32[rows, hidden], what its children get as features. Of a medusa: `top.0`, `top.1`, ... one for each head.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.heads.config import EagleConfig, HeadConfig, MedusaConfig
from mlsdc.compiler.heads.source import HEAD, LENT, ROWS
from mlsdc.compiler.ops_core import Binary, GatherRows, Reshape, Unary
from mlsdc.compiler.ops_heads import TopK
from mlsdc.compiler.ops_nn import Attention, Embed, Linear, RmsNorm, Rope, RopeTable
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.runtime.step import Limits

CHILDREN = 8  # best guesses of a row that its program reports


@dataclass(frozen=True)
class Lent:
    """The target's own names for what it lends."""

    embed: str
    head: str
    norm: str


def head_graphs(config: HeadConfig, lent: Lent, limits: Limits) -> dict[str, Graph]:
    """Programs by name: `draft`, and `fuse` where first rows need one."""
    if isinstance(config, MedusaConfig):
        return {"draft": medusa_graph(config, lent, limits)}
    fuse = config.style == "eagle3" and "fc" in config.shapes()
    return {"draft": eagle_graph(config, lent, limits), **({"fuse": fuse_graph(config, limits)} if fuse else {})}


class HeadBuilder(Builder):
    """A builder with the shorthands of a head: rows, weights of its file, weights the target lends."""

    def start(self, config: HeadConfig, lent: Lent, limits: Limits, features: int) -> None:
        self.config, self.lent_names = config, lent
        rows, out = Dim("rows", 1, limits.max_num_batched_tokens), Dim("out", 1, limits.max_logit_rows)
        self.input("tokens", TensorType(DType.I32, (rows,)))
        self.input("positions", TensorType(DType.I32, (rows,)))
        self.input("features", TensorType(DType.F32, (rows, features)))
        self.input("out_rows", TensorType(DType.I32, (out,)))

    def own(self, name: str, shape: tuple[int, ...], columns: tuple[int, int] | None = None) -> str:
        """A tensor of the file, or some of its columns."""
        if columns is None:
            return self.weight(f"w.{name}", TensorType(DType.F32, shape), HEAD + name)
        a, b = columns
        return self.weight(f"w.{name}.{a}", TensorType(DType.F32, (shape[0], b - a)), f"{HEAD}{name}[{a}:{b}]")

    def lent(self, name: str, source: str, shape: tuple[int, ...], prefix: str = LENT) -> str:
        return self.weight(f"lent.{name}", TensorType(DType.F32, shape), prefix + source)

    def norm(self, name: str, x: str, weight: str) -> str:
        return self.add(name, RmsNorm(self.config.eps), x, weight)

    def embedded(self) -> str:
        """The normed embedding of each row's token."""
        c = self.config
        if isinstance(c, EagleConfig) and c.own_embed:
            table = self.own("embed", (c.vocab_size, c.hidden_size))
        else:
            table = self.lent("embed", self.lent_names.embed, (c.vocab_size, c.target_hidden))
        return self.norm("embed_norm", self.add("embed", Embed(), "tokens", table), self.own("embed_norm", c.shapes()["embed_norm"]))


def eagle_graph(c: EagleConfig, lent: Lent, limits: Limits) -> Graph:
    b = HeadBuilder("draft")
    h, eagle3 = c.hidden_size, c.style == "eagle3"
    shapes = c.shapes()
    b.start(c, lent, limits, h)
    embedded = b.embedded()
    if eagle3:
        return _eagle3(b, c, embedded)
    hidden = b.norm("hidden_norm", "features", b.own("hidden_norm", shapes["hidden_norm"]))
    from_embed = b.add("fc.embed", Linear(), embedded, b.own("fc", shapes["fc"], (0, h)))
    from_hidden = b.add("fc.hidden", Linear(), hidden, b.own("fc", shapes["fc"], (h, h + c.target_hidden)))
    x = b.add("fc", Binary("add"), from_embed, from_hidden)
    normed = b.norm("layers.0.attn_norm", x, b.own("attn_norm", (h,)))
    parts = {part: b.add(f"layers.0.attn.{part}", Linear(), normed, b.own(part, shapes[part])) for part in "qkv"}
    return _layer(b, c, x, parts)


def fuse_graph(c: EagleConfig, limits: Limits) -> Graph:
    """EAGLE-3's first rows: `taps` f32[rows, taps * hidden] -> `features` f32[rows, hidden], a program of its own."""
    b = HeadBuilder("fuse")
    width = c.target_hidden * len(c.taps)
    taps = b.input("taps", TensorType(DType.F32, (Dim("rows", 1, limits.max_num_batched_tokens), width)))
    return b.build(features=b.add("fc", Linear(), taps, b.own("fc", c.shapes()["fc"])))


def _eagle3(b: HeadBuilder, c: EagleConfig, embedded: str) -> Graph:
    h, shapes = c.hidden_size, c.shapes()
    hidden = b.norm("hidden_norm", "features", b.own("hidden_norm", shapes["hidden_norm"]))
    parts = {}
    for part in "qkv":
        left = b.add(f"layers.0.attn.{part}.embed", Linear(), embedded, b.own(part, shapes[part], (0, h)))
        right = b.add(f"layers.0.attn.{part}.hidden", Linear(), hidden, b.own(part, shapes[part], (h, 2 * h)))
        parts[part] = b.add(f"layers.0.attn.{part}", Binary("add"), left, right)
    return _layer(b, c, hidden if c.norm_before_residual else "features", parts)


def _layer(b: HeadBuilder, c: EagleConfig, x: str, parts: dict[str, str]) -> Graph:
    """Attention over the projections, MLP, norm, head."""
    h, d, shapes = c.hidden_size, c.head_dim, c.shapes()
    table = b.add("rope_table", RopeTable(), "positions", b.weight("w.inv_freq", TensorType(DType.F32, (d // 2,)), HEAD + "inv_freq"))
    heads = {"q": c.num_heads, "k": c.num_kv_heads, "v": c.num_kv_heads}
    cut = {part: b.add(f"layers.0.attn.{part}_heads", Reshape((-1, heads[part], d)), parts[part]) for part in "qkv"}
    turned = {part: b.add(f"layers.0.attn.{part}_rope", Rope(), cut[part], table) for part in "qk"}
    attend = b.add("layers.0.attn.attend", Attention(d**-0.5), turned["q"], turned["k"], cut["v"])
    merged = b.add("layers.0.attn.merged", Reshape((-1, c.num_heads * d)), attend)
    out = b.add("layers.0.attn.out", Linear(), merged, b.own("o", shapes["o"]))
    x = b.add("layers.0.attn.residual", Binary("add"), x, out)
    normed = b.norm("layers.0.mlp_norm", x, b.own("mlp_norm", (h,)))
    gate = b.add("layers.0.mlp.gate", Linear(), normed, b.own("gate", shapes["gate"]))
    up = b.add("layers.0.mlp.up", Linear(), normed, b.own("up", shapes["up"]))
    gated = b.add("layers.0.mlp.gated", Binary("mul"), b.add("layers.0.mlp.act", Unary(c.act), gate), up)
    down = b.add("layers.0.mlp.down", Linear(), gated, b.own("down", shapes["down"]))
    hidden = b.add("layers.0.mlp.residual", Binary("add"), x, down)
    rows = b.add("out_hidden.rows", GatherRows(), hidden, "out_rows")
    final = b.norm("out_hidden", rows, b.own("norm", (h,)))
    head = b.own("lm_head", shapes["lm_head"]) if c.own_head else b.lent("head", b.lent_names.head, (c.draft_vocab, h), ROWS)
    logits = b.add("lm_head", Linear(), final, head)
    return b.build(top=b.add("top", TopK(min(CHILDREN, c.draft_vocab)), logits), hidden=hidden)


def medusa_graph(c: MedusaConfig, lent: Lent, limits: Limits) -> Graph:
    b = HeadBuilder("draft")
    h, shapes = c.hidden_size, c.shapes()
    b.start(c, lent, limits, h)
    hidden = b.norm("hidden_norm", "features", b.lent("norm", lent.norm, (h,)))
    known = b.add("next", Linear(), b.embedded(), b.own("next", shapes["next"])) if c.known_next else ""
    shared = "" if c.own_head else b.lent("head", lent.head, (c.draft_vocab, h), ROWS)
    tops = {}
    for i in range(c.num_heads):
        x = hidden
        for j in range(c.num_layers):
            name = f"heads.{i}.{j}"
            bias = (b.own(f"{name}.bias", (h,)),) if c.bias else ()
            inner = b.add(f"{name}.inner", Linear(), x, b.own(name, (h, h)), *bias)
            if known and j == 0:
                inner = b.add(f"{name}.known", Binary("add"), inner, known)
            x = b.add(name, Binary("add"), x, b.add(f"{name}.act", Unary("silu"), inner))
        rows = b.add(f"heads.{i}.rows", GatherRows(), x, "out_rows")
        head = b.own(f"heads.{i}.lm_head", shapes[f"heads.{i}.lm_head"]) if c.own_head else shared
        logits = b.add(f"heads.{i}.logits", Linear(), rows, head)
        tops[f"top.{i}"] = b.add(f"heads.{i}.top", TopK(min(CHILDREN, c.draft_vocab)), logits)
    return b.build(**tops)
