"""The one bridge from the sky to the Gaussian process: stars become weighted line integrals.

`sight_lines` turns directions and distances into rays, `observe` stars into data. Where distances
are uncertain, a `DistanceSpread` says how much variance that adds to every extinction, and
`distance_posterior` what the extinction says of the distance.
"""

from dustmap.sky.observations._column import ColumnMap as ColumnMap
from dustmap.sky.observations._column import FarColumn as FarColumn
from dustmap.sky.observations._distances import SCORES as SCORES
from dustmap.sky.observations._distances import DistancePosterior as DistancePosterior
from dustmap.sky.observations._distances import DustAlong as DustAlong
from dustmap.sky.observations._distances import SelectionWeights as SelectionWeights
from dustmap.sky.observations._distances import classes_of as classes_of
from dustmap.sky.observations._distances import common_distances as common_distances
from dustmap.sky.observations._distances import distance_nodes as distance_nodes
from dustmap.sky.observations._distances import distance_posterior as distance_posterior
from dustmap.sky.observations._distances import smoothed as smoothed
from dustmap.sky.observations._observe import HealpixBeams as HealpixBeams
from dustmap.sky.observations._observe import Observations as Observations
from dustmap.sky.observations._observe import observe as observe
from dustmap.sky.observations._observe import observe_share as observe_share
from dustmap.sky.observations._places import neighbour_scatter as neighbour_scatter
from dustmap.sky.observations._places import sky_patches as sky_patches
from dustmap.sky.observations._segments import DistanceSpread as DistanceSpread
from dustmap.sky.observations._segments import Moments as Moments
from dustmap.sky.observations._segments import Stops as Stops
from dustmap.sky.observations._sight_lines import BeyondBox as BeyondBox
from dustmap.sky.observations._sight_lines import PriorDust as PriorDust
from dustmap.sky.observations._sight_lines import SightLines as SightLines
from dustmap.sky.observations._sight_lines import predict_extinction as predict_extinction
from dustmap.sky.observations._sight_lines import sight_lines as sight_lines
