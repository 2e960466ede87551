"""One natural step of a full-rank q, by factors of Λ and by solves with Λ alone, against M."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp.families import AbstractFamily, FullRankFamily, KrylovFullRankFamily
from dustmap.gp.features import CholeskyFeatures
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern52
from pipelines.reproduce._experiment import Row
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce.ciq._training import NUGGET

DATA, NOISE, LENGTHSCALE, STEP = 100_000, 0.09, 0.1, 0.01
SIZES, BATCHES = (1000, 2000, 4000, 6000), (64, 256)
QUICK_SIZES, QUICK_BATCHES = (60,), (16,)
#: Rows of the q that a step starts from, as multiples of M.
_SEEN = 1.2
_SEED = 0


def measure(sizes: tuple[int, ...], batches: tuple[int, ...]) -> Iterator[Row]:
    """A row per M, batch and family: seconds of a step with what learning asks of it."""
    for m in sizes:
        features = CholeskyFeatures(
            Matern52(LENGTHSCALE, 1.0, dim=3), _uniform(m, 0), nugget=NUGGET
        )
        seen = _rows(features, round(_SEEN * m), 1)
        start = FullRankFamily(m).zero_statistics()
        weight = DATA / (len(seen) * NOISE)
        FullRankFamily(m).precision_statistics(seen, seen.new_full((len(seen),), weight), start)
        del seen
        for batch in batches:
            phi, reference = _rows(features, batch, 2), None
            for name in ("factors", "solves"):
                family = FullRankFamily(m) if name == "factors" else KrylovFullRankFamily(m)
                found, seconds = stopwatch(_Step(family, start, phi))
                reference = found if reference is None else reference
                error = float((found / reference - 1.0).abs().max())
                row: Row = {"part": "natural", "method": name, "M": m, "batch": batch}
                yield {**row, "step_s": seconds, "error": error, **_solved(family)}


@final
@dataclass(frozen=True, eq=False)
class _Step:
    """From a q of given statistics (M, M), with the rows φ (B, M) of a minibatch.

    φᵀSφ before and after, Λ' = (1 − l) Λ + l (I + φᵀ W φ), and S' g for the mean.
    """

    family: AbstractFamily
    start: Tensor
    phi: Tensor

    @torch.no_grad()
    def __call__(self) -> Tensor:
        family, phi = self.family, self.phi
        mean = phi.new_zeros(phi.shape[1])
        before = family.posterior(mean, self.start)
        before.quadratic(phi)
        weights = phi.new_full((len(phi),), DATA / (len(phi) * NOISE))
        statistics = family.precision_statistics(phi, weights)
        return family.natural_step(before, phi.sum(0), statistics, STEP, STEP).quadratic(phi)


def _solved(family: AbstractFamily) -> Row:
    if not isinstance(family, KrylovFullRankFamily):
        return {"J": None, "unconverged": None}
    return {"J": family.log.steps, "unconverged": family.log.unconverged}


def _uniform(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED + seed)
    return torch.rand((count, 3), dtype=torch.float64, generator=generator)


@torch.no_grad()
def _rows(features: CholeskyFeatures, count: int, seed: int) -> Tensor:
    return features.rows(PointValues(_uniform(count, seed))).phi
