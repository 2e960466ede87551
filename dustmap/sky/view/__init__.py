"""A map in three dimensions: a page for any browser, and a scene for programs that draw.

`view_of` makes a `MapView` of a `DustMap`, which turns, cuts and asks it from one file and without
a network; it is saved as HTML, or shown by Jupyter. `_volumes` takes cubes from the map, as fine as
a number of bytes allows, and packs them as text; `_page` joins them with the files of `page/`:
HTML, CSS and JavaScript of this package's own. `scene_of` makes a `Scene` in binary glTF of
surfaces of constant density (`iso_surface`).
"""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

if TYPE_CHECKING:
    from dustmap.sky.view._glb import Scene as Scene
    from dustmap.sky.view._glb import check_scene as check_scene
    from dustmap.sky.view._glb import scene_at as scene_at
    from dustmap.sky.view._glb import scene_of as scene_of
    from dustmap.sky.view._page import MOST_BYTES as MOST_BYTES
    from dustmap.sky.view._page import SAMPLES as SAMPLES
    from dustmap.sky.view._page import MapView as MapView
    from dustmap.sky.view._page import page_of as page_of
    from dustmap.sky.view._page import view_of as view_of
    from dustmap.sky.view._surfaces import Surface as Surface
    from dustmap.sky.view._surfaces import iso_surface as iso_surface
    from dustmap.sky.view._volumes import MOST_VOXELS as MOST_VOXELS
else:
    __getattr__, __dir__ = on_use(__name__)
