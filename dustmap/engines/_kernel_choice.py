"""The smoothness and the scales of a kernel, by the predictive density of held-out patches.

The evidence hardly tells how smooth a field is across a gap: it is a sum over data with near
neighbours, and those of temperatures from orbit prefer Matérn-3/2 to Matérn-1/2 by 0.0014 nats a
datum, where predictions of gaps as wide as clouds are worse by half. So every candidate learns its
hyperparameters by the evidence of ten windows of neighbours less a patch of each, and predicts the
patches of these windows and of more, each from the rest of its window. A hyperparameter needs few
windows, a difference between kernels many. Up to 1,000 rows are one window of ten patches,
each predicted from all other rows at hyperparameters of all: a handful of numbers, as many for
each of them. With 81 rows of fields known to be smooth or rough this loses a third of what
patches of half of the rows lose, at hyperparameters of the other half.

Neighbours of many rows know nothing of scales beyond their window. So 1,000 random rows are a
window, too, in patches as wide as a 25th of all rows, and sums of two scales are candidates
beside it: of temperatures from orbit in patches as wide as clouds Matérn-1/2 has an error of
1.54 °C, with a far shorter Matérn-3/2 beside it 1.36.

Scores differ more between patches than between kernels, so differences are compared with their
standard errors over patches; among candidates within one of the best the roughest is chosen, since
a field that is taken to be too smooth has intervals that are too narrow.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, final

import torch
from torch import Tensor

from dustmap import gp
from dustmap.engines import _learning
from dustmap.engines._starts import best_start, places_of
from dustmap.errors import UserError
from dustmap.gp import Batch, GPModel
from dustmap.gp.features import different_places
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel, SumKernel, kernel_named
from dustmap.inference import (
    NO_CHECKPOINTS,
    AbstractCheckpointer,
    ParameterVector,
    State,
    StateReader,
    state_of,
)

#: From rough to smooth, and the kernel where there are too few rows to choose.
CANDIDATES, FALLBACK = ("matern12", "matern32", "matern52"), "matern32"
#: Candidates of two scales of more rows than one window, in as many columns at most as neighbours
#: learn in; and the longer scale over that of its term alone, where learning starts.
SUMS, _MOST_COLUMNS, _LONGER = ("matern12+matern12", "matern12+matern32"), 4, 2.0
#: Distinct rows that a choice needs, and that make one window; rows among which windows are sought.
LEAST_ROWS, _ONE_WINDOW, MOST_OF_CHOICE = 30, 1_000, 100_000
#: Windows at most, of which the first learn, their rows, and the rows of the patch in each.
# Of 12,000 smooth values in four columns with a tenth of noise, the patches of 10 windows chose
# each of the kernels for one seed or another; those of 80 the smoothest for five of six.
_WINDOWS, _LEARNING, _WINDOW, _PATCH = 80, 10, 300, 40
#: Patches that one window falls into.
_PATCHES = 10
_STATE = "kernel choice"
#: Steps of learning, and the largest gradient per datum where it ends.
_MAX_STEPS, _TOLERANCE = 60, 5e-3


@final
@dataclass(frozen=True)
class Candidate:
    """A kernel's score: the mean over patches of the log predictive density per datum.

    Attributes
    ----------
    name, score, seconds
    difference, standard_error : to the best score, over patches
    learned : values of hyperparameters, where they have units that a user knows
    """

    name: str
    score: float
    difference: float
    standard_error: float
    seconds: float
    learned: Mapping[str, float] = field(default_factory=dict)

    def as_plain(self) -> dict[str, Any]:
        """The fields that have a value, hyperparameters by their own names."""
        plain = asdict(self)
        return plain if self.learned else {k: v for k, v in plain.items() if k != "learned"}

    def in_words(self) -> str:
        """The score, for the log."""
        return (
            f"{self.name}: log predictive density {self.score:.4g} per datum, "
            f"{self.difference:.2g} ± {self.standard_error:.2g} from the best"
        )


@final
@dataclass(frozen=True)
class KernelChoice:
    """The kernel that was chosen, and the candidates from rough to smooth.

    Attributes
    ----------
    name, candidates
    rows : that hyperparameters were learned from, each as often as there are windows with it
    patches, held_out : patches, and the rows in them
    remark : why a candidate, or all of them, have no score; "" where all have
    model : with that kernel, where learning goes on; None of a choice that was read
    """

    name: str
    candidates: tuple[Candidate, ...] = ()
    rows: int = 0
    patches: int = 0
    held_out: int = 0
    remark: str = ""
    model: GPModel | None = field(default=None, compare=False, repr=False)

    def as_plain(self) -> dict[str, Any]:
        """The fields but for the model as values that JSON can hold."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}
        return plain | {"candidates": [c.as_plain() for c in self.candidates]}

    @staticmethod
    def of_trials(trials: Mapping[str, "Trial"], **counts: Any) -> "KernelChoice":
        """The roughest within one standard error of the best of trials in the same patches.

        trials: from rough to smooth, one at least. counts: other fields, by their names.
        """
        scores = torch.stack([trial.scores for trial in trials.values()])
        best, differences, errors = roughest_within_error(scores)
        candidates = tuple(
            Candidate(name, float(trial.scores.mean()), d, e, trial.seconds, trial.learned)
            for (name, trial), d, e in zip(trials.items(), differences, errors, strict=True)
        )
        return KernelChoice(candidates[best].name, candidates, patches=scores.shape[1], **counts)

    @staticmethod
    def of_plain(plain: Mapping[str, Any]) -> "KernelChoice":
        """The choice of `as_plain`."""
        candidates = tuple(Candidate(**c) for c in plain["candidates"])
        return KernelChoice(**{**plain, "candidates": candidates})


