"""Variational inference for a positive field: mode, hyperparameters, metric samples, mean."""

from torch import Tensor

from dustmap.gp import Batch
from dustmap.inference._journal import NO_JOURNAL, AbstractJournal
from dustmap.inference.lognormal._lognormal import LogNormalModel
from dustmap.inference.lognormal._lognormal_state import LogNormalProblem
from dustmap.inference.lognormal._mgvi_phases import Fit, Rounds
from dustmap.inference.lognormal._mgvi_report import MGVISettings, MGVISolution
from dustmap.inference.lognormal._mgvi_solution import solution_of
from dustmap.linalg import Progress, unwatched


def fit_mgvi(
    model: LogNormalModel,
    data: Batch,
    settings: MGVISettings | None = None,
    rounds: Rounds | None = None,
    *,
    origin: Tensor | None = None,
    journal: AbstractJournal = NO_JOURNAL,
    progress: Progress = unwatched,
) -> MGVISolution:
    """Posterior of a log-normal field, hyperparameters of kernel and noise learned in place.

    1. The mode of ξ by Gauss-Newton, every linear system solved from the side of the data.
    2. Newton steps on the evidence of the model linearised there, each followed by the mode of the
       new hyperparameters.
    3. Metric Gaussian variational inference: S/2 pairs ±δ_s ~ N(0, (I + Jᵀ Σ⁻¹ J)⁻¹) at ξ̄, then
       ξ̄ lowers the sampled energy mean_s ½ ‖y − L ρ(ξ̄ ± δ_s)‖²_{Σ⁻¹} + ½ ‖ξ̄‖²; repeated with the
       same random numbers. With `curved` each sample follows the curvature of ρ instead.

    With Student-t noise (settings.robust) the rounds of 1 and 2 also renew the weights of the data,
    ν and the scale, from residuals and spread of the linearised model.

    Noise that grows with the response (likelihood.relative) takes that of the centre, renewed
    before every descent and every draw and held fixed in between: neither the pull on ξ nor the
    evidence's gradient has a derivative of it. These are the estimating equations of Carroll &
    Ruppert (1982), which are right on average whatever the shape of the noise.

    origin (Q,): centre of the priors of the log-parameters, in the order of
    `LogNormalModel.log_parameters`; None: where they start.

    journal: kept after every round, and between curved samples; rounds is called with new rounds
    only, progress with draws and steps of solvers.

    Σ is the noise alone. What the multilinear interpolant leaves out between nodes is in neither.

    Reference: Knollmüller & Enßlin (2019), "Metric Gaussian variational inference"; Frank, Leike
    & Enßlin (2021), "Geometric variational inference".
    """
    if len(data) == 0:
        raise ValueError("data is empty: fit_mgvi needs at least one datum")
    settings = settings or MGVISettings()
    scale = model.likelihood.log_scale
    twice = settings.robust is not None and settings.robust.learn_scale
    if twice and scale is not None and scale.requires_grad:
        raise ValueError(
            "the scale of Student-t noise is learned with ν: give a GaussianLikelihood whose scale "
            "is fixed (log_scale.requires_grad_(False)), or RobustSettings(learn_scale=False)"
        )
    problem = LogNormalProblem.of(model, data)
    fit = Fit(problem, settings, rounds, progress, origin, journal)
    return solution_of(fit.state, settings.seed)
