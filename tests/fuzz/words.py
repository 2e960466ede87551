"""Configurations and command lines that nobody would write."""

import dataclasses
import json
from random import Random
from typing import get_type_hints

from dustmap.config import Config
from tests.fuzz.mutations import ODD_NUMBERS, ODD_WORDS

#: Command lines that work, of the samples (IN) into a folder (OUT).
COMMANDS = (
    "run IN/run.toml --output OUT/run --dry-run",
    "run IN/run.toml --output OUT/run --until fit --json",
    "run IN/run.toml --output OUT/run --set data.catalog=IN/stars.zarr --dry-run",
    "run IN/fit.toml --output OUT/run --dry-run --memory 1GiB --threads 1 --dtype float64",
    "config --example",
    "simulate --stars 20 --seed 1 --output OUT/s.csv --size 60 60 40 --step 10",
    "simulate --stars 20 --seed 1 --output OUT/s.fits --truth OUT/t.zarr --size 60 60 40",
    "simulate --stars 9 --seed 1 --output OUT/s.ecsv --from-prior IN/run.toml --system A_V",
    "ingest IN/sky.fits --output OUT/stars.zarr --cuts none --system A_V",
    "ingest IN/sky.csv --output OUT/stars.zarr --schema IN/card.toml --system A_V --json",
    "ingest IN/sky.vot IN/sky.h5 --output OUT/stars.zarr --invalid drop",
    "ingest IN/sky.dat --output OUT/stars.zarr --distance-max 2kpc --parallax-zero-point 0.01",
    "evaluate IN/run --catalog IN/sky.fits --json",
    "evaluate IN/fit --catalog IN/sky.csv",
    "predict IN/run --catalog IN/sky.parquet --output OUT/p.csv",
    "predict IN/fit --catalog IN/sky.csv --output OUT/p.fits",
    "export IN/run --format zarr --output OUT/map.zarr --step 10 --quantity mean,std --samples 2",
    "export IN/run --format fits --output OUT/map.fits --box -20 20 -20 20 -10 10 --step 10",
    "export IN/run --format healpix --output OUT/hp.fits --nside 4 --distances 5 15 4",
    "export IN/run --format bayestar --output OUT/b.h5 --nside 4",
    "export IN/run --format gtomo --output OUT/g.h5 --step 10",
    "export IN/fit --format zarr --output OUT/f.zarr",
    "query IN/run --l 30 --b 5 --distance 9",
    "query IN/map.zarr --l 30 --b 5 --distance 0.009kpc --json",
    "query IN/map.fits --file IN/sky.csv",
    "plot IN/map.zarr --slice z=0 --output OUT/x.png",
    "view IN/map.zarr --points IN/sky.csv --samples 1 --max-size 1 --output OUT/x.html",
)
_VALUES = (
    *("-1", "0", "1", "3", "-5pc", "1e30pc", "0.1kpc", "3km", "1,2", "mean,std", "[1, 2, 3]"),
    *("IN/run", "IN/sky.fits", "IN/map.zarr", "IN/nothing", "IN", "OUT/x/y", "IN/card.toml"),
    *("--json", "--overwrite", "--verbose", "--set", "grid.size=1", "fit.samples=1e9"),
)
#: Large numbers that a machine could try to obey: a simulation of a day is no failure.
_HARMLESS = tuple(n for n in ODD_NUMBERS if n not in ("65536", "2147483647", "4294967296"))


def odd_arguments(random: Random) -> list[str]:
    """A command line of COMMANDS with one to three words changed, added, removed or repeated."""
    words = random.choice(COMMANDS).split()
    for _ in range(random.choice((1, 1, 2, 3))):
        at = random.randrange(len(words))
        odd = random.choice((*_VALUES, *_HARMLESS, *ODD_WORDS)).replace("\0", "")
        act = random.randrange(6)
        if act == 0:
            del words[at]
        elif act == 1:
            words.insert(at, odd)
        elif act == 2:
            words.append(words[at])
        else:
            words[at] = odd
        words = words or ["run"]
    return words


def odd_configuration(text: str, random: Random) -> str:
    """The configuration with lines for random keys, of right and wrong types, and deep nesting."""
    lines = text.strip().splitlines()
    for _ in range(random.choice((1, 1, 2, 5))):
        section = random.choice(list(get_type_hints(Config)))
        names = [f.name for f in dataclasses.fields(get_type_hints(Config)[section])]
        key = random.choice(names) if random.random() < 0.9 else random.choice(ODD_WORDS)
        value = odd_toml(random)
        lines = [line for line in lines if not line.startswith(f"{key} =")]
        if f"[{section}]" not in lines or random.random() < 0.05:
            lines.append(f"[{section}]")
        lines.insert(lines.index(f"[{section}]") + 1, f"{_key(key)} = {value}")
    return "\n".join(lines) + "\n"


def odd_toml(random: Random, depth: int = 0) -> str:
    """A value in TOML, or nearly."""
    kind = random.randrange(9 if depth < 3 else 5)
    if kind < 2:
        return random.choice(ODD_NUMBERS)
    if kind < 4:
        return json.dumps(random.choice((*ODD_WORDS, *_WORDS)))
    if kind == 4:
        return random.choice(("true", "1979-05-27", "[]", "{}", "''", "5", "20", "0.5", '"9' * 2))
    entries = [odd_toml(random, depth + 1) for _ in range(random.choice((1, 2, 3, 3, 3)))]
    if kind == 8:
        return "{" + ", ".join(f"k{i} = {e}" for i, e in enumerate(entries)) + "}"
    return f"[{', '.join(entries)}]"


_WORDS = (
    *("300pc", "0.3kpc", "-3pc", "1e400pc", "gaussian", "lognormal", "hip", "global", "student-t"),
    *("matern32", "disc", "length", "std", "8GiB", "1B", "1e300GiB", "cuda", "float64", "drop"),
    *("monte-carlo", "full", "block", "zarr", "fits", "slice", "stars.zarr", "sky.fits", "."),
)


def _key(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else json.dumps(name)
