"""A checkpointer in memory that interrupts; what must come of it are the bits of never stopping."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from dustmap.gp import AbstractParametric
from dustmap.inference import AbstractCheckpointer, State

V = TypeVar("V")

#: Interruptions after which a computation is taken to make no progress.
_MOST = 300


class Interrupted(Exception):
    """The computation was ended after its state was kept."""


@final
@dataclass
class Pages:
    """What a checkpointer and its parts have saved, as bytes and text.

    left: states before the end; copies: where a copy of each state goes, if anywhere.
    """

    written: dict[str, tuple[str, dict[str, bytes]]] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    kept: int = 0
    left: int | None = None
    copies: list["Pages"] | None = None


@final
@dataclass
class MemoryCheckpointer(AbstractCheckpointer):
    """Every keep is due; everything goes through numpy's bytes and JSON's text."""

    pages: Pages = field(default_factory=Pages)
    name: str = "whole"

    def child(self, name: str) -> "MemoryCheckpointer":
        return MemoryCheckpointer(self.pages, f"{self.name}/{name}")

    def load(self) -> State | None:
        if self.name not in self.pages.written:
            return None
        text, arrays = self.pages.written[self.name]
        return State(json.loads(text), {name: _loaded(data) for name, data in arrays.items()})

    def save_if_due(self, make: Callable[[], State]) -> None:
        self._write(make())
        self.pages.kept += 1
        if self.pages.copies is not None:
            self.pages.copies.append(Pages(dict(self.pages.written), [*self.pages.finished]))
        if self.pages.left is not None:
            self.pages.left -= 1
            if self.pages.left == 0:
                raise Interrupted

    def finish(self, result: State) -> None:
        self._write(result)
        self.pages.finished.append(self.name)
        for name in [n for n in self.pages.written if n.startswith(f"{self.name}/")]:
            del self.pages.written[name]

    def _write(self, kept: State) -> None:
        arrays = {name: _saved(array) for name, array in kept.arrays.items()}
        self.pages.written[self.name] = json.dumps(kept.values), arrays


def often_interrupted(compute: Callable[[AbstractCheckpointer], V]) -> V:
    """The result of `compute`, ended after every single keep."""
    pages = Pages()
    for _ in range(_MOST):
        pages.left = 1
        try:
            return compute(MemoryCheckpointer(pages))
        except Interrupted:
            continue
    raise AssertionError(f"no end after {_MOST} interruptions")


def states(compute: Callable[[AbstractCheckpointer], Any]) -> list[Pages]:
    """What is there for a new beginning after every keep of `compute`, which is never ended."""
    copies: list[Pages] = []
    compute(MemoryCheckpointer(Pages(copies=copies)))
    return copies


def keeps(compute: Callable[[AbstractCheckpointer], Any]) -> int:
    """How often `compute` can be interrupted."""
    pages = Pages()
    compute(MemoryCheckpointer(pages))
    return pages.kept


def same_bits(one: object, other: object, where: str = "") -> None:
    """An assertion for every tensor, number and text in two results."""
    assert type(one) is type(other), where
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one.detach(), other.detach()), (where, one, other)
    elif isinstance(one, AbstractParametric) and isinstance(other, AbstractParametric):
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            assert (p.name, p.is_learned) == (q.name, q.is_learned), where
            same_bits(p.value, q.value, f"{where}.{p.name}")
        if is_dataclass(one) and is_dataclass(other):
            for f in fields(one):
                same_bits(getattr(one, f.name), getattr(other, f.name), f"{where}.{f.name}")
    elif is_dataclass(one) and not isinstance(one, type):
        for f in fields(one):
            same_bits(getattr(one, f.name), getattr(other, f.name), f"{where}.{f.name}")
    elif isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            same_bits(a, b, f"{where}[{i}]")
    elif isinstance(one, (int, float, str, bool, Enum, type(None), torch.dtype)):
        assert one == other, (where, one, other)


def _saved(array: Tensor) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array.detach().cpu().contiguous().numpy(), allow_pickle=False)
    return buffer.getvalue()


def _loaded(data: bytes) -> Tensor:
    return torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False))
