"""The global engine: sparse weights on the map's own grid, one solve for all stars."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from dustmap.config import Config
from dustmap.gp import Batch, FitStatus
from dustmap.inference import (
    NO_JOURNAL,
    AbstractJournal,
    CoefficientSpread,
    GlobalFit,
    GlobalSettings,
    LearnStep,
    ModelMaker,
    PathwisePosterior,
    RobustSettings,
    explained_share,
    fit_global,
)
from dustmap.linalg import Progress, unwatched
from dustmap.runs.engines._exact import estimator_of
from dustmap.runs.memory import allotted
from dustmap.runs.models import (
    Arrays,
    Hyperparameters,
    Learning,
    Parts,
    StarFit,
    Tell,
    dtype_of,
    grid_of,
    learned_names,
    scale_with_nu,
    silent,
    start_of,
)

log = logging.getLogger(__name__)

MOST_ROWS = 100_000_000
#: Stars that take part in learning on the grid, at most: more would hardly sharpen it.
LEARN_ROWS = 100_000

#: Arrays of a posterior beside the spread of its coefficients.
_FIELDS = ("coefficients", "eps_mean", "deviations")


def fit_whole(
    config: Config,
    data: Batch,
    start: Hyperparameters | None,
    journal: AbstractJournal = NO_JOURNAL,
    tell: Tell = silent,
    progress: Progress = unwatched,
) -> StarFit:
    """Learns on the grid from some of the stars, from start on; solves for all."""
    parts = Parts.of(config, start or start_of(config.model), data)
    settings = _settings(config, start, data)
    # The numbers of Student-t noise are learned beside the evidence, not by it.
    names = learned_names(parts.kernel, parts.likelihood if settings.robust is None else None)
    fit = fit_global(
        parts.model,
        data,
        grid_of(config.grid),
        settings,
        estimator=estimator_of(config),
        steps=_telling(names, tell),
        journal=journal,
        progress=progress,
    )
    at = Parts.fitted(fit.gp).hyperparameters()
    if fit.robust is not None:
        at = at.with_student_t(fit.robust.noise)
    arrays = _arrays(fit, config.fit.seed)
    # As a later command will see it, so that both see the same bits.
    found = reopen_whole(config, data, at, arrays)
    learning = _learning(fit, len(data), names)
    return replace(found, summary=fit.report, learning=learning, arrays=arrays)


def reopen_whole(config: Config, data: Batch, at: Hyperparameters, arrays: Arrays) -> StarFit:
    """The posterior that an earlier fit has left: nothing is solved again.

    Runs of earlier versions know no share that is explained; their coverage goes by their std.
    """
    parts = Parts.of(config, at, data)
    settings = _settings(config, None, data).grid
    maker = ModelMaker(grid_of(config.grid), settings, estimator_of(config))
    order, torus = int(arrays["order"]), tuple(int(m) for m in np.asarray(arrays["torus_shape"]))
    tensors = {
        name: torch.from_numpy(np.asarray(value)).to(data.y.device)
        for name, value in arrays.items()
        if name in (*_FIELDS, "explained") or name.startswith("spread_")
    }
    coefficients, mean, deviations = (tensors[name] for name in _FIELDS)
    posterior = PathwisePosterior(
        maker.on_torus(parts.model, torus, order),
        coefficients,
        mean,
        deviations,
        spread=CoefficientSpread.of_tensors(tensors),
        explained=tensors.get("explained"),
    )
    return StarFit(posterior, at, {}, None, at_nodes=posterior.at_nodes)


def _settings(config: Config, start: Hyperparameters | None, data: Batch) -> GlobalSettings:
    """What was learned before needs no start from few stars."""
    allotment = allotted(config, data.functional)
    return GlobalSettings(
        samples=config.fit.samples,
        rtol=config.fit.tolerance,
        max_steps=config.fit.max_steps,
        seed=config.fit.seed,
        # Chosen by the stars of each tile it would differ from tile to tile, and make seams.
        order=4 if config.data.tile else None,
        dtype=dtype_of(config.compute),
        memory=config.compute.memory_bytes,
        rows_memory=allotment.rows,
        solve_memory=allotment.vectors,
        start_rows=GlobalSettings.start_rows if start is None else 0,
        learn_rows=LEARN_ROWS,
        robust=robust_settings(config, start),
    )


def robust_settings(config: Config, start: Hyperparameters | None) -> RobustSettings | None:
    """Of Student-t noise, None for Gaussian."""
    if config.model.noise == "gaussian":
        return None
    nu = RobustSettings().nu if start is None or start.nu is None else start.nu
    return RobustSettings(nu=nu, learn_scale=scale_with_nu(config.model))


def _arrays(fit: GlobalFit, seed: int) -> Arrays:
    posterior = fit.posterior
    spread = {} if posterior.spread is None else posterior.spread.tensors()
    return {
        "order": np.array(fit.features.order),
        "torus_shape": np.array(fit.features.prior.torus_shape),
        **{name: getattr(posterior, name).cpu().numpy() for name in _FIELDS},
        **({name: value.cpu().numpy() for name, value in spread.items()}),
        "explained": explained_share(posterior, seed).cpu().numpy(),
    }


def _learning(fit: GlobalFit, n: int, names: tuple[str, ...]) -> Learning | None:
    learned = fit.learned
    if learned is None:
        return None
    return Learning(
        status=learned.status.value,
        converged=learned.status is FitStatus.CONVERGED,
        remedy=learned.message(),
        n_data=min(n, LEARN_ROWS),
        trace=tuple(_line(step, names) for step in learned.history),
        summary={"learning_median_residual_variance_over_noise": learned.grid_error},
    )


def _line(step: LearnStep, names: tuple[str, ...]) -> dict[str, float]:
    """Numbers of one step, for metrics.jsonl."""
    values = {"solver_steps": float(step.solver_steps), "accepted": float(step.accepted)}
    for name, parameter, slope in zip(names, step.parameters, step.gradient, strict=True):
        values[f"log_{name}"] = parameter
        values[f"gradient_{name}"] = slope
    return values


def _telling(names: tuple[str, ...], tell: Tell) -> Callable[[LearnStep], None]:
    """Logs a step, and tells its numbers."""

    def told(step: LearnStep) -> None:
        log.info(
            "learning hyperparameters: %s, %d solver steps",
            ", ".join(
                f"{name} {math.exp(value):.4g}"
                for name, value in zip(names, step.parameters, strict=True)
            ),
            step.solver_steps,
        )
        tell(_line(step, names))

    return told
