"""What a server allows: the fields are the flags of `mlsdc serve`."""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.runtime.errors import RequestError


@dataclass(frozen=True)
class ServerSettings:
    """Limits and names. Raises RequestError, naming the field."""

    served_model_name: str | None = None  # None: the model's name in the artifact
    api_keys: tuple[str, ...] = ()  # any of them opens /v1, /tokenize and /detokenize; none: all are open
    max_queue: int = 64  # choices that may wait beside those that run; more is a 429
    max_body_bytes: int = 4 << 20
    max_prompts: int = 64  # prompts of one completion request
    max_n: int = 16
    max_stop: int = 16  # stop strings of a request
    max_stop_chars: int = 256
    max_logprobs: int = 20
    max_schema_bytes: int = 64 << 10  # of a JSON schema and of a request's tools
    deadline_s: float | None = None  # of a request that names none itself
    max_deadline_s: float = 3600.0
    read_timeout_s: float = 30.0  # for a request's body
    write_timeout_s: float = 60.0  # for one event of a stream that its client does not read
    step_timeout_s: float = 60.0  # a step that takes longer is stuck: dump, error, not alive
    drain_timeout_s: float = 30.0  # after SIGTERM

    def __post_init__(self) -> None:
        counts = [name for name in vars(self) if name.startswith("max_") and not name.endswith("_s")]
        for name in counts:
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise RequestError(f"{name}: {value!r}, expected an integer of at least 0")
        for name in ("max_deadline_s", "read_timeout_s", "write_timeout_s", "step_timeout_s", "drain_timeout_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise RequestError(f"{name}: {value!r}, expected seconds above 0")
        if any(not key for key in self.api_keys):
            raise RequestError("api_keys: an empty key, expected text")
