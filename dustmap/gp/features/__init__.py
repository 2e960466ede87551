"""Feature maps: f_n = m_n + φ_nᵀ ε + r_n with white ε.

`HIPFeatures` (Wu et al. 2021) whitens gridded inducing points by Toeplitz PCG and a rectangular
circulant root; millions of points. `LocalFeatures` sums kriging weights on the few nodes around
each datum: sparse rows and no solve, for millions of data; `NestedFeatures` does on the finest of
nested grids, and `NodeFeatures` has the same of a field that is known at their nodes.
`TorusFeatures` takes all points of the padded torus as inducing points: no solve at all, tighter
variances, wider rows. `CholeskyFeatures` is the classical whitening for any points, M ≲ 10⁴, which
may be learned and start as `clustered_points` of the data. `CIQFeatures` (Pleiss et al. 2020) takes
the symmetric root instead, by products alone: more points than can be factorised. Nothing
downstream knows which one it got.

`DenseCovariance` has the covariance of few data as a matrix, `JointResiduals` what their features
leave of it. `CellResiduals` draws what a grid leaves out of rays, alike along one beam.
`interpolation` gives the multilinear rows of fields that must stay positive; `Nodes` and `Stencil`
are what local weights are made of.
"""

from dustmap.gp.features._base import AbstractFeatureMap as AbstractFeatureMap
from dustmap.gp.features._base import AbstractGridFeatures as AbstractGridFeatures
from dustmap.gp.features._base import AbstractRowFeatures as AbstractRowFeatures
from dustmap.gp.features._base import Features as Features
from dustmap.gp.features._base import SolveSummary as SolveSummary
from dustmap.gp.features._base import products_by_rows as products_by_rows
from dustmap.gp.features._base import residual_variance_by_rows as residual_variance_by_rows
from dustmap.gp.features._dense_covariance import MOST_KEPT as MOST_KEPT
from dustmap.gp.features._dense_covariance import DenseCovariance as DenseCovariance
from dustmap.gp.features._dense_covariance import JointResiduals as JointResiduals
from dustmap.gp.features._dense_covariance import dense_bytes as dense_bytes
from dustmap.gp.features._dense_covariance import dense_covariance as dense_covariance
from dustmap.gp.features._dense_covariance import different_places as different_places
from dustmap.gp.features._dense_covariance import factor_bytes as factor_bytes
from dustmap.gp.features._dense_covariance import has_dense_covariance as has_dense_covariance
from dustmap.gp.features._dense_covariance import in_float64 as in_float64
from dustmap.gp.features._dense_covariance import lookup_bytes as lookup_bytes
from dustmap.gp.features._dense_covariance import suits_dense as suits_dense
from dustmap.gp.features._dense_covariance import takes_matrix as takes_matrix
from dustmap.gp.features._grouped import GroupedFeatures as GroupedFeatures
from dustmap.gp.features._grouped import field_features as field_features
from dustmap.gp.features._inducing import HIPFeatures as HIPFeatures
from dustmap.gp.features._inducing import clustered_points as clustered_points
from dustmap.gp.features._interpolation import AbstractBeams as AbstractBeams
from dustmap.gp.features._interpolation import BeamExpansion as BeamExpansion
from dustmap.gp.features._interpolation import BeamTable as BeamTable
from dustmap.gp.features._interpolation import beamed_interpolation as beamed_interpolation
from dustmap.gp.features._interpolation import interpolation as interpolation
from dustmap.gp.features._interpolation import interpolation_taps as interpolation_taps
from dustmap.gp.features._interpolation import row_bytes as row_bytes
from dustmap.gp.features._local import LocalFeatures as LocalFeatures
from dustmap.gp.features._local_weights import CellResiduals as CellResiduals
from dustmap.gp.features._local_weights import Taps as Taps
from dustmap.gp.features._nested import KrigingFeatures as KrigingFeatures
from dustmap.gp.features._nested import LevelResiduals as LevelResiduals
from dustmap.gp.features._nested import NestedFeatures as NestedFeatures
from dustmap.gp.features._nested import NodeFeatures as NodeFeatures
from dustmap.gp.features._nested import StencilOrder as StencilOrder
from dustmap.gp.features._nested import residual_draws as residual_draws
from dustmap.gp.features._nested import stencil_order as stencil_order
from dustmap.gp.features._nodes import Nodes as Nodes
from dustmap.gp.features._nodes import in_cells as in_cells
from dustmap.gp.features._nodes import nodes_of as nodes_of
from dustmap.gp.features._operators import ArrangedOperator as ArrangedOperator
from dustmap.gp.features._operators import CrossCovariance as CrossCovariance
from dustmap.gp.features._operators import InverseOperator as InverseOperator
from dustmap.gp.features._operators import ProductOperator as ProductOperator
from dustmap.gp.features._operators import divided_rows as divided_rows
from dustmap.gp.features._operators import rows_made_together as rows_made_together
from dustmap.gp.features._operators import warn_unconverged as warn_unconverged
from dustmap.gp.features._stencil import ORDERS as ORDERS
from dustmap.gp.features._stencil import Stencil as Stencil
from dustmap.gp.features._whitened import CholeskyFeatures as CholeskyFeatures
from dustmap.gp.features._whitened import CIQFeatures as CIQFeatures
from dustmap.gp.features._whitened import TorusFeatures as TorusFeatures
from dustmap.linalg import chunks as chunks
