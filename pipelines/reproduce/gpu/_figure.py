"""The figure of `gpu`: products and fits on both devices, and minibatches on their way."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from pipelines.reproduce import _figures as style
from pipelines.reproduce._experiment import Row, number


def draw(rows: Sequence[Row]) -> Figure:
    """Seconds of products against entries, of fits against stars; errors of minibatches."""
    figure, (times, fits, errors) = style.panels(1, 3)
    style.label(times, "One product of the metric", "entries of L", "seconds")
    style.label(fits, "Fits, hyperparameters known", "stars N", "seconds of the fit")
    style.label(
        errors, "Minibatches of 2,000 rays", "seconds of steps", "error of stars, MAE [mag]"
    )
    devices = sorted({str(row["device"]) for row in rows})
    for device, colour in zip(devices, style.COLOURS, strict=False):
        mine = [row for row in rows if row["device"] == device]
        for vectors, marker in ((1, "o"), (8, "s")):
            made = [row for row in mine if row.get("vectors") == vectors]
            times.plot(
                [number(row, "entries") for row in made],
                [number(row, "product_s") for row in made],
                marker,
                color=colour,
                label=f"{device}, {vectors} vector{'s' if vectors > 1 else ''}",
            )
        made = [row for row in mine if row["part"] == "fit"]
        stars, seconds = ([number(row, key) for row in made] for key in ("stars", "fit_s"))
        name = device if device != "cpu" else f"cpu, {made[0]['threads']} threads" if made else ""
        fits.plot(stars, seconds, "o", color=colour, label=name)
    for row, colour in zip(
        (row for row in rows if row["part"] == "minibatches"), style.COLOURS, strict=False
    ):
        way = row["mae_on_the_way"]
        assert isinstance(way, list)
        seconds, mae = ([look[i] for look in way] for i in (0, 1))
        name = f"{row['whitening']}, {row['device']}"
        errors.plot(seconds, mae, "o-", markersize=3, color=colour, label=name)
    errors.legend(frameon=False, fontsize=8, loc="upper right")
    for axes in (times, fits):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    fits.set_xlim(1e5, 1e7)
    fits.set_ylim(1.0, 100.0)
    times.set_xlim(1e6, 1e8)
    times.set_ylim(1e-4, 1.0)
    return figure
