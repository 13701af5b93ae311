"""Tiles, stages and shared memory of `decode.cu`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cuattn import _params, _tbq4
from cuattn._device import KIB, Device
from cuattn._kinds import Dtype, KvFormat
from cuattn._plan.base import REGISTERS_PER_SM, WARP, align
from cuattn._plan.tiles import decode_tiles, heads_tiles
from cuattn._problem import DecodeProblem, norm_bytes, row_bytes

# Query rows of a row tile, the N of an mma.
_TILE_ROWS = 8
# Registers of accumulators and Q together, where a thread may have 255; half of it where it has 168, or has to make the
# two parts of floats.
_Q_REGISTER_LIMIT = 128
_WARPS_OF_255_REGISTERS = 8
# Splits of that many steps of all warps are cut into whole ones: it takes less time if a few splits have a step more
# than if one warp of each has. With fewer, a step more is too much.
_MANY_STEPS = 8
# The address of an entry of the table of levels is put together from bytes: code byte in the second, lane in the first.
_WIDE_STRIDE = 256
_TABLE_ALIGNMENT = 64 * KIB
# The shared window begins with memory of the system, 1 KB on all GPUs so far; up to 4 KB do no harm.
_SYSTEM_BYTES = 4 * KIB


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Compile-time choices of ``decode.cu``; one cubin per distinct value.

    Attributes
    ----------
    dtype : Dtype
        Of q and out.
    k_format, v_format : KvFormat
        Of the caches.
    head_dim : int
        One of `HEAD_DIMS`.
    row_tiles : int
        Query rows (query heads of the group times query tokens) of one CTA, in tiles of 8.
    tile_kv : int
        Keys of one step of one warp.
    num_stages : int
        Tiles of the ring of each warp; K and V tiles alternate in it.
    num_warps : int
        Warps of a CTA.
    table_stride : int
        Bytes between entries of the table of levels of TBQ4: 128, or 256, with half of them unused and one instruction
        less for each look-up. 0 without TBQ4.
    tile_heads : int
        KV heads whose rows stand side by side in a tile and share the query rows; more than one with TBQ4 only.
    ctas_per_sm : int
        CTAs that must fit on an SM together; bounds the registers.
    """

    dtype: Dtype
    k_format: KvFormat
    v_format: KvFormat
    head_dim: int
    row_tiles: int
    tile_kv: int
    num_stages: int
    num_warps: int
    table_stride: int = 0
    tile_heads: int = 1
    ctas_per_sm: int = 1

    kernel = "decode"

    def describe(self) -> str:
        """One line for people."""
        formats = f"{self.k_format.value} keys, {self.v_format.value} values"
        heads = f" of {self.tile_heads} KV heads" if self.tile_heads > 1 else ""
        return f"{self.dtype.value}, {formats}, head_dim {self.head_dim}, {self.rows} query rows{heads}"

    @property
    def rows(self) -> int:
        """Query rows of a CTA."""
        return _TILE_ROWS * self.row_tiles

    @property
    def head_rows(self) -> int:
        """Query rows of each KV head of a CTA."""
        return self.rows // self.tile_heads

    @property
    def uses_tbq4(self) -> bool:
        """Whether K or V is in TBQ4."""
        return KvFormat.TBQ4 in (self.k_format, self.v_format)

    def slot_bytes(self, kv_format: KvFormat) -> int:
        """Bytes of one slot of the ring: a tile of rows, then their norms."""
        row = row_bytes(kv_format, self.dtype, self.head_dim) + norm_bytes(kv_format, self.head_dim)
        return align(self.tile_kv * self.tile_heads * row, 128)

    @property
    def keys_per_step(self) -> int:
        """Keys of one step of all warps."""
        return self.num_warps * self.tile_kv

    @property
    def min_split(self) -> int:
        """Fewest keys of a split: one step for every warp."""
        return self.keys_per_step

    @property
    def q_in_registers(self) -> bool:
        """Whether Q's fragments stay in registers.

        Accumulators take head_dim / 4 a row tile and Q head_dim / 8 for each head of the tile, or four times that
        for floats and their two parts; the rest is for scores, fragments and addresses.
        """
        floats = self.dtype is Dtype.FP32
        few = floats or self.num_warps > _WARPS_OF_255_REGISTERS
        limit = _Q_REGISTER_LIMIT // 2 if few else _Q_REGISTER_LIMIT
        q = self.tile_heads * self.head_dim // (2 if floats else 8)
        return self.row_tiles * (self.head_dim // 4 + q) <= limit

    @property
    def smem_bytes(self) -> int:
        """``sizeof(Smem)`` in decode.cu, which asserts it.

        What lies below the table; the table of levels and the other rings (later o); q, and of each of its rows a
        scale, a bias and what it sees of a tree; m and l of a warp.
        """
        loop = self.table_bytes + (self.num_warps - self.warps_below) * self._ring_bytes
        padding = self.head_dim // 8 if self.v_format is KvFormat.TBQ4 else 0
        o = self.num_warps * self.rows * (self.head_dim + padding + 4) * 4
        q = self.rows * (self.head_dim * self.dtype.itemsize + 3 * 4)
        above = align(align(max(loop, o), 128) + q + 2 * self.num_warps * self.rows * 4, 128)
        return self.lead_bytes + above

    @property
    def _ring_bytes(self) -> int:
        return self.num_stages * (self.slot_bytes(self.k_format) + self.slot_bytes(self.v_format)) // 2

    @property
    def lead_bytes(self) -> int:
        """Bytes up to the multiple of 64 KB where a table with a stride of 256 begins."""
        return _TABLE_ALIGNMENT if self.table_stride == _WIDE_STRIDE else 0

    @property
    def warps_below(self) -> int:
        """Warps whose rings lie below the table: all but one at most, as an array above has at least one element."""
        return min(self.num_warps - 1, max(0, self.lead_bytes - _SYSTEM_BYTES) // self._ring_bytes)

    @property
    def table_bytes(self) -> int:
        """Bytes of the table of levels: 256 entries; 128 that are not used without TBQ4."""
        return 256 * self.table_stride if self.uses_tbq4 else 128

    def constants(self) -> dict[str, object]:
        """Values of ``namespace cfg`` in the order printed."""
        return {
            "DTYPE": self.dtype,
            "K_FORMAT": self.k_format,
            "V_FORMAT": self.v_format,
            "HEAD_DIM": self.head_dim,
            "ROW_TILES": self.row_tiles,
            "TILE_HEADS": self.tile_heads,
            "TILE_KV": self.tile_kv,
            "NUM_STAGES": self.num_stages,
            "NUM_WARPS": self.num_warps,
            "CTAS_PER_SM": self.ctas_per_sm,
            "KEYS_PER_STEP": self.keys_per_step,
            "MIN_SPLIT": self.min_split,
            "MANY_STEPS": _MANY_STEPS,
            "Q_IN_REGISTERS": self.q_in_registers,
            "SMEM_BYTES": self.smem_bytes,
            "TABLE_BYTES": self.table_bytes,
            "LEAD_BYTES": self.lead_bytes,
            "WARPS_BELOW": self.warps_below,
            "PARAMS_BYTES": _params.DECODE.itemsize,
        } | self._format_constants()

    def _format_constants(self) -> dict[str, object]:
        if not self.uses_tbq4:
            return {}
        block = _tbq4.block_of(self.head_dim)
        return {"TABLE_STRIDE": self.table_stride, **_tbq4.attention_constants(block)}


def config_of(  # noqa: PLR0917  the axes of the tables, in their order
    dtype: Dtype,
    k_format: KvFormat,
    v_format: KvFormat,
    head_dim: int,
    row_tiles: int,
    device: Device,
    *,
    tile_heads: int = 1,
) -> DecodeConfig:
    """Config of a row of a tile table."""
    if tile_heads > 1:
        t = heads_tiles(device, k_format, v_format)[head_dim, tile_heads]
    else:
        t = decode_tiles(device, k_format, v_format)[head_dim, row_tiles]
    config = DecodeConfig(
        dtype, k_format, v_format, head_dim, row_tiles, t.tile_kv, t.num_stages, t.num_warps, t.table_stride, tile_heads
    )
    # A thread may have 255 registers, allocated as 256.
    by_registers = REGISTERS_PER_SM // (256 * config.num_warps * WARP)
    by_smem = device.smem_per_sm // (config.smem_bytes + KIB)
    return replace(config, ctas_per_sm=max(1, min(by_smem, by_registers)))


def decode_config(problem: DecodeProblem, device: Device) -> DecodeConfig:
    """Config for a problem: the most KV heads a tile that share eight query rows, else the fewest row tiles.

    Where no number of row tiles holds the query rows of a KV head it is the most there are.
    """
    formats, head_dim = (problem.k_format, problem.v_format), problem.head_dim
    together = [
        n
        for dim, n in heads_tiles(device, *formats)
        if dim == head_dim and n * problem.rows <= _TILE_ROWS and problem.adjacent_heads % n == 0
    ]
    choices = sorted(n for dim, n in decode_tiles(device, *formats) if dim == head_dim)
    row_tiles = next((n for n in choices if _TILE_ROWS * n >= problem.rows), choices[-1])
    return config_of(problem.dtype, *formats, head_dim, row_tiles, device, tile_heads=max(together, default=1))
