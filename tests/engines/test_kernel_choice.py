"""The smoothness of a kernel by held-out patches: fields of known smoothness, and the rule."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from dustmap import gp
from dustmap.engines import FALLBACK, KernelChoice, _kernel_choice, choose_kernel
from dustmap.errors import UserError
from dustmap.gp import Batch, ConstantMean, GPModel
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern12, Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from tests.inference.checkpointers import MemoryCheckpointer
from tests.regression_cases import two_scales


def spectral_field(nu: float, n: int, dim: int = 2, noise: float = 0.01) -> Batch:
    """A sum of 4,000 waves, whose frequencies have the spectrum of a Matérn field of length 0.3.

    That spectrum is Student's t in `dim` dimensions, of 2ν degrees of freedom.
    """
    rng = np.random.default_rng(0)
    normal, chi2 = rng.standard_normal((4000, dim)), rng.chisquare(2 * nu, (4000, 1))
    frequencies, phases = normal / np.sqrt(chi2 / (2 * nu)) / 0.3, rng.uniform(0, 2 * np.pi, 4000)
    x = rng.uniform(size=(n, dim))
    y = np.cos(x @ frequencies.T + phases).sum(1) * math.sqrt(2 / 4000)
    y += noise * rng.standard_normal(n)
    return Batch(PointValues(torch.from_numpy(x)), torch.from_numpy(y))


def start(dim: int = 2) -> GPModel:
    """A model of unit scales, all of which are learned."""
    return GPModel(Matern32([1.0] * dim), ConstantMean(), GaussianLikelihood(jitter=0.3))


@pytest.mark.parametrize(
    ("nu", "name", "n", "dim"),
    [
        (0.5, "matern12", 400, 1),
        (2.5, "matern52", 400, 1),
        (0.5, "matern12", 400, 2),
        (1.5, "matern32", 400, 2),
        (2.5, "matern52", 400, 2),
        pytest.param(0.5, "matern12", 1500, 2, marks=pytest.mark.slow),
        pytest.param(2.5, "matern52", 1500, 2, marks=pytest.mark.slow),
    ],
)
def test_a_field_has_the_kernel_of_its_smoothness(nu: float, name: str, n: int, dim: int) -> None:
    field = spectral_field(nu, n, dim)
    choice = choose_kernel(start(dim), field)
    assert choice.name == name
    assert [c.name for c in choice.candidates] == list(_kernel_choice.candidates_of(field))
    assert [c.name for c in choice.candidates][:3] == ["matern12", "matern32", "matern52"]


@pytest.mark.parametrize("names", [("matern32",), ("matern12+matern32",)])
def test_a_choice_that_was_saved_goes_on_with_the_same_model(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer, data = MemoryCheckpointer(), spectral_field(0.5, 60)
    made = choose_kernel(start(), data, names=names, checkpointer=checkpointer)
    monkeypatch.setattr(_kernel_choice, "_chosen", None)
    again = choose_kernel(start(), data, names=names, checkpointer=checkpointer)
    assert again == made
    assert again.model is not None
    assert made.model is not None
    assert repr(again.model.kernel) == repr(made.model.kernel)
    np.testing.assert_array_equal(
        gp.Parameters.of(again.model).theta, gp.Parameters.of(made.model).theta
    )


def _batch(x: np.ndarray, y: np.ndarray) -> Batch:
    return Batch(PointValues(torch.from_numpy(x)), torch.from_numpy(y))


@pytest.mark.slow
def test_two_scales_are_a_sum() -> None:
    field = _batch(*two_scales(1_500))
    choice = choose_kernel(start(), field)
    assert "+" in choice.name
    best_of_one = max(c.score for c in choice.candidates if "+" not in c.name)
    assert max(c.score for c in choice.candidates) > best_of_one + 0.02
    # Learning goes on with its scales.
    assert choice.model is not None
    long, short = choice.model.kernel.terms()
    assert bool((long.lengthscale > 4 * short.lengthscale).all())
    assert all(p.is_learned for p in choice.model.kernel.parameters())


def test_few_rows_or_many_columns_have_no_sums() -> None:
    field = _batch(*two_scales(1_500))
    assert any("+" in name for name in _kernel_choice.candidates_of(field))
    for data in (field[torch.arange(900)], spectral_field(1.5, 1_200, 5)):
        assert _kernel_choice.candidates_of(data) == ("matern12", "matern32", "matern52")


def test_sums_start_at_twice_and_half_of_their_terms_alone() -> None:
    noise = GaussianLikelihood(jitter=0.1)
    rough = GPModel(Matern12([0.2, 0.4], 3.0), ConstantMean(), noise)
    smooth = GPModel(Matern32([0.1, 0.3], 2.0).learning("length"), ConstantMean(), noise)
    optima = {"matern12": rough, "matern32": smooth}
    two = _kernel_choice._start(start(), "matern12+matern32", optima).kernel
    (long, short) = two.terms()
    assert (long.profile.name, short.profile.name) == ("matern12", "matern32")
    assert long.lengthscale.tolist() == pytest.approx([0.4, 0.8])
    assert short.lengthscale.tolist() == pytest.approx([0.05, 0.15])
    assert (float(long.variance), float(short.variance)) == pytest.approx((1.5, 1.0))
    learned = {p.name: p.is_learned for p in two.parameters()}
    assert learned == {
        **{"length[0]": True, "variance[0]": True},
        **{"length[1]": True, "variance[1]": False},
    }


def test_learning_goes_on_from_the_start_of_one_term() -> None:
    model = choose_kernel(start(), spectral_field(0.5, 60)).model
    assert model is not None
    assert [p.value.tolist() for p in model.kernel.parameters()] == [
        p.value.tolist() for p in start().kernel.parameters()
    ]


def test_a_wave_is_not_rough() -> None:
    x = torch.rand((300, 2), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.sin(6 * x[:, 0]) * torch.cos(4 * x[:, 1])
    y += 0.05 * torch.randn(300, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    choice = choose_kernel(start(), Batch(PointValues(x), y))
    assert choice.name == "matern52"


def test_few_noisy_rows_of_waves_are_seldom_rough() -> None:
    names = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        x = rng.uniform(size=(81, 2))
        y = 2.0 * np.sin(6 * x[:, 0] + seed) * np.cos(4 * x[:, 1]) + 0.3 * rng.standard_normal(81)
        unit = [torch.from_numpy((v - v.mean(0)) / v.std(0)) for v in (x, y)]
        names.append(choose_kernel(start(), Batch(PointValues(unit[0]), unit[1])).name)
    # The rougher one within a standard error: one draw in six is mistaken, of halves two in five.
    assert names.count("matern12") <= 1


@pytest.mark.parametrize(
    ("n", "least"), [(1_200, 15), pytest.param(4_000, 50, marks=pytest.mark.slow), (12_000, 80)]
)
def test_of_many_rows_ten_windows_learn_and_all_score(n: int, least: int) -> None:
    """Patches that have no row in common, at most 80, beside those of 1,000 random rows."""
    data = spectral_field(1.5, n)
    wide, *windows = _kernel_choice.windows_of(data, 0)
    assert len(wide.patches) == 25
    assert sorted(torch.cat(wide.patches).tolist()) == list(range(1_000))
    assert least <= len(windows) <= 80
    held_out = torch.cat([w.data.y[patch] for w in windows for patch in w.patches])
    assert len(set(held_out.tolist())) == len(held_out) == 40 * len(windows)
    if n < 12_000:
        choice = choose_kernel(start(), data, names=["matern32"])
        assert (choice.patches, choice.held_out) == (25 + len(windows), 1_000 + len(held_out))
        assert choice.rows == 500 + 10 * (300 - 40)


@pytest.mark.slow
def test_many_noisy_rows_of_smooth_waves_are_seldom_rough() -> None:
    names = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        x = torch.from_numpy(rng.uniform(size=(12_000, 4)))
        y = torch.sin(3 * x[:, 0]) + x[:, 3] ** 2 + torch.cos(2 * x[:, 1] * x[:, 2])
        y += 0.1 * torch.from_numpy(rng.standard_normal(12_000))
        unit = [(v - v.mean(0)) / v.std(0) for v in (x, y)]
        names.append(choose_kernel(start(4), Batch(PointValues(unit[0]), unit[1])).name)
    # Ten patches, of hyperparameters as good, chose one of each kernel for three seeds.
    assert names.count("matern52") >= 5


def test_errors_of_the_rows_are_their_noise() -> None:
    data = spectral_field(0.5, 400, noise=0.3)
    errors = Batch(data.functional, data.y, torch.full_like(data.y, 0.09))
    model = GPModel(Matern32([1.0, 1.0]), ConstantMean(), GaussianLikelihood(learn=False))
    assert choose_kernel(model, errors).name == "matern12"


def test_the_roughest_within_one_standard_error_of_the_best() -> None:
    # Differences to the last: -2 ± 1, -1 ± 1, 0.
    last = torch.zeros(4)
    wobble = torch.tensor([math.sqrt(3.0), -math.sqrt(3.0)] * 2)
    best, differences, errors = _kernel_choice.roughest_within_error(
        torch.stack([last - 2 + wobble, last - 0.99 + wobble, last]).double()
    )
    assert best == 1
    assert errors == pytest.approx([1.0, 1.0, 0.0])
    assert differences == pytest.approx([-2.0, -0.99, 0.0])


def test_a_difference_that_all_patches_share_decides() -> None:
    patches = torch.tensor([5.0, -3.0, 1.0, 0.5])
    best, _, errors = _kernel_choice.roughest_within_error(
        torch.stack([patches - 0.01, patches, patches - 0.5]).double()
    )
    assert best == 1
    assert errors == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("n", [30, 250, 1200])
def test_scores_are_those_of_the_exact_process(n: int) -> None:
    data, model = spectral_field(1.5, n), start()
    for window in _kernel_choice.windows_of(data, 3):
        scores = _kernel_choice.patch_scores(model, window)
        assert scores.tolist() == pytest.approx(slow_scores(model, window), rel=1e-9)


def slow_scores(model: GPModel, window: _kernel_choice.Window) -> list[float]:
    """Condition on the other rows, patch by patch, and predict."""
    scores = []
    for patch in window.patches:
        inside = torch.zeros(len(window.data), dtype=torch.bool)
        inside[patch] = True
        kept, held = window.data[~inside], window.data[inside]
        noise = model.likelihood.noise_variance(kept)
        posterior = gp.ExactGP(model.kernel, model.mean).condition(kept.functional, kept.y, noise)
        with torch.no_grad():
            seen, noise = posterior.predict(held.functional), model.likelihood.noise_variance(held)
            law = norm(seen.mean.numpy(), (seen.variance + noise).sqrt().numpy())
            scores.append(float(law.logpdf(held.y.numpy()).mean()))
    return scores


@pytest.mark.parametrize("n", [30, 99, 500, 1000, 1001])
def test_patches_are_disjoint_neighbours(n: int) -> None:
    data = spectral_field(1.5, n)
    for number, window in enumerate(_kernel_choice.windows_of(data, 0)):
        held = torch.cat(window.patches)
        assert len(held) == len(set(held.tolist()))
        if number == 0:
            assert sorted(held.tolist()) == list(range(min(n, 1000)))
            assert len(window.patches) in ((9, 10) if n <= 1000 else (25,))
        else:
            assert not set(held.tolist()) & set(window.learning.tolist())
        first = places(window.data)[window.patches[0]]
        assert bool((first.amax(0) - first.amin(0) < 0.7).all())


def places(data: Batch) -> Tensor:
    """Inputs (N, D)."""
    assert isinstance(data.functional, PointValues)
    return data.functional.x


def test_the_same_seed_chooses_the_same() -> None:
    data = spectral_field(1.5, 150)
    first = choose_kernel(start(), data, seed=4)
    again = choose_kernel(start(), data, seed=4)
    other = choose_kernel(start(), data, seed=5)
    scores = [c.score for c in first.candidates]
    assert scores == [c.score for c in again.candidates]
    assert scores != [c.score for c in other.candidates]


@pytest.mark.parametrize("repeats", [1, 50])
def test_few_distinct_rows_keep_the_kernel_and_say_so(repeats: int) -> None:
    few = spectral_field(0.5, 29)
    x, y = places(few).repeat(repeats, 1), few.y.repeat(repeats)
    choice = choose_kernel(start(), Batch(PointValues(x), y))
    assert (choice.name, choice.candidates) == (FALLBACK, ())
    assert "fewer than 30 distinct rows" in choice.remark


def test_repeated_rows_have_no_part() -> None:
    data = spectral_field(0.5, 200)
    twice = Batch(PointValues(places(data).repeat(2, 1)), data.y.repeat(2))
    (window,) = _kernel_choice.windows_of(twice, 0)
    assert len(window.data) == 200


def test_a_candidate_that_is_refused_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    learn = _kernel_choice._learned

    def refusing(model: GPModel, parts: list[Batch], search_start: bool) -> GPModel:
        if model.kernel.terms()[0].profile.name == "matern52":
            raise UserError("not positive definite")
        return learn(model, parts, search_start)

    monkeypatch.setattr(_kernel_choice, "_learned", refusing)
    choice = choose_kernel(start(), spectral_field(0.5, 60))
    assert [c.name for c in choice.candidates] == ["matern12", "matern32"]
    assert choice.remark == "matern52: not positive definite"


def test_plain_values_bring_the_choice_back() -> None:
    choice = choose_kernel(start(), spectral_field(0.5, 60))
    assert KernelChoice.of_plain(choice.as_plain()) == choice
