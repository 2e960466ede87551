"""Models as functions of their parameters, for gradients and gradcheck."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from dustmap.gp import AbstractParametric
from dustmap.gp.kernels import AbstractKernel

T = TypeVar("T")
M = TypeVar("M", bound=AbstractParametric)


def with_values(model: M, values: Sequence[Tensor]) -> M:
    """The model with these unconstrained values, one per parameter."""
    pairs = zip(model.parameters(), values, strict=True)
    return model.with_parameters([p.at(value) for p, value in pairs])


def traced(model: M) -> tuple[M, tuple[Tensor, ...]]:
    """The model on leaf tensors of its parameters that require a gradient, and these."""
    leaves = tuple(p.value.detach().clone().requires_grad_() for p in model.parameters())
    return with_values(model, leaves), leaves


def of_parameters(
    kernel: AbstractKernel, outputs: Callable[[AbstractKernel], T]
) -> Callable[..., T]:
    """(log_lengthscale, log_variance) ↦ outputs(kernel with those parameters)."""
    return lambda *values: outputs(with_values(kernel, values))


def normal_like(x: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=generator, dtype=x.dtype)


def check_one_direction(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    atol: float,
    rtol: float,
    step: float = 1e-6,
) -> None:
    """Hold the gradient of a random projection of all outputs against central differences, in one
    random direction of each input: of two inputs, five evaluations and one backward pass."""

    def projected(values: Sequence[Tensor]) -> Tensor:
        parts = [(normal_like(x, i) * x).sum() for i, x in enumerate(function(*values))]
        return torch.stack(parts).sum()

    gradients = torch.autograd.grad(projected(inputs), inputs)
    for i, (x, gradient) in enumerate(zip(inputs, gradients, strict=True)):
        direction = normal_like(x, i)
        with torch.no_grad():
            above, below = (
                projected([*inputs[:i], x + h * direction, *inputs[i + 1 :]]) for h in (step, -step)
            )
        difference = (above - below) / (2 * step)
        torch.testing.assert_close((gradient * direction).sum(), difference, atol=atol, rtol=rtol)
