"""Checks shared by the functionals: finite float64 coordinates of the right shape."""

import torch
from torch import Tensor

UNIT_TOLERANCE = 1e-5  # loose enough for directions that were normalised in float32


def coordinates(name: str, x: Tensor, like: Tensor | None = None) -> Tensor:
    """x as float64 (N, D), refused unless finite and of the shape of `like`."""
    return _checked(name, x, "(N, D)", 2, like)


def table(name: str, x: Tensor, rows: int) -> Tensor:
    """x as float64 (rows, J), refused unless finite."""
    checked = _checked(name, x, f"({rows}, J)", 2, None)
    if len(checked) != rows:
        raise ValueError(f"{name} must have {rows} rows, one per datum; got {len(checked)}.")
    return checked


def unit_vectors(name: str, x: Tensor, like: Tensor) -> Tensor:
    """x as float64 directions (N, D) of length one."""
    direction = coordinates(name, x, like)
    off = (direction.norm(dim=-1) - 1).abs() > UNIT_TOLERANCE
    if bool(off.any()):
        row = int(off.nonzero()[0])
        raise ValueError(
            f"{name} must hold unit vectors: row {row} has length "
            f"{direction[row].norm().item():.6g}; divide every row by its length."
        )
    return direction


def _checked(name: str, x: Tensor, shape: str, rank: int, like: Tensor | None) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor {shape}, got {type(x).__name__}.")
    if x.ndim != rank or x.shape[-1] == 0:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}.")
    if like is not None and x.shape != like.shape:
        raise ValueError(f"{name} must have shape {tuple(like.shape)}, got {tuple(x.shape)}.")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name} is on {x.device}, the rest on {like.device}; use one device.")
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        row = int((~finite).any(-1).nonzero()[0])
        raise ValueError(
            f"{name} must be finite: row {row} is {x[row].tolist()}; drop or repair such rows."
        )
    return x.to(torch.float64)
