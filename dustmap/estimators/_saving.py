"""Fitted estimators as directories of one JSON and one npz file; nothing is pickled.

model.json        of a regressor: arguments, scaling, hyperparameters, sizes and the report
classifier.json   of a classifier: arguments, scaling, labels, and each latent function's plan
                  both: the names of the columns, where the data had any
arrays.npz        exact: the data; hip: mean and statistics of q(ε); global: mean and draws of ε;
                  svgp, sgpr: as hip, and the inducing points, numbered by latent function for a
                  classifier; where coefficients of the mean were fitted, their spread, which
                  models of earlier versions do not have
"""

import json
import zipfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator

from dustmap import engines
from dustmap.engines import Arrays, EngineFit
from dustmap.errors import UserError
from dustmap.estimators._arguments import Standardisation, kernel_of, value_of
from dustmap.estimators._engines import Classification, FittedRegression
from dustmap.gp import AbstractMean, Batch, ConstantMean, GPModel, LinearMean, RegularGrid
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel, stationary_named
from dustmap.gp.likelihoods import BernoulliLikelihood, BernoulliLink, GaussianLikelihood
from dustmap.inference import StudentTNoise

REGRESSOR, CLASSIFIER, ARRAYS = "model.json", "classifier.json", "arrays.npz"
FORMAT = 1

#: Fields of a fitted regression that JSON holds as they are.
_AS_THEY_ARE = ("engine", "evidence", "noise_is_given", "report")

_Json = dict[str, Any]
E = TypeVar("E", bound=BaseEstimator)


def write_regression(path: Path, fitted: FittedRegression, estimator: BaseEstimator) -> None:
    """Write model.json and arrays.npz into a new or empty directory."""
    model, fit = fitted.model, fitted.fit
    content = {
        **_plain_estimator(estimator),
        **{name: getattr(fitted, name) for name in _AS_THEY_ARE},
        "scaling": asdict(fitted.scaling),
        **_plain_kernel_and_mean(model),
        "noise": {
            "scale": value_of(model.noise.log_scale),
            "jitter": value_of(model.noise.log_jitter),
        },
        "dof": fitted.dof,
    }
    if fitted.engine == "exact":
        content["mean_is_fitted"] = model.mean.is_learned
    if fit.plan is not None:
        content["plan"] = fit.plan.as_plain()
    _write(path, REGRESSOR, content, fit.arrays)


def read_regression(path: Path, kind: type[E]) -> tuple[E, FittedRegression]:
    """The estimator of `write_regression`, not yet fitted, and its regression."""
    content, arrays = _read(path, REGRESSOR)
    engine = content["engine"]
    learns_mean = engine != "exact" or content.get("mean_is_fitted", False)
    kernel, mean = _kernel_and_mean(content, learns_mean)
    model = GPModel(kernel, mean, GaussianLikelihood(**content["noise"]))
    dof = content.get("dof")
    fit = _loaded(engine, model, content.get("plan"), arrays)
    noise = None if dof is None else StudentTNoise(dof)
    fitted = FittedRegression(
        scaling=Standardisation.of_plain(content["scaling"]),
        fit=replace(fit, noise=noise, arrays=arrays),
        **{name: content[name] for name in _AS_THEY_ARE},
    )
    return _estimator(kind, content, fitted.scaling), fitted


def write_classification(
    path: Path, fitted: Classification, classes: NDArray[Any], estimator: BaseEstimator
) -> None:
    """Write classifier.json and arrays.npz into a new or empty directory."""
    content = {
        **_plain_estimator(estimator),
        "classes": _plain_classes(classes),
        "scaling": asdict(fitted.scaling),
        "latents": [_plain_latent(latent) for latent in fitted.latents],
    }
    arrays = {
        f"{name}_{i}": array
        for i, latent in enumerate(fitted.latents)
        for name, array in latent.arrays.items()
    }
    _write(path, CLASSIFIER, content, arrays)


