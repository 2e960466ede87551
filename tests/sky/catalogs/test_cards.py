"""Schema cards: all that come along can be used, and a typo is named."""

import tomllib
from pathlib import Path

import pytest

from dustmap.errors import UserError
from dustmap.sky.catalogs import card_named, known_cards
from dustmap.sky.catalogs._card import card_directory, parse_card

REPOSITORY = Path(__file__).resolve().parents[3]
NAMES = (
    *("ananke", "dias2021", "gaia-gspphot", "gaia-i355", "generic", "hipparcos"),
    *("hunt2023", "miglio2021"),
    *("shboost24", "starhorse-edr3", "starhorse-i354", "zg25", "zgr23"),
)
SMALL = """
title = "Mine"
reference = ""
system = "A_V"
invalid = "drop"
identifiers = "row"
positions = ["galactic"]
distances = ["error"]
extinctions = ["error"]
[columns.l]
names = ["l"]
[columns.b]
names = ["b"]
[columns.distance]
names = ["d"]
unit = "kpc"
[columns.extinction]
names = ["a"]
[columns.extinction_error]
names = ["ea"]
[columns.flag]
names = ["flag"]
type = "integer"
[constants]
distance_error = 5.0
[flags.flag]
bad = 2
[cuts]
default = [{column = "flag", bits_clear = ["bad"]}]
"""


def test_the_cards_that_come_along() -> None:
    assert known_cards() == NAMES
    for name in NAMES:
        card = card_named(name)
        assert {"default", "none"} <= set(card.presets)
        assert card.cuts("none") == ()
        assert card.name == name
        assert (card.system is None) == (name == "generic")
    assert "edenhofer24" in card_named("zgr23").presets


def test_queries_fetch_what_their_card_reads() -> None:
    """Of the columns of the alternatives that a card prefers, all but where it asks for all."""
    known = {name for name in NAMES if card_named(name).query}
    assert known == {
        *("dias2021", "gaia-gspphot", "hunt2023", "starhorse-edr3", "starhorse-i354", "zgr23"),
    }
    for name in known:
        card = card_named(name)
        assert card.service.startswith("TAP service of ")
        assert card.query.startswith("SELECT ")
        asked, _, _ = card.query.removeprefix("SELECT ").partition("FROM")
        if asked.strip() == "*":
            continue
        fetched = {word.strip().rpartition(".")[2] for word in asked.split(",")}
        ways = (*card.distances[:1], *card.extinctions[:1])
        places = [set(way.columns) for way in card.positions]
        needed = {role for way in ways for role in way.columns} | {"source_id"}
        needed |= {column for cut in card.cuts("default") for column in cut.quantity.columns}
        held = {
            role
            for role, column in card.columns.items()
            if fetched & {alias.ref.name for alias in column.aliases}
        }
        assert needed <= held, name
        assert any(place <= held for place in places), name


def test_a_query_says_where_it_is_sent() -> None:
    with pytest.raises(UserError, match="service, query: expected both"):
        parse_card(tomllib.loads('query = "SELECT *"\n' + SMALL), "mine")


def test_the_wheel_has_the_cards() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"catalogs": "dustmap/_cards"}
    assert card_directory() in (REPOSITORY / "catalogs", REPOSITORY / "dustmap" / "_cards")


def own(directory: Path, text: str) -> Path:
    path = directory / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_card_of_ones_own(tmp_path: Path) -> None:
    card = card_named(own(tmp_path, SMALL))
    assert str(card.columns["distance"].aliases[0].unit) == "kpc"
    assert str(card.columns["distance"].unit) == "pc"
    assert card.constants["distance_error"] == 5.0
    assert card.flags["flag"]["bad"] == 2


def test_errors_are_rounded_in_the_unit_of_their_column(tmp_path: Path) -> None:
    text = 'inherits = "generic"\n[columns.distance_error]\nnames = ["e_d"]\n'
    text += 'unit = "kpc"\nrounded_to = 0.01\n'
    assert card_named(own(tmp_path, text)).columns["distance_error"].step == pytest.approx(10.0)


def test_a_card_that_inherits_says_what_differs(tmp_path: Path) -> None:
    text = 'inherits = "generic"\nsystem = "A_G"\n[columns.l]\nnames = ["LON"]\n'
    text += "[constants]\nextinction_error = 0.1\n"
    text += "[cuts]\nnear = [{column = 'distance', below = 9}]\n"
    card, generic = card_named(own(tmp_path, text)), card_named("generic")
    assert card.title == generic.title
    assert card.invalid == generic.invalid
    assert card.system is not None
    assert card.system.name == "A_G"
    assert [str(alias.ref) for alias in card.columns["l"].aliases] == ["LON"]
    assert card.columns["b"] == generic.columns["b"]
    assert card.constants == {"extinction_error": 0.1}
    assert [len(cuts) for cuts in card.presets.values()] == [0, 1, 0]


