"""The sky: star catalogs in, maps of the dust density out.

`read_catalog` gives a checked `StarTable`, `simulate` a sky with its true density beside it. A
density field is written by `write_map`; a `DustMap` opens such files, answers queries and is drawn
by `slice_figure` and its like. The packages below have the rest: `observations` is the only bridge
to `dustmap.gp`, `layouts` writes published maps' files for their readers.
Positions are heliocentric Galactic X, Y, Z in pc, densities mag/pc.
"""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

if TYPE_CHECKING:
    from dustmap.sky._coordinates import cartesian as cartesian
    from dustmap.sky._coordinates import galactic as galactic
    from dustmap.sky._provenance import Provenance as Provenance
    from dustmap.sky.catalogs import Places as Places
    from dustmap.sky.catalogs import SchemaCard as SchemaCard
    from dustmap.sky.catalogs import card_named as card_named
    from dustmap.sky.catalogs import galactic_from_icrs as galactic_from_icrs
    from dustmap.sky.catalogs import ingest as ingest
    from dustmap.sky.catalogs import read_catalog as read_catalog
    from dustmap.sky.figures import Axis as Axis
    from dustmap.sky.figures import extinction_sky_figure as extinction_sky_figure
    from dustmap.sky.figures import line_of_sight_figure as line_of_sight_figure
    from dustmap.sky.figures import profile_of_map as profile_of_map
    from dustmap.sky.figures import projection_figure as projection_figure
    from dustmap.sky.figures import save_figure as save_figure
    from dustmap.sky.figures import shell_figure as shell_figure
    from dustmap.sky.figures import slice_figure as slice_figure
    from dustmap.sky.layouts import LAYOUTS as LAYOUTS
    from dustmap.sky.layouts import LayoutCounts as LayoutCounts
    from dustmap.sky.layouts import read_gtomo as read_gtomo
    from dustmap.sky.maps import DustMap as DustMap
    from dustmap.sky.maps import write_map as write_map
    from dustmap.sky.maps._quantities import add_answers as add_answers
    from dustmap.sky.maps._quantities import labels as labels
    from dustmap.sky.maps._quantities import unit_of as unit_of
    from dustmap.sky.observations import Observations as Observations
    from dustmap.sky.simulation import Turbulence as Turbulence
    from dustmap.sky.simulation import column_density as column_density
    from dustmap.sky.simulation import simulate as simulate
    from dustmap.sky.stars import StarTable as StarTable
    from dustmap.sky.stars import open_star_store as open_star_store
    from dustmap.sky.stars import star_store as star_store
    from dustmap.sky.view import MapView as MapView
    from dustmap.sky.view import view_of as view_of
    from dustmap.tables._outputs import check_enclosed as check_enclosed
    from dustmap.tables._outputs import check_output as check_output
    from dustmap.tables._outputs import refuse_inputs as refuse_inputs
else:
    __getattr__, __dir__ = on_use(__name__)
