"""The tile tables of `decode.cu`: what was measured, by GPU, formats and head_dim."""

from __future__ import annotations

from dataclasses import dataclass

from cuattn._device import KIB, Device
from cuattn._kinds import KvFormat


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """A row of the tile tables; see `DecodeConfig`."""

    tile_kv: int
    num_stages: int
    num_warps: int
    table_stride: int = 0


# By (head_dim, row_tiles); the largest row_tiles of a head_dim bounds the rows of a CTA. Accumulators take head_dim / 4
# registers a row tile and are held to 128; scores take row_tiles * tile_kv / 4, so that four row tiles leave room for
# 16 keys only. Eight warps with rings of 120 to 144 KB, half of them in flight or more, and one CTA an SM: where two
# fit, CTAs of the next launch crowd on the SMs that are free first, as launches overlap. Measured on an H200
# (docs/decode.md, bench/results/h200-2026-12-01-tiles.json), row_tiles 2 and 4 at head_dim 128; 512 is by analogy.
_DECODE_LARGE = {
    (64, 1): DecodeTile(32, 4, 8),
    (64, 2): DecodeTile(32, 4, 8),
    (64, 4): DecodeTile(16, 8, 8),
    (96, 1): DecodeTile(32, 3, 8),
    (96, 2): DecodeTile(32, 3, 8),
    (96, 4): DecodeTile(16, 5, 8),
    (128, 1): DecodeTile(32, 2, 8),
    (128, 2): DecodeTile(32, 2, 8),
    (128, 4): DecodeTile(16, 4, 8),
    (192, 1): DecodeTile(16, 3, 8),
    (192, 2): DecodeTile(16, 3, 8),
    (256, 1): DecodeTile(16, 2, 8),
    (256, 2): DecodeTile(16, 2, 8),
    (512, 1): DecodeTile(16, 2, 4),  # a third stage would not fit an A100
}
# GPUs with 99 KB a block (sm_86, sm_89, sm_120): a ring of up to 64 KB, or the accumulators in its place.
_DECODE_SMALL = {
    (64, 1): DecodeTile(32, 4, 4),
    (64, 2): DecodeTile(32, 4, 4),
    (64, 4): DecodeTile(16, 8, 4),
    (96, 1): DecodeTile(32, 2, 4),
    (96, 2): DecodeTile(32, 2, 4),
    (96, 4): DecodeTile(16, 4, 4),
    (128, 1): DecodeTile(32, 2, 4),
    (128, 2): DecodeTile(32, 2, 4),
    (128, 4): DecodeTile(16, 4, 4),
    (192, 1): DecodeTile(16, 2, 4),
    (192, 2): DecodeTile(16, 2, 4),
    (256, 1): DecodeTile(16, 2, 4),
    (256, 2): DecodeTile(16, 2, 4),
    (512, 1): DecodeTile(16, 2, 2),
}
# Floats: as many bytes in flight, of half as many keys. Their parts take registers as well, so that a CTA has 16 query
# rows at most, and 8 with longer ones; there may be several.
_FLOAT_LARGE = {
    (64, 1): DecodeTile(32, 2, 8),
    (64, 2): DecodeTile(16, 4, 8),
    (96, 1): DecodeTile(16, 3, 8),
    (96, 2): DecodeTile(16, 3, 8),
    (128, 1): DecodeTile(16, 2, 8),
    (128, 2): DecodeTile(16, 2, 8),
    (192, 1): DecodeTile(16, 2, 6),
    (256, 1): DecodeTile(16, 2, 4),
    (512, 1): DecodeTile(16, 2, 2),
}
_FLOAT_SMALL = {
    (64, 1): DecodeTile(32, 2, 4),
    (64, 2): DecodeTile(16, 4, 4),
    (96, 1): DecodeTile(16, 3, 4),
    (96, 2): DecodeTile(16, 3, 4),
    (128, 1): DecodeTile(16, 2, 4),
    (192, 1): DecodeTile(16, 2, 2),
    (256, 1): DecodeTile(16, 2, 2),
    (512, 1): DecodeTile(16, 2, 1),
}
# TBQ4 for K and V. The table of levels takes 64 KB, or 32 KB where a GPU has little. Decoding takes registers as well:
# with more than 64 for accumulators a thread would spill, but at head_dim 64 and 512. Measured for one row tile at
# head_dim 128 and 256 on an H200 (docs/decode.md); the others are by analogy.
_TBQ4_LARGE = {
    (64, 1): DecodeTile(32, 6, 12, 256),
    (64, 2): DecodeTile(32, 6, 8, 256),
    (64, 4): DecodeTile(16, 8, 8, 256),
    (128, 1): DecodeTile(32, 4, 12, 256),
    (128, 2): DecodeTile(32, 4, 8, 256),
    (256, 1): DecodeTile(32, 4, 8, 256),
    (512, 1): DecodeTile(16, 4, 4, 256),
}
_TBQ4_SMALL = {
    (64, 1): DecodeTile(32, 6, 4, 128),
    (64, 2): DecodeTile(32, 6, 4, 128),
    (64, 4): DecodeTile(16, 8, 4, 128),
    (128, 1): DecodeTile(32, 6, 4, 128),
    (128, 2): DecodeTile(32, 6, 4, 128),
    (256, 1): DecodeTile(16, 6, 4, 128),
    (512, 1): DecodeTile(16, 4, 2, 128),
}
# One of K and V in TBQ4, the other in 16 bits: a pair of tiles is 2.5 times as large.
_MIXED_LARGE = {
    (64, 1): DecodeTile(32, 4, 8, 256),
    (64, 2): DecodeTile(32, 4, 8, 256),
    (64, 4): DecodeTile(16, 4, 8, 256),
    (128, 1): DecodeTile(16, 4, 8, 256),
    (128, 2): DecodeTile(16, 4, 8, 256),
    (256, 1): DecodeTile(16, 4, 4, 256),
    (256, 2): DecodeTile(16, 4, 4, 256),
    (512, 1): DecodeTile(16, 4, 2, 256),
}
_MIXED_SMALL = {
    (64, 1): DecodeTile(16, 6, 4, 128),
    (64, 2): DecodeTile(16, 6, 4, 128),
    (64, 4): DecodeTile(16, 6, 4, 128),
    (128, 1): DecodeTile(16, 4, 4, 128),
    (128, 2): DecodeTile(16, 4, 4, 128),
    (256, 1): DecodeTile(16, 4, 2, 128),
    (256, 2): DecodeTile(16, 4, 2, 128),
    (512, 1): DecodeTile(16, 4, 1, 128),
}
# TBQ4 for K and V, one row tile, by (head_dim, tile_heads). With short rows, or few query rows a head, several KV heads
# stand side by side in a tile: rows of 128 bytes instead of 64 or 32, and no column of an mma for padding. Measured on
# an H200 (docs/decode.md).
_TBQ4_HEADS_LARGE = {
    (64, 2): DecodeTile(32, 4, 12, 256),
    (64, 4): DecodeTile(32, 4, 8, 256),
    (128, 2): DecodeTile(32, 4, 8, 256),
}
# fp8 for K and V: rings of as many bytes as in 16 bits, of twice as many keys where registers allow. Measured as those,
# one row tile at head_dim 128 and 256; the others are by analogy.
_FP8_LARGE = {
    (64, 1): DecodeTile(32, 8, 8),
    (64, 2): DecodeTile(32, 8, 8),
    (64, 4): DecodeTile(16, 16, 8),
    (96, 1): DecodeTile(32, 5, 8),
    (96, 2): DecodeTile(32, 5, 8),
    (96, 4): DecodeTile(16, 10, 8),
    (128, 1): DecodeTile(32, 4, 8),
    (128, 2): DecodeTile(32, 4, 8),
    (128, 4): DecodeTile(16, 8, 8),
    (192, 1): DecodeTile(32, 3, 8),
    (192, 2): DecodeTile(16, 5, 8),
    (256, 1): DecodeTile(32, 2, 8),
    (256, 2): DecodeTile(16, 4, 8),
    (512, 1): DecodeTile(16, 2, 8),
}
_FP8_SMALL = {
    (64, 1): DecodeTile(32, 8, 4),
    (64, 2): DecodeTile(32, 8, 4),
    (64, 4): DecodeTile(16, 12, 4),
    (96, 1): DecodeTile(32, 4, 4),
    (96, 2): DecodeTile(32, 4, 4),
    (96, 4): DecodeTile(16, 8, 4),
    (128, 1): DecodeTile(32, 4, 4),
    (128, 2): DecodeTile(32, 4, 4),
    (128, 4): DecodeTile(16, 8, 4),
    (192, 1): DecodeTile(16, 5, 4),
    (192, 2): DecodeTile(16, 5, 4),
    (256, 1): DecodeTile(16, 4, 4),
    (256, 2): DecodeTile(16, 4, 4),
    (512, 1): DecodeTile(16, 2, 4),
}
# One of K and V in fp8, the other in 16 bits: a pair of tiles is three times a tile of fp8. By analogy.
_FP8_RAW_LARGE = {
    (64, 1): DecodeTile(32, 6, 8),
    (64, 2): DecodeTile(32, 6, 8),
    (64, 4): DecodeTile(16, 10, 8),
    (96, 1): DecodeTile(32, 4, 8),
    (96, 2): DecodeTile(32, 4, 8),
    (96, 4): DecodeTile(16, 8, 8),
    (128, 1): DecodeTile(32, 4, 6),
    (128, 2): DecodeTile(32, 4, 6),
    (128, 4): DecodeTile(16, 6, 8),
    (192, 1): DecodeTile(16, 4, 8),
    (192, 2): DecodeTile(16, 4, 8),
    (256, 1): DecodeTile(16, 4, 6),
    (256, 2): DecodeTile(16, 4, 6),
    (512, 1): DecodeTile(16, 2, 6),
}
_FP8_RAW_SMALL = {
    (64, 1): DecodeTile(32, 4, 4),
    (64, 2): DecodeTile(32, 4, 4),
    (64, 4): DecodeTile(16, 8, 4),
    (96, 1): DecodeTile(16, 6, 4),
    (96, 2): DecodeTile(16, 6, 4),
    (96, 4): DecodeTile(16, 6, 4),
    (128, 1): DecodeTile(16, 4, 4),
    (128, 2): DecodeTile(16, 4, 4),
    (128, 4): DecodeTile(16, 4, 4),
    (192, 1): DecodeTile(16, 2, 4),
    (192, 2): DecodeTile(16, 2, 4),
    (256, 1): DecodeTile(16, 2, 4),
    (256, 2): DecodeTile(16, 2, 4),
    (512, 1): DecodeTile(16, 2, 2),
}
# One of K and V in fp8, the other in TBQ4, with its table: a pair of tiles is 1.5 times a tile of fp8. By analogy.
_FP8_TBQ4_LARGE = {
    (64, 1): DecodeTile(32, 6, 8, 256),
    (64, 2): DecodeTile(32, 6, 8, 256),
    (64, 4): DecodeTile(16, 6, 8, 256),
    (128, 1): DecodeTile(32, 4, 8, 256),
    (128, 2): DecodeTile(16, 6, 8, 256),
    (256, 1): DecodeTile(16, 4, 8, 256),
    (256, 2): DecodeTile(16, 6, 4, 256),
    (512, 1): DecodeTile(16, 4, 4, 256),
}
_FP8_TBQ4_SMALL = {
    (64, 1): DecodeTile(32, 6, 4, 128),
    (64, 2): DecodeTile(32, 6, 4, 128),
    (64, 4): DecodeTile(16, 6, 4, 128),
    (128, 1): DecodeTile(16, 6, 4, 128),
    (128, 2): DecodeTile(16, 6, 4, 128),
    (256, 1): DecodeTile(16, 4, 4, 128),
    (256, 2): DecodeTile(16, 4, 2, 128),
    (512, 1): DecodeTile(16, 4, 2, 128),
}
_LARGE_SMEM = 160 * KIB
# A table of 64 KB at a multiple of 64 KB, and rings on both sides of it.
_LARGE_SMEM_TBQ4 = 200 * KIB
# By the formats of K and V, whichever is which: the table of a GPU with much shared memory a block, and of the others.
_TABLES = {
    frozenset({KvFormat.RAW16}): (_DECODE_LARGE, _DECODE_SMALL),
    frozenset({KvFormat.RAW32}): (_FLOAT_LARGE, _FLOAT_SMALL),
    frozenset({KvFormat.TBQ4}): (_TBQ4_LARGE, _TBQ4_SMALL),
    frozenset({KvFormat.FP8}): (_FP8_LARGE, _FP8_SMALL),
    frozenset({KvFormat.RAW16, KvFormat.TBQ4}): (_MIXED_LARGE, _MIXED_SMALL),
    frozenset({KvFormat.RAW16, KvFormat.FP8}): (_FP8_RAW_LARGE, _FP8_RAW_SMALL),
    frozenset({KvFormat.TBQ4, KvFormat.FP8}): (_FP8_TBQ4_LARGE, _FP8_TBQ4_SMALL),
}


def decode_tiles(
    device: Device, k_format: KvFormat = KvFormat.RAW16, v_format: KvFormat = KvFormat.RAW16
) -> dict[tuple[int, int], DecodeTile]:
    """Tile table of a device and of formats, by (head_dim, row_tiles)."""
    formats = frozenset({k_format, v_format})
    large, small = _TABLES[formats]
    return large if device.smem_per_block >= (_LARGE_SMEM_TBQ4 if KvFormat.TBQ4 in formats else _LARGE_SMEM) else small


def heads_tiles(device: Device, k_format: KvFormat, v_format: KvFormat) -> dict[tuple[int, int], DecodeTile]:
    """Tile table of a device and of formats for tiles of several KV heads, by (head_dim, tile_heads)."""
    codes = k_format is v_format is KvFormat.TBQ4
    return _TBQ4_HEADS_LARGE if codes and device.smem_per_block >= _LARGE_SMEM_TBQ4 else {}
