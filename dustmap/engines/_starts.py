"""Where the search for hyperparameters starts: lengths from wider than the data to their distances.

The evidence has several maxima: one calls everything noise, and another, of no length at all, all
noise a function. A length far longer than the field's sees white noise, and a climb from there ends
at the first: 40 years of months at lengths of 0.08 standard deviations and more, where a year is
0.09 of them.
"""

import itertools
import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from dustmap.gp import Batch, GPModel, Parameter
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import StationaryKernel, SumKernel

#: A model and its score.
Scored: TypeAlias = tuple[GPModel, float]
#: Starts in standardised units: lengths, which go on by the last of their ratios, and noise with a
#: factor on the variance of the kernel. From a variance of 1 a climb ends where all is noise where
#: there is much of it.
_LENGTHS, _SHORTER, _SHORTEST = (2.0, 0.7, 0.25, 0.08), 0.32, 1e-6
_NOISE, _ALL_NOISE = ((0.5, 1.0), (0.1, 1.0), (0.95, 0.15)), (1.0, 1e-3)
#: Nats that others must be better by than a start of the most noise, for of a length of 0 its
#: evidence is theirs; and lengths beside `_LENGTHS` than those and than noise alone.
_PREFERENCE = 2.0
#: Rows that tell of distances, at most, those of them whose neighbours do, and the part of these
#: that is nearer.
_MOST_ROWS, _PROBES, _NEAR = 20_000, 100, 0.1
#: Rows of a window, as a part of all, and the relative width below which a column is uneven.
_WINDOW, _UNEVEN = 0.25, 0.25


def places_of(data: Batch) -> Tensor:
    """x (N, D) of point values."""
    assert isinstance(data.functional, PointValues)
    return data.functional.x


def start_lengths(x: Tensor) -> list[Tensor]:
    """Length scales (D,) to start at, for standardised rows x (N, D).

    ℓ_j = ℓ √D in all columns, ℓ from 2 to 0.08 and on to the distances of neighbours; where a
    column is uneven, such as one of two far clusters or of one far row, also ℓ_j = ℓ √D s_j with
    the `local_spreads` s.

    Examples
    --------
    >>> x = torch.linspace(-1.7, 1.7, 201, dtype=torch.float64)[:, None]
    >>> [round(length.item(), 4) for length in start_lengths(x)]
    [2.0, 0.7, 0.25, 0.08, 0.0256]
    >>> x[0] = -170.0
    >>> [round(length.item(), 4) for length in start_lengths(x / x.std(0))][-1]
    0.0021
    """
    x = _some(x, _MOST_ROWS)
    spreads = local_spreads(x)
    scales = [torch.ones_like(spreads)]
    if bool(spreads.min() < _UNEVEN):
        scales.append(spreads)
    root = math.sqrt(x.shape[1])
    return [
        length * root * scale
        for scale in scales
        for length in _down_to(_neighbour_distance(x / scale) / root)
    ]


def local_spreads(x: Tensor) -> Tensor:
    """Widths (D,) that a quarter of the rows of x (N, D) has, over that of evenly spread ones.

    s_j = median_i (x_(i+w)j − x_(i)j) / (√12 w/N) of sorted columns of standard deviation 1 and
    w = N/4; at most 1, and 1 where half of such windows have one value.

    Examples
    --------
    >>> x = torch.linspace(-1.7, 1.7, 101)[:, None]
    >>> two = torch.cat([x, torch.cat([x[:51] + 1000.0, x[51:]])], dim=1)
    >>> [round(s, 3) for s in local_spreads(two / two.std(0)).tolist()]
    [0.995, 0.002]
    """
    n = len(x)
    w = max(1, round(_WINDOW * n))
    if w >= n:
        return torch.ones_like(x[0])
    ordered = x.sort(dim=0).values
    widths = (ordered[w:] - ordered[:-w]).median(dim=0).values
    spreads = (widths / (math.sqrt(12.0) * w / n)).clamp(max=1.0)
    return torch.where(spreads > 0.0, spreads, 1.0)


@torch.no_grad()
def best_start(model: GPModel, x: Tensor, score: Callable[[GPModel], float]) -> GPModel:
    """The model of the best score among `start_lengths` of rows x (N, D) and widths of noise.

    For a kernel of one learned length scale per axis, or a sum of such, whose ratios stay; other
    models stay as they are.
    """
    kernel = model.kernel
    terms = kernel.kernels if isinstance(kernel, SumKernel) else (kernel,)
    if not all(isinstance(k, StationaryKernel) and k.length.is_learned for k in terms):
        return model
    learns_noise = any(p.name == "scatter" and p.is_learned for p in model.likelihood.parameters())
    widths = _NOISE if learns_noise else ((1.0, 1.0),)
    lengths = start_lengths(x)
    usual, further = lengths[: len(_LENGTHS)], lengths[len(_LENGTHS) :]

    def better(best: Scored, lengths: list[Tensor], preference: float) -> Scored:
        for length, (noise, factor) in itertools.product(lengths, widths):
            tried = _at(model, length, noise, factor)
            value = score(tried) + (preference if factor < 1.0 else 0.0)
            best = (tried, value) if value > best[1] else best
        return best

    best, most = better((model, -math.inf), usual, _PREFERENCE)
    if further and learns_noise:
        most = max(most, score(_at(model, usual[0], *_ALL_NOISE)))
    return better((best, most + _PREFERENCE), further, 0.0)[0]


def _at(model: GPModel, length: Tensor, noise: float, factor: float) -> GPModel:
    """The model at this length (D,) of its first term, this noise and so many times its variance,
    where these are learned."""
    first = model.kernel.parameters()[0].value.detach()

    def moved(p: Parameter) -> Parameter:
        name = p.name.partition("[")[0]
        if name == "length":
            one = length if p.value.numel() == len(length) else length.amin()
            return p.reshaped(one.log().to(p.value) + _over(p, first))
        if name == "scatter" and p.is_learned:
            return p.at(torch.full_like(p.value, noise).log())
        return p.at(p.value + math.log(factor)) if name == "variance" and p.is_learned else p

    return model.with_parameters([moved(p) for p in model.parameters()])


def _over(p: Parameter, first: Tensor) -> Tensor | float:
    """ln of the length of a term of a sum over that of the first; 0 of other parameters."""
    return p.value.detach() - first if p.name.startswith("length[") else 0.0


def _down_to(least: float) -> list[float]:
    """The lengths of `_LENGTHS` and shorter ones that are at least as long as this."""
    lengths = list(_LENGTHS)
    while lengths[-1] * _SHORTER >= max(least, _SHORTEST):
        lengths.append(lengths[-1] * _SHORTER)
    return lengths


def _some(x: Tensor, most: int) -> Tensor:
    """At most so many rows of x (N, D), evenly over all."""
    if len(x) <= most:
        return x
    return x[torch.linspace(0, len(x) - 1, most, dtype=torch.float64).long()]


def _neighbour_distance(x: Tensor) -> float:
    """The distance that a tenth of rows of x (N, D) has to the nearest other place; ∞ without."""
    distances = torch.cdist(_some(x, _PROBES), x, compute_mode="donot_use_mm_for_euclid_dist")
    nearest = distances.masked_fill(distances == 0.0, math.inf).amin(1)
    nearest = nearest[nearest.isfinite()]
    return float(nearest.quantile(_NEAR)) if len(nearest) > 0 else math.inf
