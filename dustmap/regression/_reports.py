"""What gridded fits tell: sizes, how their solves ended, and advice."""

from dataclasses import asdict
from typing import Any

import torch

from dustmap.regression import _global, _hip
from dustmap.regression._global import GlobalPlan
from dustmap.regression._plan import HipPlan


def hip_report(plan: HipPlan, fitted: _hip.HipFit) -> dict[str, Any]:
    """Plain values of a fit of the hip engine."""
    solve = fitted.solution.solve
    return {
        "grid_shape": list(plan.grid.shape),
        "torus_shape": list(plan.torus_shape),
        "n_features": plan.n_features,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "whitening": plan.whitening,
        "family": plan.family,
        "block": None if plan.block is None else list(plan.block),
        "rank": plan.rank,
        "bytes_needed": plan.bytes_needed,
        "bytes_rows": plan.bytes_rows,
        "prior": _hip.prior_report(fitted.model.features),
        "rows": asdict(fitted.rows),
        "solve": {
            "status": solve.worst.name.lower(),
            "steps": int(solve.steps.max()),
            "residual": float(solve.residuals.max()),
        },
        "residual_ratio": fitted.residual_ratio,
        "advice": _advice(fitted),
    }


def global_report(fitted: _global.WholeFit) -> dict[str, Any]:
    """Plain values of a fit of the global engine."""
    plan, solution = fitted.plan, fitted.solution
    advice = _coarse(fitted.residual_ratio)
    if not solution.converged:
        advice.append(_unsolved(solution.message(), plan))
    return {
        "grid_shape": list(plan.grid.shape),
        "torus_shape": list(plan.torus_shape),
        "n_features": plan.n_features,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "bytes_needed": plan.bytes_needed,
        "samples": plan.samples,
        "monte_carlo_error_of_std": solution.posterior.monte_carlo_error,
        "solve": {
            "space": fitted.space,
            "status": solution.solve.worst.name.lower(),
            "steps": solution.block_steps,
            "residual": solution.worst_residual,
        },
        "residual_ratio": fitted.residual_ratio,
        "advice": advice,
    }


def _unsolved(message: str, plan: GlobalPlan) -> str:
    if plan.dtype == torch.float64:
        return message
    return f'{message}; rounding errors of float32 may be why: pass dtype="float64"'


def _coarse(residual_ratio: float) -> list[str]:
    if residual_ratio <= 1.0:
        return []
    return [
        f"the grid is too coarse: it leaves {residual_ratio:.2g} times the noise variance of a "
        f"typical datum unexplained; give grid more points per axis, or raise max_memory"
    ]


def _advice(fitted: _hip.HipFit) -> list[str]:
    advice = _coarse(fitted.residual_ratio)
    if fitted.rows.unconverged:
        advice.append(
            f"{fitted.rows.unconverged} of {fitted.rows.columns} rows of features stopped at a "
            f'relative residual of up to {fitted.rows.residual:.1e}: use dtype="float64", more '
            f'padding, or whitening="torus"'
        )
    if not fitted.solution.solve.converged:
        advice.append(fitted.solution.solve.message())
    return advice
