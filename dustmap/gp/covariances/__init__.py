"""Covariances of linear functionals under a stationary kernel.

An estimator gives `cross` (K_fu with grid nodes or points), `variance` (k_ff) and `between` (two
sets of functionals). `ClosedForm` is the default; `Quadrature` is the definition it is tested
against; `MonteCarlo` is the estimator of Wu et al. (2021). They differ for line integrals only:
values and derivatives at points are exact in all three.
With a `Wrapping` they use the wrapped kernel Σ_j k(x + jL) of a torus; `wrapped_lags` tabulates
that kernel at the lags of the torus, `wrapped_variance` is its value at lag 0, `plain_lags` the
kernel itself at the lags of a grid.
"""

from dustmap.gp.covariances._estimators import AbstractEstimator as AbstractEstimator
from dustmap.gp.covariances._estimators import ClosedForm as ClosedForm
from dustmap.gp.covariances._estimators import MonteCarlo as MonteCarlo
from dustmap.gp.covariances._estimators import Quadrature as Quadrature
from dustmap.gp.covariances._measures import plain_lags as plain_lags
from dustmap.gp.covariances._measures import wrapped_lags as wrapped_lags
from dustmap.gp.covariances._measures import wrapped_variance as wrapped_variance
from dustmap.gp.covariances._wrapping import Wrapping as Wrapping
