"""Questions about the same places that would count those outside again."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger("dustmap.sky.maps")


@contextmanager
def quietly() -> Iterator[None]:
    """Inside, maps keep to warnings: what they have told of some places need not be told again."""
    level = _log.level
    _log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        _log.setLevel(level)
