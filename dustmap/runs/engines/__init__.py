"""The engines that fit stars, under one interface, and rounds of uncertain distances."""

from dustmap.runs.engines._bytes import engine_memory as engine_memory
from dustmap.runs.engines._distance_rounds import DistanceFit as DistanceFit
from dustmap.runs.engines._distance_rounds import arrays_of_added as arrays_of_added
from dustmap.runs.engines._distance_rounds import fit_distances as fit_distances
from dustmap.runs.engines._distance_rounds import reopened as reopened
from dustmap.runs.engines._engines import engine_of as engine_of
from dustmap.runs.engines._exact import MOST_ROWS as MOST_ROWS
from dustmap.runs.engines._lognormal import STD as STD
from dustmap.runs.engines._reopened import reopened_config as reopened_config
