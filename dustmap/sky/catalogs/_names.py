"""What names of columns say: errors of which quantity, one side of it, a unit, an extinction."""

import functools
import re
import shlex
from collections.abc import Sequence

from astropy import units as u

from dustmap.sky.systems import known_systems

#: Parts of names of columns that hold errors; of those that hold percentiles, too, whole words or
#: anywhere; and units.
_ERROR_WORDS = "err(or)?|sig(ma)?|std|unc(ert(ainty)?)?"
_BOUNDS = (
    "e?(lo|low|lower|hi|high|up|upper|plus|minus|pos|neg|min|max)|sd|rms|disp|iqr|delta|th|"
    "rel(ative)?|frac(tional)?|perc(ent)?|pct|var(iance)?"
)
_ERRORS = re.compile(rf"\b(e|s|b|p|q|{_BOUNDS})\b|{_ERROR_WORDS}|0?5|16|84|95|68")
#: The same beside whole words, which u_distance and dist_q1 have, and u_x has not.
_LONG, _ERRORS_OF_WORDS = 3, re.compile(rf"{_ERRORS.pattern}|\b(l|u|ci)\b|\b[pq]\d+\b")
#: The same where one of these is there: err1, lerr.
_MARKED = re.compile(rf"\b([a-z]|{_BOUNDS})\b|{_ERROR_WORDS}|\d+")
_UNITS = frozenset(("pc", "kpc"))
#: Units behind names, in brackets, are of angles, lengths and magnitudes, for A(V) has none.
_BRACKETED, _LONGEST_UNIT = (u.deg, u.pc, u.mag), 16
#: What columns of extinctions and their errors are called: A_G, e_A0, ext50, E(BP-RP), ebv.
CALLED_EXTINCTION = re.compile(
    r"^(e_)?a_?([vgk0ujhriz]|bp|rp|ks)\w{0,3}$|ext|^(e_)?e_?\(?b|ebv|redd"
)
#: Names of coordinates of frames that are not read: ecliptic and supergalactic ones.
_OF_ANOTHER_FRAME = re.compile(
    r"(^|_)ecl(_|$)|ecliptic|^e(cl)?_?l(on|at)(itude|gitude)?$|^sg[lb]$|supergal"
)
#: In names of columns of errors, and of what is made of errors.
_OF_ERRORS = re.compile(f"{_ERROR_WORDS}|(^|_)e_|^s_|^d_")
_MADE_OF_ERRORS = re.compile("over|snr|ratio|corr|var|perc|pct|rel|frac")
#: In names of the lower and of the upper side of a value, and of what is further from it than one
#: standard deviation.
_SIDES = (
    re.compile("(^|_)(lo|low|lower|min|minus)(_|$)|16$"),
    re.compile("(^|_)(hi|high|up|upper|max|plus)(_|$)|84$"),
)
_FAR = re.compile(r"(?:lo|hi|low|high|[pqlu]|[^0-9a-z])(0?5|95|0?25|975|01|99)$")
#: What names of errors, of one side and of percentiles have around that of their value.
_MEDIAN = re.compile("_?(p?50|med|median)$")
_BEFORE = re.compile("^(e|s|err|sig|sigma|std|unc|u|d)_")
_BEHIND = re.compile(
    "_?(e|err|error|std|sig|sigma|unc)?_?(lo|low|lower|hi|high|up|upper|plus|minus|neg|pos)$|"
    "_(e|err|error|std|sig|sigma|unc)$|_?p?(16|84)$"
)
#: What systems are called besides.
_ALSO = {"ak": "A_Ks", "azero": "A0"}
#: Names of extinctions in a band and of colour excesses: ak, ebpminrp.
_BAND = "bp|rp|ks|[ubvgriyzjhk]"
_OF_A_BAND = re.compile(rf"a({_BAND}|w[1-4])|e({_BAND})(min)?(?!\2)({_BAND})")


