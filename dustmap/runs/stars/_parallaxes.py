"""How well the parallaxes of a run's stars are known, and what follows for its map."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dustmap.gp.functionals import Sharded
from dustmap.runs.reports import Check
from dustmap.runs.stars._share import StarShare
from dustmap.sky.observations import Observations
from dustmap.sky.stars import ParallaxDistances

log = logging.getLogger(__name__)

#: Median error / parallax above which a map may be biased by some per cent, and by too many.
_NOTICEABLE, _MOST = 0.15, 0.3
_ADVICE = (
    "at 30 %, extinctions to a distance were off by up to 5 % under the learned prior, 15 % under "
    "exponential-density and 10 to 30 % under flat-parallax, and by more than their errors said; "
    "cut on the ratio, or take distances that know the photometry, too"
)


def median_fractional_error(
    share: StarShare, observed: Observations, train: torch.Tensor
) -> float | None:
    """Median error / parallax of the stars that are fitted, of all ranks; infinite where half of
    the parallaxes are not positive, None without parallaxes."""
    distances, rays = share.given.stars.distances, observed.batch.functional
    if not isinstance(distances, ParallaxDistances):
        return None
    own = observed.rows - share.first
    own = own[(own >= 0) & (own < len(distances))]
    parallax, error = distances.parallax[own], distances.error[own]
    positive = parallax > 0.0
    ratio = np.where(positive, error / np.where(positive, parallax, 1.0), np.inf)
    every = torch.from_numpy(ratio).to(train.device)
    if isinstance(rays, Sharded):
        every = rays.gathered(every)
    return float(every[train].median())


def told_of_parallaxes(median: float | None) -> tuple[Mapping[str, Any], tuple[Check, ...]]:
    """For the report: the median error / parallax, with a warning where it matters, and a check."""
    if median is None:
        return {}, ()
    found = {"median_parallax_error_over_parallax": median if np.isfinite(median) else "infinite"}
    check = Check("median parallax error / parallax", median, 0.0, _MOST, _ADVICE)
    if median <= _NOTICEABLE:
        return found, (check,)
    warning = f"parallax errors are {100 * median:.0f} % of the parallaxes (median): {_ADVICE}"
    log.warning("%s", warning)
    return found | {"warning": warning}, (check,)