@final
@dataclass(frozen=True, eq=False)
class _Where:
    """θ (P,) of the chosen model."""

    theta: ParameterVector


@final
@dataclass(frozen=True, eq=False)
class Window:
    """Rows of neighbours: data (n,), the indices of the rows that learn, and those of disjoint
    patches, each predicted from all others in the window."""

    data: Batch
    learning: Tensor
    patches: tuple[Tensor, ...]


@final
@dataclass(frozen=True, eq=False)
class Trial:
    """The scores (P,) of a candidate in P patches, and what it has learned, by name."""

    scores: Tensor
    seconds: float
    learned: Mapping[str, float] = field(default_factory=dict)


def choice_bytes(n: int) -> int:
    """Bytes of the largest dense matrices of `choose_kernel` for n rows, with their gradients."""
    return _learning.MATRICES_OF_GRADIENT * 8 * min(n, _ONE_WINDOW) ** 2


def choose_kernel(
    model: GPModel,
    data: Batch,
    *,
    search_start: bool = True,
    seed: int = 0,
    names: Sequence[str] | None = None,
    checkpointer: AbstractCheckpointer = NO_CHECKPOINTS,
) -> KernelChoice:
    """Choose the kernel of point values by held-out patches, or take the choice that was saved.

    Parameters
    ----------
    model : where learning starts, with a kernel of one term, whose profile alone is changed
    data : inputs in units in which distance means dependence
    search_start : as of `EvidenceSettings`
    seed : of the windows
    names : of candidates, from rough to smooth and then sums; None for `CANDIDATES` and, where the
        rows are many, `SUMS`
    checkpointer : saves the choice
    """
    if (state := checkpointer.load()) is not None:
        return _restored(state, model)
    choice = _chosen(model, data, search_start, seed, names)
    assert choice.model is not None
    where = _Where(gp.Parameters.of(choice.model).theta)
    kept = state_of(_STATE, replace(choice, model=None), where, finished=True)
    checkpointer.finish(kept)
    return choice


def _restored(state: State, model: GPModel) -> KernelChoice:
    """The choice that was saved, with the kernel where learning goes on."""
    reader = StateReader.of(state, _STATE)
    choice = reader.read(KernelChoice)
    parameters = gp.Parameters.of(_start(model, choice.name, {}))
    where = reader.read(_Where, {"theta": parameters.theta}, P=len(parameters))
    return replace(choice, model=parameters.build(where.theta).detached())


