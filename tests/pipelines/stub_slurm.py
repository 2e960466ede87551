"""A scheduler that runs jobs at once: what sbatch, srun and scontrol do, as far as scripts see it.

    python stub_slurm.py sbatch|srun|scontrol ARGUMENTS...

In the folder $STUB_FOLDER: jobs.jsonl, a line for every start of a task, and its output beside.
$STUB_PREEMPT names a task, such as tiles.sh:4, that gets SIGUSR1, its batch shell alone, when the
path $STUB_WHEN is there; $STUB_NTASKS is how many tasks srun starts.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType


def main(arguments: Sequence[str]) -> int:
    """One of the three programs."""
    name, *rest = arguments
    return {"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[name](rest)


def folder() -> Path:
    return Path(os.environ["STUB_FOLDER"])


def sbatch(arguments: Sequence[str]) -> int:
    """Runs all tasks of a job, one after the other, then prints its number."""
    # Options of the job end at the script's name; what follows is the script's own.
    first = next(i for i, a in enumerate(arguments) if not a.startswith("--"))
    options = dict(a.partition("=")[::2] for a in arguments[:first])
    script, rest = Path(arguments[first]), arguments[first + 1 :]
    told = dict(re.findall(r"^#SBATCH (--[a-z-]+)=?(\S*)$", script.read_text(), re.MULTILINE))
    options = told | options
    job = len(list(folder().glob("job-*"))) + 1
    spool = folder() / f"job-{job}"
    spool.mkdir()
    depends = options.get("--dependency", "")
    if depends and not (folder() / f"job-{depends.rpartition(':')[2]}").is_dir():
        raise SystemExit(f"no such job: {depends}")
    copy = spool / "slurm_script"  # as Slurm does: what is beside the script is not beside it
    shutil.copy(script, copy)
    for task in _tasks(options.get("--array", "")):
        _run(copy, rest, script.name, job, task, options)
    print(job if "--parsable" in options else f"Submitted batch job {job}")
    return 0


def _tasks(array: str) -> list[int | None]:
    if not array:
        return [None]
    found: list[int | None] = []
    for part in array.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _run(
    copy: Path,
    arguments: Sequence[str],
    name: str,
    job: int,
    task: int | None,
    options: dict[str, str],
) -> None:
    """A task, and again for as long as it is queued again."""
    unique = 1000 * job + (task or 0)
    environment = os.environ | {
        "SLURM_JOB_ID": str(unique),
        "SLURM_SUBMIT_DIR": str(Path.cwd()),
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_NTASKS": os.environ.get("STUB_NTASKS", "1"),
        "SLURM_JOB_NODELIST": "node[1-2]",
    }
    if task is not None:
        environment |= {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_JOB_ID": str(job)}
    queued = folder() / f"requeued-{unique}"
    label = name if task is None else f"{name}:{task}"
    for restart in range(3):
        with (folder() / f"{label.replace(':', '-')}.log").open("a") as log:
            process = subprocess.Popen(
                ["bash", str(copy), *arguments], env=environment, stdout=log, stderr=log
            )
            if label == os.environ.get("STUB_PREEMPT") and restart == 0:
                _preempt(process, Path(os.environ["STUB_WHEN"]), options)
            code = process.wait()
        line = {"task": label, "restart": restart, "code": code, "queued": queued.exists()}
        with (folder() / "jobs.jsonl").open("a") as jobs:
            jobs.write(json.dumps(line) + "\n")
        if not queued.exists():
            return
        queued.unlink()
    raise SystemExit(f"{label} was queued three times")


def _preempt(process: "subprocess.Popen[bytes]", when: Path, options: dict[str, str]) -> None:
    assert options["--signal"] == "B:USR1@120"
    assert "--requeue" in options
    while process.poll() is None and not when.exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGUSR1)


def srun(arguments: Sequence[str]) -> int:
    """The command as often as there are tasks; SIGUSR1 goes on to all, SIGTERM kills all."""
    command = list(arguments)
    while command[0].startswith("--"):
        command.pop(0)
    count = int(os.environ["SLURM_NTASKS"])
    tasks = [
        subprocess.Popen(
            command,
            env=os.environ | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(count)
    ]

    def pass_on(number: int, frame: FrameType | None) -> None:
        for task in tasks:
            task.send_signal(signal.SIGKILL if number == signal.SIGTERM else number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, pass_on)
    codes = [task.wait() for task in tasks]
    return max(128 - code if code < 0 else code for code in codes)


def scontrol(arguments: Sequence[str]) -> int:
    """requeue JOB; show hostnames LIST."""
    if arguments[0] == "requeue":
        (folder() / f"requeued-{arguments[1]}").touch()
    else:
        assert list(arguments[:2]) == ["show", "hostnames"]
        print("localhost\nlocalhost")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
