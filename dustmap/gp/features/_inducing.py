"""What feature maps of inducing points share, however K_uu is whitened."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dustmap.gp._grid import RegularGrid
from dustmap.gp.covariances import AbstractEstimator, ClosedForm, Wrapping
from dustmap.gp.features._base import (
    AbstractFeatureMap,
    products_by_rows,
    residual_variance_by_rows,
)
from dustmap.gp.functionals import AbstractFunctional, PointValues
from dustmap.gp.kernels import AbstractKernel


@dataclass(frozen=True, eq=False)
class AbstractInducingFeatures(AbstractFeatureMap):
    """φ_n = L⁻¹ k_{u,n} of some root L Lᵀ = K_uu + ν I, M_w = M.

    inducing: a grid, or free points (M, D). Points that are an `nn.Parameter` are learned like the
        kernel's: they are among the `parameters`, and rows of point values are differentiable in
        them (rows of other functionals are refused then).
    nugget: ν relative to the kernel's variance. No further jitter is ever added.
    """

    kernel: AbstractKernel
    inducing: RegularGrid | Tensor
    estimator: AbstractEstimator = field(default_factory=ClosedForm)
    wrapping: Wrapping | None = None
    nugget: float = 0.0
    rows_dtype: torch.dtype = torch.float64
    memory: int = 2**28

    def __post_init__(self) -> None:
        if not self.nugget >= 0:
            raise ValueError(
                f"nugget is a fraction of the variance, got {self.nugget}: give 0 or more"
            )
        if isinstance(self.inducing, Tensor):
            _check_points(self.inducing, self.kernel)

    @property
    def n_features(self) -> int:
        inducing = self.inducing
        return inducing.size if isinstance(inducing, RegularGrid) else len(inducing)

    @property
    def dtype(self) -> torch.dtype:
        return self.rows_dtype

    @property
    def points(self) -> Tensor:
        """Inducing points (M, D), float64."""
        return self.inducing.points() if isinstance(self.inducing, RegularGrid) else self.inducing

    @property
    def prefers_products(self) -> bool:
        return False

    def products(self, functional: AbstractFunctional, eps: Tensor) -> Tensor:
        return products_by_rows(self, functional, eps)

    def residual_variance(self, functional: AbstractFunctional) -> Tensor:
        return residual_variance_by_rows(self, functional)

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self.kernel.parameters()
        if isinstance(self.inducing, nn.Parameter):
            yield self.inducing

    def _points_seen(self, functional: AbstractFunctional) -> tuple[Tensor, Tensor] | None:
        """The places x of the data and the points, where K_fu is differentiable in both."""
        z = self.inducing
        if isinstance(z, Tensor) and self.wrapping is None and isinstance(functional, PointValues):
            return functional.x, z
        if isinstance(z, Tensor) and z.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"inducing is a parameter to be learned, but rows of {type(functional).__name__} "
                f"are not differentiable in it: use PointValues without wrapping, or give "
                f"inducing.detach()"
            )
        return None

    def _estimated_cross(self, functional: AbstractFunctional) -> Tensor:
        """K_fu (N, M) as the estimator has it."""
        return self.estimator.cross(
            self.kernel, functional, self.inducing, self.wrapping, self.dtype
        )


def _check_points(points: Tensor, kernel: AbstractKernel) -> None:
    if points.ndim != 2 or points.shape[1] != kernel.dim:
        raise ValueError(
            f"inducing must be (M, {kernel.dim}) like the kernel, got {tuple(points.shape)}"
        )
    if not bool(torch.isfinite(points).all()):
        raise ValueError("inducing must be finite; drop rows with NaN or infinite coordinates")
