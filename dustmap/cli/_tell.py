"""What a command prints when it is done."""

import json
import sys
from collections.abc import Mapping
from typing import Any


def tell(values: Mapping[str, Any], as_json: bool) -> None:
    """On stdout: one JSON object, or one `name: value` a line."""
    if as_json:
        sys.stdout.write(json.dumps(dict(values)) + "\n")
        return
    for name, value in values.items():
        sys.stdout.write(f"{name}: {_shown(value)}\n")


def _shown(value: object) -> str:
    """For people: `a 1, b 2` of a mapping and `1, 2` of a list, `none` of an empty one."""
    if isinstance(value, Mapping):
        parts = (f"{name} {_shown(held)}" for name, held in value.items())
        return ", ".join(parts) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value)) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
