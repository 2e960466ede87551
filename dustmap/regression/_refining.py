"""Hyperparameters of many rows: from the exact evidence of a few on, by that of near neighbours."""

from dataclasses import dataclass
from typing import Any, final

import torch

from dustmap.gp import Batch, FitStatus, HyperparameterFit, fit_neighbour_evidence
from dustmap.regression._learning import Prior, random_part

#: Conditionals in the sum that is maximised, its steps, and the rows neighbours are sought among.
# 10,000 conditionals moved learned length scales by 1 and 9 per cent, at four times the time.
CONDITIONALS = 2_000
_MAX_STEPS = 40
_MOST_ROWS = 100_000


@final
@dataclass(frozen=True)
class Refinement:
    """fit: how it ended, None where a small system was not positive definite. kept: whether the
    evidence rose; otherwise all parameters stand where they stood."""

    fit: HyperparameterFit | None
    kept: bool

    def report(self) -> dict[str, Any]:
        """Plain values."""
        if self.fit is None:
            return {"neighbours_status": FitStatus.STAGNATED.value, "neighbours_kept": False}
        return {
            "neighbours_status": self.fit.status.value,
            "neighbours_kept": self.kept,
            "neighbours_n_data": self.fit.n_data,
            "neighbours_conditionals": min(CONDITIONALS, self.fit.n_data),
            "neighbours_evaluations": len(self.fit.objective),
            "neighbours_gain_per_datum": self.fit.objective[-1] - self.fit.objective[0],
        }


def refine(prior: Prior, batch: Batch, n_learned: int, seed: int) -> Refinement | None:
    """Maximises the evidence of neighbours among more rows than were learned from, in place.

    A small part of dense data takes what is finer than the distance of its points for noise: with
    1,000 of 20,000 satellite temperatures, length scales of Matérn-3/2 were 1.0 degrees, noise 1.55
    and the error of held-out rows 1.54 °C; after this 0.06 to 0.08, 0.62 and 0.98. None where there
    are no more rows, or kernel and noise are given.
    """
    owners = (prior.kernel, prior.likelihood)
    learns = any(p.requires_grad for owner in owners for p in owner.parameters())
    if not learns or len(batch) <= n_learned:
        return None
    before = prior.state()
    data = random_part(batch, _MOST_ROWS, seed)
    fit = None
    try:
        fit = fit_neighbour_evidence(
            prior.kernel,
            prior.mean,
            prior.likelihood,
            data,
            max_rows=CONDITIONALS,
            max_steps=_MAX_STEPS,
            seed=seed,
        )
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        _forget_gradients(prior)
    kept = fit is not None and fit.objective[-1] > fit.objective[0]
    if not kept:
        prior.load(before)
    return Refinement(fit, kept)


def learning_report(
    learned: HyperparameterFit | None, refined: Refinement | None
) -> dict[str, Any]:
    """How both stages ended; the status is that of the one that had the last word."""
    if learned is None:
        return {"status": "nothing to learn"}
    last = learned if refined is None or not refined.kept or refined.fit is None else refined.fit
    report = {
        "status": last.status.value,
        "n_data": learned.n_data,
        "objective": list(learned.objective),
        "log_evidence": learned.log_evidence,
        "largest_gradient": learned.largest_gradient,
    }
    return report if refined is None else report | refined.report()


def _forget_gradients(prior: Prior) -> None:
    for parameter in prior.parameters():
        parameter.grad = None
