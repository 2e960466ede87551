"""A GPU that is not there: tensors of the CPU of which a note says that they are on a GPU.

Operations that a real GPU would refuse are refused: tensors of two devices in one operation, numpy
arrays of tensors on the GPU. What such a device computes is what the CPU computes.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
aten = torch.ops.aten
#: Operations that take tensors of two devices: copies, and indices that may be on the CPU.
_MIXED = {
    "copy_",
    "_to_copy",
    "index",
    "index_put_",
    "_index_put_impl_",
    "index_put",
    "_unsafe_index",
}
#: Notes from which on those of storages that are gone are looked for.
_FEWEST = 10_000
_NEEDS_CPU = {"numpy", "__array__", "data_ptr"}


@final
class _Notes:
    """Which storages are said to be on the GPU.

    The weak references keep addresses of storages from being used again. Notes of storages that
    are gone are removed now and then.
    """

    def __init__(self) -> None:
        self._gpu: dict[int, tuple[StorageWeakRef, bool]] = {}
        self._most = _FEWEST

    def on_gpu(self, x: Tensor) -> bool:
        key = _storage(x)._cdata
        return self._gpu[key][1] if key in self._gpu else False

    def note(self, x: Tensor, gpu: bool) -> None:
        storage = _storage(x)
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._gpu[storage._cdata] = (reference, gpu)
        if len(self._gpu) > self._most:
            left = self._gpu.items()
            self._gpu = {key: note for key, note in left if not note[0].expired()}  # type: ignore[no-untyped-call]
            self._most = max(_FEWEST, 2 * len(self._gpu))


@functools.cache
def _notes() -> _Notes:
    """The same for all: what is cached outlives a test."""
    return _Notes()


def _storage(x: Tensor) -> torch.UntypedStorage:
    return (x.values() if x.layout != torch.strided else x).untyped_storage()


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


@final
class _Below(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every operation, those of derivatives too."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes = notes

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = _tensors((args, kwargs or {}))
        name = func.overloadpacket.__name__
        # Numbers of the CPU go everywhere, those of the GPU stay there.
        held = [(x, self._notes.on_gpu(x)) for x in given]
        gpu = {there for x, there in held if x.dim() > 0 or there}
        if len(gpu) == 2:
            if name not in _MIXED:
                places = ", ".join(
                    f"{tuple(x.shape)} {'cuda' if self._notes.on_gpu(x) else 'cpu'}" for x in given
                )
                raise RuntimeError(f"{name}: tensors on two devices: {places}")
            gpu = {self._notes.on_gpu(given[0])}
        result = func(*args, **(kwargs or {}))
        shared = {_storage(x)._cdata for x in given}
        for x in _tensors(result):
            if _storage(x)._cdata not in shared:
                self._notes.note(x, gpu == {True})
        return result


@final
class _Moved(torch.autograd.Function):
    """A copy on another device; derivatives go back to where the tensor came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: _Notes, gpu: bool) -> Tensor:
        ctx.notes, ctx.gpu = notes, notes.on_gpu(x)
        result = x.clone()
        notes.note(result, gpu)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        result = grad.clone()
        ctx.notes.note(result, ctx.gpu)
        return result, None, None


def _moved(x: Tensor, notes: _Notes, gpu: bool) -> Tensor:
    result: Tensor = _Moved.apply(x, notes, gpu)  # type: ignore[no-untyped-call]
    return result


@final
class _Above(TorchFunctionMode):
    """Answers for the devices of tensors, and takes them where a device is asked for."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self._notes = notes

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        getter = getattr(func, "__self__", None)
        if name == "__get__":
            if getter is torch.Tensor.device:
                return GPU if self._notes.on_gpu(args[0]) else CPU
            if getter is torch.Tensor.is_cuda:
                return self._notes.on_gpu(args[0])
            if getter is torch.Tensor.is_cpu:
                return not self._notes.on_gpu(args[0])
        if name in _NEEDS_CPU and args and self._notes.on_gpu(args[0]):
            raise TypeError(f"{name}: can't convert cuda:0 device type tensor to numpy")
        if func is torch.Tensor.to:
            return self._to(args[0], list(args[1:]), keywords)
        if func in (torch.Tensor.cpu, torch.Tensor.cuda):
            return self._to(args[0], [CPU if func is torch.Tensor.cpu else GPU], {})
        device = keywords.get("device")
        if device is None and name == "new_tensor":
            device = GPU if self._notes.on_gpu(args[0]) else CPU
        if device is None:
            return func(*args, **keywords)
        gpu = torch.device(device).type == "cuda"
        if gpu and keywords.get("generator") is not None:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        result = func(*args, **(keywords | {"device": CPU}))
        given = {_storage(x)._cdata for x in _tensors((args, keywords))}
        for x in _tensors(result):
            if _storage(x)._cdata in given:
                if self._notes.on_gpu(x) != gpu:
                    result = _moved(x, self._notes, gpu)
            else:
                self._notes.note(x, gpu)
        return result

    def _to(self, x: Tensor, args: list[Any], keywords: dict[str, Any]) -> Tensor:
        device = keywords.pop("device", None)
        kept: list[torch.dtype] = []
        for arg in args:
            if isinstance(arg, str | torch.device):
                device = arg
            elif isinstance(arg, Tensor):
                device = GPU if self._notes.on_gpu(arg) else CPU
                kept.append(arg.dtype)
            elif isinstance(arg, torch.dtype):
                kept.append(arg)
        y = x.to(kept[0], **keywords) if kept else x.to(**keywords) if keywords else x
        if device is None or (torch.device(device).type == "cuda") == self._notes.on_gpu(y):
            return y
        return _moved(y, self._notes, torch.device(device).type == "cuda")


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Inside, `cuda` is a device like any other."""
    notes = _notes()
    above, backward = _Above(notes), torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def derivative(*args: Any, **kwargs: Any) -> Any:
        # Modes are off inside of the operation that began it.
        with above:
            return backward(*args, **kwargs)

    with (
        patch("torch.autograd._engine_run_backward", derivative),
        patch("torch.cuda.is_available", lambda: True),
        patch("torch.cuda.device_count", lambda: 1),
        patch("torch.cuda.synchronize", lambda *_: None),
        patch("torch.cuda.empty_cache", lambda: None),
        patch("torch.cuda.get_device_name", lambda *_: "a GPU that is not there"),
        _Below(notes),
        above,
    ):
        yield
