"""Prior, noise and what of them is learned: by the exact log evidence of a random subset."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch

from dustmap.gp import (
    AbstractMean,
    Batch,
    ConstantMean,
    ExactGP,
    GPModel,
    HyperparameterFit,
    LinearMean,
    Parameter,
    fit_hyperparameters,
)
from dustmap.gp.kernels import KERNELS, AbstractKernel, StationaryKernel, kernel_named
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.regression._choices import one_of

MEANS = ("constant", "linear")
LEARNABLE = ("length", "variance", "noise", "mean", "inducing")
NOISES = ("auto", "learn", "given", "scale", "jitter", "student-t")
STUDENT_T = "student-t"

# Where the search starts, in standardised units: the evidence has several maxima, one of which
# calls everything noise.
_START_LENGTHS = (2.0, 0.7, 0.25, 0.08)
_START_NOISE = (0.5, 0.1)
# Largest gradient of the log evidence per datum at which learning ends: finer steps change the
# log evidence by far less than one.
TOLERANCE = 1e-4


@final
@dataclass(eq=False)
class Prior:
    """Kernel, mean and noise of a regression, in standardised units, as they are learned."""

    kernel: AbstractKernel
    mean: AbstractMean
    likelihood: GaussianLikelihood

    @property
    def model(self) -> GPModel:
        """As a value."""
        return GPModel(self.kernel, self.mean, self.likelihood)

    def take(self, model: GPModel) -> None:
        """Goes on from this model."""
        self.kernel, self.mean, self.likelihood = model.kernel, model.mean, model.likelihood


def learned_names(learn: object) -> frozenset[str]:
    """The names in `learn`: True for all of them, False for none, or some of `LEARNABLE`."""
    if isinstance(learn, bool):
        return frozenset(LEARNABLE if learn else ())
    if not isinstance(learn, list | tuple | set | frozenset):
        raise ValueError(f"learn must be True, False or names out of {LEARNABLE}, got {learn!r}")
    return frozenset(one_of("learn", name, LEARNABLE) for name in learn)


def make_kernel(kernel: object, dim: int, learned: frozenset[str]) -> AbstractKernel:
    """The user's kernel, or the named one with a length scale per axis."""
    if isinstance(kernel, AbstractKernel):
        if kernel.dim != dim:
            raise ValueError(
                f"kernel has {kernel.dim} input dimensions but X has {dim} columns: build the "
                f"kernel with dim={dim}"
            )
        made: AbstractKernel = kernel
    else:
        name = one_of("kernel", "matern32" if kernel is None else kernel, tuple(KERNELS))
        made = kernel_named(name, [1.0] * dim)
    return made.with_parameters(
        [replace(p, is_learned=p.is_learned and _kind(p) in learned) for p in made.parameters()]
    )


def _kind(parameter: Parameter) -> str:
    return "length" if parameter.is_one_of(("length",)) else "variance"


def make_mean(mean: object, dim: int, learned: frozenset[str]) -> AbstractMean:
    """The named mean; 0 in standardised units until it is learned."""
    learn = "mean" in learned
    if one_of("mean", mean, MEANS) == "linear":
        return LinearMean([0.0] * dim, learn=learn)
    return ConstantMean(learn=learn)


def make_likelihood(
    noise: object, given: bool, y_scale: float, spread: float, learned: frozenset[str]
) -> GaussianLikelihood:
    """The noise model in standardised units.

    given: whether the data came with noise_std; spread: standard deviation of y'.
    """
    learn = "noise" in learned
    if isinstance(noise, int | float) and not isinstance(noise, bool):
        _refuse_noise(given, noise)
        return GaussianLikelihood(jitter=float(noise) / y_scale, learn=False)
    name = one_of("noise", noise, NOISES)
    if name == "auto":
        name = "given" if given else "learn"
    if name == STUDENT_T:
        name = "scale" if given else "learn"
    if name == "learn" and given:
        raise ValueError(
            'noise = "learn" replaces noise_std, which was given too: use noise="jitter" to learn '
            'more noise on top of it, noise="scale" for a factor, or leave one of them out'
        )
    if name in ("given", "scale") and not given:
        raise ValueError(f'noise = "{name}" needs noise_std: pass it to fit, or use noise="learn"')
    scale = 1.0 if name == "scale" else None
    jitter = 0.3 * spread if name in ("learn", "jitter") else None
    return GaussianLikelihood(scale, jitter, learn=learn)


def learn(prior: Prior, batch: Batch, max_steps: int) -> HyperparameterFit | None:
    """Maximises the log evidence of a random part of the data; the prior takes the result.

    A random part leaves noise and length scales unbiased; clusters of neighbours would not.
    """
    if not prior.model.is_learned:
        return None
    fit = fit_hyperparameters(prior.model, batch, max_steps=max_steps, tolerance=TOLERANCE)
    prior.take(fit.model)
    return fit


def random_part(batch: Batch, n: int, seed: int) -> Batch:
    """At most n of the data, picked at random, in their order."""
    if len(batch) <= n:
        return batch
    generator = torch.Generator().manual_seed(seed)
    return batch[torch.randperm(len(batch), generator=generator)[:n].sort().values]


def choose_start(prior: Prior, score: Callable[[], float]) -> None:
    """The best of a few starts of a named kernel, by a score of the prior as it then stands."""
    kernel, start = prior.kernel, prior.model
    if not isinstance(kernel, StationaryKernel) or not kernel.length.is_learned:
        return
    jitter = (p for p in prior.likelihood.parameters() if p.name == "scatter")
    noises = _START_NOISE if any(p.is_learned for p in jitter) else (None,)
    scored = []
    for length, noise in itertools.product(_START_LENGTHS, noises):
        prior.take(_at_start(start, length * kernel.dim**0.5, noise))
        scored.append((score(), prior.model))
    prior.take(max(scored, key=lambda pair: pair[0])[1])


def _at_start(model: GPModel, length: float, noise: float | None) -> GPModel:
    logs = {"length": length} if noise is None else {"length": length, "scatter": noise}
    return model.with_parameters(
        [
            p.at(torch.full_like(p.value, logs[p.name]).log()) if p.name in logs else p
            for p in model.parameters()
        ]
    )


@torch.no_grad()
def evidence(prior: Prior, batch: Batch) -> float:
    """ln p(y) of all of these data."""
    noise = prior.likelihood.noise_variance(batch)
    gp = ExactGP(prior.kernel, prior.mean)
    return float(gp.log_evidence(batch.functional, batch.y, noise))


def _refuse_noise(given: bool, noise: float) -> None:
    if given:
        raise ValueError(
            f"noise = {noise} is the standard deviation of all data, and noise_std was given to "
            f"fit as well: leave one of them out"
        )
    if not 0 < noise < float("inf"):
        raise ValueError(f"noise must be a positive standard deviation, got {noise}")
