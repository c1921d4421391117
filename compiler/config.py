"""model.yaml: what to compile, as frozen dataclasses. Names are vLLM's where vLLM has the same thing.

    target: {model: ..., weights: int8, kv: bf16}
    cascade: [{kind: ngram, max_nodes: 8}]
    memory: {kv_pool: 256MiB}
    limits: {max_model_len: 2048, max_num_seqs: 8}
    hardware: cpu-native
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from mlsdc.compiler.config_kv import KvConfig, kv_section
from mlsdc.compiler.config_levels import HeadsConfig, ModelConfig, SelfConfig
from mlsdc.compiler.errors import ConfigError
from mlsdc.compiler.schema import Where, option, parse_bytes, read, read_mapping, show, suggest
from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.step import SCRATCH_SLOTS, Limits

LEVEL_KINDS = ("ngram", "medusa", "eagle", "model", "self")
LEVEL_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
MAX_RANKS = 64
_SECTIONS = ("target", "cascade", "memory", "limits", "hardware", "passes", "quality_gate", "tensor_parallel", "kernels")


@dataclass(frozen=True)
class TargetConfig:
    """The model. `model` is a path relative to the YAML file (a GGUF file or a Hugging Face folder), or `package:NAME/FILE` for one
    that an installed Python package brings (capture.load_source). `name` is what the artifact calls itself; default: the source's name.
    `exact: false` lets a GPU sum a drafted row's ancestors in the order of the tree's slots: faster, but not to the bit what they will be
    once committed. CPUs are always exact."""

    model: str = option()
    name: str | None = option(None)
    weights: str = option("int8", choices=("int8", "int4", "int4-a16", "fp8", "fp8-a8", "bf16"))
    exact: bool = option(True)
    kv: KvConfig = option(KvConfig(), parse=kv_section)


@dataclass(frozen=True)
class NgramConfig:
    """A count-based level. It looks up the last `order` tokens (then fewer) and proposes at most `max_nodes` nodes, `width` siblings
    a node at most, none whose path is less likely than `min_probability`. `counts` is a file of static counts (`mlsdc train --level
    counts`), relative to the YAML file; one count of the request itself weighs `live_weight` of them."""

    kind: str = option(choices=("ngram",))
    name: str = option("ngram")
    order: int = option(4, low=1, high=8)
    max_nodes: int = option(7, low=1, high=SCRATCH_SLOTS - 1)
    width: int = option(6, low=1, high=8)
    min_probability: float = option(0.02, low=0.0, high=1.0)
    counts: str | None = option(None)
    live_weight: float = option(32.0, low=0.01, high=1000.0)

    def params(self) -> dict[str, Any]:
        """What the level's runtime half reads from the manifest."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in ("kind", "name")}


LevelConfig = NgramConfig | HeadsConfig | ModelConfig | SelfConfig
_LEVELS: dict[str, type[Any]] = {
    "ngram": NgramConfig, "medusa": HeadsConfig, "eagle": HeadsConfig, "model": ModelConfig, "self": SelfConfig}
_REQUIRED = {"medusa": "heads", "eagle": "heads", "model": "model", "self": "layers"}


@dataclass(frozen=True)
class MergeOptions:
    """What a merge has beside its levels."""

    max_nodes: int = option(16, low=1, high=SCRATCH_SLOTS - 1)


@dataclass(frozen=True)
class MergeConfig(MergeOptions):
    """Levels whose nodes go into one tree, the likeliest paths of all of them, at most `max_nodes`."""

    merge: tuple[LevelConfig, ...] = ()


def _bytes(raw: Any) -> int | None:
    return None if raw is None else parse_bytes(raw)


def _number(raw: Any) -> Any:
    """YAML takes `1e-3` for a text; here it is a number."""
    try:
        return float(raw) if isinstance(raw, str) else raw
    except ValueError:
        return raw


@dataclass(frozen=True)
class MemoryConfig:
    """`kv_pool`: bytes of the page pool, e.g. `256MiB`. `total`: of everything, weights included; the pool is what is left, unless both
    are given. Neither: a pool of 256 MiB."""

    kv_pool: int | None = option(None, parse=_bytes, low=2**20)
    total: int | None = option(None, parse=_bytes, low=2**20)

    @property
    def pool_bytes(self) -> int | None:
        """Of the pool, None where it is what `total` leaves."""
        return self.kv_pool if self.kv_pool is not None or self.total is not None else 256 * 2**20


