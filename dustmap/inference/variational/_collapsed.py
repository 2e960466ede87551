"""Sparse Gaussian processes with q(ε) integrated out: SGPR's bound, DTC and FITC.

Rows Φ of any feature map and Gaussian noise Σ = diag(σ_n²) make ε a linear regression, so that q
has a closed form and the bound needs none:

    Λ = I + Φᵀ diag(s)⁻¹ Φ,   q(ε) = N(Λ⁻¹ Φᵀ diag(s)⁻¹ (y − m), Λ⁻¹),
    L = ln N(y; m, Φ Φᵀ + diag(s)) − penalty

The four classical methods differ in s (N,), in the penalty, and in what they predict:

    ====  ============  =================  ==================  =============================
          s_n           penalty            Var f_*             from
    ====  ============  =================  ==================  =============================
    SoR   σ_n²          none               φ_*ᵀ Λ⁻¹ φ_*          Smola & Bartlett (2001)
    DTC   σ_n²          none               ... + Var r_*       Seeger et al. (2003)
    FITC  σ_n²+Var r_n  none               ... + Var r_*       Snelson & Ghahramani (2006)
    SGPR  σ_n²          ½ Σ Var r_n / σ_n²   ... + Var r_*       Titsias (2009)
    ====  ============  =================  ==================  =============================

Only SGPR's L is a lower bound of ln p(y), and the ELBO of its q: it rises when inducing points are
added and ends at ln p(y), so kernel, noise and inducing points may all be learned from it. SoR and
DTC leave Var r_n out of the data altogether: one likelihood, one q, and nothing that keeps the
length scale or the points from leaving much unexplained. Away from the inducing points SoR is sure
of the mean, DTC is not. FITC takes r_n for noise of each datum: its q is that of the exact
posterior of *another* prior, whose ln p(y) may lie above the true one, and whose learned σ² is too
small wherever Var r stands in for it. The global solver of this package takes FITC's s, with Var r
of local weights, on grids fine enough for it to be small beside the noise.

References: Quiñonero-Candela & Rasmussen (2005), "A unifying view of sparse approximate Gaussian
process regression"; Titsias (2009), "Variational learning of inducing variables in sparse Gaussian
processes"; Bauer, van der Wilk & Rasmussen (2016), "Understanding probabilistic sparse Gaussian
process approximations".
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import Batch, FitStatus, Parameters, maximise, own_batch
from dustmap.gp._model import scale_of_effect
from dustmap.gp.families import AbstractGaussian, FullRankFamily, FullRankGaussian
from dustmap.gp.features import Features, chunks
from dustmap.gp.functionals import world_of
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference.variational._model import RowSource, VariationalModel
from dustmap.linalg import AbstractWorld

Rows = Callable[[], Iterator[tuple[slice, Features]]]


class AbstractCollapsedObjective(ABC):
    """L = ln N(y; m, Φ Φᵀ + diag(s)) − Σ_n penalty_n: what a method makes of noise and Var r.

    Arguments and results are (N,), float64, with their graph.
    """

    @abstractmethod
    def spread(self, noise_variance: Tensor, residual_variance: Tensor) -> Tensor:
        """s_n > 0 of σ_n² and Var r_n."""

    def penalty(self, noise_variance: Tensor, residual_variance: Tensor) -> Tensor:
        """Return what is subtracted from the log density of datum n: nothing but of a bound."""
        return torch.zeros_like(noise_variance)


@final
@dataclass(frozen=True)
class SGPR(AbstractCollapsedObjective):
    """ln N(y; m, Φ Φᵀ + Σ) − ½ Σ_n Var r_n / σ_n² ≤ ln p(y)   (Titsias 2009)."""

    def spread(self, noise_variance: Tensor, residual_variance: Tensor) -> Tensor:
        return noise_variance

    def penalty(self, noise_variance: Tensor, residual_variance: Tensor) -> Tensor:
        return 0.5 * residual_variance / noise_variance


@final
@dataclass(frozen=True)
class DTC(AbstractCollapsedObjective):
    """ln N(y; m, Φ Φᵀ + Σ), also SoR's: the data are seen as if Var r were zero."""

    def spread(self, noise_variance: Tensor, residual_variance: Tensor) -> Tensor:
        return noise_variance


