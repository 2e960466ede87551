"""Inference of the whitened field ε from data.

With rows of Φ: q(ε) = N(m, S) in a structured family, for any likelihood.

`solve_direct` is the closed-form optimum for Gaussian noise (S by one pass, m by CG on Λ): use it
whenever it applies. `fit_svi` takes natural-gradient steps on minibatches, for other likelihoods
and for learning hyperparameters. Both give a state that `VariationalPosterior` predicts with.
`Scores` says how well, and how well calibrated.

With products of Φ, for Gaussian noise and any number of data: `solve_global` finds the
posterior mean and exact pathwise draws of a `GridModel` in one block solve; `PathwisePosterior`
predicts any functional from them.
"""

from dustmap.inference._data_space import DataSpaceSolution as DataSpaceSolution
from dustmap.inference._data_space import solve_in_data_space as solve_in_data_space
from dustmap.inference._diagnostics import Scores as Scores
from dustmap.inference._diagnostics import pit as pit
from dustmap.inference._diagnostics import scores as scores
from dustmap.inference._direct import DirectSolution as DirectSolution
from dustmap.inference._direct import full_elbo as full_elbo
from dustmap.inference._direct import solve_direct as solve_direct
from dustmap.inference._global_solve import GlobalSolution as GlobalSolution
from dustmap.inference._global_solve import SolveSettings as SolveSettings
from dustmap.inference._global_solve import solve_global as solve_global
from dustmap.inference._grid_model import GridModel as GridModel
from dustmap.inference._model import VariationalModel as VariationalModel
from dustmap.inference._pathwise import PathwisePosterior as PathwisePosterior
from dustmap.inference._pathwise import field_at_nodes as field_at_nodes
from dustmap.inference._precision import PrecisionOperator as PrecisionOperator
from dustmap.inference._precision import batch_stability as batch_stability
from dustmap.inference._precision import power_stability as power_stability
from dustmap.inference._predict import VariationalPosterior as VariationalPosterior
from dustmap.inference._source import RowSource as RowSource
from dustmap.inference._svi import StepSchedule as StepSchedule
from dustmap.inference._svi import SVISettings as SVISettings
from dustmap.inference._svi import SVIState as SVIState
from dustmap.inference._svi import fit_svi as fit_svi
from dustmap.inference._svi import natural_step as natural_step
from dustmap.inference._svi import svi as svi
