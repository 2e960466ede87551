"""Files and directories take the place of others whole, and only where they may."""

import errno
import itertools
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dustmap.cli._console import Terminated, terminating
from dustmap.tables import _outputs
from dustmap.tables._outputs import (
    check_output,
    clear_leftovers,
    foreign_entries,
    refuse_inputs,
    replacing,
    undisturbed,
)

OURS = {"attributes": {"source": "dustmap 2.0"}}
LONG = "a" * 240


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """SIGINT as a terminal has it, whatever started the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def store(path: Path, content: str = "old") -> Path:
    """A zarr group as dustmap writes them."""
    (path / "density_mean" / "c" / "0").mkdir(parents=True)
    (path / "zarr.json").write_text(json.dumps(OURS))
    (path / "density_mean" / "zarr.json").write_text("{}")
    (path / "density_mean" / "c" / "0" / "0").write_text(content)
    return path


def content_of(path: Path) -> str:
    chunk = path / "density_mean" / "c" / "0" / "0"
    return (chunk if path.is_dir() else path).read_text()


def write(path: Path, new: str, as_store: bool) -> None:
    store(path, new) if as_store else path.write_text(new)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=[True, False], ids=["exchange", "renames"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that swaps two names in one step, and one that cannot."""
    if not request.param:
        monkeypatch.setattr(_outputs, "_exchange", lambda one, other: False)


@pytest.mark.parametrize("content", ["thesis.tex", "zarr.json", ".zgroup"])
def test_directories_of_other_things_are_not_replaced(tmp_path: Path, content: str) -> None:
    """Neither a folder of files nor somebody else's zarr group."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / content).write_text('{"attributes": {}}')
    with (
        pytest.raises(FileExistsError, match="not a zarr group that dustmap wrote"),
        replacing(mine, overwrite=True) as partial,
    ):
        partial.write_text("a map")
    assert names(mine) == [content]
    assert names(tmp_path) == ["mine"]


@pytest.mark.parametrize("foreign", ["thesis.tex", "data/x.csv", "density_mean/notes", "link"])
def test_files_of_others_in_a_map_are_not_removed(tmp_path: Path, foreign: str) -> None:
    target = store(tmp_path / "map.zarr")
    (target / foreign).parent.mkdir(exist_ok=True)
    if foreign == "link":
        (target / foreign).symlink_to(tmp_path)
    else:
        (target / foreign).write_text("years")
    with pytest.raises(FileExistsError, match=rf"did not write \({foreign}\); move them"):
        check_output(target, overwrite=True)


def test_what_is_foreign_is_listed(tmp_path: Path) -> None:
    target = store(tmp_path / "map.zarr")
    (target / ".partial-1-x").mkdir()
    (target / ".partial-1-x" / "half").write_text("")
    assert foreign_entries(target, r"zarr\.json") == [
        "density_mean/c/0/0",
        "density_mean/zarr.json",
    ]


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("as_store", [True, False], ids=["store", "file"])
def test_zarr_groups_and_empty_directories_are_replaced(tmp_path: Path, as_store: bool) -> None:
    group, empty = store(tmp_path / "a.zarr"), tmp_path / "b.zarr"
    empty.mkdir()
    for target in (group, empty):
        with replacing(target, overwrite=True) as partial:
            write(partial, "new", as_store)
            assert content_of(group) == ("old" if target == group else "new")
        assert content_of(target) == "new"
    assert names(tmp_path) == ["a.zarr", "b.zarr"]


def test_a_group_is_there_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is done to the names, the target is never absent: no kill can leave it so."""
    target, other = store(tmp_path / "map.zarr"), store(tmp_path / "other")
    if not _outputs._exchange(target, other):
        pytest.skip("this file system cannot swap names")
    before = os.rename
    monkeypatch.setattr(os, "rename", lambda *a: pytest.fail("two renames"))
    with replacing(target, overwrite=True) as partial:
        store(partial, "new")
    monkeypatch.setattr(os, "rename", before)
    assert content_of(target) == "new"


