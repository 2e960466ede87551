"""Where schema cards are: `catalogs/` of the repository, or inside the installed package."""

import difflib
import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dustmap.sky.catalogs._card import SchemaCard, inherited, parse_card
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


def card_named(name: str | Path, columns: Mapping[str, str] | None = None) -> SchemaCard:
    """A card by its name, or your own by the path of its TOML file.

    columns: by the card's names what the file calls them, which counts before what the card says.
    """
    return parse_card(_content(card_path(name), str(name)), str(name)).with_columns(columns or {})


def card_path(name: str | Path) -> Path:
    """The TOML file of a card."""
    if str(name).endswith(_ENDING):
        return Path(name)
    if str(name) not in known_cards():
        close = difflib.get_close_matches(str(name), known_cards(), n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise CatalogError(
            f"schema {str(name)!r} is unknown{hint}; choose {', '.join(known_cards())}, "
            f"or give the path of a card of your own, card{_ENDING}"
        )
    return card_directory() / f"{name}{_ENDING}"


def _content(path: Path, name: str) -> dict[str, Any]:
    """All keys of a card, with those of the card that it inherits from."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CatalogError(f"{path}: no schema card ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CatalogError(f"card {name}: not a TOML file ({error})") from None
    parent = content.pop("inherits", None)
    if parent is None:
        return content
    if parent not in known_cards() or parent == name:
        others = ", ".join(f'"{card}"' for card in known_cards() if card != name)
        raise CatalogError(f"card {name}: inherits = {parent!r}: expected one of {others}")
    return inherited(content, _content(card_directory() / f"{parent}{_ENDING}", parent))
