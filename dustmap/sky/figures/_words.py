"""Labels with units, as print has them."""

import re

from dustmap.sky.systems import ExtinctionSystem

GALACTIC_L, GALACTIC_B = "Galactic longitude $l$ [deg]", "Galactic latitude $b$ [deg]"


def symbol_of(system: ExtinctionSystem) -> str:
    """The name of a system: A_V becomes $A_V$, others stay words."""
    name = system.name.removeprefix("custom:")
    head, _, index = name.partition("_")
    if len(head) == 1 and index.isalnum():
        return f"${head}_\\mathrm{{{index}}}$" if len(index) > 1 else f"${head}_{index}$"
    words = name.replace("_", " ").replace("$", "")
    # The minus of a colour, B - V; other hyphens are hyphens.
    return re.sub(r"\((\w+)-(\w+)\)", "(\\1\N{MINUS SIGN}\\2)", words)


def unit_of(system: ExtinctionSystem) -> str:
    """Of extinctions."""
    return "e-folds" if system.name.startswith("e-folding") else "mag"


def density_of(system: ExtinctionSystem) -> str:
    """Symbol of a density."""
    return f"$\\rho$ in {symbol_of(system)}"


def density_unit(system: ExtinctionSystem) -> str:
    """On axes and bars, which count thousandths."""
    return f"$10^{{-3}}$ {unit_of(system)} pc$^{{-1}}$"


def signed(value: float) -> str:
    """+5, −5 and 0, with a minus sign and not a hyphen."""
    return f"{value:+g}".replace("-", "\N{MINUS SIGN}") if value else "0"


def plain(value: float) -> str:
    """5 and −5, with a minus sign."""
    return f"{value:g}".replace("-", "\N{MINUS SIGN}")
