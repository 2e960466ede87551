"""Agreement of maps: extinctions of one beside those of others, published ones among them.

A `Comparison` has measured extinctions and their predictions. `compare_maps` pairs the extinctions
of two sources on the same `Segments` of rays; `score_table` scores them by distance and latitude.
`published_source` opens the maps that the dustmaps package queries, which is imported only there.
"""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

if TYPE_CHECKING:
    from dustmap.sky.agreement._scores import Comparison as Comparison
    from dustmap.sky.agreement._scores import Pairs as Pairs
    from dustmap.sky.agreement._scores import Score as Score
    from dustmap.sky.agreement._scores import compare_maps as compare_maps
    from dustmap.sky.agreement._scores import distance_edges as distance_edges
    from dustmap.sky.agreement._scores import score_table as score_table
    from dustmap.sky.agreement._sources import PUBLISHED as PUBLISHED
    from dustmap.sky.agreement._sources import AbstractSource as AbstractSource
    from dustmap.sky.agreement._sources import MapSource as MapSource
    from dustmap.sky.agreement._sources import Published as Published
    from dustmap.sky.agreement._sources import PublishedSource as PublishedSource
    from dustmap.sky.agreement._sources import Segments as Segments
    from dustmap.sky.agreement._sources import published_source as published_source
else:
    __getattr__, __dir__ = on_use(__name__)
