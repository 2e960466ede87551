"""Layouts of published dust maps, so that their readers open ours.

Each writer streams a density field, `write_X(path, field, options, provenance, overwrite)`, and
returns the counts of what was outside the box or raised to a floor.
"""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

if TYPE_CHECKING:
    from dustmap.sky.layouts._formats import LAYOUTS as LAYOUTS
    from dustmap.sky.layouts._formats import GTomoOptions as GTomoOptions
    from dustmap.sky.layouts._formats import LayoutRequest as LayoutRequest
    from dustmap.sky.layouts._formats import LeikeOptions as LeikeOptions
    from dustmap.sky.layouts._formats import read_gtomo as read_gtomo
    from dustmap.sky.layouts._formats import write_gtomo as write_gtomo
    from dustmap.sky.layouts._formats import write_leike2020 as write_leike2020
    from dustmap.sky.layouts._places import LayoutCounts as LayoutCounts
    from dustmap.sky.layouts._places import RadialBins as RadialBins
    from dustmap.sky.layouts._places import Shells as Shells
    from dustmap.sky.layouts._shells import BayestarOptions as BayestarOptions
    from dustmap.sky.layouts._shells import EdenhoferOptions as EdenhoferOptions
    from dustmap.sky.layouts._shells import HealpixOptions as HealpixOptions
    from dustmap.sky.layouts._shells import write_bayestar as write_bayestar
    from dustmap.sky.layouts._shells import write_edenhofer2023 as write_edenhofer2023
    from dustmap.sky.layouts._shells import write_healpix as write_healpix
else:
    __getattr__, __dir__ = on_use(__name__)
