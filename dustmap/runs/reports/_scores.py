"""Scores of predictions: of all data together, and in bins by what may go wrong with them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.inference import DatumScores, Scores
from dustmap.sky.agreement import Comparison
from dustmap.sky.stars import StarTable

#: Bins of the histogram of probability integral transforms.
PIT_BINS = 10
#: Extinctions below and above which catalogs and maps are known to be biased, in mag of A_V.
FAINT, OPAQUE = 0.05, 4.0
#: Bins of equally many places by distance from the Sun.
DISTANCE_BINS = 4
#: What is scored, as the entry "y" beside scores says: the predictive distributions of measurements
#: hold their noise, those of noise-free values the posterior's variance alone.
MEASURED, NOISE_FREE = "measured", "noise-free"


@final
@dataclass(frozen=True, eq=False)
class Predictions:
    """N measured values y beside their predictive distributions, noise included.

    mean, std (N,): std of a normal distribution whose ±1σ holds as much as theirs, all distances
    together. data: the scores of each under its distribution. index (N,): their rows in the star
    table.
    """

    y: Tensor
    mean: Tensor
    std: Tensor
    data: DatumScores
    index: NDArray[np.int64]

    def scores(self) -> Scores:
        """Return the mean scores."""
        return self.data.scores()

    def as_dict(self) -> dict[str, Any]:
        """Return the scores, and that they are of measurements."""
        return labelled(self.scores(), MEASURED)

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return all columns by name, for `of_arrays`."""
        tensors = {"y": self.y, "mean": self.mean, "std": self.std, **vars(self.data)}
        columns = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
        return {**columns, "index": self.index}

    @staticmethod
    def of_arrays(arrays: Mapping[str, NDArray[np.generic]]) -> "Predictions":
        """Return the predictions whose `arrays` these are."""
        columns = {name: torch.from_numpy(array) for name, array in arrays.items()}
        data = DatumScores(*(columns[field.name] for field in fields(DatumScores)))
        index = np.asarray(arrays["index"], np.int64)
        return Predictions(columns["y"], columns["mean"], columns["std"], data, index)


def labelled(scores: Scores, y: str) -> dict[str, Any]:
    """Return scores by name, and what is scored: MEASURED or NOISE_FREE values."""
    return {"y": y, **scores.as_dict()}


def comparison_of(stars: StarTable, predictions: Predictions) -> Comparison:
    """Set measured extinctions beside the predictions, for figures; stars: of the whole run."""
    seen = stars[predictions.index]
    columns = (predictions.y, predictions.mean, predictions.std, predictions.data.normal)
    y, mean, std, normal = (values.cpu().double().numpy() for values in columns)
    return Comparison(seen.l, seen.b, y, mean, std, seen.system, normal)


def held_out_sections(
    predictions: Predictions, distance: NDArray[np.float64], per_a_v: float | None
) -> dict[str, Any]:
    """Score held-out stars, all together and in bins; distance (N,) in pc, per_a_v: see
    `quality_proxies`."""
    return {
        "held_out_stars": predictions.as_dict(),
        "held_out_by_distance": {"bins": held_out_by_distance(predictions, distance)},
        "calibration": calibration(predictions),
        "quality_proxies": quality_proxies(predictions, per_a_v),
    }


def calibration(predictions: Predictions) -> dict[str, Any]:
    """Return the shares within the central 68 and 95 %, and the histogram of the probability
    integral transforms, flat where calibrated."""
    transforms = predictions.data.pit.cpu().numpy()
    counts, _ = np.histogram(transforms, bins=PIT_BINS, range=(0.0, 1.0))
    shares = _some(predictions.scores(), "n", "coverage68", "coverage95")
    return {"y": MEASURED, **shares, "pit_histogram": counts.tolist()}


def _some(scores: Scores, *names: str) -> dict[str, Any]:
    return {name: getattr(scores, name) for name in names}


def quality_proxies(predictions: Predictions, per_a_v: float | None) -> dict[str, Any]:
    """Score where published maps are known to be biased: A_V below 50 mmag, and above 4 mag.

    The bins go by the prediction: by the measurement, noise alone would bias them. per_a_v: mag of
    the map's system for one of A_V; None, of a custom system, has no such bins.
    """
    if per_a_v is None:
        return {}
    bins = {
        "A_V_below_0.05": predictions.mean < FAINT * per_a_v,
        "A_V_above_4": predictions.mean > OPAQUE * per_a_v,
    }
    rows = [{"bin": name, **_scores_where(predictions, chosen)} for name, chosen in bins.items()]
    return {"y": MEASURED, "bins": rows}


