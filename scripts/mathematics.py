#!/usr/bin/env python3
"""Pictures of the page on mathematics, each computed by the package in some seconds.

    scripts/mathematics.py FOLDER             all of them, as .png
    scripts/mathematics.py FOLDER --only torus

Needs an environment in which dustmap is installed; what it uses is the public interface.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dustmap.gp import Batch, ConstantMean, ExactGP, GPModel, GridPrior, RegularGrid
from dustmap.gp.covariances import ClosedForm
from dustmap.gp.features import (
    AbstractRowFeatures,
    CholeskyFeatures,
    HIPFeatures,
    LocalFeatures,
    Stencil,
    TorusFeatures,
    interpolation,
)
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.gp.kernels import Matern12, Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    GlobalSettings,
    LogNormalModel,
    MGVISettings,
    Unresolved,
    fit_global,
    fit_mgvi,
)
from dustmap.sky import save_figure
from dustmap.sky.stars import AbstractDistancePrior, ExponentialDensity, FlatParallax

#: Colours that colour-blind readers tell apart (Okabe & Ito).
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the pictures and say where they are."""
    options = parser().parse_args(arguments)
    for name in options.only or PICTURES:
        path = Path(options.folder) / f"{name}.png"
        torch.manual_seed(0)
        save_figure(PICTURES[name](), path, overwrite=True)
        print(path)
    return 0


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    command = argparse.ArgumentParser(description="Pictures of the page on mathematics.")
    command.add_argument("folder", help="where the pictures go")
    command.add_argument("--only", nargs="+", choices=PICTURES, help="some of them")
    return command


def panels(*titles: str, height: float = 2.7) -> tuple[Figure, list[Axes]]:
    """A row of panels with titles."""
    figure = Figure(figsize=(7.2, height), layout="constrained", dpi=130)
    axes = list(figure.subplots(1, len(titles)))
    for one, title in zip(axes, titles, strict=True):
        one.set_title(title, fontsize=9, loc="left")
        one.tick_params(labelsize=8)
        one.xaxis.label.set_size(8)
        one.yaxis.label.set_size(8)
    return figure, axes


def line_integrals() -> Figure:
    """A density with sight lines, and the covariance of one integral with every node."""
    grid = RegularGrid.from_bounds((-1.0, -1.0), (1.0, 1.0), (81, 81))
    kernel = Matern32(0.4, 1.0, dim=2)
    root = GridPrior.padded(kernel, grid).root()
    white = torch.randn(
        1, root.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(4)
    )
    density = root.matmul(white).exp().reshape(81, 81)
    stars = torch.tensor([[0.8, 0.5], [-0.7, 0.6], [-0.3, -0.8], [0.6, -0.5], [0.1, 0.9]]).double()
    rays = LineIntegrals.from_observer(stars)
    cross = ClosedForm().cross(kernel, rays[:1], grid).reshape(81, 81)
    figure, (sky, covariance) = panels(
        "a density ρ, and the rays of five stars",
        "K_fu: covariance of f₁ with ρ at the nodes",
    )
    extent = (-1.0, 1.0, -1.0, 1.0)
    for axes, image, label in ((sky, density, "ρ"), (covariance, cross, "Cov(f₁, ρ(z))")):
        shown = axes.imshow(image.mT, origin="lower", extent=extent, cmap="cividis")
        bar = figure.colorbar(shown, ax=axes)
        bar.set_label(label, size=8)
        bar.ax.tick_params(labelsize=8)
        axes.plot(0.0, 0.0, "o", color="white", markeredgecolor="black", markersize=5)
    for n, (x, y) in enumerate(stars.tolist()):
        sky.plot([0.0, x], [0.0, y], color="white", linewidth=1.0)
        sky.plot(x, y, "*", color=ORANGE, markersize=7)
        sky.annotate(f"f{'₁₂₃₄₅'[n]}", (x, y), xytext=(4, 2), textcoords="offset points", c="w")
    end = stars[0].tolist()
    covariance.plot([0.0, end[0]], [0.0, end[1]], color="white", linewidth=1.0)
    return figure


