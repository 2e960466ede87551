"""Fitted classifiers as directories of one JSON and one npz file; nothing is pickled.

classifier.json   arguments of the estimator, scaling, labels, and each latent function's plan
arrays.npz        of each latent function: inducing points, mean and statistics of q(ε)
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap.gp.likelihoods import BernoulliLikelihood, BernoulliLink
from dustmap.regression import _checkpoint
from dustmap.regression._classification import Classification, Latent

MODEL = "classifier.json"
FORMAT = 1

_Json = dict[str, Any]


def write(
    path: Path, fitted: Classification, classes: NDArray[Any], parameters: Mapping[str, Any]
) -> None:
    """Writes classifier.json and arrays.npz into a new or empty directory."""
    _checkpoint.make_directory(path)
    content = {
        "format": FORMAT,
        "parameters": _checkpoint.plain_arguments(parameters),
        "classes": _plain_classes(classes),
        "scaling": asdict(fitted.scaling),
        "latents": [_plain_latent(latent) for latent in fitted.latents],
    }
    arrays = {
        f"{name}_{i}": array
        for i, latent in enumerate(fitted.latents)
        for name, array in _checkpoint.svgp_arrays(latent.state).items()
    }
    np.savez(path / _checkpoint.ARRAYS, allow_pickle=False, **arrays)
    # Last: a directory without it is not a model.
    (path / MODEL).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> tuple[Classification, NDArray[Any], _Json]:
    """The fitted latent functions of `write`, the labels, and the arguments of the estimator."""
    content = _checkpoint.read_json(path, MODEL, FORMAT)
    with np.load(path / _checkpoint.ARRAYS, allow_pickle=False) as stored:
        arrays = {name: torch.from_numpy(stored[name]) for name in stored.files}
    latents = []
    for i, told in enumerate(content["latents"]):
        end = f"_{i}"
        own = {n.removesuffix(end): array for n, array in arrays.items() if n.endswith(end)}
        kernel, mean = _checkpoint.kernel_and_mean(told)
        likelihood = BernoulliLikelihood(BernoulliLink(told["link"]))
        state = _checkpoint.svgp_state(kernel, mean, likelihood, told["plan"], own)
        latents.append(Latent(state, told["elbo"], told["report"]))
    classes = content["classes"]
    fitted = Classification(_checkpoint.scaling_of(content["scaling"]), tuple(latents))
    labels = np.array(classes["values"], dtype=classes["dtype"])
    return fitted, labels, _checkpoint.arguments(content["parameters"])


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
    model = latent.state.posterior.model
    assert isinstance(model.likelihood, BernoulliLikelihood)
    return {
        **_checkpoint.plain_kernel_and_mean(latent.kernel, model.mean),
        "link": model.likelihood.link.value,
        "plan": _checkpoint.plain_plan(latent.state.plan),
        "elbo": latent.elbo,
        "report": latent.report,
    }
