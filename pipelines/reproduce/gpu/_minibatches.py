"""HIP-GP at its authors' own scale (002, 5.5): a pass over half a million stars in minibatches.

The sky of `paper_scale` on its 50×50×25 inducing points, hyperparameters known. From the prior on,
natural-gradient steps of the mean-field family; the rows of every minibatch are made anew.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch

from dustmap import inference
from dustmap.gp import Batch, ConstantMean, GridPrior
from dustmap.gp.families import MeanFieldFamily
from dustmap.gp.features import AbstractFeatureMap, HIPFeatures, TorusFeatures
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.likelihoods import GaussianLikelihood
from pipelines.reproduce._experiment import Row
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce.paper_scale import _sky as skies

#: Of a row's solve, as the engine has it in float32.
_RTOL = 1e-4
#: A fit has converged where the error of held-out stars is within so much of its last.
_CONVERGED = 1.01
#: Held-out stars that are looked at on the way.
_WATCHED = 1000
_SKY = skies.SkySettings()


@final
@dataclass(frozen=True)
class Plan:
    """A sky, minibatches of `batch` stars, and passes.

    looks : times that held-out stars are looked at in a pass
    seconds : after which no step is taken any more, of each way of making rows
    memory : bytes for the rows that are made together
    """

    sky: skies.SkySettings = _SKY
    batch: int = 2000
    epochs: int = 3
    looks: int = 10
    seconds: float = 110.0
    memory: int = 2**34

    def as_row(self) -> Row:
        """What defines the part."""
        return {"minibatch": self.batch, "epochs": self.epochs, "seconds_at_most": self.seconds}


QUICK = Plan(skies.SkySettings((8, 8, 6), 400, 50, length=1.0), 40, 2, 2, memory=2**28)


def measured(plan: Plan, device: torch.device) -> Iterator[Row]:
    """Yield what the steps took and came to, by rows of the torus and by PCG."""
    sky = skies.draw(plan.sky)
    kernel = plan.sky.kernel().to(device).fixed()
    prior = GridPrior.padded(kernel, plan.sky.grid(), dtype=torch.float32)
    ways: dict[str, AbstractFeatureMap] = {
        "torus": TorusFeatures(prior, memory=plan.memory),
        "hip": HIPFeatures(prior, rtol=_RTOL, memory=plan.memory),
    }
    for name, features in ways.items():
        yield {"part": "minibatches", "whitening": name, **_fit(plan, sky, features, device)}


def _fit(plan: Plan, sky: skies.Sky, features: AbstractFeatureMap, device: torch.device) -> Row:
    mean, noise = ConstantMean(plan.sky.mean).to(device).fixed(), GaussianLikelihood()
    family = MeanFieldFamily(features.n_features)
    model = inference.VariationalModel(features, mean, noise, family)
    rays = LineIntegrals.from_observer(sky.positions.to(device))
    data = Batch(rays, sky.y.to(device).float(), sky.sigma.to(device).float().square())
    source = inference.RowSource(features, rays, memory=0)
    settings = inference.SVISettings(plan.batch, epochs=plan.epochs, one_pass=False)
    steps = inference.svi(model, data, source, settings, torch.Generator().manual_seed(0))
    a_pass = -(-plan.sky.stars // plan.batch)
    spent, curve = 0.0, []
    while spent < plan.seconds:
        state, seconds = stopwatch(lambda: _settled(next(steps, None)))
        if state is None:
            break
        last, spent = state, spent + seconds
        if last.step % max(1, a_pass // plan.looks) == 0:
            found = _held_out(model, last, sky, device, _WATCHED)
            curve.append([spent, float(found["held_out_mae"])])
    is_broken_off = last.step < plan.epochs * a_pass
    return {
        "stars": plan.sky.stars,
        "M": plan.sky.grid().size,
        "M_w": features.n_features,
        "steps": last.step,
        "seconds": spent,
        "seconds_an_epoch": spent / last.step * a_pass,
        "seconds_to_converge": None if is_broken_off else _converged(curve, plan.looks),
        "mae_on_the_way": curve,
        **_held_out(model, last, sky, device, plan.sky.held_out),
    }


def _held_out(
    model: inference.VariationalModel,
    state: inference.SVIState,
    sky: skies.Sky,
    device: torch.device,
    count: int,
) -> dict[str, float]:
    """Scores of noise-free extinctions of stars that took no part, the first `count` of them."""
    rays = LineIntegrals.from_observer(sky.test_positions[:count].to(device))
    found = inference.VariationalPosterior(model, state.posterior).predict(rays)
    mean, variance = found.mean.cpu(), found.variance.cpu()
    scores = inference.scores(sky.test_extinction[:count], mean, variance).as_dict()
    chosen = ("mae", "rmse", "loglike", "chi2", "coverage68")
    return {f"held_out_{name}": scores[name] for name in chosen}


def _converged(curve: list[list[float]], looks: int) -> float | None:
    """Seconds from which on the error stayed within `_CONVERGED` times the last, None where that
    is less than the `looks` of a pass."""
    stayed = 0
    while stayed < len(curve) and curve[-1 - stayed][1] <= _CONVERGED * curve[-1][1]:
        stayed += 1
    return curve[-stayed][0] if stayed > looks else None


def _settled(state: inference.SVIState | None) -> inference.SVIState | None:
    """The same, once the device has made it."""
    if state is not None and state.posterior.mean.is_cuda:
        torch.cuda.synchronize()
    return state
