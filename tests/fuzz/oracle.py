"""What may happen to an input: it is read, or refused in one line; and what must not."""

import enum
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, final

from dustmap.errors import UserError

#: Seconds of computing, seconds by the clock of a machine that has other work, too, and bytes of
#: address space that one input may take.
SECONDS, PATIENCE, ROOM = 10, 100, 2 * 2**30
#: Characters of a message: a name of 10,000 that the user has given may be repeated.
LONGEST = 12_000


@final
class Verdict(enum.Enum):
    """The first two are good."""

    READ = "read"
    REFUSED = "refused"
    TRACEBACK = "traceback"  # an exception of another kind
    MESSAGE = "message"  # of several lines, none, or too long
    SLOW = "slow"
    MEMORY = "memory"
    LITTER = "litter"  # a file where none should be, or an act that has nothing to do with reading
    CRASH = "crash"  # of the process

    @property
    def good(self) -> bool:
        return self in (Verdict.READ, Verdict.REFUSED)


@final
@dataclass(frozen=True)
class Finding:
    """A verdict, what was said, and how long it took."""

    verdict: Verdict
    words: str
    seconds: float


class TooSlow(BaseException):
    """Not an Exception: nobody who handles errors is to handle this one."""


class Complaint(Exception):
    """Raised by a use that sees for itself what is wrong: its verdict and words."""

    def __init__(self, verdict: Verdict, words: str) -> None:
        super().__init__(words)
        self.verdict = verdict


@final
@dataclass
class Watch:
    """Hears what Python does, by an audit hook: files that are written, programs, pickles.

    An audit hook cannot be taken away; this one is deaf while `root` is None.
    """

    root: Path | None = None
    heard: list[str] = field(default_factory=list)

    def install(self) -> "Watch":
        sys.addaudithook(self._hear)
        return self

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.root is None:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = (isinstance(flags, int) and flags & 0o3) or (mode and set(mode) & set("wax+"))
            if writes and not self._allowed(path):
                self.heard.append(f"{path} opened to write")
        elif event in _MOVES and not _relative(event, arguments):
            if not all(map(self._allowed, arguments[: _MOVES[event]])):
                self.heard.append(f"{event} {arguments}")
        elif event in _NEVER:
            self.heard.append(f"{event} {arguments}"[:200])

    def _allowed(self, path: object) -> bool:
        if isinstance(path, int) or path is None:
            return True
        text = os.path.abspath(os.fsdecode(path) if isinstance(path, bytes) else str(path))
        return text.startswith((f"{self.root}/", "/dev/null"))


#: Events that change a file system, and how many of their arguments are paths.
_MOVES = {
    "os.rename": 2,
    "os.remove": 1,
    "os.mkdir": 1,
    "os.rmdir": 1,
    "os.symlink": 2,
    "os.link": 2,
    "os.truncate": 1,
    "shutil.rmtree": 1,
}
_NEVER = frozenset(
    {
        *("pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"),
        *("socket.connect", "socket.getaddrinfo", "urllib.Request"),
    }
)


def _relative(event: str, arguments: tuple[Any, ...]) -> bool:
    """To an open directory, as in the depths of shutil.rmtree, whose beginning is heard."""
    return event != "os.truncate" and isinstance(arguments[-1], int) and arguments[-1] >= 0


def judge(use: Callable[[], None], sandbox: Path, watch: Watch) -> Finding:
    """Runs `use`, which reads below `sandbox` and writes below `sandbox`/out alone.

    After an error `out` must be as empty as before.
    """
    before, out = _listing(sandbox), sandbox / "out"
    watch.root, watch.heard = sandbox, []
    start = time.process_time()
    try:
        with _within():
            use()
        verdict, words = Verdict.READ, ""
    except TooSlow:
        verdict, words = Verdict.SLOW, f"more than {SECONDS} s, or {PATIENCE} s by the clock"
    except Complaint as complaint:
        verdict, words = complaint.verdict, str(complaint)
    except MemoryError as error:
        verdict, words = Verdict.MEMORY, str(error)
    except (UserError, OSError) as error:
        verdict, words = Verdict.REFUSED, str(error)
        if not words or "\n" in words.strip() or len(words) > LONGEST:
            verdict, words = Verdict.MESSAGE, f"{type(error).__name__}: {words}"
    except Exception as error:
        verdict, words = Verdict.TRACEBACK, f"{type(error).__name__}: {error}"
    seconds = time.process_time() - start
    watch.root = None
    after = _listing(sandbox)
    left = {p for p in after ^ before if verdict is not Verdict.READ or out not in p[0].parents}
    if verdict.good and (left or watch.heard):
        verdict = Verdict.LITTER
        words = f"{sorted(str(p[0]) for p in left)} {watch.heard} after {words!r}"
    return Finding(verdict, words, seconds)


def _listing(folder: Path) -> set[tuple[Path, int]]:
    """Every path, with the time of its last change where it is a file."""
    return {
        (path, path.lstat().st_mtime_ns if path.is_file() or path.is_symlink() else 0)
        for path in folder.rglob("*")
    }


@contextmanager
def _within() -> Iterator[None]:
    """Raises TooSlow after so many seconds, MemoryError beyond so many bytes more than now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    clocks = {signal.SIGALRM: signal.ITIMER_REAL, signal.SIGPROF: signal.ITIMER_PROF}
    handlers = {number: signal.signal(number, _too_slow) for number in clocks}
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + ROOM, hard))
    for clock, seconds in zip(clocks.values(), (PATIENCE, SECONDS), strict=True):
        signal.setitimer(clock, seconds)
    try:
        yield
    finally:
        for number, clock in clocks.items():
            signal.setitimer(clock, 0)
            signal.signal(number, handlers[number])
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _too_slow(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise TooSlow


def _address_space() -> int:
    """Bytes that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
