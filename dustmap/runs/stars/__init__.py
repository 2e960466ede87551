"""Runs of data.kind = "stars": from a catalog to a map of the dust, and the map reopened.

Start at `_run`: `prepare_stars` reads the stars (`_input`; the tile of a sky, the part of a rank:
`_parts`) and checks them (`_catalog_checks`, `_checks`). `StarRun` plans (`_plan`), fits
(`_distance_rounds` around `_engines`, on what `_model` makes of the configuration), scores and
exports (`_export`). `_map` reopens a finished run.
"""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

if TYPE_CHECKING:
    from dustmap.runs.stars._catalog_checks import store_checks as store_checks
    from dustmap.runs.stars._export import of_no_group as of_no_group
    from dustmap.runs.stars._export import write_in_slabs as write_in_slabs
    from dustmap.runs.stars._input import places_of as places_of
    from dustmap.runs.stars._input import places_of_map as places_of_map
    from dustmap.runs.stars._map import StarMap as StarMap
    from dustmap.runs.stars._map import reopen_star_map as reopen_star_map
    from dustmap.runs.stars._model import prior_sky as prior_sky
    from dustmap.runs.stars._parts import sky_of_tiles as sky_of_tiles
    from dustmap.runs.stars._plan import export_components as export_components
    from dustmap.runs.stars._plan import star_components as star_components
    from dustmap.runs.stars._run import prepare_stars as prepare_stars
else:
    __getattr__, __dir__ = on_use(__name__)
