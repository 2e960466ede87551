"""Runs of data.kind = "stars": from a catalog to a map of the dust, and the map reopened."""

from dustmap.runs.stars._export import write_in_slabs as write_in_slabs
from dustmap.runs.stars._map import StarMap as StarMap
from dustmap.runs.stars._map import places_of_map as places_of_map
from dustmap.runs.stars._map import reopen_star_map as reopen_star_map
from dustmap.runs.stars._prior_sky import prior_sky as prior_sky
from dustmap.runs.stars._run import prepare_stars as prepare_stars
from dustmap.runs.stars._tile_merge import sky_of_tiles as sky_of_tiles