@dataclass(frozen=True)
class LimitsConfig:
    """Sizes the artifact is compiled for. `max_model_len` defaults to the model's own, `max_logit_rows` to what a full batch verifies."""

    max_model_len: int | None = option(None, low=16, high=2**20)
    max_num_seqs: int = option(8, low=1, high=256)
    max_num_batched_tokens: int = option(256, low=1, high=8192)
    max_logit_rows: int | None = option(None, low=1, high=4096)


@dataclass(frozen=True)
class PassesConfig:
    """`disable` leaves out optional passes by name; `mlsdc passes` lists them."""

    disable: tuple[str, ...] = option(())


@dataclass(frozen=True)
class GateConfig:
    """What the cache format may cost against 16 bits, measured by the compile: mean KL in nats, relative change of perplexity, share of
    equal first choices. `text` is a file (default: Python's manual of topics), scored from its beginning in windows."""

    kl: float | None = option(None, parse=_number, low=0.0)
    perplexity: float | None = option(None, parse=_number, low=0.0)
    top1: float | None = option(None, parse=_number, low=0.0, high=1.0)
    tokens: int = option(2048, low=64, high=2**20)
    window: int = option(1024, low=16, high=2**20)
    text: str | None = option(None)


@dataclass(frozen=True)
class KernelsConfig:
    """Which compiler's kernels do what where there is a choice. `attention: nvrtc`: CUDA C++ for h100 and h200; `linear: tma`: linears for
    many rows by tensor maps, for sm_90, sm_100 and sm_120; neither ran on a card yet. `variants`: ship other builds of a GPU's linears and
    attention, that `mlsdc tune` chooses among on the card."""

    attention: str = option("triton", choices=("triton", "nvrtc"))
    linear: str = option("plain", choices=("plain", "tma"))
    variants: bool = option(True)


@dataclass(frozen=True)
class Config:
    """A whole model.yaml. `tensor_parallel` processes share the model's heads and MLP columns.

    `where` is the file for error messages, `folder` what relative paths are relative to."""

    target: TargetConfig
    cascade: tuple[LevelConfig | MergeConfig, ...] = ()
    memory: MemoryConfig = MemoryConfig()
    limits: LimitsConfig = LimitsConfig()
    hardware: str = "cpu-native"
    passes: PassesConfig = PassesConfig()
    quality_gate: GateConfig | None = None
    tensor_parallel: int = 1
    kernels: KernelsConfig = KernelsConfig()
    where: Where = field(default=Where("config"), compare=False)
    folder: Path = field(default=Path("."), compare=False)

    @property
    def max_tree_nodes(self) -> int:
        """The most nodes any level may propose."""
        return max((item.max_nodes for item in self.cascade), default=0)

    def drafters(self) -> list[tuple[str, LevelConfig]]:
        """Every level below the target with its path in the file (`cascade[0].merge[1]`), those of a merge one by one."""
        found: list[tuple[str, LevelConfig]] = []
        for i, item in enumerate(self.cascade):
            if isinstance(item, MergeConfig):
                found += ((f"cascade[{i}].merge[{j}]", level) for j, level in enumerate(item.merge))
            else:
                found.append((f"cascade[{i}]", item))
        return found

    def fail(self, path: str, message: str) -> NoReturn:
        """A ConfigError at a path of this config, for checks that need more than the file."""
        dataclasses.replace(self.where, path=path).fail(message)

    def resolve_limits(self, model_max_len: int) -> Limits:
        """The limits with defaults filled in from the model, checked against each other. Raises ConfigError."""
        limits, rows = self.limits, self.max_tree_nodes + 1
        max_len = limits.max_model_len or model_max_len
        if max_len > model_max_len:
            self.fail("limits.max_model_len", f"{max_len}, but the model was trained for at most {model_max_len} tokens")
        if limits.max_num_batched_tokens < rows:
            self.fail("limits.max_num_batched_tokens", f"{limits.max_num_batched_tokens} is less than a verify of {rows} rows "
                      f"(cascade max_nodes + 1); at least {rows} is allowed")
        logit_rows = limits.max_logit_rows or min(limits.max_num_seqs * rows, limits.max_num_batched_tokens)
        if not rows <= logit_rows <= limits.max_num_batched_tokens:
            self.fail("limits.max_logit_rows", f"{logit_rows} is out of range; {rows} (cascade max_nodes + 1) to "
                      f"{limits.max_num_batched_tokens} (limits.max_num_batched_tokens) is allowed")
        return Limits(max_len, limits.max_num_seqs, limits.max_num_batched_tokens, logit_rows, self.max_tree_nodes)


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Read model.yaml and apply `--set` overrides (`limits.max_num_seqs=16`). Raises ConfigError."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, expected a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8 text'})") from None
    return parse_config(_load_yaml(text, str(path)), str(path), path.parent, overrides)