def torus() -> Figure:
    """The kernel on a torus, wrapped; and spectra of the smallest embedding and of a padded one."""
    grid = RegularGrid.from_bounds((0.0,), (1.0,), (41,))
    kernel = Matern32(0.4, 1.0, dim=1)
    minimal, padded = GridPrior.minimal(kernel, grid), GridPrior.padded(kernel, grid)
    length = padded.torus_shape[0]
    lag = torch.arange(length) * grid.spacing[0]
    column = torch.fft.irfft(padded.spectrum, n=length)
    figure, (space, modes) = panels("first column of C on the torus", "eigenvalues of C")
    space.axvspan(0.0, 1.0, color=GREY, alpha=0.15, linewidth=0)
    space.text(0.5, 0.08, "box", ha="center", color=GREY, fontsize=8)
    space.text(0.5 * (1.0 + lag[-1]), 0.08, "padding", ha="center", color=GREY, fontsize=8)
    space.plot(lag, column, color=BLUE, label="wrapped kernel")
    space.plot(lag, kernel(lag[:, None].double()).detach(), "--", color=ORANGE, label="kernel")
    space.set(xlabel="lag")
    space.legend(fontsize=7, loc="upper center")
    for prior, colour, name in (
        (minimal, ORANGE, "2M − 2 points"),
        (padded, BLUE, f"box + 4ℓ: {length} points"),
    ):
        spectrum = prior.spectrum / prior.spectrum.max()
        frequency = torch.linspace(0.0, 1.0, len(spectrum))
        negative = spectrum < 0
        modes.plot(frequency, spectrum.abs(), color=colour, linewidth=1.0, label=name)
        modes.plot(frequency[negative], -spectrum[negative], "x", color=colour, markersize=5)
    modes.plot([], [], "x", color=ORANGE, label="negative ones, absolute")
    modes.set(yscale="log", xlabel="frequency over Nyquist's", ylabel="relative to the largest")
    modes.legend(fontsize=7)
    return figure


def weights() -> Figure:
    """Exact kriging weights beside local ones, and what each feature map leaves of a point."""
    grid = RegularGrid.from_bounds((0.0,), (1.0,), (13,))
    kernel = Matern32(0.2, 1.0, dim=1)
    prior = GridPrior.padded(kernel, grid)
    x = torch.tensor([[0.47]]).double()
    k_u = ClosedForm().cross(kernel, PointValues(x), grid, prior.wrapping)
    exact = torch.linalg.solve(prior.dense_covariance(), k_u[0])
    stencil = Stencil.of(prior, 4)
    position = x / grid.spacing[0]
    cell = int(position)
    local = stencil.weights(position - cell)
    figure, (bars, left) = panels("weights of the nodes around x = 0.47", "prior variance left")
    nodes = grid.axes()[0]
    bars.bar(nodes, exact, width=0.05, color=GREY, label="all nodes: K_uu⁻¹ k_u")
    near = cell + stencil.axis_shifts()
    bars.plot(nodes[near], local[0], "o", color=ORANGE, label="four nodes")
    bars.axhline(0.0, color="black", linewidth=0.6)
    bars.axvline(0.47, color=BLUE, linewidth=1.0, linestyle=":")
    bars.legend(fontsize=7)
    bars.set(xlabel="x")
    across = torch.linspace(0.0, 1.0, 401, dtype=torch.float64)
    few = torch.linspace(0.05, 0.95, 6, dtype=torch.float64)[:, None]
    maps: Sequence[tuple[AbstractRowFeatures | LocalFeatures, str, str, str]] = (
        (CholeskyFeatures(kernel, few), GREEN, "-", "6 free points"),
        (HIPFeatures(prior), GREY, "-", "13 nodes, HIP"),
        (TorusFeatures(prior), BLUE, "--", "13 nodes and the torus"),
        (LocalFeatures(prior), ORANGE, ":", "13 nodes, four at a time"),
    )
    for features, colour, style, name in maps:
        variance = features.residual_variance(PointValues(across[:, None])).detach()
        left.plot(across, variance, style, color=colour, label=name, linewidth=1.2)
    left.set(xlabel="x", ylabel="Var r", ylim=(0.0, None))
    left.legend(fontsize=7)
    return figure


