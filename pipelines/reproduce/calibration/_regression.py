"""What regressions claim: their memory, what fitted means leave open, and engines at a switch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dustmap import HIPGPRegressor
from dustmap.gp.kernels import Matern32
from pipelines.reproduce.calibration._case import Claim

Array = NDArray[np.float64]

#: Release 0.1 on the same data: bytes of its plan over the budget, by columns and by the rows that
#: the kernel was learned from.
_BYTES_BEFORE = {(1, 500): 2.1e-7, (2, 500): 65.5, (3, 500): 5.48e8, (3, 100): 21.8}
#: Standard deviation over that of universal kriging, at three times the extent of the data.
_STD_BEFORE = {("exact", 1): 0.388, ("exact", 3): 0.379, ("global", 1): 0.388, ("global", 3): 0.379}
#: Root mean square error and mean negative log predictive density with 2,001 rows, whose kernel
#: was learned from so many.
_SWITCH_BEFORE = {2000: (0.1302, -0.5194), 200: (0.1172, -0.7080)}

_LENGTH, _NOISE = 0.3, 0.02


def claims(quick: bool) -> Sequence[Claim]:
    """Rows on memory, on means that are fitted, and on the change of engines at 2,000 rows."""
    return [*_memory(quick), *_linear_means(quick), *_switch(quick)]


def _memory(quick: bool) -> list[Claim]:
    """Noise alone, whose learned length scales are anything."""
    found = []
    n_learn = 100 if quick else 500
    for dim in (3,) if quick else (1, 2, 3):
        rng = np.random.default_rng(dim)
        X = rng.uniform(size=(2500, dim))
        model = HIPGPRegressor("matern32", engine="hip", n_learn=n_learn)
        model.fit(X, rng.standard_normal(len(X)))
        share = model.report_["bytes_needed"] / model.max_memory
        case, before = f"pure noise, {dim} columns, 2,500 rows", _BYTES_BEFORE[dim, n_learn]
        found.append(Claim(case, "planned bytes / max_memory", 1.0, share, before, 0.0, 1.0))
    return found


def _linear_means(quick: bool) -> list[Claim]:
    found = []
    for engine, dim in (("exact", 1),) if quick else tuple(_STD_BEFORE):
        rng = np.random.default_rng(0)
        X = rng.uniform(-1.0, 1.0, size=(40, dim))
        y = 2.0 * X[:, 0] + 0.1 * rng.standard_normal(40)
        kernel = Matern32([_LENGTH] * dim, 0.01)
        model = HIPGPRegressor(
            kernel, engine=engine, mean="linear", noise=0.1, learn=("mean",), samples=256
        )
        far = np.full((1, dim), 3.0)
        _, std = model.fit(X, y).predict(far, return_std=True)
        ratio = float(std[0]) / _universal_kriging_std(X, far, variance=0.01, noise=0.1)
        case = f"linear mean at three times the data, {dim} columns, {engine}"
        before = _STD_BEFORE[engine, dim]
        # One that is drawn has an error of 1/√(2 · 256).
        found.append(Claim(case, "std / universal kriging", 1.0, ratio, before, 0.9, 1.1))
    return found


def _universal_kriging_std(X: Array, at: Array, variance: float, noise: float) -> float:
    """√(k_** − k_*ᵀA⁻¹k_* + uᵀ(HᵀA⁻¹H)⁻¹u), u = h_* − HᵀA⁻¹k_*, for one place `at`."""
    A = variance * _matern32(X, X) + noise**2 * np.eye(len(X))
    k = variance * _matern32(X, at)
    H, h = (np.column_stack([np.ones(len(x)), x]) for x in (X, at))
    u = h.T - H.T @ np.linalg.solve(A, k)
    fitted = u.T @ np.linalg.solve(H.T @ np.linalg.solve(A, H), u)
    return float(np.sqrt(variance - k.T @ np.linalg.solve(A, k) + fitted)[0, 0])


def _matern32(a: Array, b: Array) -> Array:
    r = np.sqrt(3.0) * np.linalg.norm(a[:, None] - b[None], axis=-1) / _LENGTH
    return np.asarray((1.0 + r) * np.exp(-r))


def _switch(quick: bool) -> list[Claim]:
    """One row more than the exact engine takes without asking for anything."""
    n_learn = 200 if quick else 2000
    exact, more = (_scores(n, n_learn) for n in (2000, 2001))
    names = ("root mean square error", "negative log predictive density")
    # The training sets differ by a row: a twentieth of either is far beyond what it does.
    case = "3-D, length 0.3, noise 0.02: 2,001 rows beside 2,000"
    return [
        Claim(case, name, a, b, before, a - 0.05 * abs(a), a + 0.05 * abs(a))
        for name, a, b, before in zip(names, exact, more, _SWITCH_BEFORE[n_learn], strict=True)
    ]


def _scores(n: int, n_learn: int) -> tuple[float, float]:
    """RMSE against the field, and mean negative log density of new measurements."""
    rng = np.random.default_rng(1000)
    X = rng.uniform(size=(21_000, 3))[: 1000 + n]
    f = _field(X)
    y = f + _NOISE * np.random.default_rng(1).standard_normal(len(X))
    model = HIPGPRegressor("matern32", n_learn=n_learn).fit(X[1000:], y[1000:])
    mean, std = model.predict(X[:1000], return_std=True, include_noise=True)
    z = (y[:1000] - mean) / std
    density = 0.5 * z**2 + np.log(std) + 0.5 * np.log(2.0 * np.pi)
    return float(np.sqrt(np.mean((mean - f[:1000]) ** 2))), float(density.mean())


def _field(X: Array) -> Array:
    """A Matérn-3/2 field of variance 1 at X (N, 3), by 4,000 random Fourier features."""
    rng = np.random.default_rng(0)
    g = rng.gamma(1.5, 1.0, 4000)
    omega = rng.standard_normal((4000, 3)) * np.sqrt(1.5 / g)[:, None] / _LENGTH
    phase = rng.uniform(0.0, 2.0 * np.pi, 4000)
    parts = [np.cos(x @ omega.T + phase).sum(1) for x in np.array_split(X, 8)]
    return np.asarray(np.sqrt(2.0 / 4000) * np.concatenate(parts))
