"""The section [data] of a run configuration: where the data come from, and what is known of them.

Fields are declared as in `dustmap.config._schema`.
"""

from dataclasses import dataclass
from typing import Annotated, final

from dustmap.config._values import (
    boolean,
    choice,
    names,
    number,
    parsecs,
    power_of_two,
    shown,
    sky_tile,
    text,
    texts,
)
from dustmap.errors import UserError


@final
@dataclass(frozen=True)
class DataConfig:
    """Where the data come from."""

    kind: Annotated[str, choice("stars", "regression"), "a map of dust, or any data"] = "stars"
    catalog: Annotated[
        tuple[str, ...],
        texts(paths="*"),
        "the file, or a list of files, with the data; has no default",
    ] = ()
    schema: Annotated[
        str,
        text(paths="*.toml"),
        "stars: which columns the catalog has: the name of a survey's card, or the path of "
        "your own card.toml",
    ] = "generic"
    system: Annotated[
        str,
        text(empty=True),
        "stars: extinction system of the map, such as A_V or custom:NAME; empty for the "
        "catalog's own",
    ] = ""
    columns: Annotated[
        tuple[tuple[str, str], ...],
        names('l = "GLON"\ndistance = "DIST [kpc]"'),
        "stars: the catalog's own names of columns, before those of the card; with a unit "
        "where the file has none",
    ] = ()
    cuts: Annotated[
        str, text(), "stars: which of the card's sets of quality cuts; none keeps all rows"
    ] = "default"
    invalid: Annotated[
        str,
        choice("", "error", "drop"),
        "stars: what rows that cannot be used do: stop the run, or count and go; empty for "
        "the card's own rule",
    ] = ""
    distance_prior: Annotated[
        str,
        choice("learned", "exponential-density", "flat-parallax"),
        "stars with parallaxes: distribution of distances before they are measured: learned from "
        "parallaxes of the catalog (20,000 at most), selection included; d^2 "
        "exp(-d/distance_scale); or flat in 1/d, which biases maps",
    ] = "learned"
    distance_max: Annotated[
        float, parsecs(positive=True, high=1e12), "stars with parallaxes: end of that prior", "pc"
    ] = 10_000.0
    distance_scale: Annotated[
        float,
        parsecs(positive=True),
        "length over which exponential-density falls by e; where it is learned, its guess",
        "pc",
    ] = 1350.0
    parallax_zero_point: Annotated[float, number(), "subtracted from all parallaxes", "mas"] = 0.0
    holdout: Annotated[
        float, number(low=0.0, below=1.0), "part of the rows kept back to judge the fit", "fraction"
    ] = 0.1
    refit: Annotated[
        bool, boolean(), "once they are scored, make the map from all rows, with these too"
    ] = True
    groups: Annotated[
        str,
        text(empty=True),
        "stars: column of text or whole numbers, such as the survey, whose groups each have a "
        "zero point of their own (model.group_std), and a scale where model.group_scale is not "
        "0; empty for none",
    ] = ""
    combine: Annotated[
        float,
        number(low=0.0, high=4.0),
        "stars: width of cells, in spacings of the nodes there, whose stars make one datum, "
        "their mean; 1 for millions of stars; 0: every star is one. Not with model.scatter or "
        "model.relative_scatter, which are of single stars",
        "spacings",
    ] = 0.0
    magnitude_limit: Annotated[
        float,
        number(low=0.0),
        "stars: faintest magnitude of the catalog, in magnitude_band; where the map's dust "
        "would dim all but a tenth of its stars beyond it, coverage is 0; 0 for no limit",
        "mag",
    ] = 0.0
    magnitude_column: Annotated[
        str,
        text(empty=True),
        "stars: column of the apparent magnitudes, which magnitude_limit needs; empty for the "
        "card's own",
    ] = ""
    magnitude_band: Annotated[
        str, text(), "stars: extinction system of these magnitudes, which says how dust dims them"
    ] = "A_G"
    magnitude_weights: Annotated[
        bool,
        boolean(),
        "stars: with a magnitude_limit, weight uncertain distances by the part of the stars "
        "that is seen behind the map's dust, refreshed with fit.distance_rounds",
    ] = True
    far_column: Annotated[
        str,
        text(empty=True, paths="*"),
        "stars: HEALPix map (FITS) of the extinction all through the Galaxy's dust, which the "
        "map of the run is held to; empty for none",
    ] = ""
    far_column_kind: Annotated[
        str,
        choice("about", "at most"),
        "stars: the column through the box is far_column less what the prior expects behind "
        "the box, give or take; or at most far_column, which takes fit.distance_rounds >= 1",
    ] = "about"
    far_column_scatter: Annotated[
        float,
        number(above=0.0),
        "stars: standard deviation of far_column as a part of it, 0.01 mag at least",
        "fraction",
    ] = 0.1
    far_column_system: Annotated[
        str, text(), "stars: extinction system of far_column, such as A_V or E(B-V)_SFD"
    ] = "E(B-V)"
    far_column_factor: Annotated[
        float,
        number(above=0.0),
        "stars: on the numbers of far_column, which makes them magnitudes of that system",
    ] = 1.0
    far_column_nside: Annotated[
        int,
        power_of_two(1024),
        "stars: HEALPix nside to whose pixels far_column is averaged, a datum each",
    ] = 32
    truth: Annotated[
        str,
        text(empty=True, paths="*"),
        "stars: true density (zarr) drawn beside the map; may be empty",
    ] = ""
    tile: Annotated[
        str,
        sky_tile((1, 2, 4)),
        "stars: NSIDE/PIXEL, such as 2/17, maps but the cone of this HEALPix pixel (NESTED, "
        "Galactic) within [grid], to be merged with the others; empty for all of it",
    ] = ""
    tile_margin: Annotated[
        float,
        parsecs(low=0.0),
        "around the cone, where stars count too: at least 2 x model.length, which 0 stands for",
        "pc",
    ] = 0.0
    inputs: Annotated[
        tuple[str, ...], texts(), "regression: the columns to predict from, 1 to 3"
    ] = ()
    target: Annotated[
        str, text(empty=True), "regression: the column to predict, or log(column)"
    ] = ""
    error: Annotated[
        str,
        text(empty=True),
        "regression: the column of the target's standard error, of log(column) that of the "
        "logarithm; may be empty, then the noise is learned",
    ] = ""

    @property
    def weights_distances(self) -> bool:
        """Whether uncertain distances are weighted by what a magnitude limit leaves."""
        return self.magnitude_limit > 0.0 and self.magnitude_weights


