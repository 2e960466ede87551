"""Extinctions of stars whose distances are known or not."""

from dustmap.gp import AbstractPosterior, Prediction
from dustmap.sky.observations._sight_lines import SightLines


def predict_extinction(
    posterior: AbstractPosterior, lines: SightLines, samples: int = 8, seed: int = 0
) -> Prediction:
    """Mean and variance (N,) of A(<d) over the posterior of ρ and the distribution of d.

        E A = E_ρ ∫ρ sf ds,    Var A = Var_ρ ∫ρ sf ds + E_ρ Var_d A(<d)

    The last term is the mean over `samples` draws of the posterior; 0 for known distances.
    """
    weighted = posterior.predict(lines.rays)
    if lines.spread is None:
        return weighted
    added = lines.spread.added_variance(posterior, samples, seed).to(weighted.variance)
    return Prediction(weighted.mean, weighted.variance + added, weighted.clamped)
