"""What sweeps try: tiles in place of those of the tile table, and numbers of splits."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cuattn import _decode, _plan

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_SPLITS: tuple[int | None, ...] = (None, 8, 11, 16, 22, 29, 33, 44, 57, 66, 99, 132)


@dataclass(frozen=True, slots=True)
class Tile:
    """What `tiles` varies of a row of the tile table; written ``32x3x4``."""

    tile_kv: int
    num_stages: int
    num_warps: int

    def __str__(self) -> str:
        return f"{self.tile_kv}x{self.num_stages}x{self.num_warps}"

    @classmethod
    def of(cls, config: _plan.DecodeConfig) -> Tile:
        """Return the tile of a config."""
        return cls(config.tile_kv, config.num_stages, config.num_warps)


# By format, then by head_dim.
DEFAULT_TILES = {
    # Rings of 64 to 192 KB, with as many bytes in flight in few large tiles as in many small ones.
    "raw16": {
        128: (
            *(Tile(16, stages, 4) for stages in (4, 6, 8)),
            *(Tile(16, stages, 8) for stages in (2, 3, 4)),
            *(Tile(32, stages, 4) for stages in (2, 3, 4, 6)),
            *(Tile(32, stages, 8) for stages in (2, 3)),
            *(Tile(64, stages, 4) for stages in (2, 3)),
        ),
        256: (
            *(Tile(16, stages, 2) for stages in (4, 6)),
            *(Tile(16, stages, 4) for stages in (2, 3, 4, 6)),
            *(Tile(16, stages, 8) for stages in (2, 3)),
            *(Tile(32, stages, 4) for stages in (2, 3)),
        ),
    },
    # Beside a table of 64 KB; a tile has about a quarter of the bytes, and norms want four stages.
    "tbq4": {
        128: (  # two KV heads a tile
            Tile(16, 8, 4),
            *(Tile(16, stages, 8) for stages in (4, 6, 8)),
            Tile(16, 4, 12),
            *(Tile(32, stages, 4) for stages in (4, 6)),
            *(Tile(32, 4, warps) for warps in (6, 8)),
        ),
        256: (
            *(Tile(16, stages, 4) for stages in (4, 6, 8, 12)),
            *(Tile(16, stages, 8) for stages in (4, 5, 6)),
            *(Tile(32, stages, 4) for stages in (4, 6)),
        ),
    },
    # As in 16 bits, of twice as many keys; and more warps, as there is more to do for each byte.
    "fp8": {
        128: (
            *(Tile(16, stages, 4) for stages in (6, 8, 12)),
            *(Tile(16, stages, 8) for stages in (4, 6, 8)),
            *(Tile(32, stages, 4) for stages in (3, 4, 6, 8)),
            *(Tile(32, stages, 8) for stages in (2, 3, 4)),
        ),
        256: (
            *(Tile(16, stages, 4) for stages in (4, 6, 8)),
            *(Tile(16, stages, 8) for stages in (2, 3, 4)),
            *(Tile(32, stages, 4) for stages in (2, 3, 4)),
            *(Tile(32, stages, 8) for stages in (2, 3)),
        ),
    },
}


@contextmanager
def substituted_tile(config: _plan.DecodeConfig, tile: Tile | None, device: _plan.Device) -> Iterator[None]:
    """Put another tile in place of the one that a config came from; None leaves it as it is.

    Parameters
    ----------
    config : DecodeConfig
    tile : Tile, optional
    device : Device
        Whose table is changed.

    Yields
    ------
    None
    """
    if tile is None:
        yield
        return
    several = config.tile_heads > 1
    table: dict[tuple[int, int], Any] = (_plan.heads_tiles if several else _plan.decode_tiles)(
        device, config.k_format, config.v_format
    )
    key = (config.head_dim, config.tile_heads if several else config.row_tiles)
    row = table[key]
    table[key] = replace(row, tile_kv=tile.tile_kv, num_stages=tile.num_stages, num_warps=tile.num_warps)
    _decode.forget_plans()
    try:
        yield
    finally:
        table[key] = row
        _decode.forget_plans()
