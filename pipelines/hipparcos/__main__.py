"""The command: `python -m pipelines.hipparcos RAW.csv.gz OUTPUT.csv.gz`."""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dustmap.errors import UserError
from pipelines.hipparcos._catalogue import RawStars, Reddenings, reddenings, write
from pipelines.hipparcos._colours import IntrinsicColours


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the catalogue and print the numbers that `catalogs/README.md` states."""
    parser = argparse.ArgumentParser(description="The reddening of Hipparcos stars.")
    parser.add_argument("raw", type=Path, help="the raw table, gzipped CSV")
    parser.add_argument("output", type=Path, help="the catalogue, gzipped CSV")
    options = parser.parse_args(arguments)
    try:
        stars = RawStars.read(options.raw)
    except (OSError, UserError) as error:
        sys.stderr.write(f"hipparcos: error: {error}\n")
        return 2
    catalogue = reddenings(stars, IntrinsicColours.read())
    write(stars, catalogue, options.output)
    sys.stdout.write(summary(catalogue))
    return 0


def summary(catalogue: Reddenings) -> str:
    """Describe the catalogue: the law of parallaxes, counts, and a line for each class."""
    law = catalogue.parallaxes.law
    of_gaia = int(catalogue.parallaxes.of_gaia[catalogue.rows].sum())
    lines = [
        f"sigma(parallax)^2 = ({law.a:.3f}^2 + {law.b:.3f}^2 x 10^(0.4 (Hp - 8)))"
        f" x exp(-2 x {law.c:.3f} (sin^2 beta - 1/2)) mas^2; offset {law.offset:+.3f} mas",
        ", ".join(f"{count} {name}" for name, count in catalogue.counts.items()),
        f"{len(catalogue.rows)} kept, {of_gaia} with Gaia's parallax",
        "class       stars  reference  zero point  slope  spread",
    ]
    stars = Counter(catalogue.classes)
    for name, one in sorted(catalogue.calibrations.items()):
        zero, spread = sorted(one.zero), sorted(one.spread)
        middle = len(zero) // 2
        lines.append(
            f"{name:10} {stars[name]:6d} {one.stars:10d} {zero[middle]:+11.3f} {one.slope:+6.3f}"
            f" {spread[middle]:7.3f}"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
