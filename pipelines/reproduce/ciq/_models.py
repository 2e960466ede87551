"""SVGP of this package, whitened by Cholesky, by CIQ and by HIP, as `ciq` trains it."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn

from dustmap.gp import ConstantMean, GridPrior
from dustmap.gp.families import AbstractFamily, BlockFamily, FullRankFamily
from dustmap.gp.features import (
    AbstractFeatureMap,
    CholeskyFeatures,
    CIQFeatures,
    HIPFeatures,
    clustered_points,
)
from dustmap.gp.kernels import Matern52, StationaryKernel
from dustmap.inference import (
    RowSource,
    StepSchedule,
    SVISettings,
    SVIState,
    VariationalModel,
    VariationalPosterior,
    svi,
)
from dustmap.linalg import TilePartition, UnconvergedWarning
from pipelines.reproduce._experiment import Row
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce.ciq._problem import SEED, Problem
from pipelines.reproduce.ciq._training import (
    MOST_STEPS,
    NODES,
    NUGGET,
    RTOL,
    UNTRAINED,
    Training,
    learned,
    paced,
    scored,
)

Whitened: TypeAlias = tuple[AbstractFeatureMap, AbstractFamily]
Whitening: TypeAlias = Callable[[Problem, StationaryKernel, int], Whitened]
#: Bytes for K_uu and chunks of rows: a GPU's own hold K_uu of 10,000 points.
_MEMORY = {"cpu": 2**28, "cuda": 2**34}
#: Whitened variables of a tile of HIP's family, about.
TILE = 100
#: Of the spectrum of HIP's grid, relative to its largest value.
_GRID_NUGGET = 1e-8


def cholesky(problem: Problem, kernel: StationaryKernel, m: int) -> Whitened:
    """Learned points, L⁻¹."""
    features = CholeskyFeatures(kernel, inducing(problem, m), nugget=NUGGET)
    return features, FullRankFamily(features.n_features)


def ciq(problem: Problem, kernel: StationaryKernel, m: int) -> Whitened:
    """The same points, the symmetric root."""
    features = CIQFeatures(
        kernel,
        inducing(problem, m),
        nugget=NUGGET,
        nodes=NODES,
        rtol=RTOL,
        max_steps=MOST_STEPS,
        memory=_MEMORY[problem.x.device.type],
    )
    return features, FullRankFamily(features.n_features)


def hip(problem: Problem, kernel: StationaryKernel, m: int) -> Whitened:
    """Nodes of a grid that do not move; S in tiles of about `TILE` variables."""
    prior = GridPrior.padded(kernel, problem.grid(m), nugget=_GRID_NUGGET)
    side = max(2, round(TILE ** (1.0 / problem.dim)))
    family = BlockFamily(TilePartition(prior.torus_shape, (side,) * problem.dim))
    return HIPFeatures(prior), family


#: By the names of the table. HIP's is for D ≤ 3.
METHODS: dict[str, Whitening] = {"Cholesky": cholesky, "CIQ": ciq, "HIP": hip}
GRIDDED = "HIP"


def inducing(problem: Problem, m: int) -> nn.Parameter:
    """The centres of m clusters of the data, to be learned."""
    return nn.Parameter(starting_points(problem, m).clone())


def starting_points(problem: Problem, m: int) -> torch.Tensor:
    """The same for all methods (M, D)."""
    return clustered_points(problem.x, m, torch.Generator().manual_seed(SEED))


def measure(problem: Problem, name: str, m: int, training: Training) -> Row:
    """Times of the steps and, where a fit is not too long, scores and what was learned."""
    model, build = stopwatch(functools.partial(_model, problem, METHODS[name], m))
    steps = svi(
        model,
        problem.train,
        RowSource(model.features, problem.train.functional, 0),
        settings_of(problem, training),
        torch.Generator().manual_seed(SEED),
    )
    with warnings.catch_warnings():
        # Rows that miss the tolerance in J steps are counted in the table.
        warnings.simplefilter("ignore", UnconvergedWarning)
        found = paced(steps, training.epochs * problem.steps_per_epoch, training.limit)
    return {
        "part": problem.name,
        "method": name,
        "asked_M": m,
        "M": _inducing_points(model.features),
        "M_w": model.features.n_features,
        "build_s": build,
        **found.as_row(problem),
        **(_trained(problem, found.last) if found.finished else UNTRAINED),
    }


def settings_of(problem: Problem, training: Training) -> SVISettings:
    """Natural steps of one length from the prior, one of Adam after each."""
    return SVISettings(
        batch_size=problem.batch,
        epochs=training.epochs,
        schedule=StepSchedule(training.natural_step(problem), power=0.0),
        one_pass=False,
        learning_rate=training.adam,
        decay=training.decay,
        natural_decay=training.decay,
    )


def _model(problem: Problem, whitening: Whitening, m: int) -> VariationalModel:
    device = problem.x.device
    kernel = Matern52(problem.lengthscale, 1.0, dim=problem.dim).to(device)
    features, family = whitening(problem, kernel, m)
    likelihood = problem.observation.likelihood().to(device)
    return VariationalModel(features, ConstantMean().to(device), likelihood, family)


def _trained(problem: Problem, state: SVIState) -> Row:
    model = state.model
    posterior = VariationalPosterior(model, state.posterior)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UnconvergedWarning)
        prediction, seconds = stopwatch(lambda: posterior.predict(problem.test.functional))
        summary = model.features.rows(problem.train.functional[: problem.batch]).solves
        scores = scored(problem, model.likelihood, prediction)
    return {
        "predict_s": seconds,
        **scores,
        **learned(model.likelihood),
        "lengthscale": _lengthscale(model.features),
        "rows_missed": summary.unconverged / max(1, summary.columns),
    }


def _inducing_points(features: AbstractFeatureMap) -> int:
    grid = features.prior.grid if isinstance(features, HIPFeatures) else None
    return features.n_features if grid is None else math.prod(grid.shape)


def _lengthscale(features: AbstractFeatureMap) -> float:
    kernel = features.prior.kernel if isinstance(features, HIPFeatures) else None
    if isinstance(features, (CholeskyFeatures, CIQFeatures)):
        kernel = features.kernel
    assert isinstance(kernel, StationaryKernel)
    return float(kernel.lengthscale[0].detach())
