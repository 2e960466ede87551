"""How much stars that were held out have of what the grid leaves out of the density, and how wide
its logarithm is for them."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline
from torch import Tensor

from dustmap.config import Config
from dustmap.engines import Watch
from dustmap.gp import Prediction
from dustmap.inference import LogNormalPosterior, nus_left_open
from dustmap.linalg import in_one_part
from dustmap.runs._machine import predicted
from dustmap.runs.stars import _beyond, _distances, _engines, _model
from dustmap.runs.stars._distance_rounds import FitData, kept_fit
from dustmap.runs.stars._engines import StarFit
from dustmap.runs.stars._model import Hyperparameters
from dustmap.sky.observations import Observations

log = logging.getLogger(__name__)

#: Held-out stars that judge the dust between the nodes, at most: at one place each, at many places.
_STARS, _PLACED = 5_000, 1_000
#: Before the data: weight and standard deviation of normal distributions of the factor's logarithm
#: around 0; the rest of the weight for no variance at all. Simulated skies of 500 to 8,000 stars
#: with errors of 2 to 10 % have factors of 0.7 to 1.3, and others where the kernel is wrong.
_MIXTURE = ((0.75, 0.4), (0.15, 0.8))
#: Logarithms of factors: as far, densities at so many, cubic splines at so many.
_WITHIN, _KNOTS, _STEPS = 4.0, 17, 129
#: The factor above which it is not the kernel's variance that stars ask for, and what it may be.
_STRUCTURE = 10.0
_FINER = (
    "far more than the kernel expects there, such as clouds that the grid has not: take a smaller "
    "grid.spacing, or grid.levels around them"
)
#: Scales of a learned noise: densities at so many, splines at so many, from below the least to
#: above the largest of it and 1; the same of a relative scatter, from 0 to above it, and the
#: probability of none: what differs between stars behind one cloud is dust as well.
_SCALES, _SCALE_STEPS, _BELOW, _ABOVE = 5, 129, 1.4, 1.2
_RELATIVES, _RELATIVE_STEPS, _NO_RELATIVE = 4, 13, 0.75

#: Learned standard deviations of ln ρ beyond which held-out stars are asked for narrower ones, by
#: this factor each and none below the third, where there are so many stars to ask.
_WIDE, _NARROWER, _NARROWEST, _JUDGES = 1.5, 0.7, 1.25, 50
#: What is counted while held-out stars are asked.
_BETWEEN = "dust between the nodes"


@final
@dataclass(frozen=True, eq=False)
class _Judges:
    """Stars by which the factor is judged, at each of K places of probability p (K,):

        p(y_n | the others) = Σ_k p_k p(y_n | A_nk).

    Measurements, errors σ² and added variance (N,); what others predict of A, nodes alone, and the
    variance more of a factor 1 (N, K).
    """

    y: Tensor
    errors: Tensor
    added: Tensor
    resolved: Prediction
    more: Tensor
    probability: Tensor

    def __len__(self) -> int:
        return len(self.y)

    @property
    def share(self) -> Tensor:
        """The part (N,) of the variance that a factor of 1 would have."""
        more, resolved = (v @ self.probability for v in (self.more, self.resolved.variance))
        return more / (resolved + more)

    def log_densities(self, noise: "_Noise", logs: Tensor) -> Tensor:
        """Σ_n ln p(y_n | the others) (R, T, 1 + F) at R relative scatters, T scales of the noise, a
        factor of 0 and F, by cubic splines through few of each; float64."""
        known = _knots(logs, _KNOTS)
        factors = torch.cat([known.new_zeros(1), known.exp()])
        relatives, scales = _knots(noise.relatives, _RELATIVES), _knots(noise.log_scales, _SCALES)
        laws = [[noise.at(float(r), float(s)) for s in scales] for r in relatives]
        table = np.array([[self.log_density(at, factors).numpy() for at in row] for row in laws])
        table = _interpolated(relatives, table, noise.relatives, 0)
        table = _interpolated(scales, table, noise.log_scales, 1)
        others = _interpolated(known, table[..., 1:], logs, 2)
        return torch.from_numpy(np.concatenate([table[..., :1], others], 2))

    def log_density(self, at: Hyperparameters, factors: Tensor) -> Tensor:
        """Σ_n ln p(y_n | the others) (F,) at factors (F,), float64; 0 of no stars."""
        if len(self) == 0:
            return torch.zeros_like(factors)
        variance = self.resolved.variance + factors.to(self.more)[:, None, None] * self.more
        expected = Prediction(self.resolved.mean.expand_as(variance), variance)
        y, errors, added = (each[:, None] for each in (self.y, self.errors, self.added))
        each = at.log_density(y, errors, expected, added)
        return torch.logsumexp(each + self.probability.log(), 2).sum(1).cpu()


@torch.no_grad()
def judged(
    config: Config, fit: StarFit, observed: Observations, holdout: Tensor
) -> tuple[StarFit, dict[str, Any]]:
    """Return the fit with the factor on that variance which the stars suggest, and a section of the
    report; 1 where there are none to ask, and fits of other engines unchanged.

    Those that were held out say how large the factor is. Fitted ones do not: their residuals, less
    what each has told the fit, are as small without that variance where Student-t noise is as wide
    as noise and the variance together, and there are so many that on skies drawn from the prior
    they find none. Of a noise whose scale was learned, all scales around it are as likely, and all
    relative scatters up to it: they may have taken what lies between the nodes for noise. ν is as
    uncertain as the fitted stars leave it: one outlier among few that are held out would otherwise
    ask for many times the variance.
    """
    if not isinstance(fit.posterior, LogNormalPosterior):
        return fit, {}
    whole = _engines.with_unresolved(config, fit, 1.0)
    posterior = whole.posterior
    assert isinstance(posterior, LogNormalPosterior)
    assert posterior.unresolved is not None
    lengths = [level.length for level in posterior.unresolved.levels]
    section: dict[str, Any] = {"lack_length": lengths[0] if len(lengths) == 1 else lengths}
    unseen = _unseen(whole, observed, holdout)
    stars = sum(len(each) for each in unseen)
    if stars == 0:
        return whole, section | {"factor": 1.0, "stars": 0}
    laws = _Noise.all_of(config, fit.hyperparameters, len(observed) - len(holdout))
    factor, std = _factor(unseen, laws)
    share = float(torch.cat([each.share for each in unseen]).median())
    said = "dust between the nodes: %.2f ± %.2f times the expected variance, by %d stars"
    log.info(said, factor, std, stars)
    fit = _engines.with_unresolved(config, whole, factor)
    fit = replace(fit, errors={**fit.errors, "unresolved": std})
    if factor > _STRUCTURE:
        section["remark"] = _FINER
        log.warning("dust between the nodes: %s", _FINER)
    return fit, section | {
        "factor": factor,
        "factor_std": std,
        "stars": stars,
        "held_out": stars,
        "median_share_of_the_variance": factor * share / (factor * share + 1.0 - share),
    }


def _factor(unseen: Sequence["_Judges"], laws: Sequence["_Noise"]) -> tuple[float, float]:
    """Mean and standard deviation of the factor, given stars and the noise that they may have."""
    logs, log_prior = _prior()
    factors = torch.cat([logs.new_zeros(1), logs.exp()])
    joint = torch.stack(
        [
            sum((each.log_densities(law, logs) for each in unseen), law.log_prior) + log_prior
            for law in laws
        ]
    )
    weights = torch.softmax(joint.flatten(), 0).view_as(joint).sum((0, 1, 2))
    factor = float((weights * factors).sum())
    return factor, float((weights * (factors - factor).square()).sum().sqrt())


def narrowed(
    config: Config, fit: StarFit, data: FitData, parts: tuple[Tensor, Tensor], watch: Watch
) -> tuple[StarFit, dict[str, Any]]:
    """Return the fit, or one of a narrower ln ρ that predicts held-out stars better, of the parts
    fitted and held out, and sections of the report.

    Its standard deviation is learned from the field's linearisation. Where stars are few that
    knows nothing of the mean of a log-normal density, e^{σ²/2} times the median: of clusters it
    finds a σ of 2.5, by which places without a cluster near have densities of tens of mag/pc.
    Narrower ones, with the rest as it was learned, follow one another; taken is the narrowest whose
    held-out stars are within a standard error of the best, for too wide does more harm.
    """
    (train, holdout), learned, noisy = parts, fit.hyperparameters, data.noisy
    with in_one_part(watch.progress, _BETWEEN):
        fit, section = judged(config, fit, noisy, holdout)
    best, tried = noisy.measured[:0], list[dict[str, float]]()
    while _may_be_narrower(config, fit, holdout):
        if not tried:
            best = _distances.predictions(fit, noisy, holdout).data.log_density
        at, beyond = fit.hyperparameters, learned.beyond_the_box()
        model = replace(config.model, std=max(_NARROWER * at.std, _NARROWEST))
        trial = _model.held(replace(config, model=model))
        part, start = watch.within(f"std-{len(tried)}"), replace(at, std=model.std)
        other = kept_fit(trial, noisy.training(train), start, part, beyond, fit.start)
        with in_one_part(watch.progress, _BETWEEN):
            other, its_section = judged(config, other, noisy, holdout)
        own = _distances.predictions(other, noisy, holdout).data.log_density
        gain, error = float((own - best).mean()), float((own - best).std()) / len(own) ** 0.5
        tried.append({"std": model.std, "gain": gain, "standard_error": error})
        log.info(
            "standard deviation of ln density %.3g in place of %.3g: held-out stars gain "
            "%.3f ± %.3f nats each",
            *(model.std, learned.std, gain, error),
        )
        if gain <= -error:
            break
        best = own if gain > 0.0 else best
        learned_errors = {name: each for name, each in fit.errors.items() if name != "std"}
        errors = {**learned_errors, **other.errors}
        at = _beyond.judged(config, other, data.observed, data.added, train)
        other = replace(other, hyperparameters=at)
        fit, section = replace(other, learning=fit.learning, errors=errors), its_section
    if (std := fit.hyperparameters.std) != learned.std:
        log.info("std %.3g: chosen by held-out stars, %.3g was learned", std, learned.std)
    choice = {"std_choice": {"learned": learned.std, "rounds": tried}} if tried else {}
    return fit, ({"unresolved": section} if section else {}) | choice


def _may_be_narrower(config: Config, fit: StarFit, holdout: Tensor) -> bool:
    """Whether a fit has learned a wide ln ρ of one scale, and there are stars to ask."""
    at, learns = fit.hyperparameters, "std" in config.model.learn
    is_lognormal = isinstance(fit.posterior, LogNormalPosterior)
    asked = is_lognormal and learns and at.first_std is None and len(holdout) >= _JUDGES
    return asked and at.std > _WIDE


def _unseen(fit: StarFit, observed: Observations, index: Tensor) -> list[_Judges]:
    """Stars that no fit has seen, at the places where they may be or at one place each.

    One normal distribution over all places would make up for its shape by the factor, and so would
    that of dust beyond the box: of uncertain distances, stars with much of it are not asked.
    """
    placed = _distances.are_placed(fit, observed, index)
    if not bool(placed.any()):
        return [_predicted(fit, observed, _some(index, _STARS))]
    known = index[_distances.are_known(observed, index)]
    some = _some(index[placed], _PLACED)
    places = _distances.PlacedStars.of(fit, observed, some)
    y, errors = observed.measured[some], observed.error_variance[some]
    parts = places.resolved, places.more, places.probability
    at_places = _Judges(y, errors, torch.zeros_like(errors), *parts)
    return [_predicted(fit, observed, _some(known, _STARS)), at_places]


def _predicted(fit: StarFit, observed: Observations, index: Tensor) -> _Judges:
    """Stars whose distances and dust beyond the box add a normal error."""
    posterior = fit.posterior
    assert isinstance(posterior, LogNormalPosterior)
    rays = observed.batch.functional[index]
    both = predicted(posterior, rays)
    resolved = predicted(replace(posterior, unresolved=None), rays)
    mean = resolved.mean + observed.expected_beyond[index].to(resolved.mean)
    more = (both.variance - resolved.variance).clamp_min(0.0)
    return _Judges(
        observed.measured[index],
        observed.error_variance[index],
        observed.added_variance[index],
        Prediction(mean[:, None], resolved.variance[:, None]),
        more[:, None],
        more.new_ones(1),
    )


def _some(index: Tensor, most: int) -> Tensor:
    """All of few stars, every so many of many."""
    if len(index) <= most:
        return index
    return index[torch.linspace(0, len(index) - 1, most).round().long()]


@final
@dataclass(frozen=True, eq=False)
class _Noise:
    """Laws of the noise: of a scale that was learned those around it and the stated errors, of a
    relative scatter none or up to somewhat more. log_scales (T,), relatives (R,); log_weight: of
    its ν."""

    fitted: Hyperparameters
    log_scales: Tensor
    relatives: Tensor
    log_weight: float

    @staticmethod
    def all_of(config: Config, at: Hyperparameters, n: int) -> "list[_Noise]":
        """Those of every ν that n fitted stars leave open."""
        nus = {None: 0.0} if at.nu is None else nus_left_open(at.nu, n)
        return [_Noise._of(config, replace(at, nu=nu), weight) for nu, weight in nus.items()]

    @staticmethod
    def _of(config: Config, at: Hyperparameters, log_weight: float) -> "_Noise":
        scales, relatives = torch.tensor([[math.log(at.noise)], [at.relative_scatter]]).double()
        if "noise" in config.model.learn:
            low, high = math.log(min(1.0, at.noise) / _BELOW), math.log(max(1.0, at.noise) * _ABOVE)
            scales = torch.linspace(low, high, _SCALE_STEPS, dtype=torch.float64)
        if "relative_scatter" in config.model.learn and at.relative_scatter > 0.0:
            most = _ABOVE * at.relative_scatter
            relatives = torch.linspace(0.0, most, _RELATIVE_STEPS, dtype=torch.float64)
        return _Noise(at, scales, relatives, log_weight)

    @property
    def log_prior(self) -> Tensor:
        """Of ν and the relative scatters (R, 1, 1), but for a constant."""
        rest = (1.0 - _NO_RELATIVE) / max(1, len(self.relatives) - 1)
        of_relatives = torch.where(self.relatives > 0.0, rest, _NO_RELATIVE).log()
        return self.log_weight + of_relatives[:, None, None]

    def at(self, relative: float, log_scale: float) -> Hyperparameters:
        """The hyperparameters with one of them."""
        return replace(self.fitted, relative_scatter=relative, noise=math.exp(log_scale))


def _knots(values: Tensor, count: int) -> Tensor:
    """So many of equidistant values, the ends among them; the one of one."""
    return values[:: max(1, (len(values) - 1) // (count - 1))]


def _interpolated(
    knots: Tensor, table: NDArray[np.float64], at: Tensor, axis: int
) -> NDArray[np.float64]:
    """Return a table at other places of an axis by a cubic spline; as it is at one."""
    return table if len(knots) == 1 else np.asarray(CubicSpline(knots, table, axis=axis)(at))


def _prior() -> tuple[Tensor, Tensor]:
    """Logarithms of factors (F,), and log-probabilities of 0 and them (1 + F,) before the data."""
    logs = torch.linspace(-_WITHIN, _WITHIN, _STEPS, dtype=torch.float64)
    parts = [w * torch.softmax(-0.5 * (logs / std).square(), 0) for w, std in _MIXTURE]
    none = logs.new_tensor([1.0 - sum(weight for weight, _ in _MIXTURE)])
    return logs, torch.cat([none, torch.stack(parts).sum(0)]).log()
