"""What commands read, which their outputs must not replace."""

from collections.abc import Iterator
from pathlib import Path


def inputs_of(
    *paths: str | Path | None, map_or_run: str | Path | None = None, schema: str = ""
) -> Iterator[Path]:
    """Those that are named; of a run, what later commands need; a card, where `schema` is one.

    Other files may lie in the directory of a run.
    """
    yield from (Path(path) for path in paths if path)
    if schema.endswith(".toml"):
        yield Path(schema)
    if map_or_run is not None:
        at = Path(map_or_run)
        is_map = at.is_file() or (at / "zarr.json").is_file()
        own = ("config.toml", "report.json", "stars.zarr", "checkpoint")
        yield from [at] if is_map else (at / name for name in own)
