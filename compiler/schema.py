"""From untyped YAML to frozen dataclasses: every error names the file, the path in it, what was found and what is allowed.

Options are dataclass fields, written once: `max_num_seqs: int = option(8, low=1, high=256)`. The field's type and the option's
bounds are the whole schema; unknown keys get a suggestion.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from mlsdc.compiler.errors import ConfigError

T = TypeVar("T")
_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Rule:
    """What an option allows. `parse` turns the YAML value into the field's and raises ValueError saying what it expects."""

    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()
    parse: Callable[[Any], Any] | None = None


def option(default: Any = dataclasses.MISSING, *, low: float | None = None, high: float | None = None, choices: Sequence[Any] = (),
           parse: Callable[[Any], Any] | None = None) -> Any:
    """A dataclass field with its rule; without a default the key is required."""
    rule = Rule(low, high, tuple(choices), parse)
    return dataclasses.field(default=default, metadata={"rule": rule})


@dataclass(frozen=True)
class Where:
    """A place in a document: `model.yaml: cascade[1].kind`. Values that `--set` changed are blamed on `--set`, not on the file."""

    file: str
    path: str = ""
    overridden: frozenset[str] = frozenset()

    def key(self, name: str) -> Where:
        return dataclasses.replace(self, path=f"{self.path}.{name}" if self.path else name)

    def item(self, index: int) -> Where:
        return dataclasses.replace(self, path=f"{self.path}[{index}]")

    def fail(self, message: str) -> NoReturn:
        blamed = any(self.path == path or self.path.startswith((path + ".", path + "[")) for path in self.overridden)
        place = f"{self.path}: " if self.path else ""
        raise ConfigError(f"{'--set' if blamed else self.file}: {place}{message}")


def read(cls: type[T], raw: Any, where: Where) -> T:
    """`raw` as an instance of the dataclass `cls`. Raises ConfigError."""
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, cls))}
    hints = typing.get_type_hints(cls)
    mapping = read_mapping(raw, tuple(fields), where)
    values = {}
    for name, field in fields.items():
        if name in mapping:
            values[name] = _value(mapping[name], hints[name], field.metadata.get("rule", Rule()), where.key(name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            where.key(name).fail("is missing")
    return cls(**values)


def read_mapping(raw: Any, allowed: Sequence[str], where: Where) -> Mapping[str, Any]:
    """`raw` as a mapping (nothing at all is an empty one) whose keys are among `allowed`."""
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        where.fail(f"expected {'keys ' + ', '.join(allowed) if allowed else 'a mapping'}, found {show(raw)}")
    for key in raw:
        if key not in allowed:
            where.key(str(key)).fail(f"unknown key{suggest(str(key), allowed)}; keys are {', '.join(allowed)}")
    return raw


def suggest(found: str, allowed: Sequence[str]) -> str:
    """` (did you mean 'x'?)`, or nothing if nothing is close."""
    close = difflib.get_close_matches(found, allowed, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def show(value: Any) -> str:
    """A found value as the error prints it, cut to a line."""
    text = repr(value) if isinstance(value, str) else f"{value!s} ({_kind(value)})"
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= 80 else text[:77] + "..."


def parse_bytes(value: Any) -> int:
    """`256MiB`, `1.5 GiB`, `64000000` -> bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if isinstance(value, bool) or match is None or match[2].upper() not in _UNITS:
        raise ValueError("expected a size such as 256MiB or 1.5GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _value(raw: Any, hint: Any, rule: Rule, where: Where) -> Any:
    if rule.parse is not None:
        try:
            raw = rule.parse(raw)
        except ValueError as error:
            where.fail(f"{error}, found {show(raw)}")
    if isinstance(hint, types.UnionType):
        if raw is None:
            return None
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    if dataclasses.is_dataclass(hint):
        return raw if isinstance(raw, typing.cast(type, hint)) else read(typing.cast(type, hint), raw, where)
    if typing.get_origin(hint) is tuple:
        if not isinstance(raw, Sequence) or isinstance(raw, str):
            where.fail(f"expected a list, found {show(raw)}")
        return tuple(_value(item, typing.get_args(hint)[0], rule, where.item(index)) for index, item in enumerate(raw))
    if hint is float and isinstance(raw, int) and not isinstance(raw, bool):
        raw = float(raw)
    if not isinstance(raw, hint) or (hint is not bool and isinstance(raw, bool)):
        where.fail(f"expected {_NAMES[hint]}, found {show(raw)}")
    if rule.choices and raw not in rule.choices:
        allowed = ", ".join(map(str, rule.choices))
        where.fail(f"{show(raw)} is not allowed{suggest(str(raw), [str(c) for c in rule.choices])}; allowed are {allowed}")
    if (rule.low is not None and raw < rule.low) or (rule.high is not None and raw > rule.high):
        where.fail(f"{raw} is out of range; {_range(rule)}")
    return raw


def _range(rule: Rule) -> str:
    if rule.high is None:
        return f"at least {rule.low} is allowed"
    if rule.low is None:
        return f"at most {rule.high} is allowed"
    return f"{rule.low} to {rule.high} is allowed"


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, bool | int | float):
        return _NAMES[type(value)]
    return "a list" if isinstance(value, Sequence) else type(value).__name__