@final
@dataclass(frozen=True)
class FITC(AbstractCollapsedObjective):
    """ln N(y; m, Φ Φᵀ + Σ + diag(Var r)): residuals are noise, independent of each other."""

    def spread(self, noise_variance: Tensor, residual_variance: Tensor) -> Tensor:
        return noise_variance + residual_variance


@final
@dataclass(frozen=True, eq=False)
class CollapsedSolution:
    """q(ε) in closed form, `state` of the features' dtype, and the bound L, `value` in float64."""

    state: AbstractGaussian
    value: float


@final
@dataclass(frozen=True, eq=False)
class CollapsedGradient:
    """The solution at θ, and ∂L/∂θ (P,)."""

    solution: CollapsedSolution
    gradient: Tensor


@torch.no_grad()
def solve_collapsed(
    model: VariationalModel,
    batch: Batch,
    source: RowSource,
    objective: AbstractCollapsedObjective | None = None,
) -> CollapsedSolution:
    """q(ε) and L of all data: two passes over the rows, M_w × M_w matrices in float64.

    objective: SGPR unless another is given. The model needs a `GaussianLikelihood` and the
    `FullRankFamily`; it then predicts with `VariationalPosterior(model, solution.state)`.
    """
    problem = _Problem.of(model, batch, objective)
    q = problem.posterior(source.chunks)
    total = torch.zeros((), dtype=torch.float64, device=batch.y.device)
    for part, rows in source.chunks():
        total += problem.log_density(q, rows, part).sum()
    return problem.solution(q, problem.world.total(total))


def collapsed_gradient(
    parameters: Parameters[VariationalModel],
    theta: Tensor,
    batch: Batch,
    objective: AbstractCollapsedObjective | None = None,
) -> CollapsedGradient:
    """L and its gradient at θ (P,) in what is learned of the model, chunk by chunk.

    L is the maximum over q of

        F(q, θ) = Σ_n E_q ln N(y_n; m_n + φ_nᵀε, s_n) − Σ_n penalty_n − KL[q ‖ N(0, I)],

    so dL/dθ = ∂F/∂θ at the q of closed form, held fixed: a sum over data, whose graph is never
    larger than that of a chunk of rows. No factor of Λ is differentiated. Rows of one chunk are
    computed once, of more than one twice.
    """
    leaf = theta.detach().clone().requires_grad_()
    problem = _Problem.of(parameters.build(leaf), batch, objective)
    rows = problem.rows()
    with torch.no_grad():
        q = problem.posterior(rows)
    total = torch.zeros((), dtype=torch.float64, device=batch.y.device)
    gradient = torch.zeros_like(theta)
    for part, features in rows():
        terms = problem.log_density(q, features, part)
        total += terms.detach().sum()
        spread, _ = problem.spread(features, part)
        expected = terms - 0.5 * q.quadratic(features.phi.double()) / spread
        value = expected.sum()
        if value.requires_grad:
            # The graph stays, for the rows of all chunks hang on the kernel's matrices.
            gradient += torch.autograd.grad(value, leaf, retain_graph=True)[0]
    gradient = problem.world.total(gradient.to(total.device)).to(theta.device)
    return CollapsedGradient(problem.solution(q, problem.world.total(total)), gradient)