def interrupted(step: int, number: signal.Signals, act: Callable[[], None]) -> bool:
    """Acts, with a signal before the given line of `_outputs`; whether it had so many."""
    lines = itertools.count()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != _outputs.__file__:
            return None
        if event == "line" and next(lines) == step:
            signal.raise_signal(number)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return next(lines) > step


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize(
    ("number", "as_store"), [(signal.SIGINT, True), (signal.SIGTERM, False)], ids=["store", "file"]
)
def test_a_signal_at_any_line_leaves_all_or_nothing(
    tmp_path: Path, number: signal.Signals, as_store: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_outputs, "_PAUSE", 0.0)
    found = []
    for step in itertools.count():
        folder = tmp_path / str(step)
        folder.mkdir()
        target = folder / "map"
        write(target, "old", as_store)

        def act(target: Path = target) -> None:
            with terminating(), replacing(target, overwrite=True) as partial:
                write(partial, "new", as_store)

        try:
            reached = interrupted(step, number, act)
        except (KeyboardInterrupt, Terminated):
            reached = True
        if not reached:
            break
        found.append(content_of(target))
        assert names(folder) == ["map"], f"line {step}"
    assert {"old", "new"} == set(found)
    assert len(found) > 10


def test_a_second_signal_does_not_interrupt_the_clearing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed, signals = shutil.rmtree, [signal.SIGINT]

    def slow(path: Path, **options: Any) -> None:
        if signals:
            signal.raise_signal(signals.pop())
        removed(path, **options)

    monkeypatch.setattr(shutil, "rmtree", slow)

    def fail() -> None:
        with replacing(tmp_path / "map", overwrite=False) as partial:
            store(partial)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert names(tmp_path) == []


def test_threads_that_write_on_are_waited_for(tmp_path: Path) -> None:
    """As those of zarr do after an interruption."""
    threads = []

    def write_on(partial: Path) -> None:
        for i in range(8):
            (partial / "c").mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # the directory may go between the two lines
                (partial / "c" / str(i)).write_text("late")
            time.sleep(0.02)

    def fail() -> None:
        with replacing(tmp_path / "map", overwrite=False) as partial:
            partial.mkdir()
            threads.append(threading.Thread(target=write_on, args=(partial,)))
            threads[0].start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    threads[0].join()
    assert names(tmp_path) == []


def test_handlers_are_as_before(tmp_path: Path) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        _interrupted_inside()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert names(tmp_path) == []


def _interrupted_inside() -> None:
    seen = []
    with undisturbed():
        signal.raise_signal(signal.SIGINT)
        seen.append("all done")
    pytest.fail("a signal that waited is lost")


@pytest.fixture
def special(tmp_path: Path) -> Iterator[dict[str, Path]]:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        (tmp_path / "link").symlink_to("/dev/null")
        yield {
            "device": Path("/dev/null"),
            "pipe": tmp_path / "pipe",
            "socket": tmp_path / "socket",
            "link": tmp_path / "link",
        }


