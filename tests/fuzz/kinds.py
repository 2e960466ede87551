"""What is broken, and what then is done with it."""

import contextlib
import io
import logging
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeAlias, final

import numpy as np

from dustmap import cli
from dustmap import config as configuration
from dustmap.errors import UserError
from dustmap.runs import open_run, open_star_map, prepare
from dustmap.sky import DustMap
from dustmap.sky.catalogs import ingest, read_catalog
from dustmap.sky.stars import open_star_store
from dustmap.sky.systems import system_named
from tests.fuzz.mutations import mutate_directory, mutate_file
from tests.fuzz.oracle import Complaint, Verdict
from tests.fuzz.words import COMMANDS, odd_arguments, odd_configuration

#: Changes the first file of the kind in place; the name of the mutation.
Break: TypeAlias = Callable[[Path, Random], str]
#: Reads from the first folder, where the samples are, and writes into the second.
Use: TypeAlias = Callable[[Path, Path, Random], None]


@final
@dataclass(frozen=True)
class Kind:
    """files: of the samples, what the input consists of; the first is broken. share: of all
    inputs, in parts."""

    name: str
    files: tuple[str, ...]
    broken: Break
    use: Use
    share: int

    def prepare(self, samples: Path, sandbox: Path, random: Random) -> str:
        """Puts a broken copy into sandbox/in; the name of the mutation."""
        for folder in (sandbox / "in", sandbox / "out"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        for name in self.files:
            source, target = samples / name, sandbox / "in" / name
            if source.is_dir():
                shutil.copytree(source, target)
            else:
                shutil.copyfile(source, target)
        return self.broken(sandbox / "in" / self.files[0], random)

    def run(self, sandbox: Path, random: Random) -> None:
        """Uses what `prepare` has left."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.use(sandbox / "in", sandbox / "out", random)


def _catalog(name: str) -> Use:
    def use(given: Path, out: Path, random: Random) -> None:
        system, invalid = system_named("A_V"), random.choice(("error", "drop"))
        if random.random() < 0.5:
            read_catalog(given / name, system=system, invalid=invalid)
        else:
            ingest(given / name, "generic", out / "s.zarr", system=system, invalid=invalid)

    return use


def _store(given: Path, out: Path, random: Random) -> None:
    del out
    if random.random() < 0.5:
        open_star_store(given / "stars.zarr").read()
    else:
        for _ in open_star_store(given / "stars.zarr").chunks(16):
            pass


def _map(name: str) -> Use:
    def use(given: Path, out: Path, random: Random) -> None:
        del out, random
        density = DustMap.open(given / name)
        l, b, d = np.array([[30.0, 5.0, 9.0], [200.0, -8.0, 15.0], [0.0, 0.0, 1000.0]]).T
        for integrated in (False, True):
            found = density.query_gal(l, b, d / 1000.0, integrated=integrated)
            if found.shape != (3,):
                raise Complaint(Verdict.TRACEBACK, f"an answer of shape {found.shape}")
        density.quantities()

    return use


def _star_run(given: Path, out: Path, random: Random) -> None:
    del out
    finished = open_star_map(given / "run")
    if random.random() < 0.25:
        finished.at(np.array([[1.0, 2.0, 3.0], [500.0, 0.0, 0.0]]))


def _regression(given: Path, out: Path, random: Random) -> None:
    del random
    open_run(given / "fit").predict(given / "sky.csv", "generic", out / "p.csv", False)


def _configured(given: Path, out: Path, random: Random) -> None:
    del out, random
    found = configuration.load(given / "run.toml")
    configuration.echo(found)
    prepare(found).plan()


def _regression_on(name: str) -> Use:
    def use(given: Path, out: Path, random: Random) -> None:
        del out, random
        prepare(configuration.load(given / "fit.toml", [f"data.catalog={given / name}"])).plan()

    return use


def _odd_configuration(path: Path, random: Random) -> str:
    path.write_text(odd_configuration(path.read_text(), random), encoding="utf-8")
    return "grammar"


def _card(given: Path, out: Path, random: Random) -> None:
    del out, random
    read_catalog(given / "sky.csv", given / "card.toml", system=system_named("A_V"))


def _untouched(path: Path, random: Random) -> str:
    del path, random
    return "arguments"


def _odd_command(given: Path, out: Path, random: Random) -> None:
    _command(odd_arguments(random), given, out)


def _mutate_any(path: Path, random: Random) -> str:
    """Any of the samples, not only the first."""
    target = random.choice(sorted(path.parent.iterdir()))
    return (mutate_directory if target.is_dir() else mutate_file)(target, random)


def _usual_command(given: Path, out: Path, random: Random) -> None:
    _command(random.choice(COMMANDS).split(), given, out)


def _command(words: list[str], given: Path, out: Path) -> None:
    """The real command line; what it must not do is a Complaint, what it refuses a UserError."""
    arguments = [w.replace("IN", str(given)).replace("OUT", str(out)) for w in words]
    said, told = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(told),
        contextlib.chdir(out),
    ):
        try:
            code = cli.main(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        finally:
            logging.basicConfig(force=True)
    errors = [line for line in said.getvalue().splitlines() if "error: " in line]
    if code in (cli.DONE, cli.CHECK_FAILED):
        return
    shown = f"{' '.join(words)[:300]}: exit {code}: {said.getvalue()[-500:]}"
    if code != cli.BAD_INPUT or "Traceback" in said.getvalue():
        raise Complaint(Verdict.TRACEBACK, shown)
    if "llocate" in said.getvalue():
        raise Complaint(Verdict.MEMORY, shown)
    if len(errors) != 1 and "--verbose" not in words:
        raise Complaint(Verdict.MESSAGE, shown)
    raise UserError(errors[0][:1000] if errors else "verbose")


_CATALOGS = {
    "FITS catalog": "sky.fits",
    "FITS catalog, gz": "sky.fits.gz",
    "HDF5 columns": "sky.h5",
    "HDF5 table": "table.h5",
    "Parquet catalog": "sky.parquet",
    "VOTable, text": "sky.vot",
    "VOTable, binary": "binary.vot",
    "VOTable, gz": "sky.vot.gz",
    "CSV catalog": "sky.csv",
    "CSV catalog, gz": "sky.csv.gz",
    "ECSV catalog": "sky.ecsv",
    "columns between blanks": "sky.dat",
}
EVERYTHING = (
    *("run.toml", "fit.toml", "card.toml", *_CATALOGS.values()),
    *("stars.zarr", "map.zarr", "map.fits", "run", "fit"),
)

KINDS: tuple[Kind, ...] = (
    *(Kind(name, (file,), mutate_file, _catalog(file), 6) for name, file in _CATALOGS.items()),
    Kind("star store", ("stars.zarr",), mutate_directory, _store, 10),
    Kind("map.zarr", ("map.zarr",), mutate_directory, _map("map.zarr"), 8),
    Kind("map.fits", ("map.fits",), mutate_file, _map("map.fits"), 6),
    Kind("run of stars", ("run", "sky.fits"), mutate_directory, _star_run, 1),
    Kind("run of a regression", ("fit", "sky.csv"), mutate_directory, _regression, 1),
    *(
        Kind(f"regression on {file}", (file, "fit.toml"), mutate_file, _regression_on(file), 2)
        for file in ("sky.csv", "sky.ecsv", "sky.fits", "sky.parquet")
    ),
    Kind("configuration, grammar", ("run.toml", "sky.fits"), _odd_configuration, _configured, 9),
    Kind("configuration, bytes", ("run.toml", "sky.fits"), mutate_file, _configured, 4),
    Kind("schema card", ("card.toml", "sky.csv"), mutate_file, _card, 5),
    Kind("command line", EVERYTHING, _untouched, _odd_command, 2),
    Kind("command on a broken file", EVERYTHING, _mutate_any, _usual_command, 1),
)