@final
@dataclass(frozen=True, eq=False)
class _Problem:
    """A model with its data, those of this rank where ranks share them."""

    model: VariationalModel
    batch: Batch
    objective: AbstractCollapsedObjective
    world: AbstractWorld

    @staticmethod
    def of(
        model: VariationalModel, batch: Batch, objective: AbstractCollapsedObjective | None
    ) -> "_Problem":
        if len(batch) == 0:
            raise UserError("the data set is empty: at least one datum is needed")
        if not isinstance(model.likelihood, GaussianLikelihood):
            raise UserError(
                f"a collapsed bound needs a GaussianLikelihood, got "
                f"{type(model.likelihood).__name__}: use fit_svi for other likelihoods"
            )
        if not isinstance(model.family, FullRankFamily):
            raise UserError(
                f"the q of a collapsed bound is in the FullRankFamily, got "
                f"{type(model.family).__name__}: use solve_direct for structured families"
            )
        return _Problem(model, own_batch(batch), objective or SGPR(), world_of(batch.functional))

    def rows(self) -> Rows:
        """All rows with their graph; kept if they are one chunk, else computed in each pass."""
        n, features = len(self.batch), self.model.features

        def computed() -> Iterator[tuple[slice, Features]]:
            for part in chunks(n, features.chunk):
                yield part, features.rows(self.batch.functional[part])

        if n > features.chunk:
            return computed
        kept = list(computed())
        return lambda: iter(kept)

    def posterior(self, rows: Rows) -> FullRankGaussian:
        """q(ε) in float64."""
        statistics = self.model.family.zero_statistics(self.batch.y.device)
        b = statistics.new_zeros(len(statistics))
        for part, features in rows():
            phi = features.phi.detach().double()
            spread, _ = self.spread(features, part)
            self.model.family.precision_statistics(phi, 1.0 / spread, statistics)
            b += (self._centred(part) / spread) @ phi
        q = self.model.family.posterior(b, self.world.total(statistics))
        assert isinstance(q, FullRankGaussian)
        return q.with_mean(q.apply_covariance(self.world.total(b)))

    def spread(self, rows: Features, part: slice) -> tuple[Tensor, Tensor]:
        """s_n and penalty_n of some rows."""
        likelihood = self.model.likelihood
        noise = likelihood.noise_variance(self.batch[part]).double()
        left = rows.residual_variance.double()
        return self.objective.spread(noise, left), self.objective.penalty(noise, left)

    def log_density(self, q: FullRankGaussian, rows: Features, part: slice) -> Tensor:
        """ln N(y_n; m_n + φ_nᵀ E ε, s_n) − penalty_n of some rows."""
        spread, penalty = self.spread(rows, part)
        misfit = self._centred(part) - rows.phi.double() @ q.mean
        return -0.5 * ((2.0 * math.pi * spread).log() + misfit.square() / spread) - penalty

    def solution(self, q: FullRankGaussian, total: Tensor) -> CollapsedSolution:
        """L = total − ½ ‖E ε‖² − ½ ln |Λ|, and q.

        (y−m)ᵀ(ΦΦᵀ + diag(s))⁻¹(y−m) is the least of Σ_n (y_n − m_n − φ_nᵀε)²/s_n + ‖ε‖², and that
        at E ε: a sum of squares. The usual difference of two large numbers loses what small noise
        leaves of it.
        """
        _, log_det = q.trace_and_log_det()
        value = float(total - 0.5 * (q.mean @ q.mean - log_det))
        dtype = self.model.features.dtype
        return CollapsedSolution(
            FullRankGaussian(q.mean.to(dtype), q.statistics, q.root.to(dtype)), value
        )

    def _centred(self, part: slice) -> Tensor:
        """y − m, float64."""
        mean = self.model.mean.values(self.batch.functional[part])
        return self.batch.y[part].double() - mean


@final
@dataclass(frozen=True, eq=False)
class CollapsedFit:
    """Result of `fit_collapsed`.

    Attributes
    ----------
    model, solution : with features of the parameters at the end; q and L there
    objective : L plus log prior per datum at every evaluation, the last being the end
    status, largest_gradient : how it ended, and the gradient of the objective there
    refused : evaluations of models that cannot be made, such as of too long a length scale
    """

    model: VariationalModel
    solution: CollapsedSolution
    objective: tuple[float, ...]
    status: FitStatus
    largest_gradient: float
    refused: int


