"""Fitted regressions as directories of one JSON and one npz file; nothing is pickled.

model.json    arguments of the estimator, scaling, hyperparameters, sizes and the report
arrays.npz    exact: the data; hip: mean and statistics of q(ε); global: mean and draws of ε;
              svgp, sgpr: as hip, and the inducing points; where coefficients of the mean were
              fitted, their spread, which models of earlier versions do not have
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.gp import (
    AbstractMean,
    Batch,
    ConstantMean,
    LinearMean,
    RegularGrid,
)
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel, KernelTerm, kernel_named
from dustmap.gp.likelihoods import AbstractLikelihood, GaussianLikelihood
from dustmap.inference import CoefficientSpread, VariationalPosterior
from dustmap.regression import _global, _hip
from dustmap.regression._fit import ExactState, GlobalState, HipState, Regression, State
from dustmap.regression._global import GlobalPlan
from dustmap.regression._learning import Prior
from dustmap.regression._plan import HipPlan
from dustmap.regression._scaling import Standardisation, kernel_of_terms
from dustmap.regression._sgpr import SGPRState
from dustmap.regression._svgp import SVGPPlan, SVGPState, build_model

MODEL = "model.json"
ARRAYS = "arrays.npz"
FORMAT = 1

_Json = dict[str, Any]


def write(path: Path, fitted: Regression, parameters: Mapping[str, Any]) -> None:
    """Writes model.json and arrays.npz into a new or empty directory."""
    make_directory(path)
    content = {
        "format": FORMAT,
        "parameters": plain_arguments(parameters),
        "engine": fitted.engine,
        "scaling": asdict(fitted.scaling),
        **plain_kernel_and_mean(fitted.prior.kernel, fitted.prior.mean),
        "noise": _noise(fitted.prior.likelihood),
        "noise_is_given": fitted.noise_is_given,
        "evidence": fitted.evidence,
        "report": fitted.report,
        "dof": fitted.dof,
    }
    if isinstance(fitted.state, ExactState):
        content["mean_is_fitted"] = fitted.state.mean_is_fitted
    if isinstance(fitted.state, HipState | GlobalState | SVGPState | SGPRState):
        content["plan"] = plain_plan(fitted.state.plan)
    np.savez(path / ARRAYS, allow_pickle=False, **_arrays(fitted.state))
    # Last: a directory without it is not a model.
    (path / MODEL).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> tuple[Regression, _Json]:
    """The fitted regression of `write`, and the arguments of its estimator."""
    content = read_json(path, MODEL, FORMAT)
    with np.load(path / ARRAYS, allow_pickle=False) as stored:
        arrays = {name: torch.from_numpy(stored[name]) for name in stored.files}
    prior = _prior(content)
    fitted = Regression(
        scaling=scaling_of(content["scaling"]),
        prior=prior,
        state=_state(prior, content, arrays),
        evidence=content["evidence"],
        noise_is_given=content["noise_is_given"],
        report=content["report"],
        dof=content.get("dof"),
    )
    return fitted, arguments(content["parameters"])


def make_directory(path: Path) -> None:
    """A new or empty directory."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists already: choose another name, or remove it first")
    path.mkdir(parents=True, exist_ok=True)


def read_json(path: Path, model: str, version: int) -> _Json:
    """The content of a model's JSON file, of this version of its format."""
    if not (path / model).is_file():
        raise FileNotFoundError(f"{path}: expected a directory with {model} and {ARRAYS}")
    content: _Json = json.loads((path / model).read_text(encoding="utf-8"))
    if content.get("format") != version:
        raise ValueError(
            f"{path / model} has format {content.get('format')!r} and this version of dustmap "
            f"reads {version}: fit the model again"
        )
    return content


def plain_arguments(parameters: Mapping[str, Any]) -> _Json:
    """Arguments of an estimator as JSON; `arguments` reads them back."""
    return {name: _plain(value) for name, value in parameters.items()}


def arguments(plain: _Json) -> _Json:
    """The arguments of `plain_arguments`."""
    return {name: _argument(value) for name, value in plain.items()}


def plain_kernel_and_mean(kernel: AbstractKernel, mean: AbstractMean) -> _Json:
    """As JSON; `kernel_and_mean` reads them back."""
    return {
        "kernel": _terms(kernel),
        "mean": mean.coefficients().tolist(),
        "linear_mean": isinstance(mean, LinearMean),
    }


def kernel_and_mean(content: _Json) -> tuple[AbstractKernel, AbstractMean]:
    """What `plain_kernel_and_mean` wrote."""
    value = content["mean"]
    mean: AbstractMean = (
        LinearMean(value[1:], value[0]) if content["linear_mean"] else ConstantMean(value[0])
    )
    return _kernel(content["kernel"]), mean


def _arrays(state: State) -> dict[str, NDArray[Any]]:
    if isinstance(state, GlobalState):
        return _global.arrays_of(state.posterior)
    if isinstance(state, HipState):
        q = state.posterior.state
        tensors = {"mean": q.mean, "statistics": q.statistics, **_spread(state.posterior)}
        return {name: tensor.numpy() for name, tensor in tensors.items()}
    if isinstance(state, SVGPState):
        return svgp_arrays(state)
    if isinstance(state, SGPRState):
        return svgp_arrays(state.fitted)
    data = state.data
    assert isinstance(data.functional, PointValues)
    assert data.noise_variance is not None
    tensors = {"x": data.functional.x, "y": data.y, "noise": data.noise_variance}
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


