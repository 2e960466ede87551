"""Extinctions of stars whose distances are known or not."""

from dustmap.gp import AbstractPosterior, Prediction
from dustmap.sky.observations._beyond import PriorDust
from dustmap.sky.observations._sight_lines import SightLines


def predict_extinction(
    posterior: AbstractPosterior,
    lines: SightLines,
    beyond: PriorDust | None = None,
    samples: int = 8,
    seed: int = 0,
) -> Prediction:
    """Mean and variance (N,) of A(<d) over the posterior of ρ and the distribution of d.

        E A = E_ρ ∫ρ sf ds,    Var A = Var_ρ ∫ρ sf ds + E_ρ Var_d A(<d)

    The last term is the mean over `samples` draws of the posterior; 0 for known distances.
    beyond: the dust of the parts outside the box, where the lines have any.
    """
    found = posterior.predict(lines.rays)
    mean, variance, behind = found.mean, found.variance, None
    if lines.beyond is not None and beyond is not None:
        behind, apart = lines.beyond.moments(beyond)
        mean, variance = mean + behind.to(mean), variance + apart.to(variance)
    if lines.spread is not None:
        added = lines.spread.added_variance(posterior, samples, seed, behind)
        variance = variance + added.to(variance)
    return Prediction(mean, variance, found.clamped)
