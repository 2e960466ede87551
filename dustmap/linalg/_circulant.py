"""Leading blocks of multilevel circulants, applied by real FFTs."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.linalg._fft import (
    cropped_irfftn,
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
        spectrum = self.spectrum.to(x.dtype)
        if torch.is_grad_enabled() and spectrum.requires_grad:
            result = _transform(spectrum, x.reshape(-1, *source), self.torus_shape, target)
            return result.reshape(*x.shape[:-1], math.prod(target))
        swapped = CirculantOperator(spectrum, self.torus_shape, source, target)
        return apply_linear(
            x,
            lambda v: _fast_product(spectrum, v, self.torus_shape, source, target),
            swapped.matmul,
        )


def _transform(
    spectrum: Tensor, x: Tensor, torus_shape: tuple[int, ...], target: tuple[int, ...]
) -> Tensor:
    return cropped_irfftn(padded_rfftn(x, torus_shape) * spectrum, torus_shape, target)


def _fast_product(
    spectrum: Tensor,
    x: Tensor,
    torus_shape: tuple[int, ...],
    source: tuple[int, ...],
    target: tuple[int, ...],
) -> Tensor:
    """`_transform` without a graph: in place and in cache-sized batches."""
    flat = x.reshape(-1, *source)
    out = x.new_empty(flat.shape[0], *target)
    batch = rows_in_cache(torus_shape, x.dtype, x.device)
    for start in range(0, flat.shape[0], batch):
        half = padded_rfftn(flat[start : start + batch], torus_shape).mul_(spectrum)
        out[start : start + batch] = cropped_irfftn(half, torus_shape, target)
    return out.reshape(*x.shape[:-1], math.prod(target))


def _fits(box: tuple[int, ...], torus_shape: tuple[int, ...]) -> bool:
    same_dim = len(box) == len(torus_shape)
    return same_dim and all(1 <= m <= length for m, length in zip(box, torus_shape, strict=True))


def _check_precision(name: str, x: Tensor, spectrum: Tensor) -> None:
    if not x.is_floating_point() or x.dtype.itemsize > spectrum.dtype.itemsize:
        raise ValueError(
            f"{name}: expected a real floating-point tensor no wider than the spectrum's "
            f"{spectrum.dtype}, got {x.dtype}; convert it, or build the operator in {x.dtype}"
        )
