"""Where rays end: patches of the sky, and what stars beside each other differ by."""

import math

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from dustmap.gp import Batch
from dustmap.gp.functionals import AbstractFunctional, gathered, own_rays
from dustmap.sky._coordinates import PIXEL, pixels_towards

#: Median of z² of a standard normal z.
_MEDIAN = 0.6744897501960817**2
#: Stars at most among which neighbours are looked for, and whose neighbours are asked.
_MOST, _ASKED = 4_000_000, 50_000


def _ends(rays: AbstractFunctional) -> tuple[Tensor, Tensor]:
    """Average distance (N,) and direction (N, 3) of each."""
    own = own_rays(rays)
    length = (own.weights * own.edges.diff(dim=-1)).sum(-1)
    return gathered(rays, own.edges[:, 0] + length), gathered(rays, own.direction)


def sky_patches(rays: AbstractFunctional, width: float) -> Tensor:
    """Number (N,) of the patch in which each ray ends, on the average of its distances.

    width: of the shells, in the units of the rays; pixels are the smallest (NESTED) that are as
    wide at the median distance, nside 1 at the largest.
    """
    distance, vectors = _ends(rays)
    widest = PIXEL * float(distance.median()) / width
    nside = 2 ** max(0, math.floor(math.log2(max(widest, 1.0))))
    pixel = pixels_towards(nside, vectors.double().cpu().numpy())
    shell = torch.div(distance.cpu(), width, rounding_mode="floor").long()
    labels = torch.from_numpy(pixel) + 12 * nside**2 * shell
    patches: Tensor = torch.unique(labels, return_inverse=True)[1]
    return patches


def neighbour_scatter(data: Batch) -> float:
    """What stars beside each other differ by, over their errors: about 1 of errors that are right.

    The square root of

        median [(y_n − y_m)² / 0.455 − v_n − v_m] / (σ_n² + σ_m²),   m the star next to n

    σ² of the measurements, v the variances that are added to them, 0.455 the median of χ². It is
    more where errors are too small, or dust between neighbours matters more than they do, and less
    where these share what is added to them; outliers and rows that repeat another have no say, nor
    have those without a measurement. 1 of fewer than two stars.

    Examples
    --------
    >>> from dustmap.gp.functionals import LineIntegrals
    >>> ends = torch.tensor([[50.0, 0.0, 0.0], [50.0, 1.0, 0.0], [0.0, 90.0, 0.0]])
    >>> y, variance = torch.tensor([0.5, 0.3, 0.3]), torch.full((3,), 1e-4)
    >>> data = Batch(LineIntegrals.from_observer(ends), y, variance)
    >>> round(neighbour_scatter(data), 2)
    20.97
    """
    if data.noise_variance is None:
        return 1.0
    added = torch.zeros_like(data.y) if data.added_variance is None else data.added_variance
    measured = (data.noise_variance > added).cpu()
    distance, vectors = (each.double().cpu()[measured] for each in _ends(data.functional))
    columns = data.y, data.noise_variance - added, added
    y, variance, more = (each.double().cpu()[measured].numpy() for each in columns)
    if len(y) < 2:
        return 1.0
    places = (distance[:, None] * vectors).numpy()[:_MOST]
    n = np.linspace(0, len(places) - 1, min(_ASKED, len(places))).astype(np.int64)
    apart, nearest = cKDTree(places).query(places[n], k=2)
    is_other = nearest[:, 0] != n  # Of stars at one place either comes first.
    m = np.where(is_other, nearest[:, 0], nearest[:, 1])
    once = (apart[:, 1] > 0.0) | (y[n] != y[m])
    square = (y[n] - y[m]) ** 2 / _MEDIAN - more[n] - more[m]
    ratio = (square / (variance[n] + variance[m]))[once]
    return math.sqrt(max(float(np.median(ratio)), 0.0)) if len(ratio) else 1.0
