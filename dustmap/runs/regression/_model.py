"""Rows of any table as inputs, targets and errors, the grid around them, and their estimator."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch
from astropy.table import Table
from numpy.typing import NDArray

from dustmap import engines
from dustmap.config import Config, DataConfig, GridConfig
from dustmap.engines import MIB, Component, During, MemoryPlan
from dustmap.errors import UserError
from dustmap.estimators import HIPGPRegressor
from dustmap.gp import RegularGrid
from dustmap.gp.kernels import kernel_named
from dustmap.inference import Scores, scores
from dustmap.runs.reports import Check, CoverageAdvice, coverage_checks, factor_check
from dustmap.tables import check_rows, numbers_or_nan, read_tables

log = logging.getLogger(__name__)

Array = NDArray[np.float64]

# Nodes per axis of the maps of a run without a [grid], by the number of inputs.
_MAP_NODES = {1: 500, 2: 120, 3: 32}
_LOGARITHMS: dict[str, Callable[[Array], Array]] = {"log": np.log, "log10": np.log10}
#: Engines that solve on the [grid] of a run, where it has one.
ON_GRID = ("hip", "global")
#: Bytes of pictures, beside the working space of the fit.
_PICTURES = 20 * MIB


@final
@dataclass(frozen=True, eq=False)
class Rows:
    """Inputs X (N, D), targets y (N,) and their standard errors (N,), if there are any."""

    X: Array
    y: Array
    error: Array | None

    def __len__(self) -> int:
        return len(self.X)

    def __getitem__(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> Self:
        error = None if self.error is None else self.error[index]
        return type(self)(self.X[index], self.y[index], error)

    def arrays(self) -> dict[str, Array]:
        """Return what a run has of its rows on disk."""
        error = {} if self.error is None else {"error": self.error}
        return {"X": self.X, "y": self.y, **error}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, Any]) -> Self:
        """Return the rows that `arrays` gave."""
        return cls(arrays["X"], arrays["y"], arrays.get("error"))


@final
@dataclass(frozen=True)
class LeftOut:
    """How many rows of a table had no value of a column that is needed, or lay outside the box."""

    incomplete: int = 0
    outside: int = 0

    def counts(self) -> dict[str, int]:
        """Return the numbers by their names in a report."""
        return {
            "rows_dropped_incomplete": self.incomplete,
            "rows_dropped_outside_the_box": self.outside,
        }


def read_rows(paths: Sequence[str | Path], config: Config) -> tuple[Rows, LeftOut]:
    """Read the rows that have all their values and are inside the box, and count the others.

    grid.outside says whether rows outside the box are left out or refused.
    """
    table, data = read_tables(*paths), config.data
    if len(table) == 0:
        raise UserError(f"{', '.join(map(str, paths))}: the table has no rows")
    target, logarithm = _target(table, data.target)
    names = (*data.inputs, target, data.error) if data.error else (*data.inputs, target)
    columns = {name: numbers_or_nan(table, name) for name in names}
    incomplete = _incomplete(columns)
    for name, values in columns.items():
        check_rows(incomplete | np.isfinite(values), name, "finite")
    if data.error:
        check_rows(incomplete | (columns[data.error] > 0), data.error, "> 0")
    if logarithm:
        needed = f"> 0, as {logarithm} needs"
        check_rows(incomplete | (columns[target] > 0), target, needed)
    columns = {name: values[~incomplete] for name, values in columns.items()}
    X = np.stack([columns[name] for name in data.inputs], axis=1)
    y = _LOGARITHMS[logarithm](columns[target]) if logarithm else columns[target]
    rows = Rows(X, y, columns.get(data.error))
    return _inside(rows, config, int(incomplete.sum()))


def inputs_of(table: Table, data: DataConfig) -> Array:
    """Return the inputs X (N, D), NaN where they are missing."""
    return np.stack([numbers_or_nan(table, name) for name in data.inputs], axis=1)


def _target(table: Table, target: str) -> tuple[str, str]:
    """A column and the name of the logarithm to take, if any: `price`, `log(price)`."""
    match = re.fullmatch(r"(\w+)\((.+)\)", target)
    if match is None or target in table.colnames:
        return target, ""
    function, name = match.groups()
    if function in _LOGARITHMS:
        return name, function
    if name in table.colnames:
        takes = " or ".join(f"{known}({name})" for known in _LOGARITHMS)
        raise UserError(f"data.target = {target!r}: expected a column, or {takes}")
    return target, ""


def _incomplete(columns: Mapping[str, Array]) -> NDArray[np.bool_]:
    """The rows (N,) that lack a value of a column, which are counted by columns in a warning."""
    empty = {name: np.isnan(values) for name, values in columns.items()}
    incomplete: NDArray[np.bool_] = np.any(list(empty.values()), axis=0)
    found = ", ".join(f"{name} in {n:,}" for name, no in empty.items() if (n := int(no.sum())))
    if incomplete.all():
        raise UserError(
            f"none of the {len(incomplete):,} rows has all its values; missing: {found}"
        )
    if incomplete.any():
        left_out = f"{int(incomplete.sum()):,} of {len(incomplete):,}"
        log.warning("%s rows are left out, for values are missing: %s", left_out, found)
    return incomplete


def _inside(rows: Rows, config: Config, incomplete: int) -> tuple[Rows, LeftOut]:
    """The rows inside the box, where there is one."""
    grid = grid_of(config)
    if grid is None:
        return rows, LeftOut(incomplete)
    inside = grid.contains(torch.from_numpy(rows.X)).numpy()
    outside = int((~inside).sum())
    if outside and config.grid.outside != "drop":
        raise UserError(
            f"{outside} of {len(rows)} rows lie outside the box {grid.lower} to {grid.upper} of "
            f"{', '.join(config.data.inputs)}: widen [grid], leave it out for a grid around the "
            f'data, or set grid.outside = "drop"'
        )
    return rows[inside], LeftOut(incomplete, outside)


def grid_of(config: Config) -> RegularGrid | None:
    """Return the box of the configuration; None, for one around the data, at the defaults."""
    grid, default, dim = config.grid, GridConfig(), len(config.data.inputs)
    center, size, spacing = grid.center, grid.size, grid.spacing
    if (center, size, spacing) == (default.center, default.size, default.spacing):
        return None
    if spacing == 0.0:
        raise UserError('grid.spacing = "auto" is for data.kind = "stars": name a length')
    for name, numbers in {"center": center, "size": size}.items():
        if len(numbers) != dim:
            stars = ", the default, is for stars" if numbers == getattr(default, name) else ""
            raise UserError(
                f"grid.{name} = {list(numbers)}{stars}: expected {dim} numbers, one for each of "
                f"data.inputs"
            )
    shape = tuple(round(length / spacing) + 1 for length in size)
    lower = tuple(c - length / 2 for c, length in zip(center, size, strict=True))
    return RegularGrid(lower, (spacing,) * dim, shape)


def map_grid(config: Config, rows: Rows) -> RegularGrid:
    """Return the grid of the configuration, or one over the data."""
    grid = grid_of(config)
    if grid is not None:
        return grid
    dim, lower, upper = rows.X.shape[1], rows.X.min(axis=0), rows.X.max(axis=0)
    upper = np.where(upper <= lower, lower + 1.0, upper)  # a constant input still has an axis
    return RegularGrid.from_bounds(lower.tolist(), upper.tolist(), (_MAP_NODES[dim],) * dim)


def estimator_of(config: Config, rows: Rows, grid: RegularGrid | None) -> HIPGPRegressor:
    """Return the estimator that a configuration describes."""
    model, fit = config.model, config.fit
    if "mean" not in model.learn:
        raise UserError(
            f'model.learn = {list(model.learn)}: a regression always learns its mean; add "mean"'
        )
    return HIPGPRegressor(
        _kernel(config, rows),
        engine=fit.engine,
        grid=grid if fit.engine in ON_GRID and grid is not None else "auto",
        family=fit.family,
        block=fit.block or None,
        rank=fit.rank,
        whitening=fit.whitening,
        noise=_noise(config),
        learn=tuple("variance" if name == "std" else name for name in model.learn),
        n_learn=fit.learn_rows,
        max_steps=fit.max_steps,
        samples=fit.samples,
        dtype=config.compute.dtype,
        max_memory=config.compute.memory_bytes,
        random_state=fit.seed,
    )


def _kernel(config: Config, rows: Rows) -> Any:
    """A name where all is learned, from the data's own scales; else model.length and model.std."""
    model = config.model
    if {"length", "std"} <= set(model.learn):
        return model.kernel_name
    lengths = [model.length] * rows.X.shape[1]
    if "length" in model.learn:
        lengths = [float(spread) or 1.0 for spread in rows.X.std(axis=0)]
    std = float(rows.y.std()) or 1.0 if "std" in model.learn else model.std
    return kernel_named(model.kernel_name, lengths, std**2)


