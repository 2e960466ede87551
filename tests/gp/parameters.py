"""Functions of a kernel as functions of its parameters, for gradcheck."""

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor, nn
from torch.func import functional_call

from dustmap.gp.kernels import AbstractKernel

T = TypeVar("T")


class _Evaluated(nn.Module, Generic[T]):
    def __init__(self, kernel: AbstractKernel, outputs: Callable[[AbstractKernel], T]) -> None:
        super().__init__()
        self.kernel, self._outputs = kernel, outputs

    def forward(self) -> T:
        return self._outputs(self.kernel)


def of_parameters(
    kernel: AbstractKernel, outputs: Callable[[AbstractKernel], T]
) -> Callable[..., T]:
    """(log_lengthscale, log_variance) ↦ outputs(kernel with those parameters)."""
    module = _Evaluated(kernel, outputs)

    def evaluate(log_lengthscale: Tensor, log_variance: Tensor) -> T:
        values = {"kernel.log_lengthscale": log_lengthscale, "kernel.log_variance": log_variance}
        result: T = functional_call(module, values, ())
        return result

    return evaluate