def _state(prior: Prior, content: _Json, arrays: Mapping[str, Tensor]) -> State:
    if content["engine"] == "exact":
        data = Batch(PointValues(arrays["x"]), arrays["y"], arrays["noise"])
        return ExactState.of(prior, data, content.get("mean_is_fitted", False))
    if content["engine"] == "global":
        whole = _global_plan(content["plan"])
        return GlobalState(_global.restored(prior, whole, arrays), whole)
    if content["engine"] in ("svgp", "sgpr"):
        parts = (prior.kernel, prior.mean, prior.likelihood)
        points = svgp_state(*parts, content["plan"], arrays)
        return points if content["engine"] == "svgp" else SGPRState(points)
    plan = _plan(content["plan"])
    model = _hip.build_model(prior, plan)
    q = model.family.posterior(arrays["mean"], arrays["statistics"])
    return HipState(VariationalPosterior(model, q, CoefficientSpread.of_tensors(arrays)), plan)


def svgp_arrays(state: SVGPState) -> dict[str, NDArray[Any]]:
    """Inducing points, mean and statistics."""
    q = state.posterior.state
    tensors = {"inducing": state.inducing, "mean": q.mean, "statistics": q.statistics}
    tensors |= _spread(state.posterior)
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def svgp_state(
    kernel: AbstractKernel,
    mean: AbstractMean,
    likelihood: AbstractLikelihood,
    plan: _Json,
    arrays: Mapping[str, Tensor],
) -> SVGPState:
    """The state of `svgp_arrays`, at the plan that was written with it."""
    read = SVGPPlan(**plan | {"dtype": getattr(torch, plan["dtype"])})
    with torch.no_grad():
        model = build_model(kernel, mean, likelihood, read, arrays["inducing"])
    q = model.family.posterior(arrays["mean"], arrays["statistics"])
    return SVGPState(VariationalPosterior(model, q, CoefficientSpread.of_tensors(arrays)), read)


def _spread(posterior: VariationalPosterior) -> dict[str, Tensor]:
    return {} if posterior.spread is None else posterior.spread.tensors()


def _terms(kernel: AbstractKernel) -> list[_Json]:
    return [
        {
            "profile": term.profile.name,
            "variance": float(term.variance.detach()),
            "lengthscale": term.lengthscale.detach().expand(kernel.dim).tolist(),
        }
        for term in kernel.terms()
    ]


def _kernel(terms: list[_Json]) -> AbstractKernel:
    return kernel_of_terms(
        [
            KernelTerm(
                torch.tensor(term["variance"], dtype=torch.float64),
                torch.tensor(term["lengthscale"], dtype=torch.float64),
                kernel_named(term["profile"], term["lengthscale"]).profile,
            )
            for term in terms
        ]
    )


def _prior(content: _Json) -> Prior:
    return Prior(*kernel_and_mean(content), GaussianLikelihood(**content["noise"]))


def _noise(likelihood: GaussianLikelihood) -> dict[str, float | None]:
    logs = {"scale": likelihood.log_scale, "jitter": likelihood.log_jitter}
    return {name: None if log is None else float(log.detach().exp()) for name, log in logs.items()}


def scaling_of(content: _Json) -> Standardisation:
    """What its fields as JSON tell."""
    return Standardisation(
        tuple(content["x_center"]),
        tuple(content["x_scale"]),
        content["y_center"],
        content["y_scale"],
    )


def plain_plan(plan: HipPlan | GlobalPlan | SVGPPlan) -> _Json:
    """As JSON."""
    return asdict(plan) | {"dtype": str(plan.dtype).removeprefix("torch.")}


def _plan(content: _Json) -> HipPlan:
    block = content["block"]
    return HipPlan(
        grid=_grid(content["grid"]),
        torus_shape=tuple(content["torus_shape"]),
        whitening=content["whitening"],
        family=content["family"],
        block=None if block is None else tuple(block),
        rank=content.get("rank", 0),
        n=content["n"],
        dtype=getattr(torch, content["dtype"]),
        max_memory=content["max_memory"],
    )


def _global_plan(content: _Json) -> GlobalPlan:
    return GlobalPlan(
        grid=_grid(content["grid"]),
        torus_shape=tuple(content["torus_shape"]),
        n=content["n"],
        samples=content["samples"],
        seed=content["seed"],
        dtype=getattr(torch, content["dtype"]),
        max_memory=content["max_memory"],
    )


def _grid(content: _Json) -> RegularGrid:
    return RegularGrid(tuple(content["lower"]), tuple(content["spacing"]), tuple(content["shape"]))


def _plain(value: Any) -> Any:
    """An argument of the estimator as JSON; `_argument` reads it back."""
    if isinstance(value, AbstractKernel):
        return {"kernel": _terms(value)}
    if isinstance(value, RegularGrid):
        return {"grid": asdict(value)}
    if isinstance(value, np.random.RandomState):
        return None  # a stream has no value that would reproduce the fit
    if isinstance(value, tuple | frozenset | set):
        return {"tuple": list(value)}
    return value.item() if isinstance(value, np.generic) else value


def _argument(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "kernel" in value:
        return _kernel(value["kernel"])
    return _grid(value["grid"]) if "grid" in value else tuple(value["tuple"])
