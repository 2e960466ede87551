"""The torus of a log-normal field while its length scale changes."""

import logging
import math

from dustmap.gp import MOST_INFLATION, GridPrior, torus_for
from dustmap.inference.lognormal._lognormal_state import LogNormalProblem

_log = logging.getLogger(__name__)

#: Prior correlation of opposite faces beyond which the torus is enlarged.
_LARGEST_WRAP = 0.15
#: A torus with this many times the points that the present length scale asks for is replaced.
_WASTE = 1.5


def on_its_torus(problem: LogNormalProblem, padding: float) -> LogNormalProblem:
    """On another torus where ℓ has outgrown the padding, or shrunk to where it is wasted.

    padding: of a new torus, in length scales.
    """
    prior = problem.model.prior
    if prior.wrapping is None:
        return problem
    wanted = math.prod(torus_for(prior.kernel, prior.grid, padding))
    report = prior.report
    outgrown = report.wrap_error > _LARGEST_WRAP or report.wrap_inflation > MOST_INFLATION
    if not (outgrown or prior.n_white > _WASTE * wanted):
        return problem
    other = GridPrior.padded(
        prior.kernel,
        prior.grid,
        padding=padding,
        nugget=prior.nugget,
        dtype=prior.dtype,
        memory=prior.memory,
        world=prior.world,
    )
    now, before = (" × ".join(map(str, each.torus_shape)) for each in (other, prior))
    _log.info("the length has changed: the padded box has %s nodes, had %s", now, before)
    return problem.on(other)


def on_torus(problem: LogNormalProblem, shape: tuple[int, ...]) -> LogNormalProblem:
    """At the kernel's present parameters, on a torus of so many points per axis."""
    prior = problem.model.prior
    if shape == prior.torus_shape:
        return problem.rebuilt()
    if prior.wrapping is None or len(shape) != prior.grid.dim:
        raise ValueError(
            f"the torus {prior.torus_shape} of this prior cannot become {shape}: it belongs to "
            "another computation"
        )
    return problem.on(
        GridPrior.padded(
            prior.kernel,
            prior.grid,
            nugget=prior.nugget,
            dtype=prior.dtype,
            torus_shape=shape,
            memory=prior.memory,
            world=prior.world,
        )
    )
