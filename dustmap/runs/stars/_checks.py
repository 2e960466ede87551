"""What a run on stars must satisfy, lest it end with the exit code of a failed check."""

import math

from dustmap.config import Config
from dustmap.gp.functionals import OutsidePolicy
from dustmap.inference import MGVISettings, Scores
from dustmap.runs.reports import Check, coverage_check
from dustmap.runs.stars._hyperparameters import StarFit
from dustmap.runs.stars._model import density_of
from dustmap.sky.observations import Observations

#: What an engine may report -> the most that is sound, and what to do beyond.
LIMITS = {
    "cg_residual": (1e-3, "the posterior mean is not solved for: take {float64} or {coarser}"),
    "cg_columns_unconverged": (
        0.0,
        "set fit.max_steps = {steps} or fit.tolerance = {tolerance:g}, or take {float64}",
    ),
    "wrap_error": (
        0.15,
        "length scale near the size of the box: take a larger one, such as grid.size = {size}",
    ),
    "wrap_inflation": (
        0.1,
        "length scale beyond what the torus around the box holds: take a larger box, such as "
        "grid.size = {size}, or a shorter model.length",
    ),
    "rows_unconverged": (0.0, "set fit.pcg_steps = {pcg_steps}, or take {float64} or {coarser}"),
    "residual_variance_over_noise": (
        1.0,
        "the grid leaves more than the noise: take a finer one, such as {finer}",
    ),
}
#: Spacings of the grid below which a log-normal density is noise from node to node, that no grid
#: so coarse can tell the length of; part of the box beyond which it holds no two such lengths.
_LEAST_SPACINGS, _MOST_OF_BOX = 2.0, 0.5
#: Spacings to a length on a grid that is advised.
_SPACINGS = 3.0
#: Hyperparameters that a star can tell at most, in the mean.
_MOST_PER_STAR = 0.1
#: Standard deviations of the priors of ln length and ln std², as far as learned values may go.
_PRIOR_STDS = 2.0


#: Part of the rays that may end at the faces of a box beyond which no dust is expected.
_CUT = 0.05


def check_of_box(config: Config, observed: Observations) -> tuple[Check, ...]:
    """Whether few rays leave a box beyond which the run expects no dust; no check elsewhere."""
    if config.grid.outside != OutsidePolicy.TRUNCATE.value:
        return ()
    advice = (
        "all the extinction of these stars is put inside the box, most of it at the faces: set "
        'grid.outside = "prior", or take a larger box (grid.size)'
    )
    cut = observed.counts.truncated / len(observed)
    return (Check("part of the rays cut at the box", cut, 0.0, _CUT, advice),)


def checks_of_fit(config: Config, fit: StarFit) -> tuple[Check, ...]:
    """Of learning and of the solver."""
    found = []
    if fit.learning is not None:
        converged = float(fit.learning.converged)
        found.append(Check("learning converged", converged, 1.0, 1.0, fit.learning.remedy))
        found.append(_carried(config, fit, fit.learning.n_data))
        if config.engine == "lognormal":
            found += _checks_of_learned(config, fit)
    for key, (most, advice) in LIMITS.items():
        if key in fit.summary:
            said = advice.format(**_numbers(config))
            found.append(Check(key, float(fit.summary[key]), 0.0, most, said))
    return tuple(found)


def _numbers(config: Config) -> dict[str, object]:
    """What advice is made of."""
    grid, fit = config.grid, config.fit
    return {
        "steps": 2 * fit.max_steps,
        "pcg_steps": 2 * fit.pcg_steps,
        "tolerance": 3.0 * fit.tolerance,
        "float64": 'compute.dtype = "float64"',
        "coarser": f"grid.spacing = {1.5 * grid.spacing:.3g} pc",
        "finer": f"grid.spacing = {0.5 * grid.spacing:.3g} pc",
        "size": [1.5 * edge for edge in grid.size],
    }


def _carried(config: Config, fit: StarFit, stars: int) -> Check:
    """Whether there are stars enough for what is learned from them."""
    learned = len(config.model.learn) + (fit.hyperparameters.nu is not None)
    enough = math.ceil(learned / _MOST_PER_STAR)
    advice = (
        f"{learned} hyperparameters were learned from stars too few ({stars:,}): give {enough:,} "
        f"or more, or hold what is known by leaving it out of model.learn"
    )
    share = learned / max(1, stars)
    return Check("learned hyperparameters per star", share, 0.0, _MOST_PER_STAR, advice)


def _checks_of_learned(config: Config, fit: StarFit) -> list[Check]:
    """Whether it is the data that say length and std of a log-normal density.

    Its field lives on the nodes and its torus grows with the length, so that neither a residual
    variance nor a wrap error tells.
    """
    model, grid, at = config.model, config.grid, fit.hyperparameters
    reach = _PRIOR_STDS * MGVISettings().prior_std
    found = []
    if "length" in model.learn:
        most = _MOST_OF_BOX * max(grid.size) / grid.spacing
        length = at.length / grid.spacing
        advice = (
            f"held by the grid, not by the data: set grid.spacing = {at.length / _SPACINGS:.2g} "
            f"pc, a third of the length, or leave length out of model.learn"
        )
        if length > most:
            edge = 1.2 * at.length / _MOST_OF_BOX
            advice = (
                f"held by the box, not by the data: take one of {edge:,.0f} pc (grid.size), or "
                f"leave length out of model.learn"
            )
        found.append(Check("learned length in spacings", length, _LEAST_SPACINGS, most, advice))
        found.append(_beside("length", at.length / model.length, reach))
    if "std" in model.learn:
        found.append(_beside("std", at.std / density_of(config).start(model).std, 0.5 * reach))
    return found


def _beside(name: str, ratio: float, reach: float) -> Check:
    """Of a learned value and that of the configuration, exp(±reach) apart at most."""
    advice = (
        f"{name} has left its prior: see whether outliers (model.noise) or scatter (model.learn) "
        f"drive it, start nearer to it, or leave it out of model.learn"
    )
    return Check(f"learned {name} / model.{name}", ratio, math.exp(-reach), math.exp(reach), advice)


def check_of_scores(held_out: Scores) -> Check:
    """Of the held-out stars' residuals."""
    advice = "the errors of the catalog or the prior do not describe the data; see chi2"
    return coverage_check("held-out stars", held_out, advice)
