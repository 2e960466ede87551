"""The section [data] of a run configuration: where the data come from, and what is known of them.

Fields are declared as in `dustmap.config._schema`.
"""

from dataclasses import dataclass
from typing import Annotated, final

from dustmap.config._values import (
    Key,
    always,
    boolean,
    card_file,
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

    kind: Annotated[str, Key(choice("stars", "regression"), "a map of dust, or any data")] = "stars"
    catalog: Annotated[
        tuple[str, ...],
        Key(texts(), "the file, or a list of files, with the data; has no default", path=always),
    ] = ()
    schema: Annotated[
        str,
        Key(
            text(),
            "stars: which columns the catalog has: the name of a survey's card, or the path of "
            "your own card.toml",
            path=card_file,
        ),
    ] = "generic"
    system: Annotated[
        str,
        Key(
            text(empty=True),
            "stars: extinction system of the map, such as A_V or custom:NAME; empty for the "
            "catalog's own",
        ),
    ] = ""
    columns: Annotated[
        tuple[tuple[str, str], ...],
        Key(
            names(),
            "stars: the catalog's own names of columns, before those of the card; with a unit "
            "where the file has none",
            table='l = "GLON"\ndistance = "DIST [kpc]"',
        ),
    ] = ()
    cuts: Annotated[
        str, Key(text(), "stars: which of the card's sets of quality cuts; none keeps all rows")
    ] = "default"
    invalid: Annotated[
        str,
        Key(
            choice("", "error", "drop"),
            "stars: what rows that cannot be used do: stop the run, or count and go; empty for "
            "the card's own rule",
        ),
    ] = ""
    distance_prior: Annotated[
        str,
        Key(
            choice("learned", "exponential-density", "flat-parallax"),
            "stars with parallaxes: distribution of distances before they are measured: learned "
            "from all parallaxes of the catalog, selection included; d^2 exp(-d/distance_scale); "
            "or flat in 1/d, which biases maps",
        ),
    ] = "learned"
    distance_max: Annotated[
        float, Key(parsecs(positive=True), "stars with parallaxes: end of that prior", "pc")
    ] = 10_000.0
    distance_scale: Annotated[
        float,
        Key(
            parsecs(positive=True),
            "length over which exponential-density falls by e; where it is learned, its guess",
            "pc",
        ),
    ] = 1350.0
    parallax_zero_point: Annotated[
        float, Key(number(), "subtracted from all parallaxes", "mas")
    ] = 0.0
    holdout: Annotated[
        float,
        Key(number(low=0.0, below=1.0), "part of the rows kept back to judge the fit", "fraction"),
    ] = 0.1
    refit: Annotated[
        bool, Key(boolean(), "once they are scored, make the map from all rows, with these too")
    ] = True
    groups: Annotated[
        str,
        Key(
            text(empty=True),
            "stars: column of text or whole numbers, such as the survey, whose groups each have a "
            "zero point of their own (model.group_std), and a scale where model.group_scale is not "
            "0; empty for none",
        ),
    ] = ""
    magnitude_limit: Annotated[
        float,
        Key(
            number(low=0.0),
            "stars: faintest magnitude of the catalog, in magnitude_band; where the map's dust "
            "would dim all but a tenth of its stars beyond it, coverage is 0; 0 for no limit",
            "mag",
        ),
    ] = 0.0
    magnitude_column: Annotated[
        str,
        Key(
            text(empty=True),
            "stars: column of the apparent magnitudes, which magnitude_limit needs; empty for the "
            "card's own",
        ),
    ] = ""
    magnitude_band: Annotated[
        str,
        Key(text(), "stars: extinction system of these magnitudes, which says how dust dims them"),
    ] = "A_G"
    far_column: Annotated[
        str,
        Key(
            text(empty=True),
            "stars: HEALPix map (FITS) of the extinction all through the Galaxy's dust, which the "
            "map of the run is held to; empty for none",
            path=always,
        ),
    ] = ""
    far_column_kind: Annotated[
        str,
        Key(
            choice("about", "at most"),
            "stars: the column through the box is far_column less what the prior expects behind "
            "the box, give or take; or at most far_column, which takes fit.distance_rounds >= 1",
        ),
    ] = "about"
    far_column_scatter: Annotated[
        float,
        Key(
            number(above=0.0),
            "stars: standard deviation of far_column as a part of it, 0.01 mag at least",
            "fraction",
        ),
    ] = 0.1
    far_column_system: Annotated[
        str,
        Key(text(), "stars: extinction system of far_column, such as A_V or E(B-V)_SFD"),
    ] = "E(B-V)"
    far_column_factor: Annotated[
        float,
        Key(
            number(above=0.0),
            "stars: on the numbers of far_column, which makes them magnitudes of that system",
        ),
    ] = 1.0
    far_column_nside: Annotated[
        int,
        Key(
            power_of_two(1024),
            "stars: HEALPix nside to whose pixels far_column is averaged, a datum each",
        ),
    ] = 32
    truth: Annotated[
        str,
        Key(
            text(empty=True),
            "stars: true density (zarr) drawn beside the map; may be empty",
            path=always,
        ),
    ] = ""
    tile: Annotated[
        str,
        Key(
            sky_tile((1, 2, 4)),
            "stars: NSIDE/PIXEL, such as 2/17, maps but the cone of this HEALPix pixel (NESTED, "
            "Galactic) within [grid], to be merged with the others; empty for all of it",
        ),
    ] = ""
    tile_margin: Annotated[
        float,
        Key(
            parsecs(low=0.0),
            "around the cone, where stars count too: at least 2 x model.length, which 0 stands for",
            "pc",
        ),
    ] = 0.0
    inputs: Annotated[
        tuple[str, ...], Key(texts(), "regression: the columns to predict from, 1 to 3")
    ] = ()
    target: Annotated[
        str, Key(text(empty=True), "regression: the column to predict, or log(column)")
    ] = ""
    error: Annotated[
        str,
        Key(
            text(empty=True),
            "regression: the column of the target's standard error; may be "
            "empty, then the noise is learned",
        ),
    ] = ""


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