def read_classification(path: Path, kind: type[E]) -> tuple[E, Classification, NDArray[Any]]:
    """The estimator of `write_classification`, not yet fitted, its latent functions and labels."""
    content, arrays = _read(path, CLASSIFIER)
    latents = []
    for i, plain in enumerate(content["latents"]):
        end = f"_{i}"
        own = {n.removesuffix(end): array for n, array in arrays.items() if n.endswith(end)}
        kernel, mean = _kernel_and_mean(plain)
        model = GPModel(kernel, mean, BernoulliLikelihood(BernoulliLink(plain["link"])))
        fit = _loaded("svgp", model, plain["plan"], own)
        latents.append(replace(fit, report=plain["report"], evidence=plain["elbo"], arrays=own))
    classes = content["classes"]
    fitted = Classification(Standardisation.of_plain(content["scaling"]), tuple(latents))
    labels = np.array(classes["values"], dtype=classes["dtype"])
    return _estimator(kind, content, fitted.scaling), fitted, labels


def columns_of(estimator: BaseEstimator) -> _Json:
    """The attributes by which an estimator knows the columns that it was fitted to."""
    names = ("n_features_in_", "feature_names_in_")
    return {name: getattr(estimator, name) for name in names if hasattr(estimator, name)}


def name_columns(estimator: BaseEstimator, columns: _Json) -> None:
    """Give an estimator the attributes of `columns_of`."""
    for name, value in columns.items():
        setattr(estimator, name, value)


def _plain_estimator(estimator: BaseEstimator) -> _Json:
    """Write arguments, and names of columns, of which arrays have none."""
    plain: _Json = {
        "parameters": {n: _plain(v) for n, v in estimator.get_params(deep=False).items()}
    }
    named = columns_of(estimator).get("feature_names_in_")
    return plain if named is None else plain | {"feature_names": [str(name) for name in named]}


def _estimator(kind: type[E], content: _Json, scaling: Standardisation) -> E:
    """Make the estimator of `_plain_estimator`; models of earlier versions have no names."""
    estimator: E = kind(**{name: _argument(value) for name, value in content["parameters"].items()})
    columns: _Json = {"n_features_in_": len(scaling.x_scale)}
    if "feature_names" in content:
        columns["feature_names_in_"] = np.array(content["feature_names"], dtype=object)
    name_columns(estimator, columns)
    return estimator


def _write(path: Path, name: str, content: _Json, arrays: Arrays) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists already: choose another name, or remove it first")
    text = json.dumps({"format": FORMAT, **content}, indent=1) + "\n"
    path.mkdir(parents=True, exist_ok=True)
    np.savez(path / ARRAYS, allow_pickle=False, **arrays)
    # Last: a directory without it is not a model.
    (path / name).write_text(text, encoding="utf-8")


def _read(path: Path, name: str) -> tuple[_Json, dict[str, NDArray[Any]]]:
    if not (path / name).is_file():
        other = "HIPGPClassifier" if name == REGRESSOR else "HIPGPRegressor"
        is_other = (path / (CLASSIFIER if name == REGRESSOR else REGRESSOR)).is_file()
        instead = f"; that is of another model, which {other}.load reads" if is_other else ""
        raise FileNotFoundError(f"{path}: expected a directory with {name} and {ARRAYS}{instead}")
    try:
        content: _Json = json.loads((path / name).read_text(encoding="utf-8"))
    except ValueError as damage:
        raise UserError(f"{path / name} is damaged ({damage}): save the model again") from damage
    if content.get("format") != FORMAT:
        raise UserError(
            f"{path / name} has format {content.get('format')!r} and this version of dustmap "
            f"reads {FORMAT}: fit the model again"
        )
    try:
        # NumPy leaves a damaged file open that it has opened itself.
        with (path / ARRAYS).open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return content, {key: stored[key] for key in stored.files}
    except (ValueError, EOFError, zipfile.BadZipFile) as damage:
        raise UserError(f"{path / ARRAYS} is damaged ({damage}): save the model again") from damage


