"""Likelihoods p(y_n | f_n), one datum at a time.

Inference needs two moments of q(f_n) = N(μ_n, v_n) only, and asks the likelihood for the expected
log-probability and its derivatives g1 = ∂E/∂μ, g2 = ∂E/∂v. `GaussianLikelihood` has them in closed
form, with given noise, learned noise, or both.
"""

from dustmap.gp.likelihoods._gaussian import GaussianLikelihood as GaussianLikelihood
from dustmap.gp.likelihoods._likelihood import AbstractLikelihood as AbstractLikelihood
