"""What each command does, once its arguments are parsed. Commands that compute live here."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dustmap import config as configuration
from dustmap._cli_exit import CHECK_FAILED, DONE, BadInput
from dustmap.config import Config, parsecs
from dustmap.runs import (
    RegressionResult,
    StarMap,
    check_free,
    execute_run,
    open_run,
    prepare,
    regression_at,
)
from dustmap.sky import (
    Provenance,
    SkyModel,
    plot_slice,
    read_map,
    refuse_existing,
    save_figure,
    simulate,
    write_stars,
    write_zarr,
)

COMPUTE = ("device", "dtype", "threads", "memory")


@contextmanager
def checking_input() -> Iterator[None]:
    """Inside, a value or a file that cannot be used is the user's to correct."""
    try:
        yield
    except (ValueError, OSError, MemoryError) as error:
        raise BadInput(error) from error


def run(options: argparse.Namespace) -> int:
    output = Path(options.output)
    with checking_input():
        config = _configuration(options)
        check_free(output, options.overwrite)
        if config.compute.threads:
            torch.set_num_threads(config.compute.threads)
        prepared = prepare(config)
    if options.dry_run:
        _tell(prepared.plan().as_dict(), options.json)
        return DONE
    try:
        report = execute_run(prepared, output, config, options.overwrite)
    except MemoryError as error:
        raise BadInput(error) from error
    _tell(report.as_dict() if options.json else _summary(report.as_dict(), output), options.json)
    return DONE if report.passed else CHECK_FAILED


def _configuration(options: argparse.Namespace) -> Config:
    given = [(name, getattr(options, name)) for name in COMPUTE]
    overrides = [f"compute.{name}={value}" for name, value in given if value is not None]
    return configuration.load(options.config, [*options.set, *overrides])


def _summary(report: Mapping[str, Any], output: Path) -> dict[str, Any]:
    failed = [check["name"] for check in report["checks"] if not check["passed"]]
    return {"status": report["status"], "failed": failed, "report": str(output / "report.md")}


def simulate_sky(options: argparse.Namespace) -> int:
    with checking_input():
        output, truth = Path(options.output), options.truth and Path(options.truth)
        for path in filter(None, (output, truth)):
            refuse_existing(path, options.overwrite)
        changes: dict[str, Any] = {}
        if options.size is not None:
            changes["size"] = tuple(parsecs(size) for size in options.size)
        if options.error is not None:
            changes["error"] = options.error
        model = dataclasses.replace(SkyModel(), **changes)
        stars, density = simulate(model, options.stars, options.seed)
    write_stars(output, stars, options.overwrite)
    if truth:
        made = (f"simulated with seed {options.seed}",)
        write_zarr(truth, density, Provenance("", made), options.overwrite)
    told = {"stars": len(stars), "output": str(output), "truth": str(truth or "not written")}
    _tell(told, options.json)
    return DONE


def evaluate(options: argparse.Namespace) -> int:
    with checking_input():
        told = open_run(Path(options.run)).evaluate(Path(options.catalog))
    _tell(told, options.json)
    return DONE


def predict(options: argparse.Namespace) -> int:
    output = Path(options.output)
    with checking_input():
        refuse_existing(output, options.overwrite)
        finished = open_run(Path(options.run))
        told = finished.predict(Path(options.catalog), output, options.overwrite)
    _tell(told, as_json=False)
    return DONE


def export(options: argparse.Namespace) -> int:
    output = Path(options.output)
    with checking_input():
        refuse_existing(output, options.overwrite)
        regression = regression_at(Path(options.run))
    if regression is not None:
        return _export_regression(regression, options)
    with checking_input():
        finished = _star_map(options.run)
        box = None if options.box is None else [parsecs(face) for face in options.box]
        grid = finished.grid(box, None if options.step is None else parsecs(options.step))
    _tell(finished.export(options.format, output, options.overwrite, grid), as_json=False)
    return DONE


def _export_regression(finished: RegressionResult, options: argparse.Namespace) -> int:
    if options.box is not None or options.step is not None:
        raise BadInput("--box and --step are for maps of the dust; [grid] says where this one is")
    _tell(finished.export(options.format, Path(options.output), options.overwrite), as_json=False)
    return DONE


def query(options: argparse.Namespace) -> int:
    with checking_input():
        finished = _star_map(options.run)
        told = finished.query(options.l, options.b, parsecs(options.distance))
    _tell(told, options.json)
    return DONE


def _star_map(path: str) -> StarMap:
    finished = open_run(Path(path))
    if not isinstance(finished, StarMap):
        raise ValueError(f'{path}: expected a run with data.kind = "stars", a map of the dust')
    return finished


def plot(options: argparse.Namespace) -> int:
    with checking_input():
        regression = regression_at(Path(options.map))
        if regression is not None:
            regression.plot(options.slice, Path(options.output), options.overwrite)
            _tell({"output": options.output}, as_json=False)
            return DONE
        axis, equals, height = options.slice.partition("=")
        if axis != "z" or not equals:
            raise ValueError(f"--slice {options.slice}: expected z=PC, such as z=0 or z=-20pc")
        density = read_map(options.map)
        truth = read_map(options.truth) if options.truth else None
        figure = plot_slice(density, parsecs(height), truth)
        save_figure(figure, options.output, options.overwrite)
    _tell({"output": options.output}, as_json=False)
    return DONE


def _tell(values: Mapping[str, Any], as_json: bool) -> None:
    """On stdout: one JSON object, or one `name: value` a line."""
    if as_json:
        sys.stdout.write(json.dumps(dict(values)) + "\n")
        return
    for name, value in values.items():
        shown = f"{value:.6g}" if isinstance(value, float) else value
        sys.stdout.write(f"{name}: {shown}\n")


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": run,
    "simulate": simulate_sky,
    "evaluate": evaluate,
    "predict": predict,
    "export": export,
    "query": query,
    "plot": plot,
}
