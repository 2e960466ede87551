"""Inference of the whitened field ε from data.

With rows of Φ: q(ε) = N(m, S) in a structured family, for any likelihood.

`solve_direct` is the closed-form optimum for Gaussian noise (S by one pass, m by CG on Λ): use it
whenever it applies. `fit_svi` takes natural-gradient steps on minibatches, for other likelihoods
and for learning hyperparameters. `solve_collapsed` and `fit_collapsed` have q integrated out:
`SGPR`'s bound, `DTC` and `FITC`, with hyperparameters by L-BFGS, for Gaussian noise and up to ~10⁴
features. All give a state that `VariationalPosterior` predicts with.
`Scores` says how well, and how well calibrated.

With products of Φ, for Gaussian noise and any number of data: `solve_global` finds the
posterior mean and exact pathwise draws of a `GridModel` in one block solve; `PathwisePosterior`
predicts any functional from them. Few data are solved for by their covariance as a matrix, which
also gives the evidence's gradient without draws (`gp.features.suits_dense`), point values on few
nodes by matrices of these (`solve_at_nodes`).

For positive fields: `fit_mgvi` finds mode, hyperparameters and metric Gaussian samples of a
`LogNormalModel`, ρ = exp(μ + R ε) at the nodes; `LogNormalPosterior` answers for any functional.

Examples
--------
Thirteen values of a sine, their posterior by products and by rows of Φ, and by dense algebra:

>>> from dustmap import gp
>>> from dustmap.gp import families, features, functionals, kernels, likelihoods
>>> x = torch.linspace(0.0, 3.0, 13, dtype=torch.float64)[:, None]
>>> y = torch.sin(x[:, 0])
>>> data = gp.Batch(functionals.PointValues(x), y, torch.full_like(y, 0.01))
>>> kernel, mean = kernels.Matern32(1.0, dim=1), gp.ConstantMean(learn=False)
>>> grid = gp.RegularGrid.from_bounds((0.0,), (3.0,), (25,))
>>> noise, prior = likelihoods.GaussianLikelihood(), gp.GridPrior.padded(kernel, grid)
>>> gridded = GridModel(features.LocalFeatures(prior), mean, noise)
>>> solution = solve_global(gridded, data, SolveSettings(samples=8))
>>> solution.posterior.predict(data.functional[6:8]).mean
tensor([0.9956, 0.9821], dtype=torch.float64)
>>> torus = features.TorusFeatures(prior)
>>> model = VariationalModel(torus, mean, noise, families.FullRankFamily(prior.n_white))
>>> rows = RowSource(torus, data.functional)
>>> optimum = solve_direct(model, data, rows)
>>> abs(full_elbo(model, optimum.state, data, rows) - optimum.elbo) < 1e-9
True
>>> settle(model, optimum.state, data, rows).converged
True
>>> unsettled(model, optimum.state, data, rows) < 1e-6
True
>>> VariationalPosterior(model, optimum.state).predict(data.functional[6:8]).mean
tensor([0.9956, 0.9821], dtype=torch.float64)
>>> exact = gp.ExactGP(kernel, mean).condition(data.functional, data.y, data.noise_variance)
>>> exact.predict(data.functional[6:8]).mean
tensor([0.9956, 0.9821], dtype=torch.float64)
"""

