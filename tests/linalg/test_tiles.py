import pytest
import torch

from dustmap.linalg import TilePartition
from tests.references import grid_indices

CASES = [
    ((6,), (2,)),
    ((7,), (3,)),
    ((4,), (9,)),
    ((4, 6), (2, 3)),
    ((5, 7), (2, 3)),
    ((3, 3), (1, 5)),
    ((4, 4, 2), (2, 2, 2)),
    ((5, 3, 4), (2, 2, 3)),
    ((2, 3, 2, 3), (2, 2, 1, 2)),
]


@pytest.mark.parametrize(("shape", "tile"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_round_trip_is_bit_exact(
    shape: tuple[int, ...], tile: tuple[int, ...], dtype: torch.dtype
) -> None:
    partition = TilePartition(shape, tile)
    size = len(grid_indices(shape))
    x = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(0)).mul(1e3).to(dtype)
    blocks = partition.to_blocks(x)
    assert blocks.shape == (2, 3, partition.n_blocks, partition.block_size)
    assert torch.equal(partition.from_blocks(blocks), x)
    assert torch.equal(partition.to_blocks(partition.from_blocks(blocks)), blocks)


@pytest.mark.parametrize(("shape", "tile"), CASES)
def test_blocks_hold_neighbours_and_zeros(shape: tuple[int, ...], tile: tuple[int, ...]) -> None:
    partition = TilePartition(shape, tile)
    points = grid_indices(shape)
    names = partition.to_blocks(torch.arange(1, len(points) + 1))
    assert int((names > 0).sum()) == len(points)
    for block in names:
        members = [points[int(k) - 1] for k in block if k > 0]
        homes = {tuple(i // t for i, t in zip(p, tile, strict=True)) for p in members}
        assert len(homes) == 1
        assert members == sorted(members)


def test_tile_longer_than_the_grid_is_one_block() -> None:
    partition = TilePartition((3, 4), (10, 10))
    assert (partition.n_blocks, partition.block_size) == (1, 12)
    assert torch.equal(partition.to_blocks(torch.arange(12)), torch.arange(12)[None])


def test_differentiable() -> None:
    partition = TilePartition((5, 3), (2, 2))
    x = torch.ones(2, 15, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(partition.to_blocks, (x,))


@pytest.mark.parametrize("tile", [(2,), (0, 2)])
def test_bad_tile_is_an_error(tile: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"tile: expected|shape .*, tile"):
        TilePartition((4, 4), tile)


def test_wrong_lengths_are_errors() -> None:
    partition = TilePartition((4, 4), (2, 2))
    with pytest.raises(ValueError, match=r"x: expected vectors of length 16"):
        partition.to_blocks(torch.ones(15))
    with pytest.raises(ValueError, match=r"blocks: expected \(\.\.\., 4, 4\)"):
        partition.from_blocks(torch.ones(4, 5))
