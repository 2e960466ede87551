"""What a command prints when it is done."""

import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dustmap.runs import Plan


def write(text: str) -> None:
    """Puts text on stdout, all of it at once, so that whatever fails does so here.

    A reader that has gone, as `head` does, has had enough, which is no failure of the command.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail again at the end of the process.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        if not isinstance(error, BrokenPipeError):
            raise OSError(error.errno, error.strerror, "stdout") from error


def tell(values: Mapping[str, Any], as_json: bool) -> None:
    """On stdout: one JSON object, or one `name: value` a line."""
    if as_json:
        write(json.dumps(dict(values)) + "\n")
        return
    write("".join(f"{name}: {_shown(value)}\n" for name, value in values.items()))


def tell_plan(plan: "Plan", seconds: float | None, as_json: bool) -> None:
    """What a command would do: one JSON object, or a table of what takes memory.

    seconds: None where they are too few to plan.
    """
    if as_json:
        known = {} if seconds is None else {"seconds_about": seconds}
        tell(plan.as_dict() | known, True)
        return
    about = [] if seconds is None else [f"seconds_about: {seconds:g}"]
    write("\n".join([*plan.lines(), *about]) + "\n")


def _shown(value: object) -> str:
    """For people: `a 1, b 2` of a mapping and `1, 2` of a list, `none` of an empty one."""
    if isinstance(value, Mapping):
        parts = (f"{name} {_shown(held)}" for name, held in value.items())
        return ", ".join(parts) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value)) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
