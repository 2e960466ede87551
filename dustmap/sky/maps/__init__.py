"""Maps of the density: asked of a posterior, written as cubes, read and queried again.

A field (`NodeField`, `PosteriorField`) answers a `MapRequest` for places, rays and whole grids.
"""

from dustmap.sky.maps._field import AbstractDensityField as AbstractDensityField
from dustmap.sky.maps._field import Planes as Planes
from dustmap.sky.maps._node_field import NodeField as NodeField
from dustmap.sky.maps._posterior_field import OwnNodes as OwnNodes
from dustmap.sky.maps._posterior_field import PosteriorField as PosteriorField
from dustmap.sky.maps._request import MapRequest as MapRequest
from dustmap.sky.maps._request import Quantity as Quantity
