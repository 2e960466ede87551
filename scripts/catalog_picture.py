#!/usr/bin/env python3
"""The stars of the Hipparcos catalog of reddening: where they are, and what they say.

    scripts/catalog_picture.py CATALOG PICTURE

Needs an environment in which dustmap is installed.
"""

import argparse
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from astropy.table import Table
from matplotlib.figure import Figure

from dustmap.sky import save_figure

#: Parallax over error of the stars that are drawn at 1/ϖ: others have no place, only odds.
GOOD = 10.0


def main(catalog: str, output: str) -> int:
    """Draw the picture and say where it is."""
    stars = Table.read(catalog, format="ascii.csv")
    l, b, parallax = (np.asarray(stars[n], float) for n in ("l_deg", "b_deg", "parallax_mas"))
    reddening = np.asarray(stars["ebv"], float)
    good = parallax > GOOD * np.asarray(stars["parallax_error_mas"], float)
    figure = Figure(figsize=(7.2, 2.9), layout="constrained", dpi=130)
    sky, depth = figure.subplots(1, 2, width_ratios=(1.5, 1.0))
    # Bins of 3 degrees: the median reddening of the stars in each.
    columns, rows = ((l + 180.0) % 360.0 // 3.0).astype(int), ((b + 90.0) // 3.0).astype(int)
    image = np.full((60, 120), np.nan)
    cell = 120 * np.clip(rows, 0, 59) + columns
    order = np.argsort(cell)
    starts = np.flatnonzero(np.diff(cell[order], prepend=-1))
    for part in np.split(order, starts[1:]):
        image.flat[cell[part[0]]] = np.median(reddening[part])
    shown = sky.imshow(image, origin="lower", extent=(-180, 180, -90, 90), vmin=0.0, vmax=0.3)
    sky.invert_xaxis()
    sky.set_xticks([180, 90, 0, -90, -180], ["180°", "90°", "0°", "270°", "180°"])
    sky.set(xlabel="l", ylabel="b [deg]", aspect="auto")
    sky.set_title(f"median E(B−V) of {len(stars):,} stars", fontsize=9, loc="left")
    figure.colorbar(shown, ax=sky, label="mag", extend="both")
    distance, low = 1000.0 / parallax[good], np.abs(b[good]) < 20.0
    edges = np.arange(0.0, 401.0, 25.0)
    for chosen, colour, name in ((low, "#D55E00", "|b| < 20°"), (~low, "#0072B2", "|b| ≥ 20°")):
        groups = [
            reddening[good][chosen & (distance >= a) & (distance < z)] for a, z in pairwise(edges)
        ]
        places = 0.5 * (edges[1:] + edges[:-1])
        known = [
            (p, *np.percentile(g, (16, 50, 84)))
            for p, g in zip(places, groups, strict=True)
            if len(g) > 20
        ]
        at, p16, p50, p84 = np.transpose(known)
        depth.fill_between(at, p16, p84, color=colour, alpha=0.2, linewidth=0)
        depth.plot(at, p50, "o-", color=colour, markersize=3, label=name)
    depth.set(xlabel="1/ϖ [pc], where ϖ > 10 σ", ylabel="E(B−V) [mag]")
    depth.set_title("median, 16 to 84 %", fontsize=9, loc="left")
    depth.legend(fontsize=7)
    save_figure(figure, Path(output), overwrite=True)
    print(output)
    return 0


if __name__ == "__main__":
    command = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    command.add_argument("catalog", help="catalogs/hipparcos_reddening.csv.gz or one like it")
    command.add_argument("picture", help="a .png or .pdf, which is replaced")
    options = command.parse_args()
    sys.exit(main(options.catalog, options.picture))
