"""Where schema cards are: `catalogs/` of the repository, or inside the installed package."""

import difflib
import functools
from pathlib import Path

from dustmap.sky.catalogs._card import SchemaCard, read_card
from dustmap.sky.catalogs.readers import CatalogError

_ENDING = ".toml"
_PACKAGE = Path(__file__).resolve().parents[2]


@functools.cache
def card_directory() -> Path:
    """The directory of the cards that come with dustmap."""
    places = (_PACKAGE / "_cards", _PACKAGE.parent / "catalogs")
    for place in places:
        if (place / f"generic{_ENDING}").is_file():
            return place
    raise CatalogError(f"no schema cards in {' or '.join(map(str, places))}; install dustmap again")


def known_cards() -> tuple[str, ...]:
    """The names of the cards that come with dustmap."""
    return tuple(sorted(path.stem for path in card_directory().glob(f"*{_ENDING}")))


def card_named(name: str | Path) -> SchemaCard:
    """A card by its name, or your own by the path of its TOML file."""
    if str(name).endswith(_ENDING):
        return read_card(Path(name), str(name))
    if str(name) not in known_cards():
        close = difflib.get_close_matches(str(name), known_cards(), n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise CatalogError(
            f"schema {str(name)!r} is unknown{hint}; choose {', '.join(known_cards())}, "
            f"or give the path of a card of your own, card{_ENDING}"
        )
    return read_card(card_directory() / f"{name}{_ENDING}", str(name))
