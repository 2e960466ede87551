"""What identifies a file that was read."""

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

#: Larger files are known by size and time of change: hashing them would double the reading.
HASHED_BYTES = 2**30


def fingerprint(path: Path) -> dict[str, Any]:
    """Name, bytes, and sha256 (or the time of change of a file above 1 GiB)."""
    status = path.stat()
    found: dict[str, Any] = {"name": path.name, "bytes": status.st_size}
    if status.st_size <= HASHED_BYTES:
        with path.open("rb") as stream:
            return found | {"sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
    return found | {"modified": datetime.fromtimestamp(status.st_mtime, UTC).isoformat()}
