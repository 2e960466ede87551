"""Configurations, lengths and command lines of any words: used, or refused in one line."""

import io
import json
import math
import string
import tomllib
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dustmap import config as configuration
from dustmap.cli import BAD_INPUT, DONE, main
from dustmap.config import Config, parsecs
from dustmap.config._config import _keys, _sections
from dustmap.errors import UserError
from dustmap.runs import prepare

fuzzed = settings(derandomize=True, database=None, deadline=None, max_examples=80)

KEYS = sorted(f"{section}.{key}" for section in _sections() for key in _keys(section))
numbers = st.one_of(
    st.integers(),
    st.integers(min_value=10**308, max_value=10**320),
    st.floats(),
    st.sampled_from([0, 1, 3, 10**18, 1e-320]),
)
words = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["300pc", "0.3kpc", "8GiB", "1e999pc", "lognormal", "hip", "", "..", "2/17"]),
)
values = st.recursive(
    st.one_of(st.booleans(), numbers, words, st.dates()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=6,
)


def _accepted(content: dict[str, dict[str, Any]], overrides: Sequence[str] = ()) -> Config | None:
    """The configuration, or None where it is refused in one line that is not too long."""
    said = None
    try:
        return configuration.from_mapping(content, overrides)
    except ValueError as error:
        said = str(error)
    assert "\n" not in said
    assert 0 < len(said) < 2000
    return None


@fuzzed
@given(st.dictionaries(st.sampled_from(KEYS), values, max_size=3))
def test_any_value_of_any_key(changes: dict[str, Any]) -> None:
    content: dict[str, dict[str, Any]] = {"data": {"catalog": "stars.fits"}}
    for name, value in changes.items():
        section, _, key = name.partition(".")
        content.setdefault(section, {})[key] = value
    found = _accepted(content)
    if found is None:
        return
    # What is accepted is written so that it reads back as itself.
    again = configuration.from_mapping(tomllib.loads(configuration.echo(found)))
    assert again == found


@fuzzed
@given(st.sampled_from(KEYS), st.text(alphabet=string.printable, max_size=30))
def test_any_text_of_an_override(name: str, text: str) -> None:
    found = _accepted({}, ["data.catalog=stars.fits", f"{name}={text}"])
    if found is not None:
        assert configuration.from_mapping(tomllib.loads(configuration.echo(found))) == found


@fuzzed
@given(st.one_of(words, st.from_regex(r"[-+]?[0-9.e]{1,9}k?pc", fullmatch=True)))
def test_any_length(text: str) -> None:
    with suppress(UserError):
        assert math.isfinite(parsecs(text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[grid]\nsize = " + "[" * 5000, "not a TOML file"),
        ("[grid]\nspacing = " + "9" * 5000, "not a TOML file"),
        ("[grid]\nspacing = 1" + "0" * 400, "grid.spacing"),
        ("[fit]\nseed = 1\nseed = 2", "not a TOML file"),
        ("[grid]\nspacing = nan", "grid.spacing = nan"),
        ("[grid]\nspacing = '" + "x" * 5000 + "'", "..."),
    ],
)
def test_found_configurations(text: str, words: str, tmp_path: Any) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        configuration.load(path)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("change", ["size = [80, 60, 1e18]", "spacing = 1e-12", "length = 1e15"])
def test_boxes_beyond_any_machine(change: str, samples: Path, tmp_path: Path) -> None:
    """The search for a length that the FFT likes did not end."""
    text = (samples / "run.toml").read_text()
    lines = [line for line in text.splitlines() if line.split(" =")[0] != change.split(" =")[0]]
    section = "[model]" if change.startswith("length") else "[grid]"
    lines.insert(lines.index(section) + 1, change)
    path = tmp_path / "run.toml"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"nodes|memory|GiB"):
        prepare(configuration.load(path, [f"data.catalog={samples / 'sky.fits'}"]))


arguments = st.lists(
    st.one_of(
        st.sampled_from(
            ["run", "config", "query", "export", "--example", "--l", "--file", "--json", "--set"]
        ),
        st.text(max_size=8).filter(lambda word: "\0" not in word),
        st.floats().map(str),
    ),
    max_size=6,
)


@settings(fuzzed, max_examples=60)
@given(arguments)
def test_any_command_line(words: list[str]) -> None:
    """Exit code 2 and one line that says why, or the answer."""
    said, told = io.StringIO(), io.StringIO()
    with redirect_stderr(said), redirect_stdout(told):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    assert code in (DONE, BAD_INPUT)
    if code == BAD_INPUT:
        assert sum("error: " in line for line in said.getvalue().splitlines()) == 1
    elif "--json" in words:
        json.loads(told.getvalue() or "{}")
