"""Leading blocks of multilevel circulants, applied by real FFTs."""

import math
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from dustmap.linalg._fft import (
    cropped_irfftn,
    fewest_rows,
    first_axis_last,
    half_spectrum_shape,
    padded_rfftn,
    rows_in_cache,
)
from dustmap.linalg._operator import AbstractOperator, apply_linear, check_vectors


@final
@dataclass(frozen=True, eq=False)
class CirculantOperator(AbstractOperator):
    """crop · C · pad, where C = F⁻¹ diag(λ) F is a symmetric circulant on a torus.

        A x = crop_rows( irfftn( λ · rfftn( pad x ) ) )

    spectrum: λ (L1, …, LD//2+1), the real half spectrum (of `rfftn`) of C's first column.
    torus_shape: (L1, …, LD).
    rows, columns: leading boxes of the torus that index the rows and columns of A; None is the
        whole torus. Both are flattened in C order.

    Computes in the precision of the vector; `.to(dtype)` rounds the spectrum once for many
    products. Differentiable in the spectrum and in the vector.
    """

    spectrum: Tensor
    torus_shape: tuple[int, ...]
    rows: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None
    _rotated: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        expected = half_spectrum_shape(self.torus_shape)
        if tuple(self.spectrum.shape) != expected or self.spectrum.is_complex():
            raise ValueError(
                f"CirculantOperator: spectrum must be real of shape {expected} (the rfftn half "
                f"spectrum of torus_shape {self.torus_shape}), got {self.spectrum.dtype} of shape "
                f"{tuple(self.spectrum.shape)}"
            )
        for name, box in (("rows", self.rows), ("columns", self.columns)):
            if box is not None and not _fits(box, self.torus_shape):
                raise ValueError(
                    f"CirculantOperator: {name} must be a box inside the torus "
                    f"{self.torus_shape}, got {box}"
                )

        object.__setattr__(self, "_rotated", first_axis_last(self.spectrum))

    @property
    def shape(self) -> tuple[int, int]:
        return math.prod(self._row_box), math.prod(self._column_box)

    @property
    def dtype(self) -> torch.dtype:
        return self.spectrum.dtype

    @property
    def device(self) -> torch.device:
        return self.spectrum.device

    def to(self, dtype: torch.dtype) -> "CirculantOperator":
        """The same operator with its spectrum rounded to `dtype`."""
        return CirculantOperator(self.spectrum.to(dtype), self.torus_shape, self.rows, self.columns)

    def matmul(self, x: Tensor) -> Tensor:
        return self._product(x, "x", self._column_box, self._row_box)

    def rmatmul(self, y: Tensor) -> Tensor:
        return self._product(y, "y", self._row_box, self._column_box)

    @property
    def _row_box(self) -> tuple[int, ...]:
        return self.torus_shape if self.rows is None else self.rows

    @property
    def _column_box(self) -> tuple[int, ...]:
        return self.torus_shape if self.columns is None else self.columns

    def _product(
        self, x: Tensor, name: str, source: tuple[int, ...], target: tuple[int, ...]
    ) -> Tensor:
        check_vectors(name, x, math.prod(source), x.dtype, self.device)
        _check_precision(name, x, self.spectrum)
        spectrum = self._rotated.to(x.dtype)
        batch = x.shape[:-1]
        if torch.is_grad_enabled() and spectrum.requires_grad:
            half = padded_rfftn(x.reshape(-1, *source), self.torus_shape) * spectrum
            block = cropped_irfftn(half, self.torus_shape, target)
            return block.reshape(*batch, math.prod(target))

        def product(v: Tensor) -> Tensor:
            block = _fast_product(spectrum, v.reshape(-1, *source), self.torus_shape, target)
            return block.reshape(*batch, math.prod(target))

        return apply_linear(x, product, lambda g: self._product(g, "gradient", target, source))


def _fast_product(
    spectrum: Tensor, x: Tensor, torus_shape: tuple[int, ...], target: tuple[int, ...]
) -> Tensor:
    """The product without a graph: in place and in cache-sized batches."""
    count = x.shape[0]
    if count == 1 and x.device.type == "cpu":
        x = x.expand(fewest_rows(torus_shape), *x.shape[1:])
    out = x.new_empty(x.shape[0], *target)
    rows = rows_in_cache(torus_shape, x.dtype, x.device)
    for first in range(0, x.shape[0], rows):
        half = padded_rfftn(x[first : first + rows], torus_shape).mul_(spectrum)
        out[first : first + rows] = cropped_irfftn(half, torus_shape, target)
    return out[:count]


def _fits(box: tuple[int, ...], torus_shape: tuple[int, ...]) -> bool:
    same_dim = len(box) == len(torus_shape)
    return same_dim and all(1 <= m <= length for m, length in zip(box, torus_shape, strict=True))


def _check_precision(name: str, x: Tensor, spectrum: Tensor) -> None:
    if not x.is_floating_point() or x.dtype.itemsize > spectrum.dtype.itemsize:
        raise ValueError(
            f"{name}: expected a real floating-point tensor no wider than the spectrum's "
            f"{spectrum.dtype}, got {x.dtype}; convert it, or build the operator in {x.dtype}"
        )
