"""Likelihoods p(y_n | f_n), one datum at a time.

Inference needs two moments of q(f_n) = N(μ_n, v_n) only, and asks the likelihood for the expected
log-probability and its derivatives g1 = ∂E/∂μ, g2 = ∂E/∂v.

- `GaussianLikelihood`: given noise, learned noise, or both; closed forms.
- `StudentTLikelihood`: noise with outliers, of learned width and tails; its predictions are a
  `NormalMixture`.
- `BernoulliLikelihood`: two classes, with the links of `BernoulliLink`.
- `PoissonLikelihood`: counts of rate e^f; closed forms but for the predictive density.

What has no closed form is summed over the nodes of `SinhTrapezoid`, whose nodes follow the bend of
ln p, so that it is about as exact for a wide q as for a narrow one.
"""

from dustmap.gp.likelihoods._likelihood import AbstractLikelihood as AbstractLikelihood
from dustmap.gp.likelihoods._likelihood import BernoulliLikelihood as BernoulliLikelihood
from dustmap.gp.likelihoods._likelihood import BernoulliLink as BernoulliLink
from dustmap.gp.likelihoods._likelihood import PoissonLikelihood as PoissonLikelihood
from dustmap.gp.likelihoods._likelihood import SinhTrapezoid as SinhTrapezoid
from dustmap.gp.likelihoods._noise import GaussianLikelihood as GaussianLikelihood
from dustmap.gp.likelihoods._noise import NormalMixture as NormalMixture
from dustmap.gp.likelihoods._noise import StudentTLikelihood as StudentTLikelihood
from dustmap.gp.likelihoods._noise import mean_size as mean_size