def _noise(config: Config) -> str:
    learned = "noise" in config.model.learn
    if config.data.error:
        return "scale" if learned else "given"
    if not learned:
        raise UserError(
            f"model.learn = {list(config.model.learn)} without data.error: expected a column of "
            f'standard errors, or "noise" among what is learned'
        )
    return "learn"


def may_be_dense(config: Config, n: int) -> bool:
    """Tell whether n rows may be fitted by dense algebra: it is asked for, or engine auto may."""
    dense = engines.most_exact(config.compute.memory_bytes)
    return config.fit.engine == "exact" or (config.fit.engine == "auto" and n <= dense)


def memory_of(config: Config, rows: Rows, grid: RegularGrid | None, learning: int) -> MemoryPlan:
    """Plan the bytes of a fit, for the kernel that a few hundred rows tell.

    learning: rows of the fit that learns; where they are fewer, both fits are held.
    """
    n = len(rows)
    fit = estimator_of(config, rows, grid).plan(rows.X, rows.y, rows.error)
    parts = [
        Component("rows", 2 * rows.X.nbytes + 3 * rows.y.nbytes, During.WHOLE, f"{n:,} rows"),
        Component("pictures", _PICTURES, During.FIGURES, "while they are drawn"),
        *fit.components,
    ]
    if config.model.kernel == "auto":
        what = "covariances of rows around held-out patches, with their gradients, float64"
        parts.append(Component("kernel choice", engines.choice_bytes(n), During.CHOOSING, what))
    kept = [part.name for part in fit.components if part.during is During.WHOLE]
    if learning < n and "factor" in kept:
        what = f"factor of the covariance of the {learning:,} rows that are not held out"
        parts.append(Component("fit to learn from", 8 * learning**2, During.WHOLE, what))
    plan = replace(fit, components=tuple(parts))
    on_grid = config.fit.engine in ("auto", *ON_GRID)
    return _within(plan, config.compute.memory_bytes) if grid is None and on_grid else plan


