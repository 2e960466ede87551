"""Clouds: the dense structures of a map, with errors from its samples, and known clouds' names.

`find_clouds` takes a `DustMap`; its result has a `table`. Structures are watersheds of the mean
density (`structures_of`).
"""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

if TYPE_CHECKING:
    from dustmap.sky.clouds._clouds import Clouds as Clouds
    from dustmap.sky.clouds._clouds import Forms as Forms
    from dustmap.sky.clouds._clouds import find_clouds as find_clouds
    from dustmap.sky.clouds._clouds import solar_masses as solar_masses
    from dustmap.sky.clouds._structures import Criteria as Criteria
    from dustmap.sky.clouds._structures import NamedPlaces as NamedPlaces
    from dustmap.sky.clouds._structures import Structures as Structures
    from dustmap.sky.clouds._structures import dense_regions as dense_regions
    from dustmap.sky.clouds._structures import structures_of as structures_of
else:
    __getattr__, __dir__ = on_use(__name__)
