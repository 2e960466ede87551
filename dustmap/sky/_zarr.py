"""Arrays of zarr groups: made, and read from groups of others, which are checked first.

Metadata of a few hundred bytes may name any codec, one that unpickles among them, and any shape.
So an array is read only if it holds numbers, packed by codecs that do nothing but unpack, and if
every chunk that it ought to have is a file. zarr takes a missing chunk for one of fill values; all
that dustmap writes has every chunk.
"""

import itertools
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
import zarr
from numpy.typing import DTypeLike, NDArray
from zarr.core.metadata import ArrayV3Metadata

from dustmap.errors import UserError
from dustmap.tables import check_enclosed, words_of_damage

Array: TypeAlias = "zarr.Array[ArrayV3Metadata]"
_CODECS = ("blosc", "bytes", "crc32c", "gzip", "sharding_indexed", "transpose", "zstd")
_IDS = ("blosc", "bz2", "crc32", "gzip", "lz4", "lzma", "shuffle", "zlib", "zstd")
#: What unpacks to more, beside so many bytes more, is no data: constants shrink 10⁴-fold.
_MOST, _SPARE = 2**16, 2**26
_METADATA = frozenset({"zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata"})


def create_group(
    path: Path,
    attributes: Mapping[str, Any],
    axes: Mapping[str, tuple[NDArray[np.float64], Mapping[str, Any]]],
) -> zarr.Group:
    """Make a group of version 3 with the coordinates (n,) and the attributes of its dimensions."""
    group = zarr.create_group(path, zarr_format=3)
    group.attrs.update(dict(attributes))
    for name, (values, described) in axes.items():
        shape = values.shape
        array = create_array(group, name, shape, (name,), "f8", chunks=shape, attributes=described)
        array[:] = values
    return group


def create_array(
    group: zarr.Group,
    name: str,
    shape: tuple[int, ...],
    dimensions: tuple[str, ...],
    dtype: DTypeLike = np.float32,
    *,
    chunks: tuple[int, ...],
    shards: tuple[int, ...] | None = None,
    fill: float = float("nan"),
    attributes: Mapping[str, Any] | None = None,
) -> Array:
    """Make an array of version 3 that `CheckedGroup` reads back: with every chunk, the chunks of
    nothing but fill values, too."""
    config: Any = {"write_empty_chunks": True}
    return group.create_array(
        name,
        shape=shape,
        dtype=np.dtype(dtype),
        chunks=chunks,
        shards=shards,
        fill_value=fill,
        config=config,
        dimension_names=dimensions,
        attributes=dict(attributes or {}),
    )


def opened_array(group: zarr.Group, path: str) -> Array:
    """Return an array that was made before."""
    array = group[path]
    assert isinstance(array, zarr.Array)
    return array


def consolidate(group: zarr.Group) -> None:
    """Keep all metadata in one place, where xarray looks first."""
    with warnings.catch_warnings():
        # The specification of version 3 has no consolidated metadata yet; readers do.
        warnings.filterwarnings("ignore", "Consolidated metadata", UserWarning)
        zarr.consolidate_metadata(group.store)


@final
class CheckedGroup:
    """A zarr group at `path`, whose arrays are checked as they are first asked for.

    what: the group that is expected there. A UserError says what keeps it from being read: no such
    group, a link that leads out of it, an array without numbers, with a codec that may do more than
    unpack, with a chunk that is missing or damaged.
    """

    def __init__(self, path: Path, what: str) -> None:
        check_enclosed(path)
        self.path = path
        self._arrays: dict[str, zarr.Array[Any]] = {}
        try:
            # What the group keeps of the metadata of its arrays may differ from their own.
            self._group = zarr.open_group(path, mode="r", use_consolidated=False)
        except Exception as error:
            words = words_of_damage(error)
            raise UserError(f"{path}: expected {what} ({words})") from error

    @property
    def tile(self) -> dict[str, Any] | None:
        """What the map of one tile says of it; None of other maps."""
        written = self.attributes.get("tile")
        return dict(written) if isinstance(written, Mapping) else None

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of the group itself."""
        return dict(self._group.attrs)

    def names(self) -> set[str]:
        """Name the arrays, judged by their files of metadata alone."""
        files = (*self.path.glob("*/zarr.json"), *self.path.glob("*/.zarray"))
        return {file.parent.name for file in files}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an array."""
        return self._array(name).shape

    def unit(self, name: str) -> str:
        """Return the attribute "units" of an array; "" where it has none."""
        return str(self._array(name).attrs.get("units", ""))

    def dimensions(self, name: str) -> tuple[str, ...]:
        """Return the names of the axes of an array; none where it has no such names."""
        array = self._array(name)
        named = getattr(array.metadata, "dimension_names", None)
        named = named or array.attrs.get("_ARRAY_DIMENSIONS", ())
        return tuple(map(str, named)) if isinstance(named, list | tuple) else ()

    def read(self, name: str, index: Any) -> NDArray[Any]:
        """Read a part of an array."""
        array = self._array(name)
        try:
            return np.asarray(array[index])
        except Exception as error:
            raise UserError(
                f"{self.path}: {name} cannot be read ({words_of_damage(error)}); the file is "
                "damaged, make or download it again"
            ) from error

    def _array(self, name: str) -> "zarr.Array[Any]":
        if name not in self._arrays:
            self._arrays[name] = _checked(self._group, self.path, name)
        return self._arrays[name]


