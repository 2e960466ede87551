"""What arrays and images are called in files, and how they are described."""

from dataclasses import dataclass
from typing import final

from dustmap.sky.maps._request import Quantity

UNIT = "mag.pc-1"  # parses as FITS, VOUnit, CDS and generic unit; `mag pc-1` does not in CDS
FRAME = "heliocentric Galactic cartesian: +X to l=0, +Y to l=90 deg, +Z to b=90 deg"
TITLE = "3D map of the interstellar dust density"
#: How percentiles come about, by whether the density is positive.
PERCENTILES_OF = {
    True: "log-normal: exp(mean + z std) of ln density over the samples",
    False: "normal: mean + z std of the density",
}


@final
@dataclass(frozen=True)
class Described:
    """extension: of FITS, the names that readers of published maps look for (the dot of the
    second belongs to it); a sample's has its number behind. variable: of zarr."""

    extension: str
    variable: str
    meaning: str
    unit: str
    ucd: str


DESCRIPTIONS = {
    Quantity.MEAN: Described(
        "MEAN",
        "density_mean",
        "posterior mean of the dust density",
        UNIT,
        "phys.absorption;stat.mean",
    ),
    Quantity.STD: Described(
        "STD.",
        "density_std",
        "posterior standard deviation of the dust density",
        UNIT,
        "stat.stdev;phys.absorption",
    ),
    Quantity.MEDIAN: Described(
        "MEDIAN",
        "density_median",
        "posterior median of the dust density",
        UNIT,
        "phys.absorption;stat.median",
    ),
    Quantity.P16: Described(
        "P16", "density_p16", "16th percentile of the dust density", UNIT, "phys.absorption"
    ),
    Quantity.P84: Described(
        "P84", "density_p84", "84th percentile of the dust density", UNIT, "phys.absorption"
    ),
    Quantity.COVERAGE: Described(
        "COVERAGE",
        "coverage",
        "1 - posterior variance / prior variance; the data dominate above 0.5",
        "",
        "stat.value",
    ),
    Quantity.SAMPLES: Described(
        "SAMPLE",
        "density_samples",
        "posterior samples of the dust density",
        UNIT,
        "phys.absorption",
    ),
}


def axis_meaning(name: str) -> str:
    """Of the axis x, y or z."""
    return f"heliocentric Galactic {name.upper()}"


def sample_extension(sample: int) -> str:
    """SAMPLE_01 for the first."""
    return f"{DESCRIPTIONS[Quantity.SAMPLES].extension}_{sample + 1:02d}"
