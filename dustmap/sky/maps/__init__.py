"""Maps of the density: asked of a posterior, written as cubes, read and queried again.

A field (`NodeField`, `PosteriorField`) answers a `MapRequest` for places, rays and whole grids.
`write_map` streams its `Slabs` to cubes of any size; `DustMap` opens them, and is asked at any
coordinates for densities and integrated extinctions.
"""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

if TYPE_CHECKING:
    from dustmap.sky.maps._answers import muted_reports as muted_reports
    from dustmap.sky.maps._dust_map import DustMap as DustMap
    from dustmap.sky.maps._field import AbstractDensityField as AbstractDensityField
    from dustmap.sky.maps._field import FieldTraits as FieldTraits
    from dustmap.sky.maps._field import Planes as Planes
    from dustmap.sky.maps._field import Slabs as Slabs
    from dustmap.sky.maps._field import bytes_per_plane as bytes_per_plane
    from dustmap.sky.maps._field import slab_memory as slab_memory
    from dustmap.sky.maps._nested_field import NestedField as NestedField
    from dustmap.sky.maps._node_field import NodeField as NodeField
    from dustmap.sky.maps._one_grid import finest_grid as finest_grid
    from dustmap.sky.maps._posterior_field import LimitedField as LimitedField
    from dustmap.sky.maps._posterior_field import OwnNodes as OwnNodes
    from dustmap.sky.maps._posterior_field import PosteriorField as PosteriorField
    from dustmap.sky.maps._posterior_field import SurveyReach as SurveyReach
    from dustmap.sky.maps._quantities import MapRequest as MapRequest
    from dustmap.sky.maps._quantities import Quantity as Quantity
    from dustmap.sky.maps._quantities import sure_coverage as sure_coverage
    from dustmap.sky.maps._trilinear import within_box as within_box
    from dustmap.sky.maps._write import form_of as form_of
    from dustmap.sky.maps._write import write_map as write_map
else:
    __getattr__, __dir__ = on_use(__name__)
