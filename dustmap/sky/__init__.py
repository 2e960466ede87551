"""The sky: star catalogs in, maps of the dust density out.

`read_catalog` gives a checked `StarTable`, `simulate` a sky with its true density beside it.
`observe` turns stars into the line integrals that `dustmap.gp` understands: the only bridge.
A density field is written by `write_map`; a `DustMap` opens such files, answers queries and is
drawn by `slice_figure` and its like. `write_edenhofer2023` and its like write the layouts of
published maps, for their readers.
Positions are heliocentric Galactic X, Y, Z in pc, densities mag/pc.
"""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

if TYPE_CHECKING:
    from dustmap.sky._coordinates import cartesian as cartesian
    from dustmap.sky._coordinates import galactic as galactic
    from dustmap.sky._provenance import Provenance as Provenance
    from dustmap.sky._tables import add_answers as add_answers
    from dustmap.sky._tables import labels as labels
    from dustmap.sky._tables import unit_of as unit_of
    from dustmap.sky.catalogs import Catalog as Catalog
    from dustmap.sky.catalogs import CatalogError as CatalogError
    from dustmap.sky.catalogs import Counts as Counts
    from dustmap.sky.catalogs import Places as Places
    from dustmap.sky.catalogs import SchemaCard as SchemaCard
    from dustmap.sky.catalogs import card_named as card_named
    from dustmap.sky.catalogs import galactic_from_icrs as galactic_from_icrs
    from dustmap.sky.catalogs import ingest as ingest
    from dustmap.sky.catalogs import known_cards as known_cards
    from dustmap.sky.catalogs import read_catalog as read_catalog
    from dustmap.sky.catalogs import read_places as read_places
    from dustmap.sky.figures import BEAM as BEAM
    from dustmap.sky.figures import Axis as Axis
    from dustmap.sky.figures import Comparison as Comparison
    from dustmap.sky.figures import Pixels as Pixels
    from dustmap.sky.figures import Profile as Profile
    from dustmap.sky.figures import busiest_direction as busiest_direction
    from dustmap.sky.figures import calibration_figure as calibration_figure
    from dustmap.sky.figures import check_picture as check_picture
    from dustmap.sky.figures import extinction_figure as extinction_figure
    from dustmap.sky.figures import extinction_sky_figure as extinction_sky_figure
    from dustmap.sky.figures import line_of_sight_figure as line_of_sight_figure
    from dustmap.sky.figures import profile_of_field as profile_of_field
    from dustmap.sky.figures import profile_of_map as profile_of_map
    from dustmap.sky.figures import projection_figure as projection_figure
    from dustmap.sky.figures import residual_figure as residual_figure
    from dustmap.sky.figures import save_figure as save_figure
    from dustmap.sky.figures import shell_figure as shell_figure
    from dustmap.sky.figures import slice_figure as slice_figure
    from dustmap.sky.layouts import LAYOUTS as LAYOUTS
    from dustmap.sky.layouts import BayestarOptions as BayestarOptions
    from dustmap.sky.layouts import EdenhoferOptions as EdenhoferOptions
    from dustmap.sky.layouts import GTomoOptions as GTomoOptions
    from dustmap.sky.layouts import HealpixOptions as HealpixOptions
    from dustmap.sky.layouts import LayoutCounts as LayoutCounts
    from dustmap.sky.layouts import LayoutRequest as LayoutRequest
    from dustmap.sky.layouts import LeikeOptions as LeikeOptions
    from dustmap.sky.layouts import RadialBins as RadialBins
    from dustmap.sky.layouts import Shells as Shells
    from dustmap.sky.layouts import read_gtomo as read_gtomo
    from dustmap.sky.layouts import write_bayestar as write_bayestar
    from dustmap.sky.layouts import write_edenhofer2023 as write_edenhofer2023
    from dustmap.sky.layouts import write_gtomo as write_gtomo
    from dustmap.sky.layouts import write_healpix as write_healpix
    from dustmap.sky.layouts import write_leike2020 as write_leike2020
    from dustmap.sky.maps import AbstractDensityField as AbstractDensityField
    from dustmap.sky.maps import DustMap as DustMap
    from dustmap.sky.maps import MapRequest as MapRequest
    from dustmap.sky.maps import NodeField as NodeField
    from dustmap.sky.maps import OwnNodes as OwnNodes
    from dustmap.sky.maps import Planes as Planes
    from dustmap.sky.maps import PosteriorField as PosteriorField
    from dustmap.sky.maps import Quantity as Quantity
    from dustmap.sky.maps import Slabs as Slabs
    from dustmap.sky.maps import write_map as write_map
    from dustmap.sky.observations import DistanceSpread as DistanceSpread
    from dustmap.sky.observations import Observations as Observations
    from dustmap.sky.observations import SightLines as SightLines
    from dustmap.sky.observations import observe as observe
    from dustmap.sky.observations import predict_extinction as predict_extinction
    from dustmap.sky.observations import sight_lines as sight_lines
    from dustmap.sky.simulation import AbstractDust as AbstractDust
    from dustmap.sky.simulation import Bubbles as Bubbles
    from dustmap.sky.simulation import Disc as Disc
    from dustmap.sky.simulation import GaussianDust as GaussianDust
    from dustmap.sky.simulation import LogNormalDust as LogNormalDust
    from dustmap.sky.simulation import Measurements as Measurements
    from dustmap.sky.simulation import Population as Population
    from dustmap.sky.simulation import SimulatedSky as SimulatedSky
    from dustmap.sky.simulation import SkyModel as SkyModel
    from dustmap.sky.simulation import StructuredDust as StructuredDust
    from dustmap.sky.simulation import Turbulence as Turbulence
    from dustmap.sky.simulation import column_density as column_density
    from dustmap.sky.simulation import simulate as simulate
    from dustmap.sky.simulation import write_sky as write_sky
    from dustmap.sky.stars import AbstractDistancePrior as AbstractDistancePrior
    from dustmap.sky.stars import AbstractDistances as AbstractDistances
    from dustmap.sky.stars import ExactDistances as ExactDistances
    from dustmap.sky.stars import ExponentialDensity as ExponentialDensity
    from dustmap.sky.stars import FlatParallax as FlatParallax
    from dustmap.sky.stars import GaussianDistances as GaussianDistances
    from dustmap.sky.stars import ParallaxDistances as ParallaxDistances
    from dustmap.sky.stars import PercentileDistances as PercentileDistances
    from dustmap.sky.stars import StarTable as StarTable
    from dustmap.sky.stars import concatenate as concatenate
    from dustmap.sky.stars import learn_prior as learn_prior
    from dustmap.sky.stars import open_star_store as open_star_store
    from dustmap.sky.stars import read_star_store as read_star_store
    from dustmap.sky.stars import star_store as star_store
    from dustmap.sky.systems import ExtinctionSystem as ExtinctionSystem
    from dustmap.sky.systems import conversion as conversion
    from dustmap.sky.systems import known_systems as known_systems
    from dustmap.sky.systems import system_named as system_named
    from dustmap.tables._outputs import check_enclosed as check_enclosed
    from dustmap.tables._outputs import check_output as check_output
    from dustmap.tables._outputs import refuse_inputs as refuse_inputs
else:
    __getattr__, __dir__ = on_use(__name__)
