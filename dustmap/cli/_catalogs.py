"""dustmap catalogs: the schema cards that come along."""

import argparse
import sys

from dustmap.cli._exit import DONE, BadInput, checking_input
from dustmap.cli._parser import Commands, add_json, new
from dustmap.cli._tell import tell


def add(commands: Commands) -> None:
    command = new(
        commands,
        "catalogs",
        "list the schema cards of catalogs, or print one",
        "catalogs",
        "catalogs zgr23 > mine.toml",
    )
    command.add_argument("card", metavar="NAME", nargs="?", help="the card to print, as TOML")
    add_json(command)


def execute(options: argparse.Namespace) -> int:
    from dustmap.sky.catalogs import card_named, card_path, known_cards

    if options.card is not None and options.json:
        raise BadInput("catalogs: --json is for the list; a card is TOML")
    with checking_input():
        if options.card is not None:
            sys.stdout.write(card_path(options.card).read_text(encoding="utf-8"))
            return DONE
        cards = [card_named(name) for name in known_cards()]
    systems = {card.name: "" if card.system is None else card.system.name for card in cards}
    if options.json:
        tell({c.name: {"title": c.title, "system": systems[c.name]} for c in cards}, True)
        return DONE
    width, across = max(map(len, systems)), max(map(len, systems.values()))
    for card in cards:
        sys.stdout.write(f"{card.name:{width}}  {systems[card.name]:{across}}  {card.title}\n")
    return DONE
