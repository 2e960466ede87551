"""The sections [compute] and [export]: where a run computes, and what it writes."""

from dataclasses import dataclass
from typing import Annotated, final

from dustmap.config._values import (
    Key,
    boolean,
    bytes_of,
    choice,
    choices,
    duration,
    integer,
    integer_or_auto,
    memory_size,
    seconds_of,
)

#: Pictures of a run on stars, in the order of its report.
STAR_FIGURES = (
    *("slice", "above", "slices", "shell", "line"),
    *("extinctions", "residuals", "calibration"),
)


@final
@dataclass(frozen=True)
class ComputeConfig:
    """Where and how it is computed."""

    device: Annotated[
        str, Key(choice("auto", "cpu", "cuda"), "auto is cuda where there is one")
    ] = "auto"
    dtype: Annotated[
        str,
        Key(
            choice("float32", "float64"),
            "of fields, draws, rows and products; stars, spectra, sums and the exact engine take "
            "float64, maps float32",
        ),
    ] = "float32"
    threads: Annotated[
        int | str,
        Key(
            integer_or_auto(0),
            "processor threads; 0: as many as torch takes; auto: of a run, as many as its products "
            "are fastest with, which it keeps when it goes on (OMP_NUM_THREADS and ranks have a "
            "number already)",
        ),
    ] = "auto"
    memory: Annotated[
        str, Key(memory_size(), "a plan that needs more is refused before it starts")
    ] = "8GiB"
    checkpoint: Annotated[
        str,
        Key(
            duration(),
            "a run keeps its state when the last one kept is older, for dustmap run --resume; "
            '"0 s" keeps every one, which may cost more than it saves',
        ),
    ] = "5 min"

    timeout: Annotated[
        str,
        Key(
            duration(),
            "of several ranks: for so long one may keep the others waiting before the run ends",
        ),
    ] = "30 min"

    @property
    def timeout_seconds(self) -> float:
        """`timeout` in seconds."""
        return seconds_of(self.timeout)

    @property
    def checkpoint_seconds(self) -> float:
        """`checkpoint` in seconds."""
        return seconds_of(self.checkpoint)

    @property
    def memory_bytes(self) -> int:
        """`memory` in bytes."""
        return bytes_of(self.memory)


@final
@dataclass(frozen=True)
class ExportConfig:
    """What the run writes beside its report."""

    formats: Annotated[tuple[str, ...], Key(choices("zarr", "fits"), "the files map.*")] = (
        "zarr",
        "fits",
    )
    quantities: Annotated[
        tuple[str, ...],
        Key(
            choices("mean", "std", "median", "p16", "p84", "coverage"),
            "of the density, in these files; coverage is the share of the prior variance that "
            "the data removed",
        ),
    ] = ("mean", "std", "median", "p16", "p84", "coverage")
    samples: Annotated[
        int, Key(integer(0), "draws from the posterior in these files; 0 for none")
    ] = 32
    figures: Annotated[
        tuple[str, ...],
        Key(
            choices(*STAR_FIGURES),
            "stars: pictures in plots/; with any of them view.html, the map to turn and to cut in "
            "a browser",
        ),
    ] = STAR_FIGURES
    pdf: Annotated[bool, Key(boolean(), "these pictures as PDF files for print, too")] = False