def _chosen(
    model: GPModel, data: Batch, search_start: bool, seed: int, names: Sequence[str] | None
) -> KernelChoice:
    names = candidates_of(data) if names is None else names
    windows, fallback = windows_of(data, seed), with_profile(model, FALLBACK)
    if not windows:
        remark = f"fewer than {LEAST_ROWS} distinct rows, too few to hold out patches"
        return KernelChoice(FALLBACK, remark=remark, model=fallback)
    parts = [window.data[window.learning] for window in windows[: 1 + _LEARNING]]
    trials: dict[str, Trial] = {}
    refused: list[str] = []
    optima: dict[str, GPModel] = {}
    for name in _from_the_middle(names):
        begun = time.perf_counter()
        start = _start(model, name, optima)
        try:
            learned = _learned(start, parts, search_start and not optima)
            scores = torch.cat([patch_scores(learned, window) for window in windows])
        except UserError as error:
            # A smooth kernel of rows that nearly coincide may not be positive definite.
            refused.append(f"{name}: {error}")
            continue
        optima[name] = learned
        trials[name] = Trial(scores, time.perf_counter() - begun)
    if not trials:
        return KernelChoice(FALLBACK, remark="; ".join(refused), model=fallback)
    choice = KernelChoice.of_trials(
        {name: trials[name] for name in names if name in trials},
        rows=sum(len(part) for part in parts),
        held_out=sum(len(patch) for window in windows for patch in window.patches),
        remark="; ".join(refused),
    )
    # The search of a start keeps the ratios of length scales, which sums have from what they
    # learned.
    is_sum = "+" in choice.name
    kernel = optima[choice.name].kernel if is_sum else with_profile(model, choice.name).kernel
    return replace(choice, model=replace(model, kernel=kernel))


def _start(model: GPModel, name: str, optima: Mapping[str, GPModel]) -> GPModel:
    """Where a candidate starts: at the first optimum, of middling smoothness, which is near that of
    others; a sum at twice and half of the length scales of its terms alone."""
    near = next(iter(optima.values()), model)
    if "+" not in name:
        return with_profile(near, name)
    long, short = (optima.get(term, with_profile(near, term)) for term in name.split("+"))
    kernels = _scaled(long.kernel, math.log(_LONGER)), _scaled(short.kernel, -math.log(_LONGER))
    return replace(long, kernel=SumKernel(kernels))


def _scaled(kernel: AbstractKernel, log_factor: float) -> AbstractKernel:
    """A kernel of one term with other length scales and half of the variance."""
    length, variance = kernel.parameters()
    return kernel.with_parameters(
        (length.at(length.value + log_factor), variance.at(variance.value - math.log(2.0)))
    )


def candidates_of(data: Batch) -> tuple[str, ...]:
    """Names of the candidates for point values, from rough to smooth and then sums."""
    assert isinstance(data.functional, PointValues)
    n, dim = data.functional.x.shape
    return CANDIDATES + SUMS if n > _ONE_WINDOW and dim <= _MOST_COLUMNS else CANDIDATES


