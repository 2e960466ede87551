"""The page that turns, cuts and asks a map in any browser, from one file and without a network.

`view_of` makes a `MapView` of a `DustMap`; it is saved as HTML, or shown by Jupyter. `_volumes`
takes cubes from the map, as fine as a number of bytes allows, and packs them as text; `_page` joins
them with the files of `page/`: HTML, CSS and JavaScript of this package's own.
"""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

if TYPE_CHECKING:
    from dustmap.sky.view._page import MOST_BYTES as MOST_BYTES
    from dustmap.sky.view._page import SAMPLES as SAMPLES
    from dustmap.sky.view._page import MapView as MapView
    from dustmap.sky.view._page import page_of as page_of
    from dustmap.sky.view._page import view_of as view_of
    from dustmap.sky.view._volumes import MOST_VOXELS as MOST_VOXELS
else:
    __getattr__, __dir__ = on_use(__name__)
