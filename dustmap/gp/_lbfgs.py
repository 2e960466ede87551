"""Minima of smooth functions by L-BFGS, with line searches to the strong Wolfe conditions.

Nocedal & Wright, Numerical Optimization, algorithms 7.4, 3.5 and 3.6, in the steps of
`torch.optim.LBFGS`, whose first use imports the compiler of torch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import torch
from torch import Tensor

#: Value and gradient (P,) at x (P,).
Function: TypeAlias = Callable[[Tensor], tuple[float, Tensor]]

#: Change of x, of the value and of gᵀd below which it stops; steps of which H is made.
_LEAST_CHANGE, _MEMORY = 1e-13, 20
#: Wolfe's conditions: the least fall per unit of a step, and the steepest slope where it may end,
#: in slopes at the start.
_FALL, _FLAT = 1e-4, 0.9
#: Curvature yᵀs below which a step says nothing of the Hessian.
_CURVATURE = 1e-10
#: A line search goes further by a hundredth to ten times; a trial of the zoom keeps away from both
#: ends by a tenth of what is left.
_FURTHER, _MARGIN = (0.01, 10.0), 0.1


@final
@dataclass(frozen=True, eq=False)
class Minimum:
    """The end of `minimise`: x (P,), how many steps led there, and evaluations of the function."""

    x: Tensor
    steps: int
    evaluations: int


def minimise(
    function: Function,
    x: Tensor,
    *,
    max_steps: int,
    max_evaluations: int,
    tolerance: float,
    on_step: Callable[[int], None] = lambda steps: None,
) -> Minimum:
    """Minimise from x (P,): x ← x + t d, d = −H g with the inverse Hessian H of the last steps.

    max_evaluations: the first trial of a search may exceed them by one; tolerance: of the largest
    |g|; on_step: is called with the number of every step.
    """
    value, gradient = function(x)
    evaluations, steps = 1, 0
    hessian = _InverseHessian()
    while steps < max_steps and evaluations < max_evaluations and not _small(gradient, tolerance):
        d = hessian.direction(gradient)
        start = _Trial(0.0, value, gradient, float(gradient.dot(d)))
        steps += 1
        on_step(steps)
        if start.slope > -_LEAST_CHANGE:
            break
        t = 1.0 if steps > 1 else min(1.0, 1.0 / float(gradient.abs().sum()))
        search = _LineSearch(function, x, d, start, max_evaluations - evaluations)
        end, made = search.end(t)
        x, value, gradient = torch.add(x, d, alpha=end.t), end.value, end.gradient
        evaluations += made
        step = d.mul(end.t)
        if _small(step, _LEAST_CHANGE) or abs(value - start.value) < _LEAST_CHANGE:
            break
        hessian = hessian.extended(gradient - start.gradient, step)
    return Minimum(x, steps, evaluations)


def _small(x: Tensor, limit: float) -> bool:
    return float(x.abs().max()) <= limit


@final
@dataclass(frozen=True, eq=False)
class _InverseHessian:
    """H of the pairs (y, s, 1 / yᵀs) of the last steps, `scale` times the identity before them."""

    pairs: tuple[tuple[Tensor, Tensor, float], ...] = ()
    scale: float = 1.0

    def extended(self, y: Tensor, s: Tensor) -> "_InverseHessian":
        """H after a step s (P,) that changed the gradient by y (P,)."""
        curvature = float(y.dot(s))
        if not curvature > _CURVATURE:
            return self
        pairs = (*self.pairs, (y, s, 1.0 / curvature))[-_MEMORY:]
        return replace(self, pairs=pairs, scale=curvature / float(y.dot(y)))

    def direction(self, gradient: Tensor) -> Tensor:
        """−H g (P,), by two loops over the pairs."""
        d, shares = gradient.neg(), []
        for y, s, inverse in reversed(self.pairs):
            shares.append(float(s.dot(d)) * inverse)
            d.add_(y, alpha=-shares[-1])
        d = d * self.scale
        for (y, s, inverse), share in zip(self.pairs, reversed(shares), strict=True):
            d.add_(s, alpha=share - float(y.dot(d)) * inverse)
        return d


@final
@dataclass(frozen=True, eq=False)
class _Trial:
    """The function at x + t d: its value, gradient g (P,) and slope gᵀd."""

    t: float
    value: float
    gradient: Tensor
    slope: float


@final
@dataclass(frozen=True, eq=False)
class _LineSearch:
    """A search along x + t d, `start` being t = 0, in `most` trials beyond the first."""

    function: Function
    x: Tensor
    d: Tensor
    start: _Trial
    most: int

    def end(self, t: float) -> tuple[_Trial, int]:
        """A point of the strong Wolfe conditions, first sought at t, and how many were tried."""
        before, trial, made = self.start, self._at(t), 0
        while made < self.most:
            if self._is_high(trial) or (made > 1 and trial.value >= before.value):
                return self._between(before, trial, made)
            if self._is_flat(trial):
                return trial, made + 1
            if trial.slope >= 0:
                return self._between(before, trial, made)
            least = trial.t + _FURTHER[0] * (trial.t - before.t)
            t = _lowest_of_cubic(before, trial, least, trial.t * _FURTHER[1])
            before, trial, made = trial, self._at(t), made + 1
        return (trial if trial.value < self.start.value else self.start), made + 1

    def _between(self, one: _Trial, other: _Trial, made: int) -> tuple[_Trial, int]:
        """The same between two points that have one of these between them."""
        low, high = (other, one) if other.value < one.value else (one, other)
        largest, was_near = float(self.d.abs().max()), False
        while made < self.most and not abs(high.t - low.t) * largest < _LEAST_CHANGE:
            first, last = sorted((low.t, high.t))
            t, margin = _lowest_of_cubic(low, high, first, last), _MARGIN * (last - first)
            is_near = min(last - t, t - first) < margin
            if is_near and (was_near or not first < t < last):
                t = last - margin if abs(t - last) < abs(t - first) else first + margin
                is_near = False
            was_near = is_near
            trial, made = self._at(t), made + 1
            if self._is_high(trial) or trial.value >= low.value:
                low, high = (trial, low) if trial.value < low.value else (low, trial)
                continue
            if self._is_flat(trial):
                return trial, made + 1
            low, high = trial, low if trial.slope * (high.t - low.t) >= 0 else high
        return low, made + 1

    def _at(self, t: float) -> _Trial:
        value, gradient = self.function(torch.add(self.x, self.d, alpha=t))
        return _Trial(t, value, gradient, float(gradient.dot(self.d)))

    def _is_high(self, trial: _Trial) -> bool:
        """Whether the first condition fails: it has not fallen enough, or is no number."""
        return not trial.value <= self.start.value + _FALL * trial.t * self.start.slope

    def _is_flat(self, trial: _Trial) -> bool:
        """Whether the second condition holds: the slope is less steep than at the start."""
        return abs(trial.slope) <= -_FLAT * self.start.slope


def _lowest_of_cubic(one: _Trial, other: _Trial, least: float, most: float) -> float:
    """Where the cubic through two values and slopes is lowest, within these bounds; their middle
    where it has no minimum."""
    first, last = (one, other) if one.t <= other.t else (other, one)
    a = first.slope + last.slope - 3 * (first.value - last.value) / (first.t - last.t)
    square = a * a - first.slope * last.slope
    root = math.sqrt(square) if square >= 0 else math.nan
    bend = last.slope - first.slope + 2 * root
    if math.isnan(bend) or bend == 0.0:
        return (least + most) / 2.0
    share = (last.slope + root - a) / bend
    return min(max(last.t - (last.t - first.t) * share, least), most)
