"""The log: one JSON object a line on stderr. Each HTTP request is one line, with the id its answer carries in `x-request-id`."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from typing import Any

LOGGER = logging.getLogger("mlsdc.server")
VALID_ID = re.compile(r"[\w.:-]{1,128}")


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(), "message": record.getMessage(), **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(level: str) -> None:
    """Log as JSON from `level` on ("debug", "info", "warning", "error"); uvicorn's own lines, too."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    for name in ("mlsdc.server", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler] if name != "uvicorn.error" else []
        logger.propagate = name == "uvicorn.error"
        logger.setLevel(level.upper() if name == "mlsdc.server" else max(logging.WARNING, logging.getLevelName(level.upper())))


def request_id(given: str | None) -> str:
    """The client's `x-request-id` if it is fit for a log, else a new one."""
    return given if given is not None and VALID_ID.fullmatch(given) else uuid.uuid4().hex