@pytest.mark.parametrize("kind", ["device", "pipe", "socket", "link"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_devices_and_pipes_are_no_outputs(
    special: dict[str, Path], kind: str, overwrite: bool
) -> None:
    expected = "device" if kind == "link" else kind
    with (
        pytest.raises(FileExistsError, match=f"is a {expected}, which is not written to"),
        replacing(special[kind], overwrite),
    ):
        pytest.fail("never written")
    assert special[kind].exists()
    assert not special[kind].is_file()


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("as_store", [True, False], ids=["store", "file"])
@pytest.mark.parametrize("there", [True, False])
def test_links_are_followed(tmp_path: Path, as_store: bool, there: bool) -> None:
    """What is written lands on the disk that the link leads to."""
    disk, here = tmp_path / "disk", tmp_path / "here"
    disk.mkdir()
    here.mkdir()
    if there:
        write(disk / "map", "old", as_store)
    (here / "link").symlink_to("../disk/map")
    with replacing(here / "link", overwrite=there) as partial:
        write(partial, "new", as_store)
    assert os.readlink(here / "link") == "../disk/map"
    assert content_of(disk / "map") == "new"
    assert (names(disk), names(here)) == (["map"], ["link"])


@pytest.mark.parametrize("ends", ["missing/map", "link", "link/below"])
def test_links_to_nowhere_are_refused(tmp_path: Path, ends: str) -> None:
    """A disk that is not mounted is not made up; nor is a loop followed."""
    target = tmp_path / "link"
    target.symlink_to(ends)
    for output in (target, target / "map.fits"):
        with (
            pytest.raises(FileNotFoundError, match=r"is a link to .*, which is not there; mend"),
            replacing(output, overwrite=True),
        ):
            pytest.fail("never written")
    assert names(tmp_path) == ["link"]


def test_inputs_are_no_outputs(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    catalog = tmp_path / "data" / "sky.fits"
    catalog.write_text("stars")
    (tmp_path / "link").symlink_to(catalog)
    (tmp_path / "store").symlink_to(tmp_path / "data")
    for output, word in (
        (catalog, "is the input"),
        (tmp_path / "link", "is the input"),
        (tmp_path / "store" / "sky.fits", "is the input"),
        (tmp_path / "data", "holds the input"),
        (tmp_path / "store", "holds the input"),
    ):
        with pytest.raises(FileExistsError, match=word):
            refuse_inputs(output, [tmp_path / "other", catalog])
        with pytest.raises(FileExistsError, match=word):
            refuse_inputs(output, [tmp_path / "link"])
    refuse_inputs(tmp_path / "data.fits", [catalog])
    for inside in (tmp_path / "data" / "map", tmp_path / "store" / "map"):
        with pytest.raises(FileExistsError, match="lies in the input"):
            refuse_inputs(inside, [tmp_path / "store"])


@pytest.mark.parametrize("name", [LONG, "é" * 120, "b" * 255])
@pytest.mark.parametrize("as_store", [True, False], ids=["store", "file"])
def test_long_names(tmp_path: Path, name: str, as_store: bool) -> None:
    target = tmp_path / name
    for content in ("old", "new"):
        with replacing(target, overwrite=True) as partial:
            write(partial, content, as_store)
            left = partial.with_name(partial.name.replace(str(os.getpid()), "4194304"))
        assert content_of(target) == content
    left.mkdir()
    assert clear_leftovers(target) == 1
    assert names(tmp_path) == [name]


def test_errors_name_the_target(tmp_path: Path) -> None:
    target = tmp_path / "map.fits"
    errors: list[Callable[[Path], Exception]] = [
        lambda partial: OSError(errno.ENOSPC, "No space left", str(partial / "c")),
        lambda partial: OSError(errno.EFBIG, "File too large"),
        lambda partial: ValueError(f"{partial} is odd"),
        lambda partial: FileExistsError("plain"),
        lambda partial: OSError("8 requested and 5 written"),
    ]

    def fail(error: Callable[[Path], Exception]) -> None:
        with replacing(target, overwrite=False) as partial:
            raise error(partial)

    said = []
    for error in errors:
        with pytest.raises(type(error(target))) as raised:
            fail(error)
        said.append(str(raised.value))
    assert said == [
        f"[Errno 28] No space left: '{target}/c'",
        f"[Errno 27] File too large, writing: '{target}'",
        f"{target} is odd",
        "plain",
        f"{target}: 8 requested and 5 written",
    ]


def test_what_the_block_packs_may_be_named_so(tmp_path: Path) -> None:
    target = tmp_path / "a.csv.gz"
    with (
        pytest.raises(ValueError, match="what dustmap writes is not compressed"),
        replacing(target, overwrite=False) as partial,
    ):
        partial.touch()
    assert list(tmp_path.iterdir()) == []
    with replacing(target, overwrite=False, packed=True) as partial:
        partial.write_bytes(b"packed")
    assert target.read_bytes() == b"packed"
