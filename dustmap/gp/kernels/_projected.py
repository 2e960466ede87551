"""Kernels of fields of which a grid holds the projection on its multilinear functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp._parameters import Parameter
from dustmap.gp.kernels._kernel import AbstractKernel, KernelTerm


@final
@dataclass(frozen=True, eq=False)
class ProjectedKernel(AbstractKernel):
    """A kernel whose field a grid holds by a share p of its projection, not by its values.

    Multilinear interpolation of a field's values smooths it: integrals along rays have too little
    variance at wavelengths of a few nodes, and a length learned from them comes out too short. The
    multilinear function that is closest to the field has, but for aliases, the coefficients

        û(ω) = s(ω) φ/G,    φ = Π_i sinc²(ω_i h_i / 2),    G = Π_i (2 + cos ω_i h_i) / 3

    (Unser, Proc. IEEE 88, 2000), where values at the nodes have û = s. A field that is its own
    interpolant, as that of a simulated sky may be, has values. `GridPrior` multiplies the spectrum
    of nodes by (φ/G)^{2p}; the covariances of the kernel are those of the field.

    kernel: of the field; odds: p/(1 − p) as the parameter "projection", learned by its logarithm.

    >>> from dustmap.gp.kernels import Matern32
    >>> kernel = ProjectedKernel.of(Matern32(3.0, dim=1), share=0.75)
    >>> round(float(kernel.share), 6), [p.name for p in kernel.parameters()]
    (0.75, ['length', 'variance', 'projection'])
    """

    kernel: AbstractKernel
    odds: Parameter

    @staticmethod
    def of(kernel: AbstractKernel, share: float) -> "ProjectedKernel":
        """Return the kernel held by a share 0 < p < 1 of the projection."""
        if not 0.0 < share < 1.0:
            raise UserError(
                f"share must lie between 0 and 1, got {share}: at 0 take the kernel itself"
            )
        return ProjectedKernel(kernel, Parameter.log("projection", share / (1.0 - share)))

    @property
    def dim(self) -> int:
        return self.kernel.dim

    def parameters(self) -> tuple[Parameter, ...]:
        return *self.kernel.parameters(), self.odds

    def with_parameters(self, parameters: Sequence[Parameter]) -> "ProjectedKernel":
        *rest, odds = parameters
        return ProjectedKernel(self.kernel.with_parameters(rest), odds)

    def terms(self) -> tuple[KernelTerm, ...]:
        return self.kernel.terms()

    @property
    def share(self) -> Tensor:
        """p (), float64."""
        return self.odds.value.double().sigmoid()

    def spectrum_factor(self, torus_shape: Sequence[int]) -> Tensor:
        """Return (φ/G)^{2p} on the half spectrum of a torus, (L_1, ..., L_D // 2 + 1), float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        last = len(torus_shape) - 1
        for axis, length in enumerate(torus_shape):
            frequencies = torch.fft.rfftfreq if axis == last else torch.fft.fftfreq
            cycles = frequencies(length, dtype=torch.float64, device=self.device)
            gram = (2.0 + (2.0 * math.pi * cycles).cos()) / 3.0
            log_ratio = 2.0 * torch.sinc(cycles).abs().log() - gram.log()
            total = total + log_ratio.reshape([-1 if a == axis else 1 for a in range(last + 1)])
        return (2.0 * self.share * total).exp()
