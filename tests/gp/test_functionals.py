"""Functionals: validation, selection, exact moments, rules, clipping."""

import math

import pytest
import torch
from torch import Tensor

from dustmap.gp import RegularGrid
from dustmap.gp.functionals import (
    Counts,
    Derivatives,
    GaussLegendre,
    LineIntegrals,
    OutsidePolicy,
    PointMeasure,
    PointValues,
    Stacked,
    Stratified,
)
from tests.contracts.functionals import uniform, unit, weighted_rays


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_moments_of_rays_by_quadrature(dim: int) -> None:
    rays = weighted_rays(6, dim)
    measure = rays.measure(GaussLegendre(2))
    torch.testing.assert_close(rays.moments(), measure.moments(), rtol=1e-13, atol=1e-14)
    position, length = uniform(4, dim), uniform(4, dim).norm(dim=-1)
    plain = LineIntegrals.from_observer(position).moments()
    torch.testing.assert_close(plain[:, 0], length)
    torch.testing.assert_close(plain[:, 1:], 0.5 * length[:, None] * position)
    mean = LineIntegrals.mean(position, position + 1).moments()
    torch.testing.assert_close(mean, torch.cat([torch.ones(4, 1).double(), position + 0.5], -1))


def test_moments_of_values_and_derivatives() -> None:
    x, v = uniform(3, 2), unit(3, 2)
    assert torch.equal(PointValues(x).moments(), torch.cat([torch.ones(3, 1).double(), x], -1))
    expected = torch.cat([torch.zeros(3, 1).double(), v], -1)
    assert torch.equal(Derivatives(x, v).moments(), expected)
    axis = Derivatives.partial(x, 1).moments()
    assert axis.tolist() == [[0.0, 0.0, 1.0]] * 3


def test_from_observer_equals_segments() -> None:
    observer = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64)
    positions = uniform(5, 3)
    rays = LineIntegrals.from_observer(positions, observer)
    torch.testing.assert_close(rays.at(rays.edges)[:, 1], positions)
    torch.testing.assert_close(rays.at(rays.edges)[:, 0], observer.expand(5, 3))
    assert torch.equal(rays.keys, torch.arange(5))


def test_a_star_at_the_observer_is_a_ray_of_no_length() -> None:
    rays = LineIntegrals.from_observer(torch.zeros(1, 3))
    assert rays.edges.tolist() == [[0.0, 0.0]]
    assert rays.moments().tolist() == [[0.0] * 4]
    points = rays.measure(Stratified(3, 0))
    assert points.weights.tolist() == [[0.0] * 3]
    assert points.points.abs().sum() == 0


def test_jumps_integrate_derivatives() -> None:
    """Σ_e Δ_e h(s_e) = ∫ w h' ds, for h = s³."""
    rays = weighted_rays(4, 2)
    by_jumps = (rays.jumps() * rays.edges**3).sum(-1)
    s, v = GaussLegendre(3).nodes(rays.edges, rays.weights, rays.keys)
    torch.testing.assert_close(by_jumps, (v * 3 * s**2).sum(-1))


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_cut_ray_has_the_same_weight_everywhere(dim: int) -> None:
    """Before its start and behind its end, in segments, on an edge, and nowhere (NaN)."""
    rays = weighted_rays(6, dim)
    middle = 0.3 * rays.edges[2, 1] + 0.7 * rays.edges[2, 2]
    at = torch.stack(
        [
            rays.edges[0, 0] - 1.0,
            rays.edges[1, -1] + 1.0,
            middle,
            rays.edges[3, 1],
            rays.edges[4, 0],
            middle.new_tensor(torch.nan),
        ]
    )
    cut = rays.cut(at)
    assert cut.weights.shape[1] == rays.weights.shape[1] + 1
    assert cut.edges[2].tolist() == sorted([*rays.edges[2].tolist(), float(middle)])
    assert torch.equal(cut.edges[:, [0, -1]], rays.edges[:, [0, -1]])
    for power in range(1, 4):  # of Σ_e Δ_e s_e^p = p ∫ w s^(p-1) ds
        for_all = [(each.jumps() * each.edges**power).sum(-1) for each in (rays, cut)]
        torch.testing.assert_close(for_all[1], for_all[0], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("order", "panels"), [(1, 1), (4, 1), (3, 5)])
def test_gauss_legendre_is_exact_for_polynomials(order: int, panels: int) -> None:
    rays = weighted_rays(4, 2)
    s, v = GaussLegendre(order, panels).nodes(rays.edges, rays.weights, rays.keys)
    assert s.shape == v.shape == (4, 3 * order * panels)
    for power in range(2 * order):
        exact = (rays.weights * rays.edges.pow(power + 1).diff(dim=-1)).sum(-1) / (power + 1)
        torch.testing.assert_close((v * s**power).sum(-1), exact, rtol=1e-12, atol=1e-14)


