"""The sections of a run configuration but [data]: every key, its type, default, unit and meaning.

A field is declared once, as `name: Annotated[type, parser, meaning, unit] = default`. Reading,
checking, echoing and the commented example all follow from the declaration.
"""

from dataclasses import dataclass
from typing import Annotated, TypeAlias, final

from dustmap.config._values import (
    AUTO,
    BYTES,
    SECONDS,
    automatic,
    boolean,
    choice,
    choice_or_sum,
    choices,
    duration,
    integer,
    memory_size,
    nested_boxes,
    number,
    parsecs,
    power_of_two,
    several,
    with_unit,
)

#: Size and spacing of nested grids in pc, coarsest first.
Boxes: TypeAlias = tuple[tuple[tuple[float, ...], float], ...]
_MATERN = ("matern13", "matern12", "matern32", "matern52", "matern")
#: Formats of maps, and what they hold.
_MAP_FORMATS = ("zarr", "fits")
_MAP_QUANTITIES = ("mean", "std", "median", "p16", "p84", "coverage")
#: Pictures of a run on stars, in the order of its report.
STAR_FIGURES = (
    *("slice", "above", "slices", "shell", "line"),
    *("extinctions", "residuals", "calibration"),
)


@final
@dataclass(frozen=True)
class GridConfig:
    """The box: nodes from center - size/2 to center + size/2, `spacing` apart."""

    center: Annotated[
        tuple[float, ...],
        several(parsecs(), (1, 2, 3), "lengths"),
        "stars: heliocentric Galactic X, Y, Z",
        "pc",
    ] = (0.0, 0.0, 0.0)
    size: Annotated[
        tuple[float, ...],
        several(parsecs(positive=True), (1, 2, 3), "positive lengths"),
        "edge to edge; regression: in the units of the inputs, and around the data where "
        "center, size and spacing are all left out",
        "pc",
    ] = (1000.0, 1000.0, 400.0)
    spacing: Annotated[
        float,
        automatic(parsecs(positive=True), stored=0.0),
        "between neighbouring nodes; stars: auto (0) is the coarsest that leaves out less than "
        "the median star's error, at model.length and model.std, within the memory, and a third of "
        "a shorter length that the stars have, down to 60,000 nodes",
        "pc",
    ] = 20.0
    levels: Annotated[
        Boxes | str,
        nested_boxes(),
        "stars, global engine: several grids around center, each {size, spacing}, finer ones "
        "in coarser ones, whose spacings are multiples; the coarsest is the box, in place of "
        "size and spacing; auto divides size, finest at spacing, by the density of stars with "
        "distance; empty for one grid",
        "pc",
    ] = ()
    around: Annotated[
        Boxes | str,
        nested_boxes(none=True),
        "stars, global engine: grids around the box, coarser and coarser, for the dust there that "
        "its stars see, which no map shows; auto lays up to three, of log-normal densities, while "
        "more than a quarter of the stars are beyond and the memory holds them; none, or a list "
        "as that of levels",
        "pc",
    ] = AUTO
    outside: Annotated[
        str,
        choice("prior", "truncate", "drop", "error"),
        "rays that leave the box, and the grids around it, go on through the prior's dust, or none "
        "(truncate: only where there is none), or the star is left out, or the run stops; "
        "regression drops rows outside it, or stops",
    ] = "prior"

    @property
    def boxes(self) -> Boxes:
        """Size and spacing of every level of the box, coarsest first; of the one grid where there
        are none, or none chosen yet."""
        chosen = () if isinstance(self.levels, str) else self.levels
        return chosen or ((self.size, self.spacing),)

    @property
    def fitted(self) -> Boxes:
        """The same of all grids of a fit: those around the box, and those in it.

        The last one around it may have the spacing of the box, whose nodes it then has.
        """
        around, boxes = self.around, self.boxes
        if isinstance(around, str) or not around:
            return boxes
        return (*around, *boxes[around[-1][1] == boxes[0][1] :])

    @property
    def finest(self) -> float:
        """Spacing of the finest level, or of the one grid."""
        return self.boxes[-1][1]


