"""Beams through the centres of HEALPix pixels: rays that many stars share."""

from functools import cached_property
from typing import final

import numpy as np
import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp.features import AbstractBeams


@final
class HealpixBeams(AbstractBeams):
    """A beam for each pixel of `nside`, bilinear between the four nearest on two rings."""

    def __init__(self, nside: int) -> None:
        if nside < 1 or nside & (nside - 1):
            raise UserError(f"nside of beams: expected a power of two, got {nside}")
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
