"""The figure of `beyond_memory`: throughput, and what rows through beams cost and lose."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipelines.reproduce import _figures as style
from pipelines.reproduce._experiment import Row, number


def draw(rows: Sequence[Row]) -> Figure:
    """Stars a second and core; entries a star; errors of shared rows."""
    figure, (speed, size, error) = style.panels(1, 3, 4.6, 3.2)
    streamed = [row for row in rows if row["part"] in ("ingest", "pass")]
    _bars(speed, streamed, "stars_per_s_and_core", 1e-3)
    style.label(speed, "Throughput of one core", "thousand stars a second", "")
    sharing = [row for row in rows if row["part"] == "sharing"]
    _bars(size, sharing, "entries_per_star", 1.0)
    style.label(size, "Entries of a row, without those of the beams", "entries a star", "")
    lossy = [row for row in sharing if "inner_error_rms" in row]
    _bars(error, lossy, "inner_error_rms", 100.0)
    style.label(error, "Error of a row away from faces, rms", "% of the extinction", "")
    return figure


def _bars(panel: Axes, rows: Sequence[Row], key: str, scale: float) -> None:
    names = [str(row.get("rows_of", row["part"])) for row in rows]
    values = [scale * number(row, key) for row in rows]
    panel.barh(range(len(rows)), values, color=style.BLUE, height=0.6)
    panel.set_yticks(range(len(rows)), names, fontsize=8)
    panel.invert_yaxis()
    for place, value in enumerate(values):
        panel.annotate(f" {value:.3g}", (value, place), va="center", fontsize=8)
    panel.margins(x=0.2)