def may_be(role: str, column: str) -> bool:
    """Tell whether a column may have a role by its name: errors those of errors, one side of a
    value that of one.

    >>> [may_be(role, "e_dist") for role in ("distance", "distance_error")]
    [False, True]
    >>> [may_be("distance_error", name) for name in ("dist_lo_err", "dist")]
    [False, False]
    """
    is_error = "_error" in role
    if bool(_OF_ERRORS.search(column.lower())) != is_error:
        return False
    if is_error and _MADE_OF_ERRORS.search(column.lower()):
        return False
    return _is_one_side(role) or not _is_one_side(column.lower())


def _is_one_side(name: str) -> bool:
    return any(side.search(name) for side in _SIDES)


def is_of_another_frame(column: str) -> bool:
    """Tell whether a name is that of ecliptic or supergalactic coordinates.

    >>> [is_of_another_frame(name) for name in ("ecl_lon", "ELAT", "elon", "SGL", "glon", "decl")]
    [True, True, True, True, False, False]
    """
    return _OF_ANOTHER_FRAME.search(column.lower()) is not None


def is_error_of(column: str, quantity: str) -> bool:
    """Tell whether the name of a column says that it has errors or percentiles of another.

    It does where words of errors are in it, and what is left of it are words of the other.

    >>> [is_error_of(name, "dist_pc") for name in ("sigma_dist", "dist84_pc", "dist_flag", "z84")]
    [True, True, False, False]
    >>> [is_error_of(name, "dist_pc") for name in ("dist_lerr", "edist", "dist_err2", "dist_2")]
    [True, True, True, False]
    >>> is_error_of("r_lo_geo", "r_med_geo"), is_error_of("B_rgeo", "rgeo")
    (True, True)
    >>> [is_error_of(name, "dist") for name in ("u_dist", "dist_l68", "dist_q1", "dist+", "dist_n")]
    [True, True, True, True, False]
    """
    if column[-1:] in ("+", "-") and _words(column) <= _words(quantity):
        return True
    of, left, is_marked = _words(quantity), set[str](), False
    is_long = any(len(word) >= _LONG for word in _words(column) & of)
    pattern = _ERRORS_OF_WORDS if is_long else _ERRORS
    pattern = _MARKED if re.search(_ERROR_WORDS, column.lower()) else pattern
    for word in _words(column) - _UNITS - of:
        of_letter = word[0] in "ed" and word[1:] in of  # edist, ddist
        # Twice: the p of p16 is a word once 16 is gone.
        rest = word[1:] if of_letter else re.sub(pattern, " ", re.sub(pattern, " ", word))
        is_marked, left = is_marked or rest != word, left | _words(rest)
    left |= _words(column) & of - _UNITS
    return is_marked and bool(left) and left <= of


def values_of_error(column: str) -> list[str]:
    """What the value may be called whose error, side or percentile a column is, in small letters.

    >>> values_of_error("E_BV_error"), values_of_error("dist_err_lo"), values_of_error("av84")
    (['bv_error', 'e_bv', 'bv'], ['dist'], ['av'])
    """
    own = column.lower()
    ahead = _BEFORE.sub("", own)
    called = (ahead, _BEHIND.sub("", own), _BEHIND.sub("", ahead))
    return [name for name in dict.fromkeys(called) if name and name != own]


def is_called_alike(value: str, called: Sequence[str]) -> bool:
    """Tell whether one of the names that an error may be of is that of a value, of its median, or
    of the same extinction.

    >>> is_called_alike("av50", ["av"]), is_called_alike("E(B-V)", ["e_bv", "bv"])
    (True, True)
    >>> is_called_alike("distance", ["dist"])
    False
    """
    own, system = value.lower(), spelled_as(value)
    is_same = bool(system) and system in map(spelled_as, called)
    return is_same or not {own, _MEDIAN.sub("", own)}.isdisjoint(called)


def are_errors_of_distances(column: str) -> bool:
    """Tell whether a column is called after errors and distances, whichever these are.

    >>> [are_errors_of_distances(name) for name in ("dist_geo_err", "dist_flag", "dist_function")]
    [True, False, False]
    """
    words = [word for word in re.split("[^a-z0-9]+", column.lower()) if word]
    errors = [bool(re.fullmatch(f"e|{_ERROR_WORDS}", word)) for word in words]
    first = next((word for word, is_error in zip(words, errors, strict=True) if not is_error), "")
    return any(errors) and re.fullmatch("dist(ances?)?", first) is not None


