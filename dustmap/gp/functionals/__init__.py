"""Linear functionals of the field: what a datum observes.

`PointValues` for ordinary regression, `Derivatives` for slopes, `LineIntegrals` for extinctions
(plain, weighted along the ray, or means over segments), `Stacked` for several kinds at once.
`Sharded` is functionals of which every rank of a world holds some; `sky_order` brings rays that see
the same part of a grid together.
`PointMeasure`, a weighted sum over points, is the common form that every functional takes under a
rule: `GaussLegendre` where accuracy counts, `Stratified` for seeded Monte Carlo.
Coordinates are float64 throughout; the covariance estimators choose the dtype of their results.
"""

from dustmap.gp.functionals._functional import AbstractFunctional as AbstractFunctional
from dustmap.gp.functionals._functional import AbstractRows as AbstractRows
from dustmap.gp.functionals._functional import AbstractRule as AbstractRule
from dustmap.gp.functionals._functional import Derivatives as Derivatives
from dustmap.gp.functionals._functional import GaussLegendre as GaussLegendre
from dustmap.gp.functionals._functional import PointMeasure as PointMeasure
from dustmap.gp.functionals._functional import PointValues as PointValues
from dustmap.gp.functionals._functional import SpacedGaussLegendre as SpacedGaussLegendre
from dustmap.gp.functionals._functional import Stratified as Stratified
from dustmap.gp.functionals._rays import FACE_SLACK as FACE_SLACK
from dustmap.gp.functionals._rays import Counts as Counts
from dustmap.gp.functionals._rays import LineIntegrals as LineIntegrals
from dustmap.gp.functionals._rays import Observed as Observed
from dustmap.gp.functionals._rays import OutsidePolicy as OutsidePolicy
from dustmap.gp.functionals._rays import chord as chord
from dustmap.gp.functionals._rays import groups_of as groups_of
from dustmap.gp.functionals._rays import neighbours_together as neighbours_together
from dustmap.gp.functionals._rays import own_rays as own_rays
from dustmap.gp.functionals._rays import responses_of as responses_of
from dustmap.gp.functionals._rays import sky_order as sky_order
from dustmap.gp.functionals._rays import with_responses as with_responses
from dustmap.gp.functionals._rays import without_groups as without_groups
from dustmap.gp.functionals._stacked import Sharded as Sharded
from dustmap.gp.functionals._stacked import Stacked as Stacked
from dustmap.gp.functionals._stacked import by_rows as by_rows
from dustmap.gp.functionals._stacked import gathered as gathered
from dustmap.gp.functionals._stacked import local_of as local_of
from dustmap.gp.functionals._stacked import mapped as mapped
from dustmap.gp.functionals._stacked import operator_by_rows as operator_by_rows
from dustmap.gp.functionals._stacked import own_rows as own_rows
from dustmap.gp.functionals._stacked import whole as whole
from dustmap.gp.functionals._stacked import world_of as world_of
from dustmap.linalg import keyed_normal as keyed_normal
