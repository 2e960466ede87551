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
        shown = f"{value:.6g}" if isinstance(value, float) else value
        sys.stdout.write(f"{name}: {shown}\n")
