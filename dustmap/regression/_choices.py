"""Checks of single arguments."""

import difflib
from collections.abc import Sequence


def one_of(name: str, value: object, allowed: Sequence[str]) -> str:
    """`value` if it is one of `allowed`; otherwise an error that lists them."""
    if isinstance(value, str) and value in allowed:
        return value
    near = difflib.get_close_matches(value, allowed, n=1) if isinstance(value, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name} = {value!r}: expected one of {', '.join(map(repr, allowed))}{hint}")
