"""The posterior that a finished log-normal fit stands for, and how the fit ended."""

import torch

from dustmap.inference.lognormal._lognormal_posterior import LogNormalPosterior
from dustmap.inference.lognormal._mgvi_draws import explained_share
from dustmap.inference.lognormal._mgvi_report import MGVISolution, MGVIStatus
from dustmap.inference.lognormal._mgvi_state import FitState

#: A mode that misses the data by more than this, in units of the noise, is no start for samples.
_LARGEST_MISFIT = 3.0
#: Samples that are turned into fields at once.
_FIELDS = 8


def solution_of(state: FitState, seed: int) -> MGVISolution:
    """Return the samples of a state that is done, their fields and the status; seed: the fit's."""
    assert state.deviations is not None
    # every +δ_s followed by its −δ_s, so that the first samples are pairs too
    deviations = torch.stack(state.deviations.chunk(2), dim=1).flatten(0, 1)
    problem, centre = state.centre.problem, state.centre.xi
    with torch.no_grad():
        parts = (centre + part for part in torch.split(deviations, _FIELDS))
        fields = torch.cat([problem.log_mean + problem.root.matmul(xi) for xi in parts])
    log_density = state.centre.log_density
    share = explained_share(problem, seed, deviations, fields, log_density)
    return MGVISolution(
        problem.model,
        LogNormalPosterior(problem.model.interpolation, log_density, fields, share),
        problem.model.coefficients(centre),
        centre,
        deviations,
        tuple(state.history),
        _status(state),
        state.weighing,
    )


def _status(state: FitState) -> MGVIStatus:
    if state.centre.misfit() > _LARGEST_MISFIT:
        return MGVIStatus.MISFIT
    if state.unsolved:
        return MGVIStatus.UNSOLVED
    if state.strayed:
        return MGVIStatus.STRAYED
    steps = [entry.stage for entry in state.history if entry.gradient]
    if steps and steps[-1] == "rejected":
        return MGVIStatus.REJECTED
    return MGVIStatus.MAX_ROUNDS if state.moved else MGVIStatus.CONVERGED
