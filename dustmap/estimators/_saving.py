"""Fitted estimators as directories of one JSON and one npz file; nothing is pickled.

model.json        of a regressor: arguments, scaling, hyperparameters, sizes and the report
classifier.json   of a classifier: arguments, scaling, labels, and each latent function's plan
arrays.npz        exact: the data; hip: mean and statistics of q(ε); global: mean and draws of ε;
                  svgp, sgpr: as hip, and the inducing points, numbered by latent function for a
                  classifier; where coefficients of the mean were fitted, their spread, which
                  models of earlier versions do not have
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.engines import (
    AbstractEngine,
    Arrays,
    EngineFit,
    EvidenceSettings,
    ExactEngine,
    ExactSettings,
    FreePointPlan,
    FreePointsEngine,
    FreePointSettings,
    InducingEngine,
    InducingPlan,
    InducingSettings,
    PathwiseEngine,
    PathwiseSettings,
    PointPlan,
    PointSettings,
    Problem,
)
from dustmap.errors import UserError
from dustmap.estimators._engines import FittedRegression
from dustmap.estimators._latent import Classification, Latent
from dustmap.estimators._standardisation import Standardisation, kernel_of_terms
from dustmap.gp import AbstractMean, Batch, ConstantMean, GPModel, LinearMean, RegularGrid
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel, KernelTerm, kernel_named
from dustmap.gp.likelihoods import BernoulliLikelihood, BernoulliLink, GaussianLikelihood
from dustmap.inference import StudentTNoise

REGRESSOR, CLASSIFIER, ARRAYS = "model.json", "classifier.json", "arrays.npz"
FORMAT = 1

_Json = dict[str, Any]
#: Engines by the names that files give them -> how their plans are read.
_PLANS: Mapping[str, Callable[[_Json], InducingPlan | PointPlan | FreePointPlan]] = {
    "hip": InducingPlan.of_plain,
    "global": PointPlan.of_plain,
    "svgp": FreePointPlan.of_plain,
    "sgpr": FreePointPlan.of_plain,
}


def write_regression(path: Path, fitted: FittedRegression, parameters: Mapping[str, Any]) -> None:
    """Write model.json and arrays.npz into a new or empty directory."""
    model, fit = fitted.model, fitted.fit
    content = {
        "parameters": plain_arguments(parameters),
        "engine": fitted.engine,
        "scaling": asdict(fitted.scaling),
        **_plain_kernel_and_mean(model),
        "noise": _plain_noise(model.noise),
        "noise_is_given": fitted.noise_is_given,
        "evidence": fitted.evidence,
        "report": fitted.report,
        "dof": fitted.dof,
    }
    if fitted.engine == "exact":
        content["mean_is_fitted"] = model.mean.is_learned
    if fit.plan is not None:
        content["plan"] = fit.plan.as_plain()
    _write(path, REGRESSOR, content, fit.arrays)


def read_regression(path: Path) -> tuple[FittedRegression, _Json]:
    """The fitted regression of `write_regression`, and the arguments of its estimator."""
    content, arrays = _read(path, REGRESSOR)
    engine = content["engine"]
    learns_mean = engine != "exact" or content.get("mean_is_fitted", False)
    kernel, mean = _kernel_and_mean(content, learns_mean)
    model = GPModel(kernel, mean, GaussianLikelihood(**content["noise"]))
    dof = content.get("dof")
    fit = _loaded(engine, model, content.get("plan"), arrays)
    noise = None if dof is None else StudentTNoise(dof)
    fitted = FittedRegression(
        scaling=_scaling(content["scaling"]),
        engine=engine,
        fit=EngineFit(fit.posterior, model, noise=noise, arrays=arrays, plan=fit.plan),
        evidence=content["evidence"],
        noise_is_given=content["noise_is_given"],
        report=content["report"],
    )
    return fitted, arguments(content["parameters"])


def write_classification(
    path: Path, fitted: Classification, classes: NDArray[Any], parameters: Mapping[str, Any]
) -> None:
    """Write classifier.json and arrays.npz into a new or empty directory."""
    content = {
        "parameters": plain_arguments(parameters),
        "classes": _plain_classes(classes),
        "scaling": asdict(fitted.scaling),
        "latents": [_plain_latent(latent) for latent in fitted.latents],
    }
    arrays = {
        f"{name}_{i}": array
        for i, latent in enumerate(fitted.latents)
        for name, array in latent.fit.arrays.items()
    }
    _write(path, CLASSIFIER, content, arrays)


def read_classification(path: Path) -> tuple[Classification, NDArray[Any], _Json]:
    """The latent functions of `write_classification`, the labels, and the estimator's arguments."""
    content, arrays = _read(path, CLASSIFIER)
    latents = []
    for i, plain in enumerate(content["latents"]):
        end = f"_{i}"
        own = {n.removesuffix(end): array for n, array in arrays.items() if n.endswith(end)}
        kernel, mean = _kernel_and_mean(plain)
        model = GPModel(kernel, mean, BernoulliLikelihood(BernoulliLink(plain["link"])))
        fit = _loaded("svgp", model, plain["plan"], own)
        whole = EngineFit(fit.posterior, model, evidence=plain["elbo"], arrays=own, plan=fit.plan)
        latents.append(Latent(whole, plain["report"]))
    classes = content["classes"]
    fitted = Classification(_scaling(content["scaling"]), tuple(latents))
    labels = np.array(classes["values"], dtype=classes["dtype"])
    return fitted, labels, arguments(content["parameters"])


