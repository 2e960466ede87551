"""Leading blocks of multilevel circulants by discrete Hartley transforms, as products of matrices.

A fast transform of a short axis takes few operations and waits for each of them: on a processor,
products of matrices make ten times as many in less time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.linalg._operator import AbstractSymmetric, apply_linear, check_vectors
from dustmap.linalg._toeplitz import CirculantOperator

#: Operations of products of matrices for one of fast transforms, at most, by what the processor
#: multiplies at once. Measured with AVX-512: of 41 × 41 × 25 nodes four times as many take half of
#: the time, of 111 × 111 × 49 eight times as many two thirds, of 201 × 201 × 81 fifteen times as
#: many as long. Others multiply half as fast.
_MOST = {"AVX512": 10.0}
_MOST_OF_OTHERS = 4.0
#: Nodes of a box below which calls take longer than what they do.
_FEWEST = 2**13


@final
@dataclass(frozen=True, eq=False)
class HartleyOperator(AbstractSymmetric):
    """crop · C · pad, where C is a circulant on a torus that is symmetric in every axis.

        C = H Λ H,   H = H_1 ⊗ … ⊗ H_D,   (H_d)_jf = (cos 2πjf/L_d + sin 2πjf/L_d) / √L_d

    H is real, symmetric and its own inverse, so that a product takes D multiplications with a
    matrix on the way to the spectrum and D back. Each is one product of large matrices: it takes
    the first axis and leaves it as the last, or the other way round, so that axes turn in a cycle.
    `CirculantOperator` does the same by fast transforms.

    spectrum: λ (L_1, …, L_D), the whole of it; factors: leading rows of H_d (m_d, L_d); from_first:
    whether the way there begins with the first axis, that of fewer operations.
    """

    spectrum: Tensor
    factors: tuple[Tensor, ...]
    from_first: bool

    @staticmethod
    def of(
        spectrum: Tensor, torus_shape: Sequence[int], box: Sequence[int], dtype: torch.dtype
    ) -> "HartleyOperator":
        """Take the real half spectrum (L_1, …, L_D//2+1) of `rfftn`, of a circulant that is
        symmetric in every axis.

        Examples
        --------
        >>> spectrum = torch.tensor([4.0, 1.0, 2.0])
        >>> K = HartleyOperator.of(spectrum, (4,), (2,), torch.float32)
        >>> K.to_dense().round(decimals=3)
        tensor([[2.0000, 0.5000],
                [0.5000, 2.0000]])
        """
        expected = (*torus_shape[:-1], torus_shape[-1] // 2 + 1)
        if tuple(spectrum.shape) != expected:
            raise UserError(
                f"HartleyOperator: spectrum must be the half spectrum {expected} of the torus "
                f"{tuple(torus_shape)}, got shape {tuple(spectrum.shape)}"
            )
        place = torch.arange(torus_shape[-1], device=spectrum.device)
        whole = spectrum.index_select(-1, torch.minimum(place, torus_shape[-1] - place))
        factors = tuple(
            _leading_rows(m, length).to(spectrum.device, dtype)
            for m, length in zip(box, torus_shape, strict=True)
        )
        first, last = _both_ways(box, torus_shape)
        return HartleyOperator(whole.to(dtype).contiguous(), factors, from_first=first <= last)

    @property
    def shape(self) -> tuple[int, int]:
        size = math.prod(len(factor) for factor in self.factors)
        return size, size

    def matmul(self, x: Tensor) -> Tensor:
        check_vectors("x", x, self.shape[1], self.dtype, self.device)
        return apply_linear(x, self._product, self.matmul)

    def _product(self, x: Tensor) -> Tensor:
        """Return K x (..., M), one vector after the other, in the same two pieces of memory."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out, spectrum = torch.empty_like(rows), self.spectrum.view(-1)
        memory = rows.new_empty(2, max(len(spectrum), rows.shape[-1]))
        there = self.factors if self.from_first else self.factors[::-1]
        back = [factor.mT for factor in there[::-1]]
        for block, target in zip(rows, out, strict=True):
            place = 0
            for matrix in there:
                block = _turned(block, matrix, self.from_first, memory[place])
                place = 1 - place
            block.mul_(spectrum)
            for matrix in back[:-1]:
                block = _turned(block, matrix, not self.from_first, memory[place])
                place = 1 - place
            _turned(block, back[-1], not self.from_first, target)
        return out.reshape(x.shape)


def suits_matrices(
    torus_shape: tuple[int, ...], box: tuple[int, ...], device: torch.device
) -> bool:
    """Tell whether products of matrices are faster than fast transforms: of short axes, and on a
    processor alone. The same on all processors of one kind.

    Examples
    --------
    >>> suits_matrices((60, 60, 48), (41, 41, 25), torch.device("cpu"))
    True
    >>> suits_matrices((16384,), (9000,), torch.device("cpu"))
    False
    """
    if device.type != "cpu" or math.prod(box) < _FEWEST:
        return False
    most = _MOST.get(torch.backends.cpu.get_cpu_capability(), _MOST_OF_OTHERS)
    return min(_both_ways(box, torus_shape)) <= most * _of_fast_transforms(box, torus_shape)


def circulant_block(
    spectrum: Tensor, torus_shape: tuple[int, ...], box: tuple[int, ...], dtype: torch.dtype
) -> HartleyOperator | CirculantOperator:
    """Return crop · C · pad (M, M) by products of matrices where faster, else by transforms.

    Spectrum (L_1, …, L_D//2+1), torus and box: as of `HartleyOperator.of`.
    """
    if suits_matrices(torus_shape, box, spectrum.device):
        return HartleyOperator.of(spectrum, torus_shape, box, dtype)
    return CirculantOperator(spectrum.to(dtype), torus_shape, rows=box, columns=box)


def _turned(block: Tensor, matrix: Tensor, is_first: bool, memory: Tensor) -> Tensor:
    """Multiply an axis of a block with a matrix (m, L), into the first numbers of a memory.

    It is the first axis, which comes back as the last, or the last, which comes back as the first.
    """
    m, length = matrix.shape
    others = block.numel() // m
    out = memory[: others * length]
    if is_first:
        torch.mm(block.view(m, others).mT, matrix, out=out.view(others, length))
    else:
        torch.mm(matrix.mT, block.view(others, m).mT, out=out.view(length, others))
    return out


def _leading_rows(m: int, length: int) -> Tensor:
    """Return the first rows (m, L) of H, float64."""
    place = torch.arange(m)[:, None] * torch.arange(length)
    angle = place.remainder(length).double() * (2.0 * math.pi / length)
    return (angle.cos() + angle.sin()) / math.sqrt(length)


def _both_ways(box: Sequence[int], torus_shape: Sequence[int]) -> tuple[float, float]:
    """Count the operations of the way there, the first axis first and the last axis first."""

    def operations(order: range) -> float:
        sides, total = list(box), 0.0
        for axis in order:
            total += 2.0 * math.prod(sides) * torus_shape[axis]
            sides[axis] = torus_shape[axis]
        return total

    return operations(range(len(box))), operations(range(len(box))[::-1])


def _of_fast_transforms(box: tuple[int, ...], torus_shape: tuple[int, ...]) -> float:
    """Count those by fast transforms, the last axis first and padding left out."""
    sides, total = list(box), 0.0
    for axis in reversed(range(len(box))):
        length = torus_shape[axis]
        others = math.prod(sides) // sides[axis]
        real = axis == len(box) - 1
        total += (2.5 if real else 5.0) * others * length * math.log2(max(2, length))
        sides[axis] = length // 2 + 1 if real else length
    return total
