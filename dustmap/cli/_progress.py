"""Bars on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, Self, final

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from dustmap.runs import LogProgress, Progress

#: Seconds before a bar is shown: what is done sooner needs none.
DELAY = 2.0


@contextmanager
def progress() -> Iterator[Progress]:
    """What a run tells how far it is, for as long as it runs."""
    if not sys.stderr.isatty():
        yield LogProgress()
        return
    with logging_redirect_tqdm(), _Bars() as bars:
        yield bars


@final
class _Bars:
    """A bar for what is being done, gone when it is done."""

    def __init__(self) -> None:
        self._bars: dict[str, tqdm[NoReturn]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for bar in self._bars.values():
            bar.close()

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._bars:
            self._bars[what] = tqdm(
                total=total, desc=what, leave=False, file=sys.stderr, delay=DELAY
            )
        bar = self._bars[what]
        bar.update(done - bar.n)
        if done >= total:
            bar.close()
            del self._bars[what]
