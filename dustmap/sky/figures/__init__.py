"""Pictures of maps: data in, a matplotlib `Figure` out, in the size in which it is printed.

Planes and projections (`slice_figure`, `projection_figure`), the sky at a distance or up to it
(`shell_figure`, `extinction_sky_figure`, on the whole sky or on `Pixels.around` a place), several
of these on one scale (`slices_figure`, `skies_figure`), one line of sight (`line_of_sight_figure`),
and what a map says of stars that it has not seen (`residual_figure`, `calibration_figure`,
`extinction_figure`). `save_figure` writes PNG and PDF.
No window is opened and pyplot is not used.
"""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

if TYPE_CHECKING:
    from dustmap.sky.agreement import Comparison as Comparison
    from dustmap.sky.figures._comparisons import agreement_figure as agreement_figure
    from dustmap.sky.figures._comparisons import calibration_figure as calibration_figure
    from dustmap.sky.figures._comparisons import extinction_figure as extinction_figure
    from dustmap.sky.figures._comparisons import held_out_figure as held_out_figure
    from dustmap.sky.figures._comparisons import residual_figure as residual_figure
    from dustmap.sky.figures._lines_of_sight import BEAM as BEAM
    from dustmap.sky.figures._lines_of_sight import Profile as Profile
    from dustmap.sky.figures._lines_of_sight import Target as Target
    from dustmap.sky.figures._lines_of_sight import busiest_direction as busiest_direction
    from dustmap.sky.figures._lines_of_sight import line_of_sight_figure as line_of_sight_figure
    from dustmap.sky.figures._lines_of_sight import profile_of_field as profile_of_field
    from dustmap.sky.figures._lines_of_sight import profile_of_map as profile_of_map
    from dustmap.sky.figures._panels import CloudMarks as CloudMarks
    from dustmap.sky.figures._planes import Axis as Axis
    from dustmap.sky.figures._planes import projection_figure as projection_figure
    from dustmap.sky.figures._planes import slice_figure as slice_figure
    from dustmap.sky.figures._planes import slices_figure as slices_figure
    from dustmap.sky.figures._sky_images import Pixels as Pixels
    from dustmap.sky.figures._sky_images import extinction_sky_figure as extinction_sky_figure
    from dustmap.sky.figures._sky_images import shell_figure as shell_figure
    from dustmap.sky.figures._sky_images import skies_figure as skies_figure
    from dustmap.sky.figures._style import check_picture as check_picture
    from dustmap.sky.figures._style import save_figure as save_figure
else:
    __getattr__, __dir__ = on_use(__name__)
