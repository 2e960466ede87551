"""Which GPU a rank takes, and more ranks on a node than it has GPUs."""

from typing import NoReturn

import pytest
import torch

from dustmap import distributed
from dustmap.config import Config, from_mapping
from dustmap.linalg import Alone
from dustmap.runs import ranks_of


class _Joining(Exception):
    """Where a rank would wait for the others."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs that the second of four ranks takes, on a node that has two."""

    def join(*_: object) -> NoReturn:
        raise _Joining

    found: list[int] = []
    environment = {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    monkeypatch.setattr(distributed, "_joined", join)
    return found


def config(device: str) -> Config:
    return from_mapping({"data": {"catalog": "stars.fits"}, "compute": {"device": device}})


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_ranks_than_gpus_are_refused(taken: list[int], device: str) -> None:
    said = r"a GPU for each of the 4 ranks.*got 2 in all; .*--nproc-per-node 2.*--device cpu"
    with pytest.raises(ValueError, match=said), ranks_of(config(device)):
        pass
    assert taken == []


def test_ranks_without_gpus_may_be_more(taken: list[int]) -> None:
    with pytest.raises(_Joining), ranks_of(config("cpu")):
        pass
    assert taken == []


def test_each_rank_takes_its_own(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(_Joining), ranks_of(config("cuda")):
        pass
    assert taken == [1]


def test_a_rank_that_sees_its_own_alone(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks do that a batch system binds: it gives no LOCAL_WORLD_SIZE."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(_Joining), ranks_of(config("cuda")):
        pass
    assert taken == [0]


def test_ranks_that_share_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they would where a launcher gives neither LOCAL_WORLD_SIZE nor LOCAL_RANK."""
    said = ["a: GPU 1", "a: GPU 2", "b: GPU 1", "a: GPU 2"]
    monkeypatch.setattr(Alone, "texts", lambda self, text: said)
    with pytest.raises(ValueError, match=r"rank 3 has the GPU of rank 1 \(a: GPU 2\).*LOCAL_RANK"):
        distributed.check_own_gpus(Alone(), "a: GPU 1")
    monkeypatch.setattr(Alone, "texts", lambda self, text: said[:3])
    distributed.check_own_gpus(Alone(), "a: GPU 1")