def _within(plan: MemoryPlan, allowed: int) -> MemoryPlan:
    """Shrink the parts of a fit on an automatic grid, which is made to fit the memory."""
    over = plan.peak - allowed
    whole = sum(part.bytes for part in plan.components if part.during is During.FIT)
    if not 0 < over <= whole:
        return plan

    def smaller(part: Component) -> Component:
        if part.during is not During.FIT:
            return part
        what = f"{part.what}; on a grid that is made to fit"
        return replace(part, bytes=part.bytes - -(-part.bytes * over // whole), what=what)

    return replace(plan, components=tuple(map(smaller, plan.components)))


def score(model: HIPGPRegressor, rows: Rows) -> Scores:
    """Score measurements, whose noise is part of the predicted variance."""
    mean, std = model.predict(rows.X, return_std=True, include_noise=True, noise_std=rows.error)
    return scores(*(torch.from_numpy(values) for values in (rows.y, mean, std**2)))


def evidence_of(model: HIPGPRegressor) -> dict[str, float]:
    """Return what the engine knows of ln p(y); the global one knows its gradient only."""
    names = {"exact": ("log_evidence", "log_evidence_"), "hip": ("evidence_lower_bound", "elbo_")}
    if model.engine_ not in names:
        return {}
    name, attribute = names[model.engine_]
    return {name: float(getattr(model, attribute))}


def sections_of(model: HIPGPRegressor) -> dict[str, dict[str, Any]]:
    """Return the estimator's report, flat enough for a table."""
    report = dict(model.report_)
    learned, errors = (
        _flat(report.pop(name, {})) for name in ("hyperparameters", "hyperparameter_errors")
    )
    nested = {name: report.pop(name) for name in list(report) if isinstance(report[name], dict)}
    nested["seconds_of_the_fit"] = nested.pop("seconds")
    return {
        "hyperparameters": learned,
        **({"hyperparameter_errors": errors} if errors else {}),
        "fit": report | evidence_of(model),
        **{name: section for name, section in nested.items() if section},
    }


def _flat(hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """Name the numbers of the one or two terms of a kernel beside the others."""
    if not hyperparameters:
        return {}
    learned = dict(hyperparameters)
    term, *second = learned.pop("kernel")  # a configuration names one kernel, or a sum of two
    flat: dict[str, Any] = dict(term)
    for other in second:
        flat |= {f"second_{name}": value for name, value in other.items()}
    return flat | learned


def refit_section(model: HIPGPRegressor) -> dict[str, Any]:
    """Return what the fit to all rows says of itself."""
    learned = model.report_["hyperparameters"]
    names = ("noise_std", "noise_scale", "mean")
    own = {name: learned[name] for name in names if learned.get(name) is not None}
    return {"rows": model.report_["n"], "engine": model.engine_, **own, **evidence_of(model)}


def checks_of(model: HIPGPRegressor, held_out: Scores | None) -> tuple[Check, ...]:
    """Check that learning and solving converged, and that held-out rows are covered."""
    report = model.report_
    status = report["learning"]["status"]
    # An input that does not matter has a length scale without bound, which is no failure.
    ended = "converged", "at_bound", "minibatches", "nothing to learn"
    learned = float(status in ended)
    advice = f"learning ended as {status}: raise fit.max_steps, or start from another seed"
    checks = [Check("learning converged", learned, 1.0, 1.0, advice)]
    checks += checks_of_solver(model)
    if "share_of_copies" in report:
        advice = (
            "rows repeat others in all numbers, which no noise explains best: errors are far too "
            "small; leave the copies out, of which held-out rows know nothing"
        )
        share = float(report["share_of_copies"])
        checks.append(Check("share of rows that repeat another", share, 0.0, 0.01, advice))
    scale = report["hyperparameters"].get("noise_scale")
    if scale is not None:
        advice = (
            "the errors of data.error are not those of the target: see their unit, and for a "
            "logarithm that they are its own (error / column)"
        )
        checks.append(factor_check(float(scale), advice))
    if held_out is not None:
        advice = "the noise or the kernel does not describe the data; see chi2"
        tails = (
            "too many rows are far from the predictions: leave out those that are wrong, or take "
            'HIPGPRegressor(noise="student-t") in Python, which forgives them'
        )
        found = CoverageAdvice(advice, advice, tails)
        checks += coverage_checks("held-out rows", held_out, found)
    return tuple(checks)


def checks_of_solver(model: HIPGPRegressor) -> list[Check]:
    """Check the solve on a grid; the exact engine has none."""
    if model.engine_ not in ON_GRID:
        return []
    report = model.report_
    solved = float(report["solve"]["status"] == "converged")
    advice = "; ".join(report["advice"]) or "nothing to do"
    return [
        Check("solver converged", solved, 1.0, 1.0, advice),
        Check("unexplained variance over noise", report["residual_ratio"], 0.0, 1.0, advice),
    ]