def pathwise() -> Figure:
    """Draws of the prior, and the same draws moved to the data."""
    kernel, noise = Matern32(0.25, 1.0, dim=1), 0.1
    x = torch.tensor([0.08, 0.15, 0.3, 0.33, 0.55, 0.62, 0.66]).double()[:, None]
    grid = torch.linspace(0.0, 1.0, 301, dtype=torch.float64)[:, None]
    y = torch.sin(7.0 * x[:, 0])
    both = torch.cat([grid, x])
    covariance = ClosedForm().between(kernel, PointValues(both), PointValues(both))
    factor = torch.linalg.cholesky(covariance + 1e-9 * torch.eye(len(both)))
    white = torch.randn(5, len(both), dtype=torch.float64)
    prior = white @ factor.mT
    noisy = prior[:, len(grid) :] + noise * torch.randn(5, len(x), dtype=torch.float64)
    K_xx = covariance[len(grid) :, len(grid) :] + noise**2 * torch.eye(len(x))
    gain = torch.linalg.solve(K_xx, covariance[len(grid) :, : len(grid)]).mT
    draws = prior[:, : len(grid)] + (y - noisy) @ gain.mT
    data = torch.full_like(y, noise**2)
    posterior = ExactGP(kernel, ConstantMean(0.0, learn=False)).condition(PointValues(x), y, data)
    answer = posterior.predict(PointValues(grid))
    figure, (before, after) = panels("draws of the prior", "the same draws, given the data")
    for axes, lines in ((before, prior[:, : len(grid)]), (after, draws)):
        axes.plot(grid[:, 0], lines.mT, color=BLUE, linewidth=0.8, alpha=0.8)
        axes.set(xlabel="x", ylim=(-3.2, 3.2))
    spread = answer.variance.sqrt()
    low, high = answer.mean - 2 * spread, answer.mean + 2 * spread
    after.fill_between(grid[:, 0], low, high, color=GREY, alpha=0.3, linewidth=0)
    after.plot(x[:, 0], y, "o", color=ORANGE, markersize=4)
    return figure


def positive() -> Figure:
    """Gaussian and log-normal densities along a ray, from extinctions of twelve stars on it."""
    grid = RegularGrid.from_bounds((0.0,), (1.0,), (101,))
    s = grid.axes()[0]
    truth = 0.05 + 2.0 * (-0.5 * ((s - 0.35) / 0.03) ** 2).exp()
    truth = truth + 1.2 * (-0.5 * ((s - 0.7) / 0.05) ** 2).exp()
    distance = torch.linspace(0.05, 0.97, 16, dtype=torch.float64)
    rays = LineIntegrals.from_observer(distance[:, None])
    rows = interpolation(rays, grid, dtype=torch.float64)
    y = rows.matmul(truth) + 0.01 * torch.randn(len(distance), dtype=torch.float64)
    data = Batch(rays, y, torch.full_like(y, 0.01**2))
    noise, places = GaussianLikelihood(), PointValues(s[:, None])
    gaussian = fit_global(
        GPModel(Matern32(0.1, 0.4, dim=1).fixed(), ConstantMean(0.4), noise.fixed()),
        data,
        grid,
        GlobalSettings(samples=64),
    ).posterior.predict(places)
    model = LogNormalModel(
        GridPrior.padded(Matern32(0.1, 2.0, dim=1).fixed(), grid),
        ConstantMean(-1.5),
        noise.fixed(),
        lambda f: interpolation(f, grid, dtype=torch.float64),
    )
    fitted = fit_mgvi(model, data, MGVISettings(samples=64)).posterior
    deviation, (centre, width) = gaussian.variance.sqrt(), fitted.node_log_moments()
    answers = (
        (gaussian.mean, gaussian.mean - deviation, gaussian.mean + deviation),
        (fitted.predict(places).mean, (centre - width).exp(), (centre + width).exp()),
    )
    figure, axes = panels("a Gaussian density", "a log-normal density: ρ = exp(μ + R ε)")
    for one, (mean, low, high) in zip(axes, answers, strict=True):
        one.fill_between(s, low, high, color=BLUE, alpha=0.25, linewidth=0, label="68 %")
        one.plot(s, mean, color=BLUE, label="mean")
        one.plot(s, truth, "--", color=ORANGE, label="truth", linewidth=1.0)
        one.plot(distance, torch.full_like(distance, -0.55), "|", color="black", markersize=6)
        one.axhline(0.0, color="black", linewidth=0.6)
        one.set(xlabel="distance; ticks: stars", ylabel="ρ", ylim=(-0.7, 2.6))
    axes[0].legend(fontsize=7)
    return figure


