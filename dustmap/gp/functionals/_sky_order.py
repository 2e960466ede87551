"""An order of rays in which neighbours see the same part of a grid."""

import torch
from torch import Tensor

from dustmap.gp.functionals._rays import LineIntegrals
from dustmap.gp.functionals._stacked import Sharded

#: Bits of each coordinate on a face of the cube of directions: 0.1° apart.
_BITS = 10


@torch.no_grad()
def sky_order(rays: LineIntegrals | Sharded) -> Tensor:
    """Return the order (N,) of rays along a curve through all directions.

    A direction ω is on the face of a cube on which |ω_a| is largest, at the place ω_b / |ω_a| of
    the other axes b; faces come one after the other, the squares of each in Morton's order, whose
    neighbours are close on the sky. Rays of one square are in the order of their ends. Rows of
    neighbours then have entries at the same nodes, and rows of the transpose at rays one after the
    other: vectors stay in cache from one row to the next.

    The order is that of the rays alone: whatever order they come in, they leave in the same, up to
    rays of one square that end at one distance.

    Examples
    --------
    >>> ends = [[9.0, 0.09, 0.0], [0.0, 9.0, 0.09], [4.0, 0.04, 0.0], [0.0, 4.0, 0.04]]
    >>> sky_order(LineIntegrals.from_observer(torch.tensor(ends)))
    tensor([2, 0, 3, 1])
    """
    own = rays.local if isinstance(rays, Sharded) else rays
    assert isinstance(own, LineIntegrals)
    place, end = _squares(own.direction), own.edges[:, -1]
    if isinstance(rays, Sharded):
        place, end = rays.gathered(place), rays.gathered(end)
    by_end = end.argsort(stable=True)
    order: Tensor = by_end[place[by_end].argsort(stable=True)]
    return order


def _squares(direction: Tensor) -> Tensor:
    """Return the place (N,) int64 on the curve of the square that each direction (N, D) is in."""
    dim = direction.shape[1]
    axis = direction.abs().argmax(1)
    along = direction.gather(1, axis[:, None])
    others = torch.stack([torch.arange(dim).roll(-1 - a)[:-1] for a in range(dim)])
    aside = direction.gather(1, others.to(axis.device)[axis]) / along.abs()
    cell = (0.5 * (aside + 1.0) * 2**_BITS).to(torch.int64).clamp(0, 2**_BITS - 1)
    place = 2 * axis + (along[:, 0] < 0)
    for bit in reversed(range(_BITS)):
        for column in cell.unbind(1):
            place = 2 * place + (column >> bit & 1)
    return place
