"""Sums of many small blocks into one matrix, differentiable in the kernel at constant memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dustmap.gp.kernels import AbstractProfile, KernelTerm

Terms = Sequence[KernelTerm]
Index = tuple[slice | Tensor, ...]


@final
@dataclass(frozen=True, eq=False)
class Block:
    """A part of the result: result[index] += evaluate(terms)."""

    index: Index
    evaluate: Callable[[Terms], Tensor]


def accumulate(
    terms: Terms,
    blocks: Callable[[], Iterator[Block]],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Σ of the blocks, (shape).

    Nothing is kept for the backward pass, which evaluates every block again and differentiates it
    alone: the memory is that of the result and one block.
    """
    target = torch.zeros(tuple(shape), dtype=dtype, device=device)
    parameters = [p for term in terms for p in (term.variance, term.lengthscale)]
    if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
        profiles = tuple(term.profile for term in terms)
        result: Tensor = _Accumulated.apply(  # type: ignore[no-untyped-call]
            target, blocks, profiles, *parameters
        )
        return result
    with torch.no_grad():
        for block in blocks():
            target[block.index] += block.evaluate(terms)
    return target


class _Accumulated(torch.autograd.Function):
    """`accumulate` with a backward pass that recomputes."""

    @staticmethod
    def forward(
        ctx: Any,
        target: Tensor,
        blocks: Callable[[], Iterator[Block]],
        profiles: tuple[AbstractProfile, ...],
        *parameters: Tensor,
    ) -> Tensor:
        ctx.blocks, ctx.profiles = blocks, profiles
        ctx.save_for_backward(*parameters)
        terms = _terms(profiles, parameters)
        for block in blocks():
            target[block.index] += block.evaluate(terms)
        ctx.mark_dirty(target)
        return target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parameters = tuple(p.detach().requires_grad_() for p in ctx.saved_tensors)
        totals = [torch.zeros_like(p) for p in parameters]
        with torch.enable_grad():
            for block in ctx.blocks():
                value = block.evaluate(_terms(ctx.profiles, parameters))
                if not value.requires_grad:
                    continue
                upstream = grad[block.index].to(value.dtype).expand_as(value)
                parts = torch.autograd.grad(value, parameters, upstream, allow_unused=True)
                for total, part in zip(totals, parts, strict=True):
                    if part is not None:
                        total += part
        return (None, None, None, *totals)


def _terms(
    profiles: tuple[AbstractProfile, ...], parameters: Sequence[Tensor]
) -> tuple[KernelTerm, ...]:
    return tuple(
        KernelTerm(parameters[2 * i], parameters[2 * i + 1], profile)
        for i, profile in enumerate(profiles)
    )