def parse_config(raw: Any, file: str = "config", folder: Path = Path("."), overrides: Sequence[str] = ()) -> Config:
    """The same from a mapping instead of a file."""
    changed = []
    for override in overrides:
        raw, key = _override(raw, override, file)
        changed.append(key)
    where = Where(file, overridden=frozenset(changed))
    sections = read_mapping(raw, _SECTIONS, where)
    if "target" not in sections:
        where.key("target").fail("is missing; it names the model, e.g. target: {model: model.gguf}")
    hardware = _hardware(sections.get("hardware", Config.hardware), where.key("hardware"))
    return Config(
        target=read(TargetConfig, sections["target"], where.key("target")),
        cascade=_cascade(sections.get("cascade"), where.key("cascade")),
        memory=read(MemoryConfig, sections.get("memory"), where.key("memory")),
        limits=read(LimitsConfig, sections.get("limits"), where.key("limits")),
        hardware=hardware,
        passes=read(PassesConfig, sections.get("passes"), where.key("passes")),
        quality_gate=_gate(sections.get("quality_gate"), where.key("quality_gate")),
        tensor_parallel=_ranks(sections.get("tensor_parallel", 1), where.key("tensor_parallel")),
        kernels=read(KernelsConfig, sections.get("kernels"), where.key("kernels")),
        where=where,
        folder=folder,
    )


def _ranks(raw: Any, where: Where) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or not 1 <= raw <= MAX_RANKS:
        where.fail(f"expected a number of processes from 1 to {MAX_RANKS}, found {show(raw)}")
    return raw


def _gate(raw: Any, where: Where) -> GateConfig | None:
    if raw is None:
        return None
    gate = read(GateConfig, raw, where)
    if gate.kl is None and gate.perplexity is None and gate.top1 is None:
        where.fail("has no bound; give kl, perplexity or top1, e.g. quality_gate: {kl: 0.01}")
    return gate


def _hardware(raw: Any, where: Where) -> str:
    """Names of targets with commas between them, from that or from a list."""
    names = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) and name.strip() for name in names):
        where.fail(f"expected a target's name or a list of them (see `mlsdc targets`), found {show(raw)}")
    return ",".join(name.strip() for name in names)