def _loaded(engine: str, model: GPModel, plan: _Json | None, arrays: Arrays) -> EngineFit:
    """The fit of an engine from its plan, whose absence means dense algebra."""
    dim = model.kernel.dim
    none = Batch(PointValues(torch.zeros(0, dim, dtype=torch.float64)), torch.zeros(0).double())
    problem, learning = engines.Problem(model, none), engines.EvidenceSettings(rows=2)
    if plan is None:
        exact = engines.ExactEngine(engines.ExactSettings(learning, max_memory=2**62))
        return exact.load(problem, arrays)
    if engine == "hip":
        grid = engines.InducingPlan.of_plain(plan)
        inducing = engines.InducingEngine(engines.InducingSettings(learning))
        return inducing.load(problem, arrays, grid)
    if engine == "global":
        points = engines.PointPlan.of_plain(plan)
        of_points = engines.PointSettings(points.samples, 4.0, points.dtype, points.max_memory)
        pathwise = engines.PathwiseEngine(engines.PathwiseSettings(of_points, learning))
        return pathwise.load(problem, arrays, points)
    free = engines.FreePointsEngine(engines.FreePointSettings(), collapsed=engine == "sgpr")
    return free.load(problem, arrays, engines.FreePointPlan.of_plain(plan))


def _plain(value: Any) -> Any:
    """Write one argument as a value of JSON."""
    if isinstance(value, AbstractKernel):
        return {"kernel": _terms(value)}
    if isinstance(value, RegularGrid):
        return {"grid": asdict(value)}
    if isinstance(value, np.random.RandomState):
        return None  # a stream has no value that would reproduce the fit
    if isinstance(value, tuple | frozenset | set):
        return {"tuple": [_plain(entry) for entry in value]}
    return value.item() if isinstance(value, np.generic) else value


def _argument(value: Any) -> Any:
    """Read one argument."""
    if not isinstance(value, dict):
        return value
    if "kernel" in value:
        return _kernel(value["kernel"])
    return RegularGrid(**value["grid"]) if "grid" in value else tuple(value["tuple"])


def _plain_kernel_and_mean(model: GPModel) -> _Json:
    """Write kernel and mean of a model."""
    return {
        "kernel": _terms(model.kernel),
        "mean": model.mean.coefficients().tolist(),
        "linear_mean": isinstance(model.mean, LinearMean),
    }


def _kernel_and_mean(content: _Json, learn: bool = True) -> tuple[AbstractKernel, AbstractMean]:
    """Read kernel and mean; `learn` is whether coefficients of the mean were fitted."""
    value = content["mean"]
    mean: AbstractMean = ConstantMean(value[0], learn=learn)
    if content["linear_mean"]:
        mean = LinearMean(value[1:], value[0], learn=learn)
    return _kernel(content["kernel"]), mean


def _terms(kernel: AbstractKernel) -> list[_Json]:
    """Write the terms of a kernel."""
    return [
        {
            "profile": term.profile.name,
            "variance": float(term.variance.detach()),
            "lengthscale": term.lengthscale.detach().expand(kernel.dim).tolist(),
        }
        for term in kernel.terms()
    ]


def _kernel(terms: list[_Json]) -> AbstractKernel:
    """Read the kernel of `_terms`."""
    return kernel_of(
        [stationary_named(t["profile"], t["lengthscale"], t["variance"]) for t in terms]
    )


def _plain_classes(classes: NDArray[Any]) -> _Json:
    """Write labels with their dtype."""
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


def _plain_latent(latent: EngineFit) -> _Json:
    """A latent function without its arrays."""
    likelihood = latent.model.likelihood
    assert isinstance(likelihood, BernoulliLikelihood)
    return {
        **_plain_kernel_and_mean(latent.model),
        "link": likelihood.link.value,
        "plan": latent.plan.as_plain(),
        "elbo": latent.evidence,
        "report": latent.report,
    }
