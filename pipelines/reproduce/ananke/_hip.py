"""HIP-GP on one sky at given hyperparameters: the closed-form optimum of two families."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from dustmap.gp import AbstractPosterior, ConstantMean, Prediction
from dustmap.gp.families import AbstractFamily, BlockFamily, MeanFieldFamily
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import RowSource, VariationalModel, VariationalPosterior, solve_direct
from dustmap.linalg import TilePartition
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce.ananke._sky import Sky
from pipelines.reproduce.dust._problem import Exact, hip_features

TILE = (2, 2, 2)
#: Of CG for the mean, in float32.
RTOL = 1e-4
#: Bytes for stored rows.
MEMORY = 2**32


@final
@dataclass(frozen=True, eq=False)
class FittedFamily:
    """One family's posterior, and the seconds from nothing to the held-out prediction."""

    name: str
    posterior: AbstractPosterior
    prediction: Prediction
    seconds: float


def fit(sky: Sky, exact: Exact, shape: tuple[int, ...]) -> Iterator[FittedFamily]:
    """Mean-field and 2×2×2 blocks, at the hyperparameters of `exact`; the rows are shared."""
    batch = sky.batch
    features = hip_features(exact, shape)
    source, rows_s = stopwatch(lambda: RowSource(features, batch.functional, MEMORY))
    families: dict[str, AbstractFamily] = {
        "HIP mean-field": MeanFieldFamily(features.n_features),
        "HIP 2×2×2": BlockFamily(TilePartition(features.prior.torus_shape, TILE)),
    }
    for name, family in families.items():
        mean = ConstantMean(0.0, learn=False)
        model = VariationalModel(features, mean, GaussianLikelihood(), family)

        def work(model: VariationalModel = model) -> tuple[VariationalPosterior, Prediction]:
            state = solve_direct(model, batch, source, rtol=RTOL).state
            posterior = VariationalPosterior(model, state)
            return posterior, posterior.predict(sky.held_out)

        (posterior, prediction), seconds = stopwatch(work)
        yield FittedFamily(name, posterior, prediction, rows_s + seconds)
