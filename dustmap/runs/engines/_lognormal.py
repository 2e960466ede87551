"""Log-normal densities: positive everywhere, by metric Gaussian variational inference."""

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from dustmap.config import Config
from dustmap.gp import Batch, GridPrior, LogDiscMean
from dustmap.gp.features import beamed_interpolation, interpolation
from dustmap.gp.functionals import world_of
from dustmap.gp.kernels import StationaryKernel
from dustmap.inference import (
    NO_JOURNAL,
    AbstractJournal,
    Interpolation,
    LogNormalModel,
    LogNormalPosterior,
    MGVIRound,
    MGVISettings,
    MGVISolution,
    MGVIStatus,
    fit_mgvi,
    nugget_for,
    typical_log_density,
)
from dustmap.linalg import AbstractOperator, Progress, unwatched
from dustmap.runs.engines._global import robust_settings
from dustmap.runs.memory import allotted
from dustmap.runs.models import (
    Arrays,
    Hyperparameters,
    Learning,
    StarFit,
    Tell,
    dtype_of,
    grid_of,
    learned_kernel,
    learned_names,
    likelihood_of,
    log_profile_of,
    noise_of,
    profile_of,
    silent,
    start_of,
)
from dustmap.sky.observations import HealpixBeams

log = logging.getLogger(__name__)

MOST_ROWS = 10_000_000
#: Standard deviation of ln ρ where the configuration leaves it open.
STD = 1.0


def fit_lognormal(
    config: Config,
    data: Batch,
    start: Hyperparameters | None,
    journal: AbstractJournal = NO_JOURNAL,
    tell: Tell = silent,
    progress: Progress = unwatched,
) -> StarFit:
    """Mode, hyperparameters and samples, from start or the configuration's values.

    Priors stay around the configuration's values, wherever the fit starts.
    """
    first = _first(config, data)
    model = _model(config, first, data)
    origin = model.log_parameters()
    if start is not None:
        model = _model(config, replace(start, mean=first.mean), data)
    settings, told = _settings(config, start), _telling(model, tell)
    solution = fit_mgvi(
        model, data, settings, told, origin=origin, journal=journal, progress=progress
    )
    arrays = _arrays(solution.posterior)
    # As a later command will see it, so that both see the same bits.
    fit = reopen_lognormal(config, data, _found(solution), arrays)
    return replace(
        fit, summary=_summary(solution), learning=_learning(solution, len(data)), arrays=arrays
    )


def reopen_lognormal(config: Config, data: Batch, at: Hyperparameters, arrays: Arrays) -> StarFit:
    """The posterior that an earlier fit has left: its samples are all there is to it.

    Runs of earlier versions know no share that is explained; their coverage goes by the prior's
    variance.
    """

    def of(name: str) -> torch.Tensor:
        return torch.from_numpy(np.asarray(arrays[name])).to(data.y.device)

    share = of("explained") if "explained" in arrays else None
    posterior = LogNormalPosterior(_rows(config), of("log_density"), of("log_samples"), share)
    return StarFit(posterior, at, {}, None, at_nodes=posterior.at_nodes)


def _first(config: Config, data: Batch) -> Hyperparameters:
    """Where a first fit starts; the median density is the data's own where it is learned."""
    std = config.model.std or STD
    mean = config.model.mean_density
    if "mean" in config.model.learn:
        profile = profile_of(config.model, 1.0).to(data.y.device)
        mean = math.exp(typical_log_density(data, std**2, profile))
    return replace(start_of(config.model), std=std, mean=mean)


def _rows(config: Config) -> "functools.partial[AbstractOperator]":
    return functools.partial(
        interpolation,
        grid=grid_of(config.grid),
        memory=config.compute.memory_bytes // 2,
        dtype=dtype_of(config.compute),
    )


def _rows_of_fit(config: Config, data: Batch) -> Interpolation:
    """Through shared beams where fit.beams says so: the posterior's own rows stay exact."""
    rows = functools.partial(_rows(config), memory=allotted(config, data.functional).rows)
    if config.fit.beams == 0:
        return rows
    return functools.partial(
        beamed_interpolation, beams=HealpixBeams(config.fit.beams), **rows.keywords
    )


