"""Stationary kernels.

A kernel is a sum of terms variance · profile(|x / ℓ|); `terms()` hands them to the covariance
estimators. Build one with `Matern` (any smoothness), `Matern13`, `Matern12`, `Matern32`,
`Matern52` or `SquaredExponential` (one length scale, or one per axis), combine with `+` and scale
with `*`. Draws from Matérn-⅓ and Matérn-½ are continuous only; the squared exponential is so smooth
that its covariance on a fine grid is numerically singular. `KERNELS` and `kernel_named` have them
by name, and sums of two. `ProjectedKernel` says how a grid holds the field. A profile of your own
needs a name and `value(r)`, for `StationaryKernel(profile, lengthscale)`.
"""

from dustmap.gp.kernels._kernel import AbstractKernel as AbstractKernel
from dustmap.gp.kernels._kernel import KernelTerm as KernelTerm
from dustmap.gp.kernels._kernel import ProjectedKernel as ProjectedKernel
from dustmap.gp.kernels._kernel import ScaledKernel as ScaledKernel
from dustmap.gp.kernels._kernel import StationaryKernel as StationaryKernel
from dustmap.gp.kernels._kernel import SumKernel as SumKernel
from dustmap.gp.kernels._kernel import folded_densities as folded_densities
from dustmap.gp.kernels._named import KERNELS as KERNELS
from dustmap.gp.kernels._named import Matern as Matern
from dustmap.gp.kernels._named import Matern12 as Matern12
from dustmap.gp.kernels._named import Matern13 as Matern13
from dustmap.gp.kernels._named import Matern32 as Matern32
from dustmap.gp.kernels._named import Matern52 as Matern52
from dustmap.gp.kernels._named import SquaredExponential as SquaredExponential
from dustmap.gp.kernels._named import kernel_named as kernel_named
from dustmap.gp.kernels._named import stationary_named as stationary_named
from dustmap.gp.kernels._profiles import AbstractMatern as AbstractMatern
from dustmap.gp.kernels._profiles import AbstractProfile as AbstractProfile
from dustmap.gp.kernels._profiles import Matern12Profile as Matern12Profile
from dustmap.gp.kernels._profiles import Matern32Profile as Matern32Profile
from dustmap.gp.kernels._profiles import Matern52Profile as Matern52Profile
from dustmap.gp.kernels._profiles import MaternProfile as MaternProfile
from dustmap.gp.kernels._profiles import SquaredExponentialProfile as SquaredExponentialProfile
from dustmap.gp.kernels._radial import TrackTable as TrackTable
