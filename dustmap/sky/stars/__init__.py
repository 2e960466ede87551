"""Stars: where they are and how well that is known, their extinctions, and the store of both.

`StarTable` holds checked stars; its `distances` are exact or a distribution per star, with a
survival function sf(d) = P(distance > d); the prior of parallaxes is learned from them
(`ParallaxSample`) or stated. A star store is a zarr v3 group of such tables; a
`SkySorter` brings stars into the order of the sky in bounded memory.
"""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

if TYPE_CHECKING:
    from dustmap.sky.stars._distances import AbstractDistances as AbstractDistances
    from dustmap.sky.stars._distances import ExactDistances as ExactDistances
    from dustmap.sky.stars._distances import GaussianDistances as GaussianDistances
    from dustmap.sky.stars._distances import ParallaxDistances as ParallaxDistances
    from dustmap.sky.stars._distances import PercentileDistances as PercentileDistances
    from dustmap.sky.stars._learned_prior import LearnedPrior as LearnedPrior
    from dustmap.sky.stars._learned_prior import ParallaxSample as ParallaxSample
    from dustmap.sky.stars._priors import AbstractDistancePrior as AbstractDistancePrior
    from dustmap.sky.stars._priors import ExponentialDensity as ExponentialDensity
    from dustmap.sky.stars._priors import FlatParallax as FlatParallax
    from dustmap.sky.stars._priors import ToLearn as ToLearn
    from dustmap.sky.stars._priors import prior_named as prior_named
    from dustmap.sky.stars._selection import LEAST as LEAST
    from dustmap.sky.stars._selection import WEIGHT_SCORES as WEIGHT_SCORES
    from dustmap.sky.stars._selection import LuminosityFunction as LuminosityFunction
    from dustmap.sky.stars._selection import SeenPart as SeenPart
    from dustmap.sky.stars._selection import WeightedDistances as WeightedDistances
    from dustmap.sky.stars._selection import distance_modulus as distance_modulus
    from dustmap.sky.stars._selection import weight_nodes as weight_nodes
    from dustmap.sky.stars._selection import well_known as well_known
    from dustmap.sky.stars._store import SKY_ORDER as SKY_ORDER
    from dustmap.sky.stars._store import SkySorter as SkySorter
    from dustmap.sky.stars._store import StarStore as StarStore
    from dustmap.sky.stars._store import StarStoreWriter as StarStoreWriter
    from dustmap.sky.stars._store import open_star_store as open_star_store
    from dustmap.sky.stars._store import star_store as star_store
    from dustmap.sky.stars._table import HAS_MAGNITUDES as HAS_MAGNITUDES
    from dustmap.sky.stars._table import LEAST_ERROR as LEAST_ERROR
    from dustmap.sky.stars._table import StarTable as StarTable
    from dustmap.sky.stars._table import combined as combined
    from dustmap.sky.stars._table import concatenate as concatenate
    from dustmap.sky.stars._table import thinned as thinned
else:
    __getattr__, __dir__ = on_use(__name__)