def test_stratified_draws_do_not_depend_on_the_batch() -> None:
    rays, rule = weighted_rays(9, 3), Stratified(5, seed=3)
    whole = rays.measure(rule)
    order = torch.tensor([7, 2, 2, 0])
    part = rays[order].measure(rule)
    assert torch.equal(part.points, whole.points[order])
    assert torch.equal(part.weights, whole.weights[order])
    assert not torch.equal(rays.measure(Stratified(5, seed=4)).points, whole.points)


def test_stratified_points_fall_in_their_strata_and_are_uniform() -> None:
    n, count = 4000, 4
    start = torch.zeros(n, 1, dtype=torch.float64)
    s = LineIntegrals.segment(start, start + 2).measure(Stratified(count, 0)).points[..., 0]
    stratum = (s / 2 * count).floor()
    assert torch.equal(stratum, torch.arange(count).double().expand(n, count))
    within = s / 2 * count - stratum
    deviation = (within.mean(0) - 0.5).abs() * math.sqrt(12 * n)
    assert deviation.max() < 5
    correlation = torch.corrcoef(within.T) - torch.eye(count)
    assert correlation.abs().max() * math.sqrt(n) < 5


def test_stratified_weights_keep_the_total_and_avoid_empty_segments() -> None:
    edges = torch.tensor([[0.0, 1.0, 2.0, 2.0, 3.0]])
    weights = torch.tensor([[1.0, 0.0, 5.0, 2.0]])
    rays = LineIntegrals(torch.zeros(1, 1), torch.ones(1, 1), edges, weights)
    measure = rays.measure(Stratified(300, 1))
    assert measure.weights.sum().item() == pytest.approx(3.0)
    s = measure.points.flatten()
    assert int((s <= 1).sum()) == 100
    assert int((s >= 2).sum()) == 200


def test_stacked_measure_pads_and_refuses_mixed_derivatives() -> None:
    values, rays = PointValues(uniform(2, 2)), weighted_rays(3, 2)
    stacked = Stacked((values, rays))
    measure = stacked.measure(GaussLegendre(2))
    assert measure.points.shape == (5, 6, 2)
    torch.testing.assert_close(measure.moments(), stacked.moments())
    mixed = Stacked((values, Derivatives(uniform(2, 2), unit(2, 2))))
    with pytest.raises(ValueError, match="mixes Derivatives"):
        mixed.measure(GaussLegendre(2))


def test_nested_stacks_are_flattened() -> None:
    a, b = PointValues(uniform(2, 2)), weighted_rays(3, 2)
    nested = Stacked((Stacked((a, b)), a))
    assert len(nested.parts) == 3
    shuffled = Stacked((a, b))[torch.tensor([4, 0, 2])]
    outer = Stacked((a, shuffled))
    torch.testing.assert_close(outer.moments(), torch.cat([a.moments(), shuffled.moments()]))


BOX = ((-1.0, -1.0), (1.0, 1.0))


def rays_around_a_box() -> LineIntegrals:
    """Inside; ends outside; starts outside; misses the box; of no length outside; on a face."""
    start = torch.tensor([[0, 0], [0, 0], [-3, 0], [-3, 2], [5, 5], [-1, -1]]).double()
    end = torch.tensor([[0.5, 0.5], [3, 0], [0, 0], [3, 2], [5, 5], [1, -1]]).double()
    return LineIntegrals.segment(start, end)


def test_truncation_keeps_the_part_inside_and_counts() -> None:
    clipped, kept, counts = rays_around_a_box().clipped(*BOX, OutsidePolicy.TRUNCATE)
    assert kept.tolist() == [0, 1, 2, 4, 5]
    assert counts == Counts(truncated=2, dropped=1)
    lengths = (clipped.edges[:, -1] - clipped.edges[:, 0]).tolist()
    assert lengths == pytest.approx([math.sqrt(0.5), 1, 1, 0, 2])
    assert clipped.keys.tolist() == [0, 1, 2, 4, 5]
    assert clipped.at(clipped.edges)[2].tolist() == [[-1.0, 0.0], [0.0, 0.0]]


def test_dropping_and_refusing() -> None:
    rays = rays_around_a_box()
    clipped, kept, counts = rays.clipped(*BOX, OutsidePolicy.DROP)
    assert kept.tolist() == [0, 4, 5]
    assert len(clipped) == 3
    assert counts == Counts(truncated=0, dropped=3)
    with pytest.raises(ValueError, match=r"3 of 6 rays leave the box.*first is row 1"):
        rays.clipped(*BOX, OutsidePolicy.ERROR)
    _, kept, counts = rays[torch.tensor([0, 5])].clipped(*BOX, OutsidePolicy.ERROR)
    assert counts == Counts(0, 0)