def _from_the_middle(names: Sequence[str]) -> list[str]:
    """Kernels of one term, from middling smoothness to both ends, and then sums."""
    single = [name for name in names if "+" not in name]
    ordered = sorted(single, key=lambda n: abs(single.index(n) - len(single) // 2))
    return ordered + [name for name in names if "+" in name]


def roughest_within_error(scores: Tensor) -> tuple[int, list[float], list[float]]:
    """The first candidate whose score is within one standard error of the best.

    scores (C, P): of C candidates from rough to smooth in P patches. Returns its index, and of
    each candidate the mean difference to the best, d = mean_p (s_cp − s_bp), and the standard error
    of that, std_p (s_cp − s_bp) / √P.
    """
    means = scores.mean(1)
    pairs = scores - scores[means.argmax()]
    differences, errors = pairs.mean(1), pairs.std(1) / math.sqrt(scores.shape[1])
    within = differences >= -errors
    return int(within.nonzero()[0]), differences.tolist(), errors.tolist()


def with_profile(model: GPModel, name: str) -> GPModel:
    """The model with the kernel of that name, at the same hyperparameters.

    Examples
    --------
    >>> from dustmap.gp import ConstantMean, kernels, likelihoods
    >>> noise = likelihoods.GaussianLikelihood(jitter=0.1)
    >>> model = GPModel(kernels.Matern32([1.0]), ConstantMean(), noise)
    >>> with_profile(model, "matern12").kernel
    StationaryKernel(matern12, lengthscale=[1.0], variance=1, dim=1)
    """
    kernel = kernel_named(name, [1.0] * model.kernel.dim)
    return replace(model, kernel=kernel.with_parameters(model.kernel.parameters()))


def windows_of(data: Batch, seed: int) -> list[Window]:
    """One window of random rows in patches and windows around rows with a patch in each, or the
    first alone where it has all rows.

    Rows at the same place as another have no part in it: they would betray what is held out. None
    where too few are left.
    """
    assert isinstance(data.functional, PointValues)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(data), generator=generator)[:MOST_OF_CHOICE]
    rows = rows[different_places(data.functional.x[rows])[0]]
    x = data.functional.x[rows]
    if len(rows) < LEAST_ROWS:
        return []
    if len(rows) <= _ONE_WINDOW:
        return [_one_window(data[rows], x, -(-len(rows) // _PATCHES), generator)]
    windows = [_one_window(data[rows[:_ONE_WINDOW]], x[:_ONE_WINDOW], _PATCH, generator)]
    free = torch.ones(len(x), dtype=torch.bool)
    for centre in torch.randperm(len(x), generator=generator):
        near = _nearest(x, x[centre], _WINDOW)
        inner = near[torch.randint(_WINDOW // 3, (), generator=generator)]
        patch, learns = _nearest(x[near], x[inner], _PATCH), torch.ones(_WINDOW, dtype=torch.bool)
        # Patches that shared rows would pass for more than they tell.
        if not bool(free[near[patch]].all()):
            continue
        free[near[patch]] = learns[patch] = False
        windows.append(Window(data[rows[near]], learns.nonzero().squeeze(-1), (patch,)))
        if len(windows) == 1 + _WINDOWS:
            break
    return windows


def _one_window(data: Batch, x: Tensor, size: int, generator: torch.Generator) -> Window:
    """Patches of so many neighbours around random rows, until all are held out; few rows all
    learn."""
    n, free = len(x), torch.ones(len(x), dtype=torch.bool)
    patches: list[Tensor] = []
    for row in torch.randperm(n, generator=generator):
        if free[row]:
            left = free.nonzero().squeeze(-1)
            patches.append(left[_nearest(x[left], x[row], min(len(left), size))])
            free[patches[-1]] = False
    learning = torch.randperm(n, generator=generator)[: max(_WINDOW, n // 2)]
    return Window(data, learning, tuple(patches))


def _nearest(x: Tensor, place: Tensor, count: int) -> Tensor:
    """Indices of the `count` rows of x (N, D) nearest to a place (D,), nearest first."""
    return (x - place).square().sum(1).topk(count, largest=False).indices


def _learned(model: GPModel, parts: Sequence[Batch], search_start: bool) -> GPModel:
    """Maximise the sum of the parts' evidences; the start is searched where that is asked for."""
    if search_start:
        x = torch.cat([places_of(part) for part in parts])
        model = best_start(
            model, x, lambda tried: sum(float(tried.log_evidence(part)) for part in parts)
        )
    scale = torch.stack([gp.mean_scale(model.mean, part) for part in parts]).mean(0)
    parameters = gp.Parameters.of(model, scales={"mean": scale})
    if len(parameters) == 0:
        return model

    def log_evidence(theta: Tensor) -> Tensor:
        at = parameters.build(theta)
        return torch.stack([at.log_evidence(part) for part in parts]).sum()

    maximum = gp.maximise(
        parameters,
        lambda theta: gp.gradient_at(theta, log_evidence),
        n_data=sum(len(part) for part in parts),
        max_steps=_MAX_STEPS,
        tolerance=_TOLERANCE,
    )
    return parameters.build(maximum.theta).detached()


@torch.no_grad()
def patch_scores(model: GPModel, window: Window) -> Tensor:
    """Mean log predictive density of the rows of each patch (P,), given all others in the window.

    With A = K_ff + Σ of the window, r = y − m and the rows p of a patch, y_p given the others is
    normal of mean y_p − C (A⁻¹ r)_p and covariance C = ((A⁻¹)_pp)⁻¹: one factor for all patches.
    """
    data, exact = window.data, gp.ExactGP(model.kernel, model.mean)
    noise_variance = model.likelihood.noise_variance(data)
    posterior = exact.condition(data.functional, data.y, noise_variance)
    precision = torch.cholesky_inverse(posterior.cholesky)
    return left_out_scores(precision, posterior.alpha, window.patches)


def left_out_scores(precision: Tensor, alpha: Tensor, patches: Sequence[Tensor]) -> Tensor:
    """The same (P,) for A⁻¹ (n, n) and A⁻¹ r (n,)."""
    scores = []
    for patch in patches:
        C = torch.cholesky_inverse(torch.linalg.cholesky(precision[patch][:, patch]))
        error, variance = C @ alpha[patch], C.diagonal()
        density = error.square() / variance + variance.log() + math.log(2.0 * math.pi)
        scores.append(-0.5 * density.mean())
    return torch.stack(scores)
