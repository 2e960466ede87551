"""Simulated skies: dust that is known, stars behind it, and catalogs of them like a survey's.

`simulate` draws a `SimulatedSky` from a `SkyModel` and a seed. Its dust is `StructuredDust`
(turbulence, the disc, bubbles such as the Local Bubble), or a draw from the prior of a map
(`LogNormalDust`, `GaussianDust`). Everything is seeded, with a random stream of its own for the
field, the bubbles, the stars and their noise: more stars see the same dust.
"""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

if TYPE_CHECKING:
    from dustmap.sky.simulation._dust import AbstractDust as AbstractDust
    from dustmap.sky.simulation._dust import Bubbles as Bubbles
    from dustmap.sky.simulation._dust import Disc as Disc
    from dustmap.sky.simulation._dust import GaussianDust as GaussianDust
    from dustmap.sky.simulation._dust import LogNormalDust as LogNormalDust
    from dustmap.sky.simulation._dust import StructuredDust as StructuredDust
    from dustmap.sky.simulation._dust import Turbulence as Turbulence
    from dustmap.sky.simulation._sky import Measurements as Measurements
    from dustmap.sky.simulation._sky import Population as Population
    from dustmap.sky.simulation._sky import SimulatedSky as SimulatedSky
    from dustmap.sky.simulation._sky import SkyModel as SkyModel
    from dustmap.sky.simulation._sky import column_density as column_density
    from dustmap.sky.simulation._sky import simulate as simulate
    from dustmap.sky.simulation._sky import write_sky as write_sky
else:
    __getattr__, __dir__ = on_use(__name__)