def test_what_is_left_after_clipping_can_be_interpolated() -> None:
    """Rays that end so near behind a face that they count as ending on it are cut there too."""
    grid = RegularGrid.from_bounds((-500.0, -500.0, -200.0), (500.0, 500.0, 200.0), (81, 81, 33))
    beyond = torch.tensor([0.0, 1e-12, 1e-6, 2e-4, 1e-3, 2e-3, 1.0], dtype=torch.float64)
    ends = torch.stack([-500.0 - beyond, 60.0 * beyond.sin(), beyond.cos()], -1)
    for policy in (OutsidePolicy.TRUNCATE, OutsidePolicy.DROP):
        rays, kept, counts = LineIntegrals.from_observer(ends).clipped(
            grid.lower, grid.upper, policy
        )
        assert len(rays) == len(kept) == len(beyond) - counts.dropped
        assert bool(grid.contains(rays.at(rays.edges).flatten(0, 1)).all())
    assert counts.dropped == 2


def test_a_negligible_tail_is_truncated_under_every_policy() -> None:
    edges, weights = torch.tensor([[0.0, 0.5, 3.0]]), torch.tensor([[1.0, 1e-4]])
    rays = LineIntegrals(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), edges, weights)
    for policy in OutsidePolicy:
        clipped, _, counts = rays.clipped(*BOX, policy, negligible=1e-3)
        assert counts == Counts(truncated=1, dropped=0)
        assert clipped.edges.tolist() == [[0.0, 0.5, 1.0]]


def test_clipping_agrees_with_the_moments_of_the_part_inside() -> None:
    rays = weighted_rays(200, 2, seed=5)
    lower, upper = (0.2, 0.1), (0.8, 0.9)
    clipped, kept, counts = rays.clipped(lower, upper, OutsidePolicy.TRUNCATE)
    measure = rays[kept].measure(GaussLegendre(2, panels=2000))
    x = measure.points
    inside = ((x >= torch.tensor(lower)) & (x <= torch.tensor(upper))).all(-1)
    mass = (measure.weights * inside).sum(-1)
    torch.testing.assert_close(clipped.moments()[:, 0], mass, rtol=0, atol=2e-3)
    assert counts.truncated + counts.dropped > 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"origin": torch.full((2, 2), torch.nan)}, "origin must be finite: row 0"),
        ({"direction": 2 * unit(2, 2)}, "direction must hold unit vectors: row 0 has length 2"),
        ({"direction": unit(2, 3)}, r"direction must have shape \(2, 2\)"),
        ({"edges": torch.tensor([[0.0, 1.0], [1.0, 0.5]])}, "must not decrease.*row 1"),
        ({"edges": torch.tensor([[0.0, 1.0], [-1.0, 0.5]])}, "edges must be >= 0.*row 1"),
        ({"edges": torch.tensor([[0.0, math.inf], [1.0, 2.0]])}, "edges must be finite: row 0"),
        ({"edges": torch.ones(2, 3)}, "one column more than weights"),
        ({"edges": torch.ones(3, 2)}, "edges must have 2 rows"),
        ({"weights": torch.tensor([[1.0], [-1.0]])}, "weights must be >= 0: row 1"),
        ({"keys": torch.arange(3)}, "keys must be int64"),
        ({"keys": torch.ones(2)}, "keys must be int64"),
    ],
)
def test_bad_rays_are_refused(arguments: dict[str, Tensor], message: str) -> None:
    good = {
        "origin": torch.zeros(2, 2),
        "direction": unit(2, 2),
        "edges": torch.tensor([[0.0, 1.0], [0.5, 0.5]]),
        "weights": torch.ones(2, 1),
    }
    assert len(LineIntegrals(**good)) == 2
    with pytest.raises(ValueError, match=message):
        LineIntegrals(**(good | arguments))


def test_bad_points_are_refused() -> None:
    with pytest.raises(ValueError, match="x must be finite: row 1"):
        PointValues(torch.tensor([[0.0], [torch.inf]]))
    with pytest.raises(ValueError, match=r"x must have shape \(N, D\)"):
        PointValues(torch.zeros(4))
    with pytest.raises(TypeError, match="x must be a tensor"):
        PointValues([[0.0]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unit vectors"):
        Derivatives(torch.zeros(1, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="end must differ from start"):
        LineIntegrals.mean(torch.zeros(1, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="points must be"):
        PointMeasure(torch.zeros(2, 2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"weights must be \(2, 3\)"):
        PointMeasure(torch.zeros(2, 3, 1), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="one dimension on one device"):
        Stacked((PointValues(torch.zeros(1, 2)), PointValues(torch.zeros(1, 3))))
    with pytest.raises(ValueError, match="order must hold"):
        Stacked((PointValues(torch.zeros(1, 2)),), torch.arange(2))


def test_bad_rules_and_boxes_are_refused() -> None:
    with pytest.raises(ValueError, match="order must be at least 1"):
        GaussLegendre(0)
    with pytest.raises(ValueError, match="count must be at least 1"):
        Stratified(0, 0)
    rays = rays_around_a_box()
    with pytest.raises(ValueError, match="must have 2 entries"):
        rays.clipped((0.0,), (1.0,), OutsidePolicy.DROP)
    with pytest.raises(ValueError, match="upper must exceed lower"):
        rays.clipped((0.0, 0.0), (1.0, 0.0), OutsidePolicy.DROP)
