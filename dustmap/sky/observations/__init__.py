"""The one bridge from the sky to the Gaussian process: stars become weighted line integrals.

`sight_lines` turns directions and distances into rays, `observe` stars into data. Where distances
are uncertain, a `DistanceSpread` says how much variance that adds to every extinction.
"""

from dustmap.sky.observations._healpix_beams import HealpixBeams as HealpixBeams
from dustmap.sky.observations._observe import Observations as Observations
from dustmap.sky.observations._observe import observe as observe
from dustmap.sky.observations._predict import predict_extinction as predict_extinction
from dustmap.sky.observations._sight_lines import NothingSeen as NothingSeen
from dustmap.sky.observations._sight_lines import SightLines as SightLines
from dustmap.sky.observations._sight_lines import sight_lines as sight_lines
from dustmap.sky.observations._spread import DistanceSpread as DistanceSpread
