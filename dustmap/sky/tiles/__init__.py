"""A sky too large for one fit, in tiles: cones from the Sun, fitted alone and merged.

A `SkyPixel` is a HEALPix pixel, NESTED, in Galactic l and b; a `Tile` its cone with a margin. It
says which stars it needs (`Tile.needs`), on which part of the whole grid (`Tile.part_of`), and with
what weight it counts where tiles overlap (`Tile.influence`). `merged` joins the maps of tiles,
slab by slab.
"""

from dustmap.sky.tiles._merged import MERGE_STEPS as MERGE_STEPS
from dustmap.sky.tiles._merged import Merged as Merged
from dustmap.sky.tiles._merged import TileMap as TileMap
from dustmap.sky.tiles._merged import map_of_tile as map_of_tile
from dustmap.sky.tiles._merged import merged as merged
from dustmap.sky.tiles._tile import SkyPixel as SkyPixel
from dustmap.sky.tiles._tile import Tile as Tile