def distances() -> Figure:
    """The weight of dust along the ray of a star with a parallax, and what the distance adds."""
    d = np.linspace(1.0, 900.0, 600)
    parallax, error = np.array([[5.0]]), np.array([[1.2]])
    figure, (weight, density) = panels(
        "weight sf(s) of the dust at s: ϖ = 5.0 ± 1.2 mas", "p(d | ϖ)"
    )
    priors: Sequence[tuple[AbstractDistancePrior, str, str]] = (
        (FlatParallax(10_000.0), GREY, "flat in 1/d"),
        (ExponentialDensity(150.0, 10_000.0), BLUE, "∝ d² exp(−d / 150 pc)"),
    )
    for prior, colour, name in priors:
        survival = prior.survival(parallax, error, d[None])[0]
        weight.plot(d, survival, color=colour, label=name)
        density.plot(d, -np.gradient(survival, d), color=colour, label=name)
    weight.step([0.0, 200.0, 900.0], [1.0, 1.0, 0.0], ":", color=ORANGE, label="1/ϖ, exact")
    density.axvline(200.0, color=ORANGE, linestyle=":")
    weight.set(xlabel="s [pc]", ylabel="P(d > s)")
    density.set(xlabel="d [pc]", ylabel="1/pc", ylim=(0.0, None))
    weight.legend(fontsize=7)
    return figure


def between_nodes() -> Figure:
    """A log-normal density with its interpolant on coarse nodes, and the variance left out."""
    fine = RegularGrid.from_bounds((0.0,), (10.0,), (2001,))
    root = GridPrior.padded(Matern12(2.0, 0.6, dim=1), fine).root()
    white = torch.randn(
        1, root.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    density = root.matmul(white)[0].exp()
    s = fine.axes()[0]
    figure, (field, variance) = panels("along a ray", "Λ/h: variance of integrals left out")
    field.plot(s, density, color=GREY, linewidth=0.7, label="ρ")
    field.plot(s[::200], density[::200], "o-", color=BLUE, markersize=4, label="nodes")
    field.set(xlabel="distance / h", ylabel="ρ")
    field.legend(fontsize=7)
    grid = RegularGrid.from_bounds((0.0,) * 3, (10.0,) * 3, (11,) * 3)
    ratio = np.geomspace(1.0, 10.0, 9)
    kernels: Sequence[tuple[Callable[[float], Matern12 | Matern32], str, str]] = (
        (lambda ell: Matern12(ell, 1.0, dim=3), ORANGE, "Matérn-1/2"),
        (lambda ell: Matern32(ell, 1.0, dim=3), BLUE, "Matérn-3/2"),
    )
    for kernel, colour, name in kernels:
        left = [Unresolved.of(kernel(ell), grid).length for ell in ratio]
        variance.plot(ratio, left, "o-", color=colour, markersize=3, label=name)
    variance.set(xscale="log", yscale="log", xlabel="ℓ / h", ylabel="Λ / h")
    variance.set_xticks([1, 2, 5, 10], ["1", "2", "5", "10"])
    variance.legend(fontsize=7)
    return figure


PICTURES: Mapping[str, Callable[[], Figure]] = MappingProxyType(
    {
        "line_integrals": line_integrals,
        "torus": torus,
        "weights": weights,
        "pathwise": pathwise,
        "positive": positive,
        "distances": distances,
        "between_nodes": between_nodes,
    }
)


if __name__ == "__main__":
    sys.exit(main())
