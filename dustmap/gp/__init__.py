"""Gaussian processes: what is observed, under which prior, and how the two meet.

`RegularGrid` holds the inducing points, `GridPrior` the prior on them: one torus, one spectrum.
`Batch` is a data set, `ConstantMean`, `LinearMean`, `DiscMean` and `LogDiscMean` prior means,
`ExactGP` the dense oracle. A `GPModel` is kernel, mean and likelihood; `Parameters` is what it
learns, as one vector θ from which the model is built. The sub-packages are `kernels` (stationary
priors), `functionals` (point values, derivatives, line integrals), `covariances` (of functionals
with grid nodes, with themselves and with each other), `features` (how data see the whitened field),
`families` (structures of its posterior) and `likelihoods`.
"""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

if TYPE_CHECKING:
    from dustmap.gp._batch import AbstractPosterior as AbstractPosterior
    from dustmap.gp._batch import Batch as Batch
    from dustmap.gp._batch import Prediction as Prediction
    from dustmap.gp._batch import own_batch as own_batch
    from dustmap.gp._batch import whole_batch as whole_batch
    from dustmap.gp._exact import ExactGP as ExactGP
    from dustmap.gp._exact import ExactPosterior as ExactPosterior
    from dustmap.gp._grid import FADE as FADE
    from dustmap.gp._grid import NestedGrids as NestedGrids
    from dustmap.gp._grid import RegularGrid as RegularGrid
    from dustmap.gp._grid import rows_by_grid as rows_by_grid
    from dustmap.gp._grid import widened_grids as widened_grids
    from dustmap.gp._lattice_prior import MOST_INFLATION as MOST_INFLATION
    from dustmap.gp._lattice_prior import AbstractLatticePrior as AbstractLatticePrior
    from dustmap.gp._lattice_prior import AbstractSlopes as AbstractSlopes
    from dustmap.gp._lattice_prior import PriorReport as PriorReport
    from dustmap.gp._lattice_prior import torus_for as torus_for
    from dustmap.gp._lattice_prior import wrap_inflation as wrap_inflation
    from dustmap.gp._means import AbstractMean as AbstractMean
    from dustmap.gp._means import ConstantMean as ConstantMean
    from dustmap.gp._means import DiscMean as DiscMean
    from dustmap.gp._means import LinearMean as LinearMean
    from dustmap.gp._means import LogDiscMean as LogDiscMean
    from dustmap.gp._means import orthogonal_directions as orthogonal_directions
    from dustmap.gp._mixture import MixturePosterior as MixturePosterior
    from dustmap.gp._model import GPModel as GPModel
    from dustmap.gp._model import HyperparameterFit as HyperparameterFit
    from dustmap.gp._model import ParameterErrors as ParameterErrors
    from dustmap.gp._model import fit_hyperparameters as fit_hyperparameters
    from dustmap.gp._model import mean_scale as mean_scale
    from dustmap.gp._multilinear import AxisWeights as AxisWeights
    from dustmap.gp._multilinear import resized as resized
    from dustmap.gp._neighbours import HeldOutRows as HeldOutRows
    from dustmap.gp._neighbours import NeighbourEvidence as NeighbourEvidence
    from dustmap.gp._neighbours import NeighbourPrecision as NeighbourPrecision
    from dustmap.gp._neighbours import nearest as nearest
    from dustmap.gp._nested_prior import NestedPrior as NestedPrior
    from dustmap.gp._nested_prior import tori_for as tori_for
    from dustmap.gp._nested_prior import zero_covariance as zero_covariance
    from dustmap.gp._pairs import log_normal_variance as log_normal_variance
    from dustmap.gp._pairs import variance_of_pairs as variance_of_pairs
    from dustmap.gp._parameters import AbstractParametric as AbstractParametric
    from dustmap.gp._parameters import FitStatus as FitStatus
    from dustmap.gp._parameters import Parameter as Parameter
    from dustmap.gp._parameters import Parameters as Parameters
    from dustmap.gp._parameters import gradient_at as gradient_at
    from dustmap.gp._parameters import maximise as maximise
    from dustmap.gp._prior import GridPrior as GridPrior
    from dustmap.gp.features._grouped import ZeroPointColumns as ZeroPointColumns
    from dustmap.gp.features._grouped import ZeroPoints as ZeroPoints
else:
    __getattr__, __dir__ = on_use(__name__)