def held_out_by_distance(
    predictions: Predictions, distance: NDArray[np.float64]
) -> list[dict[str, Any]]:
    """Score predictions of N stars in bins of distance, equally many in each.

    distance (N,) in pc. A mean residual, measured less predicted, that is many times its own error
    is dust at the wrong distance; over all stars such residuals may cancel.

    Examples
    --------
    >>> y, one = torch.tensor([0.3, 0.1, 0.2, 0.4]), torch.full((4,), 0.2)
    >>> data = DatumScores(*(one for _ in fields(DatumScores)))
    >>> predictions = Predictions(y, one, one, data, np.arange(4))
    >>> rows = held_out_by_distance(predictions, np.array([10.0, 20.0, 30.0, 40.0]))
    >>> len(rows), rows[-1]["from_pc"], round(rows[-1]["mean_residual"], 6)
    (4, 32.5, 0.2)
    """
    rows = []
    residual = (predictions.y - predictions.mean).double()
    for ends, inside in _bins_of(distance):
        chosen = torch.from_numpy(inside)
        row = {**ends, **_scores_where(predictions, chosen)}
        if row["n"] > 1:
            row["mean_residual_error"] = float(residual[chosen].std() / row["n"] ** 0.5)
        rows.append(row)
    return rows


def _scores_where(predictions: Predictions, chosen: Tensor) -> dict[str, Any]:
    """The number of those chosen and, where there are any, their mean residual and scores."""
    row: dict[str, Any] = {"n": int(chosen.sum())}
    if row["n"]:
        residual = predictions.y[chosen] - predictions.mean[chosen]
        row["mean_residual"] = float(residual.double().mean())
        names = ("rmse", "robust_scatter", "chi2", "coverage68")
        row |= _some(predictions.data.where(chosen).scores(), *names)
    return row


def _bins_of(
    distance: NDArray[np.float64],
) -> Iterator[tuple[dict[str, float], NDArray[np.bool_]]]:
    """Bins with equally many distances (N,) each: their ends and who is in them (N,)."""
    edges = np.quantile(distance, np.linspace(0.0, 1.0, DISTANCE_BINS + 1))
    bins = np.clip(np.searchsorted(edges, distance, side="right") - 1, 0, DISTANCE_BINS - 1)
    for i in range(DISTANCE_BINS):
        if (bins == i).any():
            yield {"from_pc": float(edges[i]), "to_pc": float(edges[i + 1])}, bins == i


def by_distance(
    distance: NDArray[np.float64],
    true: NDArray[np.float64],
    mean: NDArray[np.float64],
    std: NDArray[np.float64],
    inside68: NDArray[np.bool_],
) -> list[dict[str, float]]:
    """Score N places in bins of distance from the Sun, equally many in each.

    distance (N,) in pc; true, mean, std (N,) of the density; inside68 (N,): whether the central
    68 % of the posterior hold the truth.

    Examples
    --------
    >>> distance, one = np.linspace(10.0, 500.0, 50), np.ones(50)
    >>> rows = by_distance(distance, one, 1.1 * one, 0.2 * one, one > 0)
    >>> len(rows), sorted(rows[0])
    (4, ['chi2', 'correlation', 'coverage68', 'from_pc', 'n', 'rmse', 'to_pc'])
    """
    rows = []
    for ends, chosen in _bins_of(distance):
        z = (true[chosen] - mean[chosen]) / std[chosen]
        rows.append(
            {
                **ends,
                "n": int(chosen.sum()),
                "rmse": float(np.sqrt(np.mean((true[chosen] - mean[chosen]) ** 2))),
                "chi2": float(np.mean(z**2)),
                "coverage68": float(inside68[chosen].mean()),
                "correlation": correlation(mean[chosen], true[chosen]),
            }
        )
    return rows


def correlation(a: Sequence[float] | NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return Pearson's correlation of a (N,) and b (N,), 0 where one of them does not vary.

    Examples
    --------
    >>> round(correlation([1.0, 2.0, 3.0], np.array([2.0, 4.0, 6.0])), 6)
    1.0
    """
    a = np.asarray(a)
    if len(a) < 2 or np.std(a) == 0 or np.std(b) == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])
