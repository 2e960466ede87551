"""Hyperparameters by Adam on the ELBO, alternating with natural steps (002, appendix B.2)."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from dustmap.gp import Batch
from dustmap.gp.families import AbstractGaussian
from dustmap.gp.features import Features
from dustmap.gp.functionals import AbstractFunctional
from dustmap.inference._journal import Kept
from dustmap.inference._kept import Reading, state
from dustmap.inference.variational._model import VariationalModel

#: What the state of a learner is called, and what Adam has of each parameter.
_ADAM, _AVERAGES = "adam", ("step", "exp_avg", "exp_avg_sq")


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

    def step(
        self, posterior: AbstractGaussian, rows: Features, batch: Batch, scale: float, rate: float
    ) -> None:
        """One Adam step of this rate down the minibatch's −ELBO / N; nothing when inactive."""
        if self._adam is None:
            return
        self._adam.param_groups[0]["lr"] = rate
        self._adam.zero_grad()
        # Without the divergence of q, which knows nothing of the hyperparameters.
        loss = -self.model.expected_log_likelihood(posterior, rows, batch) / len(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._adam.step()
        self.model = self.model.rebuilt()

    def kept(self) -> Kept | None:
        """Parameters and Adam's averages, None when inactive."""
        if self._adam is None:
            return None
        averages = self._adam.state_dict()["state"]
        arrays = {f"parameter_{i}": p for i, p in enumerate(self._parameters)}
        arrays |= {f"{name}_{i}": averages[i][name] for i in averages for name in _AVERAGES}
        return state(_ADAM, {}, arrays)

    def restore(self, reading: Reading, name: str) -> None:
        """Goes back to where `kept` was called, which gave the part of this name."""
        if reading.has(name) != self.active:
            told = "no learning of hyperparameters" if self.active else "learned hyperparameters"
            raise reading.refusal(told)
        if self._adam is None:
            return
        part, averages = reading.part(name, _ADAM), dict[int, dict[str, Tensor]]()
        with torch.no_grad():
            for i, p in enumerate(self._parameters):
                p.copy_(part.array(f"parameter_{i}", p, *p.shape))
                if part.has(f"step_{i}"):
                    averages[i] = {"step": part.array(f"step_{i}", torch.zeros(()))}
                    for average in _AVERAGES[1:]:
                        averages[i][average] = part.array(f"{average}_{i}", p, *p.shape)
        groups = self._adam.state_dict()["param_groups"]
        self._adam.load_state_dict({"state": averages, "param_groups": groups})
        self.model = self.model.rebuilt()


@torch.no_grad()
def restored(model: VariationalModel, values: Sequence[Tensor]) -> VariationalModel:
    """The model with its parameters set back to `values` of a `snapshot`, in place."""
    if not values:
        return model
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)
    return model.rebuilt()
