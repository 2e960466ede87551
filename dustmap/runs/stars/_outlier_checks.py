"""Whether stars far above a map are errors, or behind clouds that the map lacks."""

import torch
from scipy.spatial import KDTree
from scipy.special import bdtr
from torch import Tensor

from dustmap.gp.functionals import gathered, own_rays
from dustmap.runs.reports import Check, Predictions
from dustmap.runs.stars._engines import StarFit
from dustmap.sky.observations import Observations

#: Standard deviations of its prediction above which a star lies far above the map; such stars that
#: tell something, and neighbours among which one behind is looked for.
_FAR, _FEWEST, _NEIGHBOURS = 4.0, 10, 32
#: Share of the stars behind that lie as far above by chance: 0.02 to 0.05 of errors at random, 0.15
#: to 0.7 where clouds are missing; the probability of as many as may, and their share at least.
_BY_CHANCE, _RARELY, _COHERENT = 0.05, 0.99, 0.1
#: Stars that are looked at, at least: held-out ones, and where these are fewer some of the fit.
_LOOKED_AT = 10_000


def outlier_checks(
    held_out: Predictions, fit: StarFit, observed: Observations, train: Tensor, holdout: Tensor
) -> tuple[Check, ...]:
    """Check stars far above the map, held out or among those of the fit, whom Student-t noise gives
    no say: an error is its star's own, a cloud has other stars behind it."""
    fitted = train.cpu()
    if len(fitted) == 0:
        return ()
    order = torch.randperm(len(fitted), generator=torch.Generator().manual_seed(0))
    own = fitted[order[: max(0, _LOOKED_AT - len(holdout))]]
    above = _far_above(held_out)
    if len(own) > 0:
        above = torch.cat([above, _far_above(fit.predictions(observed, own.to(train.device)))])
    seeds = torch.cat([holdout.cpu(), own])[above]
    if len(seeds) < _FEWEST:
        return ()
    rays = observed.batch.functional
    towards, depth = gathered(rays, own_rays(rays).direction).cpu(), rays.moments()[:, 0].cpu()
    most = min(_NEIGHBOURS, len(fitted))
    _, near = KDTree(towards[fitted]).query(towards[seeds], k=range(1, most + 1))
    behind = depth[fitted[near]] > depth[seeds, None]
    followed = behind.any(1)
    if followed.sum() < _FEWEST:
        return ()
    nearest = torch.from_numpy(near)[followed, behind[followed].int().argmax(1)]
    share = float(_far_above(fit.predictions(observed, train[nearest])).float().mean())
    advice = (
        f"{len(seeds)} of {len(above)} stars lie far above the map, and so do stars behind them: "
        'clouds that model.noise = "student-t" takes for errors and the map lacks; take '
        'model.noise = "gaussian", and with it a smaller grid.spacing or grid.levels around them'
    )
    n = len(nearest)
    at_most = bdtr(range(n + 1), n, _BY_CHANCE)  # the probability of so many
    limit = max(_COHERENT, int(at_most.searchsorted(_RARELY)) / n)
    return (Check("share of outliers with another behind", share, 0.0, limit, advice),)


def _far_above(predictions: Predictions) -> Tensor:
    return ((predictions.y - predictions.mean) / predictions.std > _FAR).cpu()
