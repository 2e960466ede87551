"""What every likelihood supplies to inference."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from dustmap.gp._batch import Batch


class AbstractLikelihood(nn.Module, ABC):
    """p(y_n | f_n) of independent data, averaged over q(f_n) = N(μ_n, v_n).

    All arguments and results are (N,): y, mean μ, variance v, and noise_variance, which is what
    `noise_variance(batch)` returned. A likelihood without noise returns zeros there and ignores it.
    """

    @abstractmethod
    def noise_variance(self, batch: Batch) -> Tensor:
        """σ_n² (N,) of each datum, differentiable in what is learned of it."""

    @abstractmethod
    def expected_log_prob(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        """E_n = E[ln p(y_n | f_n)] under f_n ~ N(μ_n, v_n)."""

    @abstractmethod
    def moment_gradients(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """g1_n = ∂E_n/∂μ_n and g2_n = ∂E_n/∂v_n, without a graph.

        The gradient of the data term in m is Σ_n g1_n φ_n, and −2 g2_n is the weight of φ_n φ_nᵀ
        in the precision of q.
        """

    @abstractmethod
    def log_predictive_density(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        """ln ∫ p(y_n | f) N(f; μ_n, v_n) df, the score of a held-out datum."""

    @abstractmethod
    def predictive_moments(
        self, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of a new y_n, noise included."""