def fit_collapsed(
    model: VariationalModel,
    batch: Batch,
    objective: AbstractCollapsedObjective | None = None,
    *,
    max_steps: int = 100,
    tolerance: float = 1e-5,
    prior_std: float | None = None,
) -> CollapsedFit:
    """Maximise the collapsed bound over what the model learns, by L-BFGS.

    Kernel, mean, noise and inducing points are learned, each where it says so. Inducing points and
    the mean's coefficients are no logarithms: their spacing and their effect on y are what a step
    of one is to them.

    Parameters
    ----------
    model, batch
    objective : SGPR by default; DTC and FITC are no bounds of ln p(y)
    max_steps, tolerance : of L-BFGS; it stops when the largest |gradient| per datum is below
    prior_std : width of a normal prior of every log-parameter around its start; None for a flat one

    Examples
    --------
    >>> from dustmap import gp
    >>> from dustmap.gp import families, features, functionals, kernels, likelihoods
    >>> x = torch.linspace(0.0, 3.0, 13, dtype=torch.float64)[:, None]
    >>> y = torch.sin(x[:, 0])
    >>> data = Batch(functionals.PointValues(x), y, torch.full_like(y, 0.01))
    >>> grid = gp.RegularGrid.from_bounds((0.0,), (3.0,), (7,))
    >>> torus = features.TorusFeatures(gp.GridPrior.padded(kernels.Matern32(1.0, dim=1), grid))
    >>> family = families.FullRankFamily(torus.n_features)
    >>> noise = likelihoods.GaussianLikelihood(learn=False)
    >>> model = VariationalModel(torus, gp.ConstantMean(learn=False), noise, family)
    >>> rows = RowSource(torus, data.functional)
    >>> L = [solve_collapsed(model, data, rows, method).value for method in (SGPR(), DTC())]
    >>> L[0] < L[1], fit_collapsed(model, data, max_steps=1).solution.value > L[0]
    (True, True)
    """
    parameters = Parameters.of(model, scales=_linear_scales(model, batch), prior_std=prior_std)
    parameters.require_some("the model")
    evaluated: list[CollapsedGradient] = []

    def value_and_gradient(theta: Tensor) -> tuple[float, Tensor]:
        evaluated[:] = [collapsed_gradient(parameters, theta, batch, objective)]
        return evaluated[0].solution.value, evaluated[0].gradient

    maximum = maximise(
        parameters,
        value_and_gradient,
        n_data=len(batch),
        max_steps=max_steps,
        tolerance=tolerance,
    )
    return CollapsedFit(
        model=parameters.build(maximum.theta),
        solution=evaluated[0].solution,
        objective=maximum.history,
        status=maximum.status,
        largest_gradient=maximum.largest_gradient,
        refused=maximum.refused,
    )


def _linear_scales(model: VariationalModel, batch: Batch) -> dict[str, Tensor]:
    """Return the unit of parameters that are no logarithms, by their names."""
    own, total = own_batch(batch), world_of(batch.functional).total
    effect = total(model.mean.basis(own.functional).square().sum(0)) / len(batch)
    spread = batch.y.double().square().mean().sqrt() + torch.finfo(torch.float64).tiny
    points = (p for p in model.features.parameters() if p.name == "inducing")
    return {
        "mean": scale_of_effect(spread, effect.sqrt()),
        **{p.name: _spacing(p.value) for p in points},
    }


def _spacing(points: Tensor) -> Tensor:
    """About the distance between neighbours of inducing points along each axis (M, D)."""
    count, dim = points.shape
    widths: Tensor = points.amax(0) - points.amin(0)
    widths = torch.where(widths > 0, widths, torch.ones_like(widths))
    spacing: Tensor = widths / count ** (1.0 / dim)
    return spacing.expand(count, dim)