def options_of_errors(columns: Sequence[str], distance: str) -> str:
    """Options that name these as the errors of distances, or as both sides of them."""
    sides = [next((c for c in columns if side.search(c.lower())), None) for side in _SIDES]
    low, high = sides
    bounds = [next((c for c in columns if c.startswith(start)), None) for start in ("b_", "B_")]
    if None not in bounds:
        low, high = bounds
    far = any(_FAR.search(c.lower()) or _MADE_OF_ERRORS.search(c.lower()) for c in columns)
    if far and (low is None or high is None):
        return "--column distance_error=NAME, a column of standard deviations that you make of them"
    if low is None or high is None:
        roles = {"error": columns[0]}
    elif _OF_ERRORS.search(low.lower()) and _OF_ERRORS.search(high.lower()):
        roles = {"error_lower": low, "error_upper": high}
    else:
        roles = {"p16": low, "p50": distance, "p84": high}
    named = (shlex.quote(f"distance_{role}={column}") for role, column in roles.items())
    return " ".join(f"--column {name}" for name in named)


def _words(name: str) -> set[str]:
    return {word for word in re.split("[^a-z0-9]+", name.lower()) if word}


def unit_in_name(column: str) -> tuple[str, str] | None:
    """Split the name of a column from the unit behind it in brackets; None where there is none.

    >>> unit_in_name("dist [kpc]"), unit_in_name("plx(mas)"), unit_in_name("E(B-V)")
    (('dist', 'kpc'), ('plx', 'mas'), None)
    """
    at = max(column.rfind("("), column.rfind("["))
    name, written = column[:at].strip(), column[at + 1 : -1].strip()
    if at < 1 or not name or column[-1] not in ")]" or not _is_unit(written):
        return None
    return name, written


@functools.cache
def _is_unit(written: str) -> bool:
    if not (written.isalpha() and 1 < len(written) < _LONGEST_UNIT):
        return False
    try:
        unit = u.Unit(written)
    except (ValueError, TypeError):
        return False
    return any(unit.is_equivalent(other) for other in _BRACKETED)


def spelled_as(name: str) -> str:
    """The system that is spelled so, however its letters, or with words behind; empty of others.

    >>> [spelled_as(name) for name in ("ebv", "A_v", "av50", "E_BV_median", "ag_gspphot", "red")]
    ['E(B-V)', 'A_V', 'A_V', 'E(B-V)', 'A_G', '']
    """
    spelled = _spelled()
    return next((spelled[begin] for begin in _beginnings(name) if begin in spelled), "")


def ends_like(name: str) -> str:
    """The system that is spelled at the end of a name, behind other words; empty of others.

    >>> [ends_like(name) for name in ("SFD_EBV", "my_A_G", "star_extinction", "ebv")]
    ['E(B-V)', 'A_G', '', '']
    """
    words = re.findall("[a-z]+|[0-9]+", name.lower())
    ends = ("".join(words[count:]) for count in range(1, len(words)))
    return next((found for end in ends if (found := _spelled().get(end, ""))), "")


def _spelled() -> dict[str, str]:
    return {_letters(known): known for known in known_systems()} | _ALSO


def are_other_systems(name: str, other: str) -> bool:
    """Tell whether two names are of extinctions whose numbers differ.

    >>> [are_other_systems("av", other) for other in ("E(B-V)", "A0", "y")]
    [True, False, False]
    """
    scales = [known_systems()[own].per_a_v for own in map(spelled_as, (name, other)) if own]
    return len(set(scales)) > 1


def is_of_a_band(name: str) -> bool:
    """Tell whether a column of extinctions is called after a band or a colour, known or not.

    >>> [is_of_a_band(name) for name in ("A_H", "ebpminrp_gspphot", "E(J-K)", "ext", "err", "ear")]
    [True, True, True, False, False, False]
    """
    return any(_OF_A_BAND.fullmatch(begin) for begin in _beginnings(name))


def _beginnings(name: str) -> list[str]:
    """The letters and digits of a name, then those of all but the last of its words, and so on."""
    words = re.findall("[a-z]+|[0-9]+", name.lower())
    return ["".join(words[:count]) for count in range(len(words), 0, -1)]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