def check_combined(data: DataConfig) -> None:
    """Refuse means of what is not stars, and of stars whose magnitudes count."""
    if data.combine == 0.0:
        return
    combine = f"data.combine = {data.combine:g}"
    if data.kind != "stars":
        raise UserError(f'{combine} is for data.kind = "stars": leave it out')
    for key, asks in (("magnitude_limit", "the magnitude"), ("tile", "the place")):
        if getattr(data, key):
            raise UserError(
                f"{combine} does not go with data.{key}, which asks for {asks} of every star: "
                "leave one of them out"
            )


def check_column(data: DataConfig, rounds: int) -> None:
    """Refuse a far column of what has none, and one that no fit would be held to."""
    if not data.far_column:
        return
    column = f"data.far_column = {shown(data.far_column)}"
    if data.kind != "stars":
        raise UserError(f'{column} is for data.kind = "stars": leave it out')
    for key in ("groups", "tile"):
        if getattr(data, key):
            raise UserError(f"{column} does not go with data.{key}: leave one of them out")
    if data.far_column_nside == 0:
        raise UserError("data.far_column_nside = 0: expected a power of two from 1 on")
    if data.far_column_kind == "at most" and rounds == 0:
        raise UserError(
            f'{column}: data.far_column_kind = "at most" holds down what an earlier fit has above '
            "it: set fit.distance_rounds to 1 or more"
        )
