"""States on disk: to the bit or refused in one line, whatever has become of the file."""

import errno
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dustmap.inference import State
from dustmap.runs.checkpoints import _state_file
from dustmap.runs.checkpoints._state_file import (
    DiskCheckpoints,
    has_states,
    read_state,
    token_of,
    write_state,
)

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32),
    *(torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex128, torch.complex64),
)


def a_state() -> State:
    generator = torch.Generator().manual_seed(0)
    arrays = {
        "sizes": torch.arange(5),
        "field": torch.randn(3, 4, 2, dtype=torch.float64, generator=generator),
        "inside": torch.tensor([True, False]),
    }
    history = [{"energy": 0.1 + 0.2, "steps": 3, "status": None}]
    return State({"round": 7, "history": history, "done": False, "stage": "modé"}, arrays)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "kept" / "fit.npz"
    write_state(path, "fit", (), a_state())
    return path


def test_a_state_comes_back_to_the_bit(stored: Path) -> None:
    found = read_state(stored)
    assert found.scope == "fit"
    assert found.state.values == a_state().values
    assert found.state.arrays.keys() == a_state().arrays.keys()
    for name, array in a_state().arrays.items():
        assert found.state.arrays[name].dtype == array.dtype
        assert torch.equal(found.state.arrays[name], array)
    assert found.token == token_of("fit", (), a_state())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_and_shape_of_array(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.arange(24).reshape(2, 3, 4)
    arrays = {
        "plain": values.to(dtype),
        "turned": values.to(dtype).permute(2, 0, 1),
        "one": values.to(dtype)[0, 0, 1],
        "none": values.to(dtype)[:0],
    }
    write_state(tmp_path / "a.npz", "a", (), State({}, arrays))
    found = read_state(tmp_path / "a.npz").state.arrays
    for name, array in arrays.items():
        assert found[name].dtype == dtype
        assert found[name].shape == array.shape
        assert torch.equal(found[name], array)


def test_floats_keep_all_their_bits(tmp_path: Path) -> None:
    numbers = [0.1, 1e-320, -0.0, 1.7976931348623157e308, float("inf"), float("nan")]
    bits = torch.tensor(numbers, dtype=torch.float64)
    write_state(tmp_path / "a.npz", "a", (), State({"numbers": numbers}, {"bits": bits}))
    found = read_state(tmp_path / "a.npz").state
    listed = found.values["numbers"]
    assert isinstance(listed, list)
    assert torch.tensor(listed, dtype=torch.float64).numpy().tobytes() == bits.numpy().tobytes()
    assert found.arrays["bits"].numpy().tobytes() == bits.numpy().tobytes()


def test_a_type_that_cannot_be_kept_is_named(tmp_path: Path) -> None:
    strange = State({}, {"q": torch.zeros(2, dtype=torch.float8_e4m3fn)})
    with pytest.raises(TypeError, match=r"q: float8_e4m3fn cannot be kept; known are float64"):
        write_state(tmp_path / "a.npz", "a", (), strange)
    assert list(tmp_path.iterdir()) == []


def refused(path: Path, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        read_state(path, path.parent)
    told = str(caught.value)
    assert "\n" not in told
    assert str(path) in told
    assert "--overwrite" in told


def test_truncated_files_are_refused(stored: Path) -> None:
    whole = stored.read_bytes()
    for length in (0, 1, 30, len(whole) // 2, len(whole) - 1):
        stored.write_bytes(whole[:length])
        refused(stored, "is damaged")


def test_a_flipped_byte_is_refused_or_changes_nothing(stored: Path) -> None:
    whole, seen = stored.read_bytes(), 0
    for at in range(0, len(whole), 7):
        stored.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            found = read_state(stored)
        except ValueError:
            seen += 1
        else:
            # Times and attributes of the archive's members are nobody's concern.
            assert found.state.values == a_state().values
            assert all(torch.equal(found.state.arrays[k], v) for k, v in a_state().arrays.items())
    assert seen > len(whole) // 14


def rewritten(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def as_npy(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_an_array_of_another_state_is_refused(stored: Path) -> None:
    other = as_npy(np.arange(5) + 1)
    rewritten(stored, lambda members: members.update({"array_0.npy": other}))
    refused(stored, "array sizes does not match its checksum")
    rewritten(stored, lambda members: members.update({"array_0.npy": as_npy(np.arange(6))}))
    refused(stored, "array sizes is not what its header says")


def test_a_header_that_was_changed_is_refused(stored: Path) -> None:
    header = np.frombuffer(json.dumps({"schema": 1}).encode(), np.uint8)
    rewritten(stored, lambda members: members.update({"header.npy": as_npy(header)}))
    refused(stored, "header does not match its checksum")


def test_foreign_and_newer_files_are_refused(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_state_file, "SCHEMA", 2)
    write_state(stored, "fit", (), a_state())
    monkeypatch.undo()
    refused(stored, "has schema 2 of a newer dustmap, and this reads 1")
    np.savez(stored, x=np.zeros(3))
    refused(stored, "is no state that dustmap has kept")
    stored.write_text("not an archive")
    refused(stored, "is damaged")


def test_the_state_of_another_computation_is_refused(stored: Path) -> None:
    stored.rename(stored.with_name("learn.npz"))
    with pytest.raises(ValueError, match="is the state of fit, not of learn: delete"):
        DiskCheckpoints(stored.parent, 0.0).checkpointer("learn").load()


def test_a_full_disk_leaves_the_state_before(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_state(stored, "fit", (), State({"round": 8}))
    monkeypatch.undo()
    assert read_state(stored).state.values["round"] == 7
    assert [path.name for path in stored.parent.iterdir()] == ["fit.npz"]


class Clock:
    """A time that stands still unless it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def numbered(number: int) -> Callable[[], State]:
    return lambda: State({"number": number})


def test_states_are_kept_when_the_last_is_old(tmp_path: Path) -> None:
    clock = Clock()
    checkpointer = DiskCheckpoints(tmp_path, 60.0, clock=clock).checkpointer("fit")
    assert checkpointer.load() is None
    for number, now in enumerate((0.0, 30.0, 60.0, 90.0, 119.0)):
        clock.now = now
        checkpointer.save_if_due(numbered(number))
    found = DiskCheckpoints(tmp_path, 60.0).checkpointer("fit").load()
    assert found is not None
    assert found.values == {"number": 2}


@pytest.mark.parametrize(("interval", "kept"), [(20.0, [20, 130]), (0.0, list(range(0, 200, 10)))])
def test_states_that_take_long_to_write_are_kept_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: float, kept: list[int]
) -> None:
    """Each takes two seconds: a fiftieth of the time, unless every one is asked for."""
    clock, saved = Clock(), list[int]()

    def write(path: Path, scope: str, place: object, state: State) -> str:
        saved.append(int(str(state.values["number"])))
        clock.now += 2.0
        return ""

    monkeypatch.setattr(_state_file, "write_state", write)
    checkpointer = DiskCheckpoints(tmp_path, interval, clock=clock).checkpointer("fit")
    for now in range(0, 200, 10):
        clock.now = float(now)
        checkpointer.save_if_due(numbered(now))
    assert saved == kept


def test_a_result_takes_the_place_of_what_its_parts_have_kept(tmp_path: Path) -> None:
    checkpoints = DiskCheckpoints(tmp_path, 0.0)
    checkpointer = checkpoints.checkpointer("fit")
    checkpointer.child("climb").child("solve").save_if_due(numbered(1))
    checkpoints.checkpointer("fitness").save_if_due(numbered(2))
    checkpointer.finish(numbered(3)())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit.npz", "fitness.npz"]
    assert has_states(tmp_path)
    with pytest.raises(ValueError, match=r"a part is called '\.\./x'; expected letters"):
        checkpointer.child("../x")


def test_a_part_goes_on_only_where_the_whole_is_where_it_was(tmp_path: Path) -> None:
    clock = Clock()

    def checkpoints() -> DiskCheckpoints:
        return DiskCheckpoints(tmp_path, 60.0, clock=clock)

    def rounds(checkpoints: DiskCheckpoints, last: int) -> list[int | None]:
        """Of each round, what its climb has gone on from; killed in round `last`."""
        outer, seen = checkpoints.checkpointer("fit"), []
        kept = outer.load()
        first = 0 if kept is None else int(str(kept.values["number"]))
        for number in range(first, last + 1):
            outer.save_if_due(numbered(number))
            found = outer.child("climb").load()
            seen.append(None if found is None else int(str(found.values["number"])))
            if number == last:
                clock.now += 100.0
            outer.child("climb").save_if_due(numbered(10 * number))
        return seen

    clock.now = 0.0
    assert rounds(checkpoints(), 2) == [None, None, None]
    # The state of the climb in round 2 is not that of the climbs before.
    assert rounds(checkpoints(), 2) == [None, None, 20]
    clock.now += 100.0
    first = checkpoints()
    clock.now += 100.0
    # Now the whole is kept at round 0 of this process, and what the climb had kept is void.
    assert rounds(first, 1) == [None, None]


def test_a_kept_whole_and_its_part_go_on_together(tmp_path: Path) -> None:
    for interval in (0.0, 1e9):
        outer = DiskCheckpoints(tmp_path, 0.0).checkpointer("fit")
        outer.load()
        outer.save_if_due(numbered(3))
        outer.child("climb").save_if_due(numbered(30))
        again = DiskCheckpoints(tmp_path, interval).checkpointer("fit")
        assert again.load() is not None
        again.save_if_due(numbered(3))  # as a loop does that asks before its first step
        assert again.child("climb").load() is not None
        again.save_if_due(numbered(4))
        assert again.child("climb").load() is None
