"""Linear functionals of the field ρ, and their common form: a weighted sum over points.

Rules turn a weighted integral along a track into such a sum; `PointValues` and `Derivatives` are
functionals at single points. Coordinates are checked to be finite float64 of the right shape.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self, final

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from dustmap.errors import UserError
from dustmap.linalg import counter_uniform

UNIT_TOLERANCE = 1e-5  # loose enough for directions that were normalised in float32


def coordinates(name: str, x: Tensor, like: Tensor | None = None) -> Tensor:
    """Return x as float64 (N, D), refused unless finite and of the shape of `like`."""
    return _checked(name, x, "(N, D)", like)


def table(name: str, x: Tensor, rows: int) -> Tensor:
    """Return x as float64 (rows, J), refused unless finite."""
    checked = _checked(name, x, f"({rows}, J)", None)
    if len(checked) != rows:
        raise UserError(f"{name} must have {rows} rows, one per datum; got {len(checked)}.")
    return checked


def unit_vectors(name: str, x: Tensor, like: Tensor) -> Tensor:
    """Return x as float64 directions (N, D) of length one."""
    direction = coordinates(name, x, like)
    row = first_row((direction.norm(dim=-1) - 1).abs() > UNIT_TOLERANCE)
    if row is not None:
        raise UserError(
            f"{name} must hold unit vectors: row {row} has length "
            f"{direction[row].norm().item():.6g}; divide every row by its length."
        )
    return direction


def _checked(name: str, x: Tensor, shape: str, like: Tensor | None) -> Tensor:
    """Return x in float64, refused unless a matrix of this shape and device, and finite."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor {shape}, got {type(x).__name__}.")
    if x.ndim != 2 or x.shape[-1] == 0:
        raise UserError(f"{name} must have shape {shape}, got {tuple(x.shape)}.")
    if like is not None and x.shape != like.shape:
        raise UserError(f"{name} must have shape {tuple(like.shape)}, got {tuple(x.shape)}.")
    if like is not None and x.device != like.device:
        raise UserError(f"{name} is on {x.device}, the rest on {like.device}; use one device.")
    # A sum is finite only if all terms are; it may overflow, and costs a fifth of asking for each.
    if not bool(x.sum().isfinite()) and not bool((finite := x.isfinite()).all()):
        row = int((~finite).any(-1).nonzero()[0])
        raise UserError(
            f"{name} must be finite: row {row} is {x[row].tolist()}; drop or repair such rows."
        )
    return x.to(torch.float64)


def first_row(wrong: Tensor) -> int | None:
    """Return the first row (N,) where something is wrong, None where all is well."""
    return int(wrong.nonzero()[0]) if bool(wrong.any()) else None


