"""Tiles, stages, shared memory and splits of `decode.cu`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from cuattn import _params, _tbq4
from cuattn._device import KIB, Device
from cuattn._kinds import Dtype, KvFormat
from cuattn._plan.base import MAX_SPLITS, REGISTERS_PER_SM, WARP, align, ceil_div
from cuattn._problem import DecodeProblem, norm_bytes, row_bytes

# Registers of accumulators and Q together, where a thread may have 255; half of it where it has 168.
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
    ctas_per_sm: int = 1

    kernel = "decode"

    def describe(self) -> str:
        """One line for people."""
        formats = f"{self.k_format.value} keys, {self.v_format.value} values"
        return f"{self.dtype.value}, {formats}, head_dim {self.head_dim}, {self.rows} query rows"

    @property
    def rows(self) -> int:
        """Query rows of a CTA."""
        return 8 * self.row_tiles

    @property
    def uses_tbq4(self) -> bool:
        """Whether K or V is in TBQ4."""
        return KvFormat.TBQ4 in (self.k_format, self.v_format)

    def slot_bytes(self, kv_format: KvFormat) -> int:
        """Bytes of one slot of the ring: a tile of rows, then their norms."""
        row = row_bytes(kv_format, self.dtype, self.head_dim) + norm_bytes(kv_format, self.head_dim)
        return align(self.tile_kv * row, 128)

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

        Accumulators take head_dim / 4 a row tile and Q head_dim / 8; the rest is for scores, fragments and addresses.
        """
        limit = _Q_REGISTER_LIMIT if self.num_warps <= _WARPS_OF_255_REGISTERS else _Q_REGISTER_LIMIT // 2
        return self.row_tiles * (self.head_dim // 4 + self.head_dim // 8) <= limit

    @property
    def smem_bytes(self) -> int:
        """``sizeof(Smem)`` in decode.cu, which asserts it.

        What lies below the table; the table of levels and the other rings (later o); q with a scale and a bias a row;
        m and l of a warp.
        """
        loop = self.table_bytes + (self.num_warps - self.warps_below) * self._ring_bytes
        padding = self.head_dim // 8 if self.v_format is KvFormat.TBQ4 else 0
        o = self.num_warps * self.rows * (self.head_dim + padding + 4) * 4
        q = self.rows * (self.head_dim * self.dtype.itemsize + 2 * 4)
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
        levels = _tbq4.codebook(block).astype(np.float16).view(np.uint16)
        return {
            "TABLE_STRIDE": self.table_stride,
            "LEVELS_HALF": tuple(map(int, levels)),
            **_tbq4.rotation_constants(block),
        }


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """A row of the tile tables; see `DecodeConfig`."""

    tile_kv: int
    num_stages: int
    num_warps: int
    table_stride: int = 0


# By (head_dim, row_tiles); the largest row_tiles of a head_dim bounds the rows of a CTA. Accumulators take head_dim / 4
# registers a row tile and are held to 128; scores take row_tiles * tile_kv / 4, so that four row tiles leave room for
# 16 keys only. Measured on an H200 at head_dim 128 and 256 (docs/decode.md, bench/results/h200-2026-11-30-tiles.json):
# 64 KB in flight, that is (num_stages - 1) * num_warps tiles, and four warps are enough, 32 KB and two warps are not;
# so rings of about 96 KB, for the other head_dims by analogy.
_DECODE_LARGE = {
    (64, 1): DecodeTile(32, 6, 4),  # 96 KB of ring: two CTAs on an SM of 228 KB
    (64, 2): DecodeTile(32, 6, 4),
    (64, 4): DecodeTile(16, 8, 4),
    (96, 1): DecodeTile(32, 4, 4),
    (96, 2): DecodeTile(32, 4, 4),
    (96, 4): DecodeTile(16, 6, 4),
    (128, 1): DecodeTile(32, 3, 4),
    (128, 2): DecodeTile(32, 3, 4),
    (128, 4): DecodeTile(16, 6, 4),
    (192, 1): DecodeTile(16, 4, 4),
    (192, 2): DecodeTile(16, 4, 4),
    (256, 1): DecodeTile(16, 3, 4),
    (256, 2): DecodeTile(16, 3, 4),
    (512, 1): DecodeTile(16, 2, 4),  # 128 KB, one CTA; a third stage would not fit an A100
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
_LARGE_SMEM = 160 * KIB
# A table of 64 KB at a multiple of 64 KB, and rings on both sides of it.
_LARGE_SMEM_TBQ4 = 200 * KIB


def decode_tiles(
    device: Device, k_format: KvFormat = KvFormat.RAW16, v_format: KvFormat = KvFormat.RAW16
) -> dict[tuple[int, int], DecodeTile]:
    """Tile table of a device and of formats, by (head_dim, row_tiles)."""
    if KvFormat.TBQ4 in (k_format, v_format):
        large = device.smem_per_block >= _LARGE_SMEM_TBQ4
    else:
        large = device.smem_per_block >= _LARGE_SMEM
    if k_format is not v_format:
        return _MIXED_LARGE if large else _MIXED_SMALL
    if k_format is KvFormat.TBQ4:
        return _TBQ4_LARGE if large else _TBQ4_SMALL
    return _DECODE_LARGE if large else _DECODE_SMALL


def config_of(  # noqa: PLR0917  the axes of the tables, in their order
    dtype: Dtype, k_format: KvFormat, v_format: KvFormat, head_dim: int, row_tiles: int, device: Device
) -> DecodeConfig:
    """Config of a row of a tile table."""
    t = decode_tiles(device, k_format, v_format)[head_dim, row_tiles]
    config = DecodeConfig(
        dtype, k_format, v_format, head_dim, row_tiles, t.tile_kv, t.num_stages, t.num_warps, t.table_stride
    )
    # A thread may have 255 registers, allocated as 256.
    by_registers = REGISTERS_PER_SM // (256 * config.num_warps * WARP)
    by_smem = device.smem_per_sm // (config.smem_bytes + KIB)
    return replace(config, ctas_per_sm=max(1, min(by_smem, by_registers)))


def decode_config(  # noqa: PLR0917  as above
    dtype: Dtype, k_format: KvFormat, v_format: KvFormat, head_dim: int, rows: int, device: Device
) -> DecodeConfig:
    """Config for `rows` query rows per KV head: the fewest row tiles that hold them, else the most there are."""
    choices = sorted(n for dim, n in decode_tiles(device, k_format, v_format) if dim == head_dim)
    row_tiles = next((n for n in choices if 8 * n >= rows), choices[-1])
    return config_of(dtype, k_format, v_format, head_dim, row_tiles, device)


@dataclass(frozen=True)
class DecodePlan:
    """One decode call: what will run, and why. ``str(plan)`` explains it.

    Attributes
    ----------
    problem : DecodeProblem
    device : Device
    config : DecodeConfig
    num_splits : int
        Parts into which the keys of a sequence are cut; more than one needs `merge`.
    reason : str
        Why this number of splits.
    """

    problem: DecodeProblem
    device: Device
    config: DecodeConfig
    num_splits: int
    reason: str

    @property
    def row_blocks(self) -> int:
        """CTAs over the query rows of one KV head."""
        return ceil_div(self.problem.rows, self.config.rows)

    @cached_property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of decode.cu."""
        return (self.num_splits * self.row_blocks, self.problem.num_kv_heads, self.problem.batch)

    @cached_property
    def block(self) -> tuple[int, int, int]:
        """Threads of decode.cu."""
        return (self.config.num_warps * WARP, 1, 1)

    @cached_property
    def out_partial_shape(self) -> tuple[int, ...]:
        """Shape of the float32 partial outputs; their softmax states (m, l) have 2 for head_dim."""
        p = self.problem
        return (self.num_splits, p.batch, p.seqlen_q, p.num_qo_heads, p.head_dim)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of partial outputs and their states; 0 for one split."""
        if self.num_splits == 1:
            return 0
        p = self.problem
        return self.num_splits * p.batch * p.seqlen_q * p.num_qo_heads * (p.head_dim + 2) * 4

    @property
    def roof_us(self) -> float:
        """Microseconds to read K and V at the data sheet's bandwidth; 0 if that is unknown."""
        return self.problem.kv_bytes / self.device.bandwidth * 1e6 if self.device.bandwidth else 0.0

    def __str__(self) -> str:
        p, c = self.problem, self.config
        roof = f", {self.roof_us:.1f} us at {self.device.bandwidth / 1e12:.2f} TB/s" if self.device.bandwidth else ""
        lines = [
            f"decode on {self.device.name} ({self.device.arch}, {self.device.num_sms} SMs)",
            f"  problem    batch {p.batch}, {p.seqlen_q} query tokens, {p.num_qo_heads}/{p.num_kv_heads} heads, ",
            f"  kernel     {c.rows} query rows x {c.tile_kv} keys a warp step, {c.num_warps} warps, ",
            f"  launch     grid {self.grid}, block {self.block[0]}, up to {c.ctas_per_sm} CTAs an SM",
            f"  splits     {self.num_splits}: {self.reason}",
            f"  workspace  {self.workspace_bytes} bytes" + ("" if self.num_splits > 1 else ", no merge"),
            f"  traffic    {self.problem.kv_bytes / 1e6:.1f} MB of K and V, {self.problem.flops / 1e9:.2f} GFLOP{roof}",
        ]
        caches = f", K {p.k_format.value}, V {p.v_format.value}" if c.uses_tbq4 else ""
        lines[1] += f"head_dim {p.head_dim}, {p.dtype.value}{caches}, up to {p.max_kv_len} keys"
        lines[2] += f"{c.num_stages} stages, {c.smem_bytes} bytes of shared memory"
        return "\n".join(lines)


def choose_splits(problem: DecodeProblem, config: DecodeConfig, device: Device) -> tuple[int, str]:
    """Choose the number of splits and say why.

    The fewest splits that keep the SMs within 5 % as busy as the best choice does, counting one CTA an SM: that is
    enough to reach the bandwidth (measured on an H200: 16 splits of 8 KV heads beat 29, 33 and 66), and every further
    split costs workspace traffic and merging. A split has at least two steps a warp, so that the pipeline fills. With
    TBQ4, whose steps take longer, one step a warp is enough, and there are as many splits as run in the same rounds.

    Parameters
    ----------
    problem, config, device : DecodeProblem, DecodeConfig, Device

    Returns
    -------
    num_splits : int
    reason : str
    """
    ctas = problem.batch * problem.num_kv_heads * ceil_div(problem.rows, config.rows)
    steps = 1 if config.uses_tbq4 else 2
    longest = min(MAX_SPLITS, problem.max_kv_len // (steps * config.min_split))
    if longest <= 1 or ctas == 0:
        return 1, f"{problem.max_kv_len} keys are too few to cut"
    limit = min(longest, ceil_div(2 * device.num_sms, ctas))

    def busy(splits: int) -> float:
        return splits * ctas / align(splits * ctas, device.num_sms)

    best = max(busy(s) for s in range(1, limit + 1))
    splits = next(s for s in range(1, limit + 1) if busy(s) >= 0.95 * best)
    rounds = ceil_div(splits * ctas, device.num_sms)
    if config.uses_tbq4:
        # The SMs are the bound rather than memory (docs/decode.md): the last few percent of them count.
        splits = max(splits, min(limit, rounds * device.num_sms // ctas))
    return splits, f"{splits * ctas} CTAs keep {device.num_sms} SMs {busy(splits):.0%} busy over {rounds} a SM"


@lru_cache(maxsize=1024)
def decode_plan(problem: DecodeProblem, device: Device, num_splits: int | None = None) -> DecodePlan:
    """Plan one decode call.

    Parameters
    ----------
    problem : DecodeProblem
    device : Device
    num_splits : int, optional
        Default: `choose_splits`.

    Returns
    -------
    DecodePlan

    Raises
    ------
    ValueError
        If the device has too little shared memory.
    """
    config = decode_config(problem.dtype, problem.k_format, problem.v_format, problem.head_dim, problem.rows, device)
    if config.smem_bytes > device.smem_per_block:
        raise ValueError(
            f"device must give a block {config.smem_bytes} bytes of shared memory for head_dim {problem.head_dim}, "
            f"{device.name} gives {device.smem_per_block}"
        )
    if num_splits is not None:
        return DecodePlan(problem, device, config, num_splits, "asked for")
    return DecodePlan(problem, device, config, *choose_splits(problem, config, device))
