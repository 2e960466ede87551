"""HEALPix pixels of the sky: beams through their centres, and patches that are held out together.

A star beside another is predicted by it whatever the dust between the stars is like. So what tells
of the prior is a patch larger than the correlation length, all stars of which are held out.
"""

import math
from functools import cached_property
from typing import final

import numpy as np
import torch
from torch import Tensor

from dustmap.gp.features import AbstractBeams
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, Sharded
from dustmap.sky._coordinates import refuse_bad_nside

#: Width of a pixel, in rad, times nside.
_PIXEL = math.sqrt(math.pi / 3.0)


@final
class HealpixBeams(AbstractBeams):
    """A beam for each pixel of `nside`, bilinear between the four nearest on two rings."""

    def __init__(self, nside: int) -> None:
        refuse_bad_nside(nside, "nside of beams")
        self.nside = nside

    @cached_property
    def directions(self) -> Tensor:
        import healpy  # takes a second, as it takes matplotlib

        pixels = np.arange(12 * self.nside**2)
        return torch.from_numpy(np.stack(healpy.pix2vec(self.nside, pixels, nest=True), axis=-1))

    def around(self, direction: Tensor) -> tuple[Tensor, Tensor]:
        import healpy

        theta, phi = healpy.vec2ang(direction.cpu().numpy())
        pixel, weight = healpy.get_interp_weights(self.nside, theta, phi, nest=True)
        return (
            torch.from_numpy(np.ascontiguousarray(pixel.T)).to(direction.device, torch.int64),
            torch.from_numpy(np.ascontiguousarray(weight.T)).to(direction.device),
        )


def sky_patches(rays: AbstractFunctional, width: float) -> Tensor:
    """Number (N,) of the patch in which each ray ends, on the average of its distances.

    width: of the shells, in the units of the rays; pixels are the smallest (NESTED) that are as
    wide at the median distance, nside 1 at the largest.
    """
    import healpy  # takes a second, as it takes matplotlib

    own = rays.local if isinstance(rays, Sharded) else rays
    assert isinstance(own, LineIntegrals)
    distance = own.edges[:, 0] + (own.weights * own.edges.diff(dim=-1)).sum(-1)
    vectors = own.direction
    if isinstance(rays, Sharded):
        distance = rays.gathered(distance)
        vectors = torch.stack([rays.gathered(axis) for axis in vectors.unbind(-1)], dim=-1)
    widest = _PIXEL * float(distance.median()) / width
    nside = 2 ** max(0, math.floor(math.log2(max(widest, 1.0))))
    pixel = healpy.vec2pix(nside, *vectors.double().cpu().numpy().T, nest=True)
    shell = torch.div(distance.cpu(), width, rounding_mode="floor").long()
    labels = torch.from_numpy(np.asarray(pixel, np.int64)) + 12 * nside**2 * shell
    patches: Tensor = torch.unique(labels, return_inverse=True)[1]
    return patches