class AbstractRule(ABC):
    """∫ w(s) g(s) ds ≈ Σ_q v_q g(s_q) for weights that are constant on each segment."""

    @abstractmethod
    def nodes(self, edges: Tensor, weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions s and weights v, both (N, Q).

        edges (N, J + 1): segment boundaries; weights (N, J): w between them; keys (N,): identities
        of the tracks, for rules that draw random numbers.
        """


@final
@dataclass(frozen=True)
class GaussLegendre(AbstractRule):
    """`order` Gauss-Legendre nodes on each of `panels` equal parts of every segment."""

    order: int
    panels: int = 1

    def __post_init__(self) -> None:
        _check_count("order", self.order)
        _check_count("panels", self.panels)

    def nodes(self, edges: Tensor, weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        unit, unit_weights = _rule_like(edges, self.order)
        start = torch.arange(self.panels, dtype=edges.dtype, device=edges.device)
        fractions = ((start[:, None] + unit) / self.panels).reshape(-1)  # (P · order,)
        lengths = edges.diff(dim=-1)
        s = edges[:, :-1, None] + lengths[..., None] * fractions
        v = (lengths * weights)[..., None] * unit_weights.repeat(self.panels) / self.panels
        return s.flatten(1), v.flatten(1)


@final
@dataclass(frozen=True)
class SpacedGaussLegendre(AbstractRule):
    """`order` Gauss-Legendre nodes on each panel of a segment, no panel longer than `longest`, one
    length for all tracks or one (N,) for each.

    The nodes of a track depend on that track alone: shorter ones are filled up with nodes of weight
    zero at the ends of their segments.
    """

    order: int
    longest: float | Tensor

    def __post_init__(self) -> None:
        _check_count("order", self.order)
        if not bool((torch.as_tensor(self.longest) > 0).all()):
            raise UserError(f"longest must be positive, got {self.longest}.")

    def nodes(self, edges: Tensor, weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        unit, unit_weights = _rule_like(edges, self.order)
        lengths = edges.diff(dim=-1)[..., None]  # (N, J, 1)
        longest = torch.as_tensor(self.longest, dtype=edges.dtype, device=edges.device)
        count = (lengths / longest.reshape(-1, 1, 1)).ceil().clamp_min(1.0)
        most = int(count.max()) if count.numel() else 1
        panel = torch.arange(most, dtype=edges.dtype, device=edges.device)
        start = torch.minimum(panel, count) / count  # (N, J, P)
        width = torch.where(panel < count, 1.0 / count, 0.0)
        fractions = start[..., None] + width[..., None] * unit  # (N, J, P, order)
        s = edges[:, :-1, None, None] + lengths[..., None] * fractions
        v = (lengths * weights[..., None] * width)[..., None] * unit_weights
        return s.flatten(1), v.flatten(1)


@final
@dataclass(frozen=True)
class Stratified(AbstractRule):
    """One random point in each of `count` strata of equal weight (002, section 5.5).

    The point of stratum i of track `key` depends on (seed, key, i) alone, so neither batches nor
    chunks nor their order can change it.
    """

    count: int
    seed: int

    def __post_init__(self) -> None:
        _check_count("count", self.count)

    def nodes(self, edges: Tensor, weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        stratum = torch.arange(self.count, device=edges.device)
        uniform = counter_uniform(self.seed, keys[:, None], stratum[None]).to(edges.dtype)
        cumulative = torch.nn.functional.pad((weights * edges.diff(dim=-1)).cumsum(-1), (1, 0))
        total = cumulative[:, -1:]
        target = (stratum + uniform) / self.count * total
        segment = torch.searchsorted(cumulative, target, right=True) - 1
        segment = segment.clamp(0, weights.shape[-1] - 1)
        density = weights.gather(1, segment)
        safe = torch.where(density > 0, density, torch.ones_like(density))
        beyond = (target - cumulative.gather(1, segment)) / safe
        s = edges.gather(1, segment) + beyond
        return s.clamp(edges[:, :1], edges[:, -1:]), (total / self.count).expand_as(s)


def _rule_like(edges: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the Gauss-Legendre rule on [0, 1], in the dtype of the edges."""
    nodes, weights = leggauss(order)
    return edges.new_tensor(0.5 * (nodes + 1)), edges.new_tensor(0.5 * weights)


def _check_count(name: str, value: int) -> None:
    """Raise unless the value is at least 1."""
    if value < 1:
        raise UserError(f"{name} must be at least 1, got {value}.")


class AbstractFunctional(ABC):
    """N linear functionals f_n = L_n ρ of a field on R^D; immutable, coordinates in float64."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of functionals N."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """Input dimension D."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the coordinates."""

    @abstractmethod
    def __getitem__(self, index: slice | Tensor) -> Self:
        """The functionals picked by a slice, an integer or a boolean tensor, in its order."""

    @abstractmethod
    def measure(self, rule: AbstractRule) -> "PointMeasure":
        """Return the functionals as weighted sums over points, integrals by `rule`."""

    @abstractmethod
    def moments(self) -> Tensor:
        """Return L_n applied to the functions (1, x_1, .., x_D), exactly: (N, 1 + D)."""


class AbstractRows(AbstractFunctional):
    """Functionals that are tensors of N rows: the coordinates (N, ..., D) first, or None."""

    def __len__(self) -> int:
        return len(self._coordinates)

    @property
    def dim(self) -> int:
        return self._coordinates.shape[-1]

    @property
    def device(self) -> torch.device:
        return self._coordinates.device

    def __getitem__(self, index: slice | Tensor) -> Self:
        return self.rowwise(lambda rows: rows[index])

    def rowwise(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the functionals whose tensors are function(rows)."""
        tensors = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return type(self)(*(None if rows is None else function(rows) for rows in tensors))

    @property
    def _coordinates(self) -> Tensor:
        tensor: Tensor = getattr(self, fields(self)[0].name)  # type: ignore[arg-type]
        return tensor


@final
@dataclass(frozen=True, eq=False)
class PointMeasure(AbstractRows):
    """f_n = Σ_q w_q ρ(x_q), or Σ_q w_q ∂_v ρ(x_q) where there is a direction v.

    points (N, Q, D): x_q; weights (N, Q): w_q; direction (N, D): v, or None for values.
    """

    points: Tensor
    weights: Tensor
    direction: Tensor | None = None

    def __post_init__(self) -> None:
        if self.points.ndim != 3:
            raise UserError(f"points must be (N, Q, D), got shape {tuple(self.points.shape)}.")
        n, q, dim = self.points.shape
        flat = coordinates("points", self.points.reshape(n * q, dim))
        object.__setattr__(self, "points", flat.reshape(n, q, dim))
        object.__setattr__(self, "weights", table("weights", self.weights, n))
        if self.weights.shape != (n, q):
            raise UserError(f"weights must be ({n}, {q}), got {tuple(self.weights.shape)}.")
        if self.direction is not None:
            direction = coordinates("direction", self.direction, self.points[:, 0])
            object.__setattr__(self, "direction", direction)

    def measure(self, rule: AbstractRule) -> "PointMeasure":
        return self

    def moments(self) -> Tensor:
        if self.direction is not None:
            slopes = self.weights.sum(-1, keepdim=True) * self.direction
            return torch.cat([torch.zeros_like(slopes[:, :1]), slopes], dim=-1)
        first = torch.einsum("nq,nqd->nd", self.weights, self.points)
        return torch.cat([self.weights.sum(-1, keepdim=True), first], dim=-1)


@final
@dataclass(frozen=True, eq=False)
class PointValues(AbstractRows):
    """Values of the field at points x (N, D), f_n = ρ(x_n).

    Examples
    --------
    >>> values = PointValues(torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
    >>> len(values), values.dim, len(values[:1])
    (2, 2, 1)
    """

    x: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", coordinates("x", self.x))

    def measure(self, rule: AbstractRule) -> PointMeasure:
        return PointMeasure(self.x[:, None], torch.ones_like(self.x[:, :1]))

    def moments(self) -> Tensor:
        return torch.cat([torch.ones_like(self.x[:, :1]), self.x], dim=-1)


@final
@dataclass(frozen=True, eq=False)
class Derivatives(AbstractRows):
    """Derivatives of the field, f_n = v_n · ∇ρ(x_n), at points x (N, D) along unit vectors v,
    `direction` (N, D)."""

    x: Tensor
    direction: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", coordinates("x", self.x))
        object.__setattr__(self, "direction", unit_vectors("direction", self.direction, self.x))

    @classmethod
    def partial(cls, x: Tensor, axis: int) -> "Derivatives":
        """Return ∂ρ/∂x_axis at the points x (N, D)."""
        direction = torch.zeros_like(x)
        direction[:, axis] = 1
        return cls(x, direction)

    def measure(self, rule: AbstractRule) -> PointMeasure:
        return PointMeasure(self.x[:, None], torch.ones_like(self.x[:, :1]), self.direction)

    def moments(self) -> Tensor:
        return torch.cat([torch.zeros_like(self.x[:, :1]), self.direction], dim=-1)
