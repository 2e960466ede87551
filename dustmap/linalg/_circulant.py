"""Leading blocks of multilevel circulants, applied by real FFTs."""

import math
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from dustmap.linalg._fft import (
    cropped_irfftn,
    cross_spectrum,
    fewest_rows,
    first_axis_last,
    half_spectrum_shape,
    multiplicity,
    padded_rfftn,
    rows_in_cache,
)
from dustmap.linalg._operator import AbstractOperator, check_vectors


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
        boxes = _Boxes(self.torus_shape, source, target)
        spectrum, blocks = self._rotated.to(x.dtype), x.reshape(-1, *source)
        if torch.is_grad_enabled() and (spectrum.requires_grad or x.requires_grad):
            blocks = _CirculantProduct.apply(  # type: ignore[no-untyped-call]
                spectrum, blocks, boxes
            )
        else:
            blocks = _product(spectrum, blocks, boxes)
        return blocks.reshape(*x.shape[:-1], math.prod(target))


@final
@dataclass(frozen=True)
class _Boxes:
    """A product reads from `source` and writes to `target`, leading boxes of the torus."""

    torus_shape: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]

    def swapped(self) -> "_Boxes":
        return _Boxes(self.torus_shape, self.target, self.source)


class _CirculantProduct(torch.autograd.Function):
    """y = crop F⁻¹ λ F pad x with the derivatives

        x̄ = crop F⁻¹ λ F pad ȳ,    λ-bar_k = Σ Re( conj(F pad ȳ)_k (F pad x)_k ) · multiplicity / L

    so that no transform is kept for the backward pass, which costs what the forward pass does.
    """

    @staticmethod
    def forward(ctx: Any, spectrum: Tensor, x: Tensor, boxes: _Boxes) -> Tensor:
        ctx.boxes = boxes
        ctx.save_for_backward(spectrum, x if ctx.needs_input_grad[0] else None)
        return _product(spectrum, x, boxes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        spectrum, x = ctx.saved_tensors
        (grad,) = grads
        grad_x = grad_spectrum = None
        if ctx.needs_input_grad[0]:
            grad_spectrum = _spectrum_gradient(grad, x, ctx.boxes).to(spectrum.dtype)
        if ctx.needs_input_grad[1]:
            grad_x = _CirculantProduct.apply(  # type: ignore[no-untyped-call]
                spectrum, grad, ctx.boxes.swapped()
            )
        return grad_spectrum, grad_x, None


def _product(spectrum: Tensor, x: Tensor, boxes: _Boxes) -> Tensor:
    """In place and in cache-sized batches; x (R, *source), the result (R, *target)."""
    count, torus_shape = x.shape[0], boxes.torus_shape
    if count == 1 and x.device.type == "cpu":
        x = x.expand(fewest_rows(torus_shape), *boxes.source)
    rows = rows_in_cache(torus_shape, x.dtype, x.device)
    if 0 < x.shape[0] <= rows:
        half = padded_rfftn(x, torus_shape).mul_(spectrum)
        return cropped_irfftn(half, torus_shape, boxes.target)[:count]
    out = x.new_empty(x.shape[0], *boxes.target)
    for first in range(0, x.shape[0], rows):
        half = padded_rfftn(x[first : first + rows], torus_shape).mul_(spectrum)
        out[first : first + rows] = cropped_irfftn(half, torus_shape, boxes.target)
    return out[:count]


def _spectrum_gradient(grad: Tensor, x: Tensor, boxes: _Boxes) -> Tensor:
    cross = cross_spectrum(grad, x, boxes.torus_shape).real
    weight = multiplicity(boxes.torus_shape).to(cross) / math.prod(boxes.torus_shape)
    return cross * weight


def _fits(box: tuple[int, ...], torus_shape: tuple[int, ...]) -> bool:
    same_dim = len(box) == len(torus_shape)
    return same_dim and all(1 <= m <= length for m, length in zip(box, torus_shape, strict=True))


def _check_precision(name: str, x: Tensor, spectrum: Tensor) -> None:
    if not x.is_floating_point() or x.dtype.itemsize > spectrum.dtype.itemsize:
        raise ValueError(
            f"{name}: expected a real floating-point tensor no wider than the spectrum's "
            f"{spectrum.dtype}, got {x.dtype}; convert it, or build the operator in {x.dtype}"
        )