@final
@dataclass(frozen=True)
class ModelConfig:
    """The prior of the density and the noise of the data."""

    density: Annotated[
        str,
        choice("auto", "lognormal", "gaussian"),
        "distribution of the density; lognormal is positive everywhere and takes stars, the "
        "global engine; auto is lognormal there, else gaussian",
    ] = "auto"
    kernel: Annotated[
        str,
        choice_or_sum("auto", *_MATERN, "squared-exponential", alone=("auto", "matern")),
        "covariance of the density between two places, from rough to smooth; matern has the "
        "smoothness model.nu; auto compares, by held-out patches, matern13 (if lognormal), "
        "matern12 and matern32 for stars; for a regression matern12, matern32, matern52 and, of "
        "more than 1,000 rows in up to four columns, sums of two; and takes the roughest within a "
        "standard error of the best; it is matern32 where length or std is not learned, and on "
        "tiles, which share one kernel; matern32+matern12 and other sums have two scales, which "
        "start at length and a quarter of it with half of the variance each",
    ] = "auto"
    nu: Annotated[
        float,
        number(above=0.0, high=10.0),
        "smoothness, of kernel = matern alone; its power spectrum falls with the power -(2 nu + 3)",
    ] = 1.5
    length: Annotated[float, parsecs(positive=True), "correlation length", "pc"] = 60.0
    std: Annotated[
        float,
        number(low=0.0),
        "standard deviation of the density in mag/pc, of its logarithm if lognormal; 0 leaves "
        "it open: mean_density, or 1 if lognormal",
    ] = 0.0
    mean: Annotated[
        str,
        choice("auto", "constant", "disc", "bubble"),
        "mean of the density (of its logarithm if lognormal); disc falls exponentially with "
        "the distances from its plane, which is learned with the mean if lognormal, and from the "
        "Galactic centre; bubble, if lognormal, has a cavity around the Sun as well, whose depth "
        "is learned with the mean; auto is, of a lognormal density whose mean is learned in a box "
        "that is wider than the cavity, disc or bubble by the stars near the Sun (bubble with "
        "groups); disc if the box is not wider, or the scales of the disc are given; else constant",
    ] = "auto"
    disc_height: Annotated[
        float, parsecs(positive=True), "scale height of the disc, where learning starts", "pc"
    ] = 100.0
    disc_length: Annotated[
        float, parsecs(positive=True), "scale length of the disc, where learning starts", "pc"
    ] = 3000.0
    cavity_radius: Annotated[
        float,
        parsecs(positive=True),
        "of the inner part of the cavity of a bubble; the outer has twice that",
        "pc",
    ] = 60.0
    mean_density: Annotated[
        float,
        number(),
        "the constant, the median if lognormal; where it is learned, a start value (if "
        "lognormal the data give their own)",
        "mag/pc",
    ] = 0.001
    noise: Annotated[
        str,
        choice("auto", "gaussian", "student-t"),
        "distribution of the errors; student-t forgives outliers (stars, engine global); auto "
        "is student-t there, else gaussian",
    ] = "auto"
    scatter: Annotated[
        float,
        number(low=0.0),
        "intrinsic scatter of the extinctions, added in squares to their errors; where it is "
        "learned, a start value",
        "mag",
    ] = 0.0
    relative_scatter: Annotated[
        float,
        number(low=0.0),
        "the same as a part of the extinction that the map expects, so that it grows with it "
        "(a log-normal density only)",
        "fraction",
    ] = 0.0
    group_std: Annotated[
        float,
        number(above=0.0),
        "standard deviation of the zero points of data.groups before the data are seen",
        "mag",
    ] = 0.05
    group_zero: Annotated[
        str,
        choice("prior", "mean"),
        "where zero points begin: each by group_std from 0, or from the mean of all by the "
        "precision of the stars, so that they have nothing in common that dust near the Sun looks "
        "like",
    ] = "mean"
    group_scale: Annotated[
        float,
        number(low=0.0, high=0.5),
        "the same of scales: the extinctions of a group are 1 + s times what the map has, s of "
        "this standard deviation; 0 for no scales",
    ] = 0.0
    learn: Annotated[
        tuple[str, ...],
        choices("auto", "length", "std", "mean", "noise", "scatter", "relative_scatter"),
        "learned from the data (noise is a factor on all errors); auto is the first four, and the "
        "relative scatter of single stars if lognormal",
    ] = ("auto",)
    line_integral: Annotated[
        str,
        choice("table", "quadrature", "monte-carlo"),
        "how covariances of rays are computed (a log-normal density has none)",
    ] = "table"

    @property
    def kernel_name(self) -> str:
        """The kernel by one name, its smoothness included."""
        return f"matern-{self.nu!r}" if self.kernel == "matern" else self.kernel


