"""Gaussian processes: what is observed, under which prior, and how the two meet.

`RegularGrid` holds the inducing points. The sub-packages are `kernels` (stationary priors),
`functionals` (point values, derivatives, line integrals) and `covariances` (the covariances of
functionals with grid nodes, with themselves and with each other).
"""

from dustmap.gp._grid import RegularGrid as RegularGrid
