"""Groups of stars whose extinctions have a zero point each: y_n = A_n + b_g(n) + noise.

With scales y_n = (1 + s_g(n)) A_n + b_g(n) + noise.
Groups have numbers, in the order in which the catalog's provenance names them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap.config import Config, DataConfig
from dustmap.errors import UserError
from dustmap.gp.functionals import groups_of
from dustmap.inference import LogNormalPosterior, PathwisePosterior
from dustmap.runs.stars._engines import StarFit
from dustmap.sky.observations import Observations
from dustmap.sky.stars import StarTable

#: Members of a group at least, and stars to a group in the mean.
_FEWEST, _PER_GROUP = 2, 10
#: The number of groups that a run does not know.
UNKNOWN = -1


def group_names(provenance: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of groups by their numbers; none where stars have no groups."""
    groups = provenance.get("groups")
    return tuple(groups["names"]) if isinstance(groups, Mapping) else ()


def check_groups(data: DataConfig, names: Sequence[str], observed: Observations) -> None:
    """Refuse groups that are too small or too many to have zero points."""
    groups = groups_of(observed.batch.functional)
    if groups is None:
        return
    counts = torch.bincount(groups.cpu(), minlength=len(names))
    lone = ((counts > 0) & (counts < _FEWEST)).nonzero()[:, 0].tolist()
    if lone:
        raise UserError(
            f"data.groups = {data.groups!r}: {len(lone)} groups have a single star within the box, "
            f"such as {names[lone[0]]!r}, whose zero point nothing tells; join or leave out such "
            "groups"
        )
    used, most = int((counts > 0).sum()), len(observed) // _PER_GROUP
    if used > most:
        raise UserError(
            f"data.groups = {data.groups!r}: {used:,} groups of {len(observed):,} stars, expected "
            f"at most {most:,}, a tenth; name a column whose values more stars share"
        )


def renumbered(labels: NDArray[np.str_] | Sequence[str], names: Sequence[str]) -> NDArray[np.int64]:
    """Return the numbers (N,) of labels among the names of a run, -1 for others."""
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers.get(str(label), UNKNOWN) for label in labels], np.int64)


def in_groups_of_run(
    stars: StarTable, own: Sequence[str], names: Sequence[str]
) -> tuple[StarTable, int]:
    """Return the stars of another catalog with the numbers of the run's groups, and how many are of
    groups that the run does not know; own: names of the catalog's groups."""
    if stars.groups is None:
        return stars, 0
    groups = renumbered(own, names)[stars.groups]
    return replace(stars, groups=groups), int((groups == UNKNOWN).sum())


def zero_points_section(
    config: Config,
    names: Sequence[str],
    fit: StarFit,
    observed: Observations,
    train: torch.Tensor,
) -> dict[str, Any]:
    """Return a line for each group with fitted stars, for the report; nothing without groups."""
    if not isinstance(fit.posterior, PathwisePosterior | LogNormalPosterior):
        return {}
    points, scales = fit.posterior.zero_points(), fit.posterior.scales()
    groups = groups_of(observed.batch.functional[train])
    if points is None or groups is None:
        return {}
    counts = torch.bincount(groups, minlength=len(points.mean)).tolist()
    columns = {"zero_point": points.mean.tolist(), "error": points.std.tolist()}
    prior: dict[str, Any] = {"column": config.data.groups, "prior_std_mag": config.model.group_std}
    if scales is not None:
        columns |= {"scale": (1.0 + scales.mean).tolist(), "scale_error": scales.std.tolist()}
        prior["prior_std_of_scales"] = config.model.group_scale
    lines = [
        {"group": name, "stars": count} | {what: values[g] for what, values in columns.items()}
        for g, (name, count) in enumerate(zip(names, counts, strict=False))
        if count
    ]
    return {"zero_points": {**prior, "groups": lines}}
