"""Hyperparameters of a regression as plain numbers in the user's units, with their errors."""

from typing import Any

from scipy.special import ndtr, stdtrit
from torch import Tensor

from dustmap import engines
from dustmap.engines import EngineFit
from dustmap.estimators._standardisation import Standardisation
from dustmap.gp import GPModel
from dustmap.gp.kernels import AbstractKernel
from dustmap.inference import StudentTNoise

#: Probability below one standard deviation of a normal distribution.
_UPPER = float(ndtr(1.0))


def value_of(log: Tensor | None) -> float | None:
    """The number of this logarithm."""
    return None if log is None else float(log.detach().exp())


def core_of(dof: float | None) -> float:
    """Half width of t_ν that holds as much as ±1σ of a normal distribution; 1 for normal."""
    return 1.0 if dof is None else float(stdtrit(dof, _UPPER))


def noise_numbers(
    model: GPModel, dof: float | None, scaling: Standardisation
) -> dict[str, float | None]:
    """Numbers of the noise in user units, see `FittedRegression.noise`."""
    jitter, scale = value_of(model.noise.log_jitter), value_of(model.noise.log_scale)
    core = core_of(dof)
    return {
        "noise_std": None if jitter is None else jitter * core * scaling.y_scale,
        "noise_scale": None if scale is None else scale * core,
        **({} if dof is None else {"noise_dof": dof}),
    }


def kernel_numbers(kernel: AbstractKernel) -> list[dict[str, Any]]:
    """Profile, length scales and standard deviation of every term of a kernel."""
    return [
        {
            "profile": term.profile.name,
            "length": term.lengthscale.tolist(),
            "std": float(term.variance.detach()) ** 0.5,
        }
        for term in kernel.terms()
    ]


def hyperparameter_errors(fit: EngineFit, scaling: Standardisation) -> dict[str, Any]:
    """Errors of learned hyperparameters in user units, in the form of `kernel_numbers`, the noise's
    numbers and the mean's coefficients; None where there is none, `held` what is at a bound."""

    def quantities(model: GPModel, noise: StudentTNoise | None) -> dict[str, float]:
        found = dict[str, float]()
        for i, term in enumerate(kernel_numbers(scaling.user_kernel(model.kernel))):
            found |= {f"length[{i}][{j}]": value for j, value in enumerate(term["length"])}
            found[f"std[{i}]"] = term["std"]
        numbers = noise_numbers(model, None if noise is None else noise.nu, scaling)
        mean = scaling.user_mean(model.mean.coefficients().detach().numpy()).tolist()
        found |= {name: value for name, value in numbers.items() if value is not None}
        return found | {f"mean[{i}]": value for i, value in enumerate(mean)}

    errors = engines.quantity_errors(fit, quantities)
    dim, terms = len(scaling.x_scale), len(fit.model.kernel.terms())
    kernel = [
        {
            "length": [errors.get(f"length[{i}][{j}]") for j in range(dim)],
            "std": errors.get(f"std[{i}]"),
        }
        for i in range(terms)
    ]
    names = [name for name in ("noise_std", "noise_scale", "noise_dof") if name in errors]
    size = len(fit.model.mean.coefficients())
    return {
        "kernel": kernel,
        **{name: errors[name] for name in names},
        "mean": [errors.get(f"mean[{i}]") for i in range(size)],
        "held": [name for name, error in errors.items() if error is None],
    }
