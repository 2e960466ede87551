"""Models as functions of their parameters, for gradients and gradcheck."""

from collections.abc import Callable, Sequence
from typing import TypeVar

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
