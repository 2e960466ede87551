"""The exact engine: what it leaves for a later command."""

from dataclasses import replace

import torch

from dustmap.engines import EvidenceSettings, ExactEngine, ExactSettings, Problem, Watch
from dustmap.gp import Batch, ConstantMean, GPModel
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood


def test_a_fit_of_rays_is_loaded_at_the_bits_of_its_parameters() -> None:
    """Those of a problem are logarithms of numbers that a report has, which are other bits."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.randn((40, 3), generator=generator, dtype=torch.float64)
    y = torch.rand(40, generator=generator, dtype=torch.float64)
    data = Batch(LineIntegrals.from_observer(ends), y, torch.full_like(y, 0.01))
    engine = ExactEngine(ExactSettings(EvidenceSettings(40), 2**30))
    differ = 0
    for value in torch.linspace(-0.3, 0.3, 50, dtype=torch.float64):
        kernel = Matern32(0.7, 0.5, dim=3)
        model = GPModel(kernel, ConstantMean(), GaussianLikelihood(scale=1.0))
        model = model.with_value("scale", value)
        fit = engine.condition(Problem(model, data), Watch())
        reported = model.with_value("scale", value.exp().log())
        differ += int(value.exp().log() != value)
        loaded = engine.load(Problem(replace(reported, mean=fit.model.mean), data), fit.arrays)
        one, other = (f.posterior.predict(data.functional) for f in (fit, loaded))
        assert torch.equal(one.mean, other.mean)
        assert torch.equal(one.variance, other.variance)
    assert differ > 0
