"""Hyperparameters of many rows: from the exact evidence of a few on, by that of near neighbours."""

from dataclasses import dataclass, replace
from typing import Any, final

import torch

from dustmap.gp import Batch, FitStatus, GPModel, HyperparameterFit, fit_neighbour_evidence
from dustmap.regression._learning import Prior, random_part

#: Conditionals in the sum that is maximised, its steps, and the rows neighbours are sought among.
# 10,000 conditionals moved learned length scales by 1 and 9 per cent, at four times the time.
CONDITIONALS = 2_000
_MAX_STEPS = 40
#: Conditionals that the noise alone is refined by, so that its error is half a per cent.
NOISE_CONDITIONALS = 20_000
_MOST_ROWS = 100_000


@final
@dataclass(frozen=True)
class Refinement:
    """fit: how it ended, None where a small system was not positive definite. kept: whether the
    evidence rose; otherwise all parameters stand where they stood. conditionals: in its sum."""

    fit: HyperparameterFit | None
    kept: bool
    conditionals: int

    def report(self, name: str) -> dict[str, Any]:
        """Plain values, for keys that begin with `name`."""
        if self.fit is None:
            return {f"{name}_status": FitStatus.STAGNATED.value, f"{name}_kept": False}
        return {
            f"{name}_status": self.fit.status.value,
            f"{name}_kept": self.kept,
            f"{name}_n_data": self.fit.n_data,
            f"{name}_conditionals": min(self.conditionals, self.fit.n_data),
            f"{name}_evaluations": len(self.fit.objective),
            f"{name}_gain_per_datum": self.fit.objective[-1] - self.fit.objective[0],
        }


def refine(prior: Prior, batch: Batch, n_learned: int, seed: int) -> Refinement | None:
    """Maximises the evidence of neighbours among more rows than were learned from.

    A small part of dense data takes what is finer than the distance of its points for noise: with
    1,000 of 20,000 satellite temperatures, length scales of Matérn-3/2 were 1.0 degrees, noise 1.55
    and the error of held-out rows 1.54 °C; after this 0.06 to 0.08, 0.62 and 0.98. None where there
    are no more rows, or kernel and noise are given.
    """
    learns = prior.kernel.is_learned or prior.likelihood.is_learned
    if not learns or len(batch) <= n_learned:
        return None
    found = _ascended(prior.model, batch, CONDITIONALS, seed)
    if found.kept and found.fit is not None:
        prior.take(found.fit.model)
    return found


def refine_noise(prior: Prior, batch: Batch, n_learned: int, seed: int) -> Refinement | None:
    """Maximises the same evidence over the noise alone, of ten times the conditionals.

    Of 2,000 rows the noise is known to several per cent, and with it the coverage of predictions;
    of these to half of one. None where the noise is given or there are no more rows.
    """
    if len(batch) <= n_learned or not prior.likelihood.is_learned:
        return None
    held = replace(prior.model, kernel=prior.kernel.fixed())
    found = _ascended(held, batch, NOISE_CONDITIONALS, seed)
    if found.kept and found.fit is not None:
        prior.likelihood = found.fit.model.likelihood
    return found


def _ascended(model: GPModel, batch: Batch, conditionals: int, seed: int) -> Refinement:
    data = random_part(batch, _MOST_ROWS, seed)
    try:
        fit = fit_neighbour_evidence(
            model, data, max_rows=conditionals, max_steps=_MAX_STEPS, seed=seed
        )
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return Refinement(None, False, conditionals)
    return Refinement(fit, fit.objective[-1] > fit.objective[0], conditionals)


def learning_report(
    learned: HyperparameterFit | None, refined: Refinement | None, noise: Refinement | None
) -> dict[str, Any]:
    """How the stages ended; the status is that of the last to have set the kernel."""
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
    for name, stage in (("neighbours", refined), ("noise", noise)):
        report |= {} if stage is None else stage.report(name)
    return report
