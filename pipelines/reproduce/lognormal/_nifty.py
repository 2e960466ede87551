"""The peer: NIFTy.re's correlated field and optimize_kl on the same data."""

import importlib
import importlib.util
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.inference import typical_log_density
from dustmap.linalg import SparseOperator
from pipelines.reproduce._experiment import MissingData
from pipelines.reproduce.lognormal._problem import Sky

#: Antithetic pairs of samples per iteration.
PAIRS = 4
#: Of the linear samples; at 100, as in NIFTy's introductory demo, all of them stop unconverged.
CG_STEPS = 400
#: Tolerance of NIFTy's introductory demo: absolute decrease per latent variable.
DELTA = 1e-4


def require() -> None:
    """Imports NIFTy.re, or says what to install where it is missing."""
    if importlib.util.find_spec("nifty") is None or importlib.util.find_spec("jax") is None:
        raise MissingData(
            "NIFTy.re is not installed: pip install 'dustmap[bench]' (nifty[re] >= 9) to compare "
            "with it"
        )
    importlib.import_module("nifty.re")


def fit(sky: Sky, iterations: int) -> tuple[Tensor, Tensor]:
    """Log-density (S, M) and held-out extinction (S, K) of the 2 · PAIRS samples.

    The correlated field with its usual priors: amplitude and slope of a power-law spectrum, and
    the offset, all learned; periodic on the grid itself. The noise is given.
    """
    require()
    jax: Any = importlib.import_module("jax")
    jft: Any = importlib.import_module("nifty.re")
    jax.config.update("jax_enable_x64", True)
    field = _correlated_field(jft, sky)
    likelihood = _likelihood(jax, jft, sky, field)
    key, start = jax.random.split(jax.random.PRNGKey(42))
    size = jft.size(likelihood.domain)
    samples, _ = jft.optimize_kl(
        likelihood,
        0.1 * jft.Vector(likelihood.init(start)),
        key=key,
        n_total_iterations=iterations,
        n_samples=PAIRS,
        draw_linear_kwargs={
            "cg_name": None,
            "cg_kwargs": {"absdelta": DELTA * size / 10.0, "maxiter": CG_STEPS},
        },
        kl_kwargs={
            "minimize_kwargs": {
                "name": None,
                "absdelta": DELTA * size,
                "cg_kwargs": {"name": None},
                "maxiter": 35,
            }
        },
        sample_mode="linear_resample",
        odir=None,
    )
    fields = np.stack([np.asarray(field(sample)).reshape(-1) for sample in samples])
    log_density = torch.from_numpy(fields)
    return log_density, sky.rows(sky.held, torch.float64).matmul(log_density.exp())


def _correlated_field(jft: Any, sky: Sky) -> Any:
    maker = jft.CorrelatedFieldMaker("cf")
    offset = typical_log_density(sky.train, variance=1.0)
    maker.set_amplitude_total_offset(offset_mean=offset, offset_std=(1.0, 0.5))
    maker.add_fluctuations(
        sky.grid.shape,
        distances=sky.grid.spacing,
        fluctuations=(1.0, 0.5),
        loglogavgslope=(-4.0, 1.0),
        flexibility=None,
        asperity=None,
        prefix="ax1",
        non_parametric_kind="power",
    )
    return maker.finalize()


def _likelihood(jax: Any, jft: Any, sky: Sky, field: Any) -> Any:
    """Gaussian noise around L exp(field), L by gathers and a segmented sum."""
    L = sky.rows(sky.train.functional, torch.float64)
    assert isinstance(L, SparseOperator)
    counts = np.diff(_array(L.matrix.crow_indices()))
    rows = jax.numpy.asarray(np.repeat(np.arange(len(counts)), counts))
    columns = jax.numpy.asarray(_array(L.matrix.col_indices()))
    values = jax.numpy.asarray(_array(L.matrix.values()))
    noise = sky.train.noise_variance
    assert noise is not None
    sigma = jax.numpy.asarray(_array(noise.sqrt()))

    def respond(latent: Any) -> Any:
        density = jax.numpy.exp(field(latent)).reshape(-1)
        return jax.ops.segment_sum(values * density[columns], rows, len(counts))

    response = jft.Model(respond, domain=field.domain, init=field.init)
    likelihood = jft.Gaussian(
        jax.numpy.asarray(_array(sky.train.y)),
        noise_cov_inv=lambda x: x / sigma**2,
        noise_std_inv=lambda x: x / sigma,
    )
    return likelihood.amend(response)


def _array(values: Tensor) -> NDArray[Any]:
    return values.detach().cpu().numpy()
