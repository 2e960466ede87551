"""Memory that is freed stays for the next vectors."""

import subprocess
import sys

import pytest

#: Page faults of twelve rounds of eight vectors of 20 MB, after the first.
_PROGRAM = """
import resource, sys
import numpy as np

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    vectors = [np.ones(2_500_000) for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = False
if sys.argv[1] == "kept":
    from dustmap.runs import keep_freed_memory

    kept = keep_freed_memory()
print(kept, faults(), sum(faults() for _ in range(12)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_memory_is_not_made_anew() -> None:
    found = []
    for how in ("kept", "usual"):
        command = [sys.executable, "-c", _PROGRAM, how]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    kept, first, rest = found[0].split()
    if kept == "False":
        pytest.skip("another C library")
    assert int(rest) < 4 * int(first)
    assert int(found[1].split()[2]) > 8 * int(first)