def _checked(group: zarr.Group, path: Path, name: str) -> "zarr.Array[Any]":
    try:
        array = group[name]
    except Exception as error:
        words = words_of_damage(error)
        raise UserError(f"{path}: the array {name} cannot be opened ({words})") from error
    if not isinstance(array, zarr.Array):
        raise UserError(f"{path}: {name} must be an array, got a group")
    if array.dtype.kind not in "iuf":
        raise UserError(f"{path}: {name} must hold numbers, got {array.dtype}")
    packed = sorted({"scale_factor", "add_offset"} & set(array.attrs))
    if packed:
        raise UserError(
            f"{path}: {name} is packed by {' and '.join(packed)}, which is not read; write it as "
            "numbers in its unit (xarray: dataset.drop_encoding())"
        )
    _check_codecs(array, path, name)
    _check_chunks(array, path, name)
    return array


def _check_codecs(array: "zarr.Array[Any]", path: Path, name: str) -> None:
    metadata: Mapping[str, Any] = array.metadata.to_dict()
    steps = [metadata.get("compressor"), *(metadata.get("filters") or ())]  # of version 2
    old = tuple(str(step["id"]) for step in steps if step is not None)
    allowed = _CODECS if metadata["zarr_format"] == 3 else _IDS
    for codec in (*old, *_codecs(metadata.get("codecs", ()))):
        if codec not in allowed:
            raise UserError(
                f"{path}: {name} is packed by the codec {codec!r}, which is not read; pack it by "
                f"one of {', '.join(allowed)}"
            )


def _codecs(listed: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The names of codecs, of those inside shards, too."""
    for codec in listed:
        yield str(codec["name"])
        inside = codec.get("configuration") or {}
        for key in ("codecs", "index_codecs"):
            yield from _codecs(inside.get(key, ()))


def _check_chunks(array: "zarr.Array[Any]", path: Path, name: str) -> None:
    """Every chunk is a file, and they hold about as much as the array does."""
    stored = _stored(path / name)
    pieces = array.shards or array.chunks
    counts = [-(-n // piece) for n, piece in zip(array.shape, pieces, strict=True)]
    # A shape of the metadata alone may be astronomical: no more keys are made than there are files.
    keys = map(array.metadata.encode_chunk_key, itertools.islice(_places(counts), len(stored) + 1))
    missing = [key for key in keys if key not in stored]
    if missing:
        expected = math.prod(counts)
        count = max(len(missing), expected - len(stored))
        raise UserError(
            f"{path}: a part of it is missing: {count} of the {expected} chunks of {name}, such as "
            f"{name}/{missing[0]}; copy or make it again"
        )
    largest = max(map(math.prod, (array.shape, pieces, array.chunks))) * array.dtype.itemsize
    if largest > _MOST * sum(stored.values()) + _SPARE:
        raise UserError(
            f"{path}: {name} is damaged: {sum(stored.values())} bytes cannot hold an array of "
            f"shape {array.shape} in chunks of {array.chunks}"
        )


def _places(counts: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield places in C order; itertools.product would first list every axis."""
    if not counts:
        yield ()
        return
    for first in range(counts[0]):
        for rest in _places(counts[1:]):
            yield (first, *rest)


def _stored(folder: Path) -> dict[str, int]:
    """Bytes of each file below, but for metadata, by its path from there."""
    sizes = {}
    for above, _, names in os.walk(folder):
        for name in names:
            if name not in _METADATA:
                file = Path(above, name)
                sizes[file.relative_to(folder).as_posix()] = file.stat().st_size
    return sizes
