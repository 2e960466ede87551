"""Rays through a box with nodes of half a length scale, and the exact posterior of its density."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, ExactGP, GPModel, RegularGrid
from dustmap.gp.covariances import ClosedForm
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, PointValues
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from pipelines.reproduce._experiment import Row

#: Length scale, and mean and standard deviation of the density, 1.5 and 0.5 mag/kpc at ℓ = 0.2 kpc.
LENGTH, MEAN, STD = 1.0, 0.3, 0.1
#: The error of a star, of its expected extinction and at least, in mag.
ERROR, FLOOR = 0.05, 0.01
#: Stars end in this part of the box, of its first axis; beyond it none has been.
SURVEYED = 0.7
PLACES, RAYS = 400, 200
#: A place has been seen where data leave at most so much of the prior's standard deviation.
SEEN = 0.7
SEED = 0


@final
@dataclass(frozen=True)
class Scene:
    """A box of `shape` nodes, ℓ/h = ratio, around an observer, and rays to `stars` places in it."""

    shape: tuple[int, ...]
    stars: int
    ratio: float = 2.0

    @property
    def dim(self) -> int:
        """D."""
        return len(self.shape)

    @property
    def half(self) -> tuple[float, ...]:
        """Half of each side of the box."""
        return tuple(0.5 * LENGTH / self.ratio * (count - 1) for count in self.shape)

    @property
    def grid(self) -> RegularGrid:
        """The nodes."""
        return RegularGrid.from_bounds([-h for h in self.half], self.half, self.shape)

    def as_row(self) -> Row:
        """What identifies it."""
        return {
            "D": self.dim,
            "nodes": list(self.shape),
            "M": self.grid.size,
            "stars": self.stars,
            "ell_over_h": self.ratio,
        }

    def model(self) -> GPModel:
        """Nothing is learned."""
        kernel, mean = Matern32(LENGTH, STD**2, dim=self.dim).fixed(), ConstantMean(MEAN).fixed()
        return GPModel(kernel, mean, GaussianLikelihood())


@final
@dataclass(frozen=True, eq=False)
class Reference:
    """Data of a scene, and the exact posterior's standard deviations.

    places, rays : where they are asked for, of the density and of extinctions
    std_places (P,), std_rays (R,) : of the exact Gaussian process
    seen (P,) : whether data have been near a place
    """

    scene: Scene
    data: Batch
    places: PointValues
    rays: LineIntegrals
    std_places: Tensor
    std_rays: Tensor
    seen: Tensor

    @staticmethod
    @torch.no_grad()
    def of(scene: Scene) -> "Reference":
        """By a dense Cholesky factor of the covariance of the data."""
        generator = torch.Generator().manual_seed(SEED)
        ends, places, others = _drawn(scene, generator)
        stars, rays = (LineIntegrals.from_observer(x) for x in (ends, others))
        expected = MEAN * ends.norm(dim=-1)
        noise = (ERROR * expected).clamp_min(FLOOR).square()
        model = scene.model()
        exact = ExactGP(model.kernel, model.mean, ClosedForm())
        L = torch.linalg.cholesky(exact.covariance(stars) + torch.diag(noise))

        def std(functional: AbstractFunctional) -> Tensor:
            V = torch.linalg.solve_triangular(L, exact.between(functional, stars).mT, upper=False)
            left: Tensor = exact.variance(functional) - V.square().sum(0)
            return left.sqrt()

        points = PointValues(places)
        std_places = std(points)
        seen = std_places <= SEEN * STD
        batch = Batch(stars, expected, noise)
        return Reference(scene, batch, points, rays, std_places, std(rays), seen)

    def ratios(self, std_places: Tensor, std_rays: Tensor) -> Iterator[tuple[str, float]]:
        """Name medians and 90th percentiles of standard deviations over the exact ones, of places
        that there are."""
        places = std_places.double() / self.std_places
        parts = {
            "places": places,
            "seen": places[self.seen],
            "unseen": places[~self.seen],
            "rays": std_rays.double() / self.std_rays,
        }
        for name, ratio in parts.items():
            if len(ratio) == 0:
                continue
            yield f"{name}_median", float(ratio.median())
            yield f"{name}_p90", float(ratio.quantile(0.9))


def _drawn(scene: Scene, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Ends of rays (N, D) in the surveyed part, places (P, D) in the box, ends of other rays."""
    upper = torch.tensor(scene.half, dtype=torch.float64)
    lower = -upper
    surveyed = upper.clone()
    surveyed[0] = lower[0] + SURVEYED * (upper[0] - lower[0])
    counts = ((scene.stars, surveyed), (PLACES, upper), (RAYS, surveyed))
    ends, places, others = (
        lower + (top - lower) * torch.rand(count, scene.dim, dtype=lower.dtype, generator=generator)
        for count, top in counts
    )
    return ends, places, others