def _write(path: Path, name: str, content: _Json, arrays: Arrays) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists already: choose another name, or remove it first")
    path.mkdir(parents=True, exist_ok=True)
    np.savez(path / ARRAYS, allow_pickle=False, **arrays)
    # Last: a directory without it is not a model.
    whole = {"format": FORMAT, **content}
    (path / name).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _read(path: Path, name: str) -> tuple[_Json, dict[str, NDArray[Any]]]:
    if not (path / name).is_file():
        raise FileNotFoundError(f"{path}: expected a directory with {name} and {ARRAYS}")
    content: _Json = json.loads((path / name).read_text(encoding="utf-8"))
    if content.get("format") != FORMAT:
        raise UserError(
            f"{path / name} has format {content.get('format')!r} and this version of dustmap "
            f"reads {FORMAT}: fit the model again"
        )
    with np.load(path / ARRAYS, allow_pickle=False) as stored:
        return content, {key: stored[key] for key in stored.files}


def _loaded(engine: str, model: GPModel, plan: _Json | None, arrays: Arrays) -> EngineFit:
    """The fit of an engine at the settings that its plan was made with."""
    dim = model.kernel.dim
    none = Batch(PointValues(torch.zeros(0, dim, dtype=torch.float64)), torch.zeros(0).double())
    found = None if plan is None else _PLANS[engine](plan)
    return _engine(engine, found).load(Problem(model, none), arrays, found)


def _engine(engine: str, plan: Any) -> AbstractEngine:
    learning = EvidenceSettings(rows=2)
    if isinstance(plan, InducingPlan):
        dtype, memory = plan.dtype, plan.max_memory
        return InducingEngine(InducingSettings(learning, dtype=dtype, max_memory=memory))
    if isinstance(plan, PointPlan):
        points = PointSettings(plan.samples, 4.0, plan.dtype, plan.max_memory, plan.seed)
        return PathwiseEngine(PathwiseSettings(points, learning))
    if isinstance(plan, FreePointPlan):
        settings = FreePointSettings(
            inducing=plan.n_inducing,
            batch_size=1,
            epochs=None,
            learning_rate=0.0,
            patience=None,
            learn_points=False,
            dtype=plan.dtype,
            max_memory=plan.max_memory,
            seed=0,
        )
        return FreePointsEngine(settings, collapsed=engine == "sgpr")
    return ExactEngine(ExactSettings(learning, max_memory=2**62))


def plain_arguments(parameters: Mapping[str, Any]) -> _Json:
    """Arguments of an estimator as JSON; `arguments` reads them back."""
    return {name: _plain(value) for name, value in parameters.items()}


def arguments(plain: _Json) -> _Json:
    """The arguments of `plain_arguments`."""
    return {name: _argument(value) for name, value in plain.items()}


def _plain(value: Any) -> Any:
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
    return RegularGrid(**value["grid"]) if "grid" in value else tuple(value["tuple"])


def _plain_kernel_and_mean(model: GPModel) -> _Json:
    return {
        "kernel": _terms(model.kernel),
        "mean": model.mean.coefficients().tolist(),
        "linear_mean": isinstance(model.mean, LinearMean),
    }


def _kernel_and_mean(content: _Json, learn: bool = True) -> tuple[AbstractKernel, AbstractMean]:
    value = content["mean"]
    mean: AbstractMean = ConstantMean(value[0], learn=learn)
    if content["linear_mean"]:
        mean = LinearMean(value[1:], value[0], learn=learn)
    return _kernel(content["kernel"]), mean


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
    def double(value: Any) -> Tensor:
        return torch.tensor(value, dtype=torch.float64)

    return kernel_of_terms(
        [
            KernelTerm(
                double(term["variance"]),
                double(term["lengthscale"]),
                kernel_named(term["profile"], term["lengthscale"]).profile,
            )
            for term in terms
        ]
    )


def _plain_noise(likelihood: GaussianLikelihood) -> dict[str, float | None]:
    logs = {"scale": likelihood.log_scale, "jitter": likelihood.log_jitter}
    return {name: None if log is None else float(log.detach().exp()) for name, log in logs.items()}


def _scaling(content: _Json) -> Standardisation:
    return Standardisation(
        tuple(content["x_center"]),
        tuple(content["x_scale"]),
        content["y_center"],
        content["y_scale"],
    )


def _plain_classes(classes: NDArray[Any]) -> _Json:
    if classes.dtype.kind not in "OUSiufb":
        raise TypeError(
            f"labels of dtype {classes.dtype} cannot be saved: use strings, numbers or booleans"
        )
    values = classes.tolist()
    if classes.dtype.kind in "OS" and not all(isinstance(v, str) for v in values):
        raise TypeError("labels of mixed types cannot be saved: use strings or numbers")
    return {
        "dtype": "object" if classes.dtype.kind == "O" else str(classes.dtype),
        "values": values,
    }


def _plain_latent(latent: Latent) -> _Json:
    likelihood = latent.fit.model.likelihood
    assert isinstance(likelihood, BernoulliLikelihood)
    return {
        **_plain_kernel_and_mean(latent.fit.model),
        "link": likelihood.link.value,
        "plan": latent.fit.plan.as_plain(),
        "elbo": latent.elbo,
        "report": latent.report,
    }
