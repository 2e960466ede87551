"""Held-out stars as the figures want them."""

from dustmap.runs.reports._calibration import Predictions
from dustmap.sky.figures import Comparison
from dustmap.sky.stars import StarTable


def comparison_of(stars: StarTable, predictions: Predictions) -> Comparison:
    """Measured extinctions beside those predicted, noise included; stars: of the whole run."""
    seen = stars[predictions.index]
    columns = (predictions.y, predictions.mean, predictions.std, predictions.data.normal)
    y, mean, std, normal = (values.cpu().double().numpy() for values in columns)
    return Comparison(seen.l, seen.b, y, mean, std, seen.system, normal)
