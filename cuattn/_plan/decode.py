"""Tiles, stages, shared memory and splits of `decode.cu`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from cuattn import _params
from cuattn._device import KIB, Device
from cuattn._kinds import Dtype, KvFormat
from cuattn._plan.base import MAX_SPLITS, REGISTERS_PER_SM, WARP, align, ceil_div
from cuattn._problem import DecodeProblem

Q_REGISTER_LIMIT = 128


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Compile-time choices of ``decode.cu``; one cubin per distinct value.

    Attributes
    ----------
    dtype, kv_format : Dtype, KvFormat
        Of q and out, and of the cache.
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
    ctas_per_sm : int
        CTAs that must fit on an SM together; bounds the registers.
    """

    dtype: Dtype
    kv_format: KvFormat
    head_dim: int
    row_tiles: int
    tile_kv: int
    num_stages: int
    num_warps: int
    ctas_per_sm: int = 1

    kernel = "decode"

    def describe(self) -> str:
        """One line for people."""
        return f"{self.dtype.value}, {self.kv_format.value} cache, head_dim {self.head_dim}, {self.rows} query rows"

    @property
    def rows(self) -> int:
        """Query rows of a CTA."""
        return 8 * self.row_tiles

    @property
    def row_bytes(self) -> int:
        """Bytes of one K or V row."""
        return self.head_dim * self.dtype.itemsize

    @property
    def min_split(self) -> int:
        """Fewest keys of a split: one step for every warp."""
        return self.num_warps * self.tile_kv

    @property
    def q_in_registers(self) -> bool:
        """Whether Q's fragments stay in registers.

        A thread has 255 registers. Accumulators take head_dim / 4 a row tile and Q head_dim / 8; `Q_REGISTER_LIMIT` of
        both together leave room for scores, fragments and addresses.
        """
        return self.row_tiles * (self.head_dim // 4 + self.head_dim // 8) <= Q_REGISTER_LIMIT

    @property
    def smem_bytes(self) -> int:
        """``sizeof(Smem)`` in decode.cu, which asserts it: the ring (later o), q, then m, l and weight."""
        ring = self.num_warps * self.num_stages * self.tile_kv * self.row_bytes
        o = self.num_warps * self.rows * (self.head_dim + 4) * 4
        q = self.rows * self.head_dim * self.dtype.itemsize
        return align(align(max(ring, o), 128) + q + 3 * self.num_warps * self.rows * 4, 128)

    def constants(self) -> dict[str, object]:
        """Values of ``namespace cfg`` in the order printed."""
        return {
            "DTYPE": self.dtype,
            "KV_FORMAT": self.kv_format,
            "HEAD_DIM": self.head_dim,
            "ROW_TILES": self.row_tiles,
            "TILE_KV": self.tile_kv,
            "NUM_STAGES": self.num_stages,
            "NUM_WARPS": self.num_warps,
            "CTAS_PER_SM": self.ctas_per_sm,
            "MIN_SPLIT": self.min_split,
            "Q_IN_REGISTERS": self.q_in_registers,
            "SMEM_BYTES": self.smem_bytes,
            "PARAMS_BYTES": _params.DECODE.itemsize,
        }


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """A row of the tile tables; see `DecodeConfig`."""

    tile_kv: int
    num_stages: int
    num_warps: int


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
_LARGE_SMEM = 160 * KIB


def decode_tiles(device: Device) -> dict[tuple[int, int], DecodeTile]:
    """Tile table of a device, by (head_dim, row_tiles)."""
    return _DECODE_LARGE if device.smem_per_block >= _LARGE_SMEM else _DECODE_SMALL


def config_of(dtype: Dtype, kv_format: KvFormat, head_dim: int, row_tiles: int, device: Device) -> DecodeConfig:
    tile = decode_tiles(device)[head_dim, row_tiles]
    config = DecodeConfig(dtype, kv_format, head_dim, row_tiles, tile.tile_kv, tile.num_stages, tile.num_warps)
    # A thread may have 255 registers, allocated as 256.
    by_registers = REGISTERS_PER_SM // (256 * config.num_warps * WARP)
    by_smem = device.smem_per_sm // (config.smem_bytes + KIB)
    return replace(config, ctas_per_sm=max(1, min(by_smem, by_registers)))


def decode_config(dtype: Dtype, kv_format: KvFormat, head_dim: int, rows: int, device: Device) -> DecodeConfig:
    """Config for `rows` query rows per KV head: the fewest row tiles that hold them, else the most there are."""
    choices = sorted(row_tiles for dim, row_tiles in decode_tiles(device) if dim == head_dim)
    row_tiles = next((n for n in choices if 8 * n >= rows), choices[-1])
    return config_of(dtype, kv_format, head_dim, row_tiles, device)


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
        lines[1] += f"head_dim {p.head_dim}, {p.dtype.value}, up to {p.max_kv_len} keys"
        lines[2] += f"{c.num_stages} stages, {c.smem_bytes} bytes of shared memory"
        return "\n".join(lines)


def choose_splits(problem: DecodeProblem, config: DecodeConfig, device: Device) -> tuple[int, str]:
    """Choose the number of splits and say why.

    The fewest splits that keep the SMs within 5 % as busy as the best choice does, counting one CTA an SM: that is
    enough to reach the bandwidth (measured on an H200: 16 splits of 8 KV heads beat 29, 33 and 66), and every further
    split costs workspace traffic and merging. A split has at least two steps a warp, so that the pipeline fills.

    Parameters
    ----------
    problem, config, device : DecodeProblem, DecodeConfig, Device

    Returns
    -------
    num_splits : int
    reason : str
    """
    ctas = problem.batch * problem.num_kv_heads * ceil_div(problem.rows, config.rows)
    longest = min(MAX_SPLITS, problem.max_kv_len // (2 * config.min_split))
    if longest <= 1 or ctas == 0:
        return 1, f"{problem.max_kv_len} keys are too few to cut"
    limit = min(longest, ceil_div(2 * device.num_sms, ctas))

    def busy(splits: int) -> float:
        return splits * ctas / align(splits * ctas, device.num_sms)

    best = max(busy(s) for s in range(1, limit + 1))
    splits = next(s for s in range(1, limit + 1) if busy(s) >= 0.95 * best)
    rounds = ceil_div(splits * ctas, device.num_sms)
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
    config = decode_config(problem.dtype, problem.k_format, problem.head_dim, problem.rows, device)
    if config.smem_bytes > device.smem_per_block:
        raise ValueError(
            f"device must give a block {config.smem_bytes} bytes of shared memory for head_dim {problem.head_dim}, "
            f"{device.name} gives {device.smem_per_block}"
        )
    if num_splits is not None:
        return DecodePlan(problem, device, config, num_splits, "asked for")
    return DecodePlan(problem, device, config, *choose_splits(problem, config, device))