def _cascade(raw: Any, where: Where) -> tuple[LevelConfig | MergeConfig, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        where.fail(f"expected a list of levels, found {show(raw)}")
    items = tuple(_item(item, where.item(index)) for index, item in enumerate(raw))
    for index, item in enumerate(items[1:], 1):
        if _kind(item) not in ("model", "self"):
            where.item(index).fail(f"a '{_kind(item)}' level cannot verify the level below it, only 'model' and 'self' can; write "
                                   "{merge: [...]} to put several levels' nodes into one tree")
    seen: dict[str, str] = {}
    for path, level in Config(TargetConfig(""), items).drafters():
        if not re.fullmatch(LEVEL_NAME, level.name):  # it names files of the artifact, and --cascade joins names by + and >
            dataclasses.replace(where, path=f"{path}.name").fail(
                f"{show(level.name)} is no name of a level; letters, digits, _, - and . are allowed, the first one a letter or a digit")
        if re.search(r"\.rank\d+$", level.name):  # runtime.artifact.rank_file: another process's share of the level before the dot
            dataclasses.replace(where, path=f"{path}.name").fail(
                f"'{level.name}' ends as the file of another rank's weights does; give the level another name")
        if level.name == "grammar":
            dataclasses.replace(where, path=f"{path}.name").fail(
                "'grammar' is the name of tokens that a grammar forces; give the level another name")
        if level.name == "target" or level.name in seen:
            taken = f"is {seen[level.name]}'s already" if level.name in seen else "is the target's"
            dataclasses.replace(where, path=f"{path}.name").fail(f"'{level.name}' {taken}; give the level another name")
        seen[level.name] = path
    return items


def _kind(item: LevelConfig | MergeConfig) -> str:
    return "merge" if isinstance(item, MergeConfig) else item.kind


def _item(raw: Any, where: Where) -> LevelConfig | MergeConfig:
    if not isinstance(raw, Mapping) or "merge" not in raw:
        return _level(raw, where)
    mapping = read_mapping(raw, ("merge", "max_nodes"), where)
    listed = mapping["merge"]
    if not isinstance(listed, Sequence) or isinstance(listed, str) or len(listed) < 2:
        where.key("merge").fail(f"expected a list of two levels or more, found {show(listed)}")
    levels = tuple(_level(item, where.key("merge").item(index)) for index, item in enumerate(listed))
    rest = {key: value for key, value in mapping.items() if key != "merge"}
    return MergeConfig(read(MergeOptions, rest, where).max_nodes, levels)


def _level(raw: Any, where: Where) -> LevelConfig:
    if not isinstance(raw, Mapping):
        where.fail(f"expected a level such as {{kind: ngram}}, found {show(raw)}")
    kind = raw.get("kind")
    if kind is None:
        where.key("kind").fail(f"is missing; kinds are {', '.join(LEVEL_KINDS)}")
    if kind not in LEVEL_KINDS:
        where.key("kind").fail(f"{show(kind)} is not a level kind{suggest(str(kind), LEVEL_KINDS)}; kinds are {', '.join(LEVEL_KINDS)}")
    needed = _REQUIRED.get(kind, "kind")
    if needed not in raw:
        where.key(needed).fail(f"is missing; a '{kind}' level needs it")
    level: LevelConfig = read(_LEVELS[kind], raw, where)
    return level


def _override(raw: Any, override: str, file: str) -> tuple[Any, str]:
    """`raw` with `a.b[0].c=value` applied, and the normalised path. The value is read as YAML."""
    key, equals, text = override.partition("=")
    steps = re.findall(r"[^.\[\]]+", key)
    if not equals or not steps:
        raise ConfigError(f"--set: '{override}' is not key=value, e.g. --set limits.max_num_seqs=16")
    value = _load_yaml(text, f"--set {key}")
    path = "".join(f"[{step}]" if step.isdecimal() else f".{step}" for step in steps).lstrip(".")
    return _put(raw, steps, value, Where("--set"), path), path


def _put(raw: Any, steps: Sequence[str], value: Any, where: Where, path: str) -> Any:
    if not steps:
        return value
    step, rest = steps[0], steps[1:]
    if step.isdecimal():
        if not isinstance(raw, list) or int(step) >= len(raw):
            raise ConfigError(f"--set: {path}: there is no item {step} in {where.path or 'the file'}")
        return [_put(item, rest, value, where.item(i), path) if i == int(step) else item for i, item in enumerate(raw)]
    if raw is not None and not isinstance(raw, dict):
        if where.path != "target.kv":
            raise ConfigError(f"--set: {path}: {where.path or 'the file'} is {show(raw)}, it has no keys")
        raw = {"dtype": raw}
    return {**(raw or {}), step: _put((raw or {}).get(step), rest, value, where.key(step), path)}


def _load_yaml(text: str, file: str) -> Any:
    """YAML -> plain values; a syntax error or a key given twice is one line with its line number."""
    try:
        import yaml
    except ImportError:
        raise MlsdcError("reading model.yaml needs PyYAML: pip install 'mlsdc[compile]'") from None

    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{file}: line {line}: a key must be a plain name")
            if key.value in seen:
                raise ConfigError(f"{file}: line {line}: '{key.value}' is given twice")
            seen.add(key.value)
        loader.flatten_mapping(node)
        return dict(loader.construct_pairs(node, deep=True))

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        raise ConfigError(f"{file}: {line}not YAML ({getattr(error, 'problem', None) or 'unreadable'})") from None