def _model(config: Config, at: Hyperparameters, data: Batch) -> LogNormalModel:
    device = data.y.device
    kernel = learned_kernel(config.model, at).to(device)
    prior = GridPrior.padded(
        kernel,
        grid_of(config.grid),
        nugget=nugget_for(kernel, dtype_of(config.compute)),
        dtype=dtype_of(config.compute),
        memory=config.compute.memory_bytes,
        world=world_of(data.functional),
    )
    mean = log_profile_of(config.model, math.log(at.mean)).to(device)
    mean.requires_grad_("mean" in config.model.learn)
    return LogNormalModel(
        prior, mean, likelihood_of(config.model, at, data), _rows_of_fit(config, data)
    )


def _settings(config: Config, start: Hyperparameters | None) -> MGVISettings:
    samples = config.fit.samples
    if samples % 2:
        log.info("fit.samples = %d: %d are drawn, in pairs", samples, samples + 1)
    return MGVISettings(
        samples=samples + samples % 2,
        cg_steps=config.fit.max_steps,
        seed=config.fit.seed,
        robust=robust_settings(config, start),
    )


@torch.no_grad()
def _found(solution: MGVISolution) -> Hyperparameters:
    model = solution.model
    (term,) = model.prior.kernel.terms()
    noise, scatter, relative = noise_of(model.likelihood)
    height, length = None, None
    if isinstance(model.mean, LogDiscMean):
        height, length = model.mean.scales(solution.coefficients)
    found = Hyperparameters(
        length=float(term.lengthscale[0]),
        std=float(term.variance.sqrt()),
        mean=float(solution.coefficients[0].exp()),
        noise=noise,
        scatter=scatter,
        disc_height=height,
        disc_length=length,
        relative_scatter=relative,
    )
    weighing = solution.weighing
    return found if weighing is None else found.with_student_t(weighing.noise)


def _summary(solution: MGVISolution) -> dict[str, object]:
    last = solution.history[-1]
    prior = solution.model.prior.report
    weighing = solution.weighing
    robust = {} if weighing is None else {"outliers": weighing.outliers}
    return robust | {
        "torus": list(prior.torus_shape),
        "wrap_error": prior.wrap_error,
        "wrap_inflation": prior.wrap_inflation,
        "samples": solution.posterior.n_samples,
        "monte_carlo_error_of_std": solution.posterior.monte_carlo_error,
        "rounds": len(solution.history),
        "rejected_steps": solution.rejected_steps,
        "misfit_over_noise": last.misfit,
        "cg_steps": max(line.cg_steps for line in solution.history),
        "solver": solution.message(),
    }


def _learning(solution: MGVISolution, n: int) -> Learning:
    status, model = solution.status, solution.model
    assert isinstance(model.prior.kernel, StationaryKernel)
    names = learned_names(model.prior.kernel, model.likelihood)
    return Learning(
        status=status.value,
        converged=status is MGVIStatus.CONVERGED,
        remedy=status.remedy,
        n_data=n,
        trace=tuple(_line(line, names) for line in solution.history),
    )


def _line(line: MGVIRound, names: tuple[str, ...]) -> dict[str, float]:
    """Numbers of one round, for metrics.jsonl."""
    parameters = {f"log_{n}": value for n, value in zip(names, line.parameters, strict=True)}
    return {
        "energy": line.energy,
        "misfit": line.misfit,
        "moved": line.moved,
        "cg_steps": float(line.cg_steps),
        **parameters,
    }


def _arrays(posterior: LogNormalPosterior) -> Arrays:
    assert posterior.explained is not None
    return {
        "explained": posterior.explained.cpu().numpy(),
        "log_density": posterior.log_density.cpu().numpy(),
        "log_samples": posterior.log_samples.cpu().numpy(),
    }


#: The parts of a fit, in words.
_DOING = {
    "weights": "weighing outliers",
    "mode": "most probable density",
    "evidence": "learning hyperparameters",
    "mean": "mean density",
}


def _telling(model: LogNormalModel, tell: Tell) -> Callable[[MGVIRound], None]:
    """Logs a round, and tells its numbers."""
    assert isinstance(model.prior.kernel, StationaryKernel)
    names = learned_names(model.prior.kernel, model.likelihood)

    def told(line: MGVIRound) -> None:
        log.info(
            "%s: residuals are %.3g of the errors (rms), %d solver steps",
            _DOING.get(line.stage, line.stage),
            line.misfit,
            line.cg_steps,
        )
        tell({"part": line.stage, **_line(line, names)})

    return told
