"""Spectral types as numbers: F5 is 35, K0 is 50; luminosity class III is 3, IV/V is 4.5."""

import re
from dataclasses import dataclass
from typing import final

#: A letter is ten times its place here.
LETTERS = "OBAFGKM"
_SUBCLASS = re.compile(r"([OBAFGKM])(\d(?:\.\d)?)(?:[/-]([OBAFGKM])?(\d(?:\.\d)?))?")
_LUMINOSITY = re.compile(r"\s?(III|II|IV|V|I)(?:ab|a|b)?(?:[/-](III|II|IV|V|I)(?:ab|a|b)?)?")
_ROMAN = {"I": 1.0, "II": 2.0, "III": 3.0, "IV": 4.0, "V": 5.0}
#: What may follow and leaves the colour as it is: truncated, uncertain, broad or sharp lines.
_PLAIN = re.compile(r"(?:\.\.\.|:|nn|n|\(n\)|s)*\s*")
#: Two subclasses farther apart than this are no classification.
_APART = 5.0


@final
@dataclass(frozen=True)
class SpectralType:
    """A classification.

    number: ten times the place of the letter in OBAFGKM plus the subclass, the mean of two.
    luminosity: class, the mean of two, or None where there is none. peculiar: emission lines,
    chemical peculiarities, companions and whatever else stands behind, which changes colours.
    """

    number: float
    luminosity: float | None
    peculiar: bool

    @property
    def letter(self) -> str:
        """The letter, such as F."""
        return LETTERS[int(self.number // 10)]


def parse_type(text: str) -> SpectralType | None:
    """Read a spectral type as the Hipparcos Catalogue writes them.

    Parameters
    ----------
    text
        Such as G8III, A9/F0V, K0III/IV, B9.5V or F5.

    Returns
    -------
    SpectralType or None
        None where letter or subclass are missing, or two are more than half a letter apart.

    Examples
    --------
    >>> parse_type("K0III/IV")
    SpectralType(number=50.0, luminosity=3.5, peculiar=False)
    >>> parse_type("A1m...").peculiar
    True
    """
    match = _SUBCLASS.match(text.strip())
    if match is None:
        return None
    letter, first, other, second = match.groups()
    number = _number(letter, first)
    if second is not None:
        end = _number(other or letter, second)
        if abs(end - number) > _APART:
            return None
        number = 0.5 * (number + end)
    rest = text.strip()[match.end() :]
    classed = _LUMINOSITY.match(rest)
    luminosity = None
    if classed is not None:
        one, two = classed.groups()
        luminosity = 0.5 * (_ROMAN[one] + _ROMAN[two or one])
        rest = rest[classed.end() :]
    return SpectralType(number, luminosity, _PLAIN.fullmatch(rest) is None)


def _number(letter: str, subclass: str) -> float:
    return 10.0 * LETTERS.index(letter) + float(subclass)
