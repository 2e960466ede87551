"""Rows computed group by group are the rows computed at once, and so are their gradients."""

from collections.abc import Callable

import pytest
import torch

from dustmap.gp import GridPrior, RegularGrid
from dustmap.gp.features import Features, HIPFeatures, TorusFeatures
from dustmap.gp.features import _base as groups
from dustmap.gp.functionals import LineIntegrals, PointValues, Stacked
from dustmap.gp.kernels import Matern32
from tests.gp.parameters import traced

FUNCTIONAL = Stacked(
    (
        PointValues(torch.rand(5, 2, generator=torch.Generator().manual_seed(0)).double()),
        LineIntegrals.segment(
            *torch.rand(2, 6, 2, generator=torch.Generator().manual_seed(1)).double()
        ),
    )
)
MAPS: dict[str, Callable[[GridPrior], HIPFeatures | TorusFeatures]] = {
    "hip": lambda prior: HIPFeatures(prior, rtol=1e-12, dense_below=0),
    "dense hip": HIPFeatures,
    "torus": TorusFeatures,
}
#: The torus' own far points do meet images: which are left out depends on the group, within 1e-7.
TOLERANCE = {"hip": 1e-10, "dense hip": 1e-10, "torus": 3e-6}


def prior() -> GridPrior:
    """Padded so far that images of the kernel, left out below a tolerance, never reach the box."""
    grid = RegularGrid.from_bounds((0.0, 0.0), (1.0, 1.0), (7, 6))
    return GridPrior.padded(Matern32(0.1, 1.3, dim=2), grid, padding=16.0)


def rows_in_groups_of(count: int, name: str, monkeypatch: pytest.MonkeyPatch) -> Features:
    features = MAPS[name](prior())
    monkeypatch.setattr(groups, "GROUP_BYTES", count * features.n_features * 8)
    return features.rows(FUNCTIONAL)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("count", [1, 4, 10])
def test_groups_equal_the_whole(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        whole = rows_in_groups_of(1000, name, monkeypatch)
        parts = rows_in_groups_of(count, name, monkeypatch)
    torch.testing.assert_close(parts.phi, whole.phi, rtol=0, atol=TOLERANCE[name])
    torch.testing.assert_close(
        parts.residual_variance, whole.residual_variance, rtol=0, atol=TOLERANCE[name]
    )
    assert parts.solves.columns == whole.solves.columns
    assert parts.solves.unconverged == 0


@pytest.mark.parametrize("name", MAPS)
def test_gradients_do_not_notice_groups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for count in (1000, 3):
        features, leaves = traced(MAPS[name](prior()))
        monkeypatch.setattr(groups, "GROUP_BYTES", count * features.n_features * 8)
        rows = features.rows(FUNCTIONAL)
        weight = torch.linspace(0.0, 1.0, rows.phi.numel(), dtype=torch.float64)
        loss = (rows.phi.flatten() * weight).sum() + rows.residual_variance.sum()
        slopes = torch.autograd.grad(loss, leaves)
        found.append(torch.cat([slope.flatten() for slope in slopes]))
    torch.testing.assert_close(found[1], found[0], rtol=10 * TOLERANCE[name], atol=1e-10)


def test_an_accelerator_takes_all_rows_at_once() -> None:
    assert groups.rows_together(10**9, torch.float32, torch.device("meta")) > 10**9
    assert groups.rows_together(10**9, torch.float32, torch.device("cpu")) == 1