from dustmap.gp.features._grouped import GroupSamples as GroupSamples
from dustmap.inference._diagnostics import DatumScores as DatumScores
from dustmap.inference._diagnostics import Scores as Scores
from dustmap.inference._diagnostics import log_density_of_student_t as log_density_of_student_t
from dustmap.inference._diagnostics import scores as scores
from dustmap.inference._diagnostics import scores_of_mixture as scores_of_mixture
from dustmap.inference._diagnostics import scores_of_normal as scores_of_normal
from dustmap.inference._diagnostics import scores_of_student_t as scores_of_student_t
from dustmap.inference._global_fit import GlobalFit as GlobalFit
from dustmap.inference._global_fit import fit_global as fit_global
from dustmap.inference._global_fit import residual_ratio as residual_ratio
from dustmap.inference._model_maker import GlobalSettings as GlobalSettings
from dustmap.inference._model_maker import GridSettings as GridSettings
from dustmap.inference._model_maker import ModelMaker as ModelMaker
from dustmap.inference._model_maker import nugget_for as nugget_for
from dustmap.inference._model_maker import start_rows as start_rows
from dustmap.inference._precision import CoefficientSpread as CoefficientSpread
from dustmap.inference._precision import PrecisionOperator as PrecisionOperator
from dustmap.inference._precision import batch_stability as batch_stability
from dustmap.inference._scaled_fit import fit_with_scales as fit_with_scales
from dustmap.inference._state import NO_CHECKPOINTS as NO_CHECKPOINTS
from dustmap.inference._state import REBUILT as REBUILT
from dustmap.inference._state import AbstractCheckpointer as AbstractCheckpointer
from dustmap.inference._state import Layout as Layout
from dustmap.inference._state import NoCheckpoints as NoCheckpoints
from dustmap.inference._state import ParameterVector as ParameterVector
from dustmap.inference._state import State as State
from dustmap.inference._state import StateReader as StateReader
from dustmap.inference._state import state_of as state_of
from dustmap.inference.evidence._newton import LearnedModel as LearnedModel
from dustmap.inference.evidence._newton import LearnSettings as LearnSettings
from dustmap.inference.evidence._newton import LearnStep as LearnStep
from dustmap.inference.evidence._newton import learn_evidence as learn_evidence
from dustmap.inference.evidence._newton_point import AbstractMaker as AbstractMaker
from dustmap.inference.evidence._newton_point import AbstractSolver as AbstractSolver
from dustmap.inference.evidence._robust import RobustFit as RobustFit
from dustmap.inference.evidence._robust import RobustStep as RobustStep
from dustmap.inference.evidence._robust import Sites as Sites
from dustmap.inference.evidence._robust import fit_student_t as fit_student_t
from dustmap.inference.evidence._robust import nus_left_open as nus_left_open
from dustmap.inference.evidence._robust import site_data as site_data
from dustmap.inference.evidence._robust import student_t_moments as student_t_moments
from dustmap.inference.evidence._student_t_noise import LEAST_NU as LEAST_NU
from dustmap.inference.evidence._student_t_noise import MOST_NU as MOST_NU
from dustmap.inference.evidence._student_t_noise import RobustSettings as RobustSettings
from dustmap.inference.evidence._student_t_noise import StudentTModel as StudentTModel
from dustmap.inference.evidence._student_t_noise import StudentTNoise as StudentTNoise
from dustmap.inference.evidence._student_t_noise import fitted_around as fitted_around
from dustmap.inference.evidence._student_t_noise import measured_weight as measured_weight
from dustmap.inference.evidence._student_t_noise import noise_nats as noise_nats
from dustmap.inference.evidence._student_t_noise import (
    student_t_information as student_t_information,
)
from dustmap.inference.evidence._turns import Turns as Turns
from dustmap.inference.evidence._turns import nats_left as nats_left
from dustmap.inference.evidence._turns import relaxed as relaxed
from dustmap.inference.lognormal._lognormal import LogNormalModel as LogNormalModel
from dustmap.inference.lognormal._lognormal import LogNormalPosterior as LogNormalPosterior
from dustmap.inference.lognormal._lognormal import typical_log_density as typical_log_density
from dustmap.inference.lognormal._mgvi import MGVISolution as MGVISolution
from dustmap.inference.lognormal._mgvi import MGVIStatus as MGVIStatus
from dustmap.inference.lognormal._mgvi import fit_mgvi as fit_mgvi
from dustmap.inference.lognormal._mgvi_settings import MGVIRound as MGVIRound
from dustmap.inference.lognormal._mgvi_settings import MGVISettings as MGVISettings
from dustmap.inference.lognormal._mgvi_state import MGVIStart as MGVIStart
from dustmap.inference.lognormal._tangent import most_information as most_information
from dustmap.inference.lognormal._unresolved import Unresolved as Unresolved
from dustmap.inference.solve._data_space import DRAW_VECTORS as DRAW_VECTORS
from dustmap.inference.solve._data_space import DRAWS_TOGETHER as DRAWS_TOGETHER
from dustmap.inference.solve._data_space import DataSpaceSolution as DataSpaceSolution
from dustmap.inference.solve._data_space import solve_in_data_space as solve_in_data_space
from dustmap.inference.solve._global_solve import solve_global as solve_global
from dustmap.inference.solve._grid_model import GridModel as GridModel
from dustmap.inference.solve._node_space import NodeCovariance as NodeCovariance
from dustmap.inference.solve._node_space import node_bytes as node_bytes
from dustmap.inference.solve._node_space import solve_at_nodes as solve_at_nodes
from dustmap.inference.solve._node_space import suits_nodes as suits_nodes
from dustmap.inference.solve._pathwise import GriddedDraws as GriddedDraws
from dustmap.inference.solve._pathwise import PathwisePosterior as PathwisePosterior
from dustmap.inference.solve._pathwise import at_the_nodes as at_the_nodes
from dustmap.inference.solve._pathwise import explained_share as explained_share
from dustmap.inference.solve._pathwise import field_at_nodes as field_at_nodes
from dustmap.inference.solve._solution import GlobalSolution as GlobalSolution
from dustmap.inference.solve._solution import SolveSettings as SolveSettings
from dustmap.inference.variational._collapsed import DTC as DTC
from dustmap.inference.variational._collapsed import FITC as FITC
from dustmap.inference.variational._collapsed import SGPR as SGPR
from dustmap.inference.variational._collapsed import (
    AbstractCollapsedObjective as AbstractCollapsedObjective,
)
from dustmap.inference.variational._collapsed import CollapsedFit as CollapsedFit
from dustmap.inference.variational._collapsed import CollapsedGradient as CollapsedGradient
from dustmap.inference.variational._collapsed import CollapsedSolution as CollapsedSolution
from dustmap.inference.variational._collapsed import collapsed_gradient as collapsed_gradient
from dustmap.inference.variational._collapsed import fit_collapsed as fit_collapsed
from dustmap.inference.variational._collapsed import solve_collapsed as solve_collapsed
from dustmap.inference.variational._model import DirectSolution as DirectSolution
from dustmap.inference.variational._model import RowSource as RowSource
from dustmap.inference.variational._model import VariationalModel as VariationalModel
from dustmap.inference.variational._model import VariationalPosterior as VariationalPosterior
from dustmap.inference.variational._model import fit_mean as fit_mean
from dustmap.inference.variational._model import full_elbo as full_elbo
from dustmap.inference.variational._model import mean_spread as mean_spread
from dustmap.inference.variational._model import solve_direct as solve_direct
from dustmap.inference.variational._model import unsettled as unsettled
from dustmap.inference.variational._natural_step import SettledFit as SettledFit
from dustmap.inference.variational._natural_step import StepDecay as StepDecay
from dustmap.inference.variational._natural_step import StepSchedule as StepSchedule
from dustmap.inference.variational._natural_step import SVISettings as SVISettings
from dustmap.inference.variational._natural_step import natural_step as natural_step
from dustmap.inference.variational._natural_step import settle as settle
from dustmap.inference.variational._svi import SVIState as SVIState
from dustmap.inference.variational._svi import fit_svi as fit_svi
from dustmap.inference.variational._svi import svi as svi
