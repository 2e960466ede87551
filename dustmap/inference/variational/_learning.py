"""Hyperparameters by Adam on the ELBO, alternating with natural steps (002, appendix B.2)."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from dustmap.gp import Batch
from dustmap.gp.families import AbstractGaussian
from dustmap.gp.features import Features
from dustmap.gp.functionals import AbstractFunctional
from dustmap.inference.variational._model import VariationalModel


@final
class HyperparameterLearner:
    """Adam on kernel, mean and noise at fixed q(ε), through the exact gradient of the features.

    learning_rate 0 makes it inactive. `model` always has features of the present parameters.
    """

    def __init__(self, model: VariationalModel, learning_rate: float) -> None:
        self._parameters = list(model.parameters())
        self.active = learning_rate > 0 and len(self._parameters) > 0
        self.model = model.rebuilt() if self.active else model
        self._adam = torch.optim.Adam(self._parameters, lr=learning_rate) if self.active else None

    def rows(self, functional: AbstractFunctional) -> Features:
        """Rows of a minibatch at the present parameters, with their graph."""
        return self.model.features.rows(functional)

    def snapshot(self) -> tuple[Tensor, ...]:
        """Copies of the present parameters, to restore them with `restored`; () when inactive."""
        return tuple(p.detach().clone() for p in self._parameters) if self.active else ()

    def step(self, posterior: AbstractGaussian, rows: Features, batch: Batch, scale: float) -> None:
        """One Adam step down the minibatch's −ELBO / N; nothing when inactive."""
        if self._adam is None:
            return
        self._adam.zero_grad()
        loss = -self.model.elbo(posterior, rows, batch, scale) / (scale * len(batch))
        loss.backward()  # type: ignore[no-untyped-call]
        self._adam.step()
        self.model = self.model.rebuilt()


@torch.no_grad()
def restored(model: VariationalModel, values: Sequence[Tensor]) -> VariationalModel:
    """The model with its parameters set back to `values` of a `snapshot`, in place."""
    if not values:
        return model
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)
    return model.rebuilt()
