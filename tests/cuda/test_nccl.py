"""A group of one rank with the backends of a node with GPUs: NCCL for tensors there, gloo here."""

import pytest
import torch
from torch import Tensor

from dustmap import distributed
from dustmap.linalg import AbstractWorld

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> AbstractWorld:
    for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}.items():
        monkeypatch.setenv(key, value)
    return distributed._joined(0, 1, 60.0)


def test_tensors_of_both_devices_are_shared(world: AbstractWorld) -> None:
    assert torch.distributed.is_nccl_available()
    try:
        for device in ("cpu", "cuda"):
            for dtype in (torch.float32, torch.float64, torch.int64):
                x: Tensor = torch.arange(6, device=device).reshape(2, 3).to(dtype)
                assert torch.equal(world.total(x), x)
                assert torch.equal(world.gathered(x), x)
        assert world.texts("one") == ["one"]
    finally:
        assert isinstance(world, distributed.ProcessGroup)
        world.part()
