"""Where a file came from: what every output carries in its header or attributes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from textwrap import wrap
from typing import Any, final

import h5py
from astropy.io import fits

from dustmap import __version__
from dustmap.sky._streamed_fits import printable
from dustmap.sky.maps._cubes import TILE_CARDS
from dustmap.sky.systems import ExtinctionSystem, conversion

#: Characters that a card of a FITS header holds beside its keyword.
_CARD = 72


@final
@dataclass(frozen=True)
class Provenance:
    """Where a file comes from.

    Attributes
    ----------
    config_sha256 : of the resolved configuration; empty without one
    steps : what was done, a line each
    date, creator
    catalog : what the stars were read from
    seed : of the run or the simulation
    tile : of a part of a sky, what `dustmap merge` asks of it, in values that JSON holds

    Examples
    --------
    >>> Provenance("", ("simulated",), seed=3).metadata()["SEED"]
    3
    """

    config_sha256: str
    steps: tuple[str, ...] = ()
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S"))
    creator: str = f"dustmap {__version__}"
    catalog: tuple[str, ...] = ()
    seed: int | None = None
    tile: Mapping[str, Any] = field(default_factory=dict)

    def metadata(self) -> dict[str, Any]:
        """Return the header of a table; no date, so that the same command gives the same file.

        VERSION, SEED and CONFHASH where there are any, and HISTORY, a list of lines in ASCII.
        """
        known = {"SEED": self.seed, "CONFHASH": self.config_sha256 or None}
        stated = {name: value for name, value in known.items() if value is not None}
        lines = [line for text in self.history() for line in wrap(printable(text), _CARD)]
        return {"VERSION": __version__, **stated, "HISTORY": lines}

    def stamp(self, header: fits.Header, notes: Iterable[str] = ()) -> None:
        """Add DATE, CREATOR, VERSION and HISTORY to a FITS header; `notes` become HISTORY too."""
        header["DATE"] = (self.date, "UTC")
        header["CREATOR"] = "dustmap"
        header["VERSION"] = __version__
        for key, (name, what) in TILE_CARDS.items():
            if name in self.tile:
                header[key] = (self.tile[name], what)
        for line in (*self.history(), *notes):
            header.add_history(printable(line))

    def attributes(self, title: str) -> dict[str, str]:
        """Return what zarr and HDF5 files say of where they come from."""
        return {
            "title": title,
            "source": self.creator,
            "date_created": self.date,
            "history": "\n".join(self.history()),
            "config_sha256": self.config_sha256,
        }

    def history(self) -> tuple[str, ...]:
        """Return the lines of a HISTORY block; the hash has its own: a card holds 72 characters."""
        configured = ("sha256 of the configuration:", self.config_sha256)
        seed = () if self.seed is None else (f"seed: {self.seed}",)
        catalogs = tuple(f"catalog: {name}" for name in self.catalog)
        made = (self.creator, *(configured if self.config_sha256 else ()))
        return (*made, *catalogs, *seed, *self.steps)


def density_cards(
    unit: str, system: ExtinctionSystem, provenance: Provenance, notes: Iterable[str] = ()
) -> fits.Header:
    """Return cards of an image in `unit` ("" for none) of `system`; `notes` become HISTORY too."""
    cards = fits.Header()
    if unit:
        cards["BUNIT"] = unit
    cards["EXTSYS"] = (printable(system.name), "band or curve of the extinction")
    cards.add_comment(printable(f"{system.name}: {system.meaning}"))
    provenance.stamp(cards, notes)
    return cards


def healpix_cards(cards: fits.Header, nside: int) -> fits.Header:
    """Add the cards that say which pixels: NESTED, Galactic."""
    cards = cards.copy()
    cards["NSIDE"] = nside
    cards["ORDERING"] = "NESTED"
    cards["PIXTYPE"] = "HEALPIX"
    cards["COORDSYS"] = ("G", "Galactic")
    cards["FIRSTPIX"] = 0
    cards["LASTPIX"] = 12 * nside**2 - 1
    return cards


def write_attributes(
    target: h5py.File, unit: str, system: ExtinctionSystem, provenance: Provenance, note: str
) -> None:
    """Write units, system and provenance into an HDF5 file."""
    target.attrs.update(provenance.attributes("3D map of the interstellar dust"))
    target.attrs["units"] = unit
    target.attrs["extinction_system"] = system.name
    target.attrs["extinction_meaning"] = system.meaning
    target.attrs["comment"] = note


def conversion_note(source: ExtinctionSystem, target: ExtinctionSystem) -> str:
    """State how numbers of the map became those of the file."""
    if source == target:
        return f"in the system of the map, {source.name}"
    factor = conversion(source, target)
    return f"{target.name} = {factor:.6g} x {source.name}, the system of the map"
