"""What a command prints when it is done."""

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dustmap.runs import Plan


def tell(values: Mapping[str, Any], as_json: bool) -> None:
    """On stdout: one JSON object, or one `name: value` a line."""
    if as_json:
        sys.stdout.write(json.dumps(dict(values)) + "\n")
        return
    for name, value in values.items():
        sys.stdout.write(f"{name}: {_shown(value)}\n")


def tell_plan(plan: "Plan", seconds: float | None, as_json: bool) -> None:
    """What a command would do: one JSON object, or a table of what takes memory.

    seconds: None where they are too few to plan.
    """
    if as_json:
        known = {} if seconds is None else {"seconds_about": seconds}
        tell(plan.as_dict() | known, True)
        return
    about = [] if seconds is None else [f"seconds_about: {seconds:g}"]
    sys.stdout.write("\n".join([*plan.lines(), *about]) + "\n")


def _shown(value: object) -> str:
    """For people: `a 1, b 2` of a mapping and `1, 2` of a list, `none` of an empty one."""
    if isinstance(value, Mapping):
        parts = (f"{name} {_shown(held)}" for name, held in value.items())
        return ", ".join(parts) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value)) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
