"""Variational families q(ε) = N(m, S) over the whitened field, whose prior is N(0, I).

A family is the structure of S. All families are immutable values with the same few operations, so
that inference never asks which one it has:

- `MeanFieldFamily`: diagonal S, for the largest grids; standard deviations are rough.
- `BlockFamily`: S block-diagonal over tiles of the grid (any tile shape, ragged edges allowed).
- `LowRankDiagonalFamily`: S⁻¹ a diagonal plus a matrix of any rank between none and all.
- `FullRankFamily`: unrestricted S, exact for Gaussian noise, for up to ~10⁴ features.
- `KrylovFullRankFamily`: the same without any factorisation, S⁻¹ and solves with it alone.

`family.precision_statistics` sums what data say about S (additive over batches and processes),
`family.posterior` turns the sum into a state, `family.natural_step` moves a state towards it.
"""

from dustmap.gp.families._family import AbstractFamily as AbstractFamily
from dustmap.gp.families._family import AbstractGaussian as AbstractGaussian
from dustmap.gp.families._family import AbstractRootedGaussian as AbstractRootedGaussian
from dustmap.gp.families._family import Divergence as Divergence
from dustmap.gp.families._full_rank import FullRankFamily as FullRankFamily
from dustmap.gp.families._full_rank import FullRankGaussian as FullRankGaussian
from dustmap.gp.families._full_rank import KrylovFullRankFamily as KrylovFullRankFamily
from dustmap.gp.families._full_rank import KrylovFullRankGaussian as KrylovFullRankGaussian
from dustmap.gp.families._full_rank import SolveLog as SolveLog
from dustmap.gp.families._structured import BlockFamily as BlockFamily
from dustmap.gp.families._structured import BlockGaussian as BlockGaussian
from dustmap.gp.families._structured import LowRankDiagonalFamily as LowRankDiagonalFamily
from dustmap.gp.families._structured import LowRankDiagonalGaussian as LowRankDiagonalGaussian
from dustmap.gp.families._structured import MeanFieldFamily as MeanFieldFamily
from dustmap.gp.families._structured import MeanFieldGaussian as MeanFieldGaussian