@final
@dataclass(frozen=True)
class FitConfig:
    """How the posterior is computed."""

    engine: Annotated[
        str,
        choice("auto", "global", "hip", "exact"),
        "global solves once for all rows and draws samples, hip puts inducing points on the "
        "grid and fits a structured posterior, exact is dense and takes 20,000 rows "
        "(rays of more than 300 stars end at their mean distances); auto is global for stars, "
        "and for a regression what predicts best: see engine_choice in its report",
    ] = "auto"
    samples: Annotated[
        int, integer(2), "global: draws from the posterior, which its std is made of"
    ] = 32
    max_steps: Annotated[int, integer(1), "most steps of learning or solving"] = 500
    tolerance: Annotated[
        float,
        number(above=0.0, below=1.0),
        "relative change or residual at which steps end (a log-normal density has its own)",
    ] = 1e-3
    beams: Annotated[
        int,
        power_of_two(1024),
        "lognormal: HEALPix nside of beams from the Sun that all rays of the fit are "
        "interpolated between (predictions and maps are not), 0: every ray has its own cells; "
        "pays from some 300,000 stars on if pixels are about a cell wide at the faces of the "
        "box: 64 for 40 cells from the Sun to them",
    ] = 0
    distance_rounds: Annotated[
        int,
        integer(0, 3),
        "stars with uncertain distances: most times the density found is used to refresh what "
        "they add to the noise; ends when that changes by less than 5 % (mean); with "
        "data.magnitude_limit up to 3 unless it is 0",
    ] = 1
    learn_rows: Annotated[
        int, integer(2), "hip, exact: most rows that take part in learning, drawn at random"
    ] = 500
    seed: Annotated[int, integer(0, 2**62), "of everything random: the same seed, the same run"] = 0
    family: Annotated[
        str,
        choice("auto", "mean-field", "low-rank", "block", "full"),
        "hip: structure of the posterior; auto is full for up to 3,000 inducing points, block "
        "beyond",
    ] = "auto"
    block: Annotated[
        tuple[int, ...],
        several(integer(1), (0, 1, 2, 3), "whole numbers"),
        "hip: nodes a block along each axis; empty for some 256 in all",
    ] = ()
    rank: Annotated[
        int, integer(0), "hip: directions whose correlations the low-rank family keeps"
    ] = 50
    batch: Annotated[int, integer(1), "hip, stars: rows of data a step of epochs"] = 1000
    epochs: Annotated[
        int, integer(0), "hip, stars: natural-gradient passes over the data; 0: in closed form"
    ] = 0
    pcg_steps: Annotated[int, integer(1), "hip, stars: most steps of the solve behind a row"] = 200
    whitening: Annotated[
        str,
        choice("auto", "hip", "torus", "cholesky", "ciq"),
        "hip: root of the prior; auto is cholesky for the full family, else hip for stars and "
        "torus for tables; ciq is slower than the others",
    ] = "auto"


@final
@dataclass(frozen=True)
class ComputeConfig:
    """Where and how it is computed."""

    device: Annotated[str, choice(AUTO, "cpu", "cuda"), "auto is cuda where there is one"] = AUTO
    dtype: Annotated[
        str,
        choice("float32", "float64"),
        "of fields, draws, rows and products; stars, spectra, sums and the exact engine take "
        "float64, maps float32",
    ] = "float32"
    threads: Annotated[
        int | str,
        automatic(integer(0)),
        "processor threads; 0: as many as torch takes; auto: of a run, as many as its products "
        "are fastest with, which it keeps when it goes on (OMP_NUM_THREADS and ranks have a "
        "number already)",
    ] = "auto"
    memory: Annotated[str, memory_size(), "a plan that needs more is refused before it starts"] = (
        "8GiB"
    )
    checkpoint: Annotated[
        str,
        duration(),
        "a run keeps its state when the last one kept is older, by fifty times what that one took "
        'to write as well, for dustmap run --resume; "0 s" keeps every one',
    ] = "20 s"

    timeout: Annotated[
        str,
        duration(),
        "of several ranks: for so long one may keep the others waiting before the run ends",
    ] = "30 min"

    @property
    def timeout_seconds(self) -> float:
        """`timeout` in seconds."""
        return with_unit(self.timeout, SECONDS)

    @property
    def checkpoint_seconds(self) -> float:
        """`checkpoint` in seconds."""
        return with_unit(self.checkpoint, SECONDS)

    @property
    def memory_bytes(self) -> int:
        """`memory` in bytes."""
        return int(with_unit(self.memory, BYTES))


@final
@dataclass(frozen=True)
class ExportConfig:
    """Files that the run writes beside its report."""

    formats: Annotated[tuple[str, ...], choices(*_MAP_FORMATS), "the files map.*"] = _MAP_FORMATS
    quantities: Annotated[
        tuple[str, ...],
        choices(*_MAP_QUANTITIES),
        "of the density, in these files; coverage is the share of the prior variance that "
        "the data removed",
    ] = _MAP_QUANTITIES
    samples: Annotated[int, integer(0), "draws from the posterior in these files; 0 for none"] = 32
    figures: Annotated[
        tuple[str, ...],
        choices(*STAR_FIGURES),
        "stars: pictures in plots/; with any of them view.html, the map to turn and to cut in "
        "a browser",
    ] = STAR_FIGURES
    pdf: Annotated[bool, boolean(), "these pictures as PDF files for print, too"] = False