def test_cuts_and_reference_may_be_left_out(tmp_path: Path) -> None:
    text = SMALL.replace('reference = ""\n', "").partition("[cuts]")[0]
    card = card_named(own(tmp_path, text))
    assert (card.reference, dict(card.presets)) == ("", {"default": (), "none": ()})


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"lon": "GLON"}, "column lon=GLON: the card generic has no lon; it has source_id, l, b"),
        ({"extincton": "A"}, "did you mean extinction?"),
        ({"distance": "D [kg]"}, "column distance=D [kg]: unit kg: expected one like pc"),
        ({"distance": "D [lightyeers]"}, "expected a unit such as pc, mas or mag"),
    ],
)
def test_names_that_no_card_has(names: dict[str, str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        card_named("generic", names)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("title =", "titel =", "unknown key 'titel'; did you mean title?"),
        ('"A_V"', '"AV"', "system: expected an extinction system, got 'AV'"),
        ('"drop"', '"keep"', 'invalid = \'keep\': expected "error", "drop"'),
        ('["galactic"]', '["galactical"]', "positions = ['galactical']: expected a list of"),
        ('["galactic"]', "[]", "positions: expected at least one"),
        ('identifiers = "row"\n', "", "identifiers is missing"),
        ('identifiers = "row"', 'identifiers = "column"', "columns.source_id is missing"),
        ("[columns.l]", "[columns.lon]", "columns.l is missing; galactic needs it"),
        ('unit = "kpc"', 'unit = "mag"', "columns: distance: unit mag: expected one like pc"),
        ('unit = "kpc"', 'unit = "lightyeers"', "unit = 'lightyeers': expected a unit"),
        ('unit = "kpc"', 'units = "kpc"', "columns: distance: unknown key 'units'"),
        ('type = "integer"', 'type = "int"', "type: expected number, integer, text"),
        ('type = "integer"', "", "flag needs type ="),
        ('names = ["d"]', 'names = ["d"]\nrounded_to = 1', "expected of columns of errors"),
        ('names = ["d"]', 'names = "d"', "names = 'd': expected a list of names"),
        ('names = ["d"]', 'type = "text"\nnames = ["d"]', "columns of distance are numbers"),
        ("distance_error = 5.0", "distance_err = 5.0", "unknown key 'distance_err'"),
        ("bad = 2", "bad = -2", "bad = -2: expected a bit"),
        ('"flag", bits_clear = ["bad"]', '"flags", above = 1', "'flags' is no column of this card"),
        ('bits_clear = ["bad"]', 'equals = "0"', "holds whole numbers"),
        (
            '{column = "flag", bits_clear = ["bad"]}',
            "{sum = {flag = 1}, bits_clear = [1]}",
            "bits are of whole numbers",
        ),
        ('title = "Mine"', 'inherits = "genric"', "inherits = 'genric': expected one of"),
        ("[constants]", "[constants", "not a TOML file"),
    ],
)
def test_a_wrong_card(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in SMALL
    path = own(tmp_path, SMALL.replace(old, new, 1))
    with pytest.raises(UserError) as caught:
        card_named(path)
    message = str(caught.value)
    assert message.startswith(f"card {path}")
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize("cut", ['column = "sort"', 'ratio = ["sort", "flag"]', "sum = {sort = 1}"])
def test_cuts_compare_numbers(tmp_path: Path, cut: str) -> None:
    column = '[columns.sort]\nnames = ["sort"]\ntype = "text"\n[constants]'
    text = SMALL.replace("[constants]", column)
    text = text.replace('{column = "flag", bits_clear = ["bad"]}', f"{{{cut}, above = 0}}")
    with pytest.raises(UserError, match="holds text, which only equals and one_of compare"):
        card_named(own(tmp_path, text))


def test_a_card_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"did you mean zgr23\?"):
        card_named("zgr32")
    with pytest.raises(UserError, match="no schema card"):
        card_named(tmp_path / "none.toml")


def test_a_preset_that_is_not_there() -> None:
    with pytest.raises(UserError, match="card zgr23 has default, strict, edenhofer24, none"):
        card_named("zgr23").cuts("edenhofer")
