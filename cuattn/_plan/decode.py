"""Tiles, stages, shared memory and splits of `decode.cu`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from cuattn import _params, _tbq4
from cuattn._device import KIB, Device
from cuattn._kinds import Dtype, KvFormat
from cuattn._plan.base import MAX_GRID_YZ, MAX_SPLITS, REGISTERS_PER_SM, SPLIT_UNIT, WARP, align, ceil_div
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


@dataclass(frozen=True)
class DecodePlan:
    """One decode call: what will run, and why. ``str(plan)`` explains it.

    Attributes
    ----------
    problem : DecodeProblem
    device : Device
    config : DecodeConfig
    num_splits : int
        Parts into which the keys of a sequence are cut, or of all sequences of a batch if it is `balanced`; more than
        one needs `merge`.
    reason : str
        Why this number of splits.
    split_size : int
        Tokens of a split, at whose multiples sequences are cut; 0: into even parts.
    balanced : bool
        Whether the GPU gives the parts to the sequences by their lengths.
    """

    problem: DecodeProblem
    device: Device
    config: DecodeConfig
    num_splits: int
    reason: str
    split_size: int = 0
    balanced: bool = False

    @property
    def merges(self) -> bool:
        """Whether `merge` runs, as it does for one split of a given size, too: its rounding is part of the bits."""
        return self.num_splits > 1 or self.split_size > 0

    @property
    def row_blocks(self) -> int:
        """CTAs over the query rows of one KV head, or of the heads of a tile."""
        return ceil_div(self.problem.rows, self.config.head_rows)

    @cached_property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of decode.cu."""
        heads = self.problem.num_kv_heads // self.config.tile_heads
        return (heads, self.num_splits * self.row_blocks, 1 if self.balanced else self.problem.batch)

    @cached_property
    def block(self) -> tuple[int, int, int]:
        """Threads of decode.cu."""
        return (self.config.num_warps * WARP, 1, 1)

    @cached_property
    def out_partial_shape(self) -> tuple[int, ...]:
        """Shape of the float32 partial outputs; their softmax states (m, l) have 2 for head_dim."""
        p = self.problem
        batch = () if self.balanced else (p.batch,)
        return (self.num_splits, *batch, p.seqlen_q, p.num_qo_heads, p.head_dim)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of partial outputs, their states and, if `balanced`, their shares; 0 without a merge."""
        if not self.merges:
            return 0
        p = self.problem
        rows = self.num_splits * (1 if self.balanced else p.batch) * p.seqlen_q * p.num_qo_heads
        return rows * (p.head_dim + 2) * 4 + (2 * p.batch * 4 if self.balanced else 0)

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
            f"  workspace  {self.workspace_bytes} bytes" + ("" if self.merges else ", no merge"),
            f"  traffic    {self.problem.kv_bytes / 1e6:.1f} MB of K and V, {self.problem.flops / 1e9:.2f} GFLOP{roof}",
        ]
        codes = {KvFormat.TBQ4, KvFormat.FP8} & {p.k_format, p.v_format}
        caches = f", K {p.k_format.value}, V {p.v_format.value}" if codes else ""
        lines[1] += f"head_dim {p.head_dim}, {p.dtype.value}{caches}, up to {p.max_kv_len} keys"
        lines[2] += f"{c.tile_heads} KV heads a tile, " if c.tile_heads > 1 else ""
        lines[2] += f"{c.num_stages} stages, {c.smem_bytes} bytes of shared memory"
        return "\n".join(lines)


def choose_splits(problem: DecodeProblem, config: DecodeConfig, device: Device) -> tuple[int, str]:
    """Choose the number of splits and say why.

    As many as run at once, of those that keep the SMs within 5 % as busy as the best number does: measured on an H200,
    two resident CTAs an SM read faster than one (docs/decode.md). Where none of those runs at once, the fewest of them.
    A split has at least two steps a warp, so that the pipeline fills; with TBQ4, whose steps take longer,
    one step.

    Parameters
    ----------
    problem, config, device : DecodeProblem, DecodeConfig, Device

    Returns
    -------
    num_splits : int
    reason : str
    """
    ctas = problem.batch * problem.num_kv_heads // config.tile_heads * ceil_div(problem.rows, config.head_rows)
    steps = 1 if config.uses_tbq4 else 2
    longest = min(MAX_SPLITS, problem.max_kv_len // (steps * config.min_split))
    if longest <= 1 or ctas == 0:
        return 1, f"{problem.max_kv_len} keys are too few to cut"
    at_once = config.ctas_per_sm * device.num_sms
    limit = min(longest, ceil_div(max(at_once, 2 * device.num_sms), ctas))

    def busy(splits: int) -> float:
        return splits * ctas / align(splits * ctas, device.num_sms)

    best = max(busy(s) for s in range(1, limit + 1))
    choices = [s for s in range(1, limit + 1) if busy(s) >= 0.95 * best]
    splits = max((s for s in choices if s * ctas <= at_once), default=choices[0])
    rounds = ceil_div(splits * ctas, device.num_sms)
    return splits, f"{splits * ctas} CTAs keep {device.num_sms} SMs {busy(splits):.0%} busy, {rounds} on an SM"


def _balanced_plan(problem: DecodeProblem, config: DecodeConfig, device: Device) -> DecodePlan | None:
    """Plan parts of a whole batch, None where there is nothing to give: in whole rounds, at least two a sequence.

    So equal sequences get as many each as they would by themselves, and of unequal ones the long ones have most.
    """
    if problem.batch == 1 or problem.num_kv_heads == 0:
        return None
    row_blocks = ceil_div(problem.rows, config.head_rows)
    ctas = problem.num_kv_heads // config.tile_heads * row_blocks
    at_once = config.ctas_per_sm * device.num_sms
    rounds = ceil_div(2 * problem.batch * ctas, at_once)
    most = problem.batch * (problem.max_kv_len // config.min_split)
    parts = min(rounds * at_once // ctas, most, MAX_GRID_YZ // row_blocks)
    if parts <= problem.batch:
        return None
    reason = f"given to {problem.batch} sequences by their lengths, {rounds} CTAs on an SM"
    return DecodePlan(problem, device, config, parts, reason, balanced=True)


@lru_cache(maxsize=1024)
def decode_plan(
    problem: DecodeProblem,
    device: Device,
    num_splits: int | None = None,
    split_size: int | None = None,
    *,
    balance: bool = False,
) -> DecodePlan:
    """Plan one decode call.

    Parameters
    ----------
    problem : DecodeProblem
    device : Device
    num_splits : int, optional
        Default: `choose_splits`.
    split_size : int, optional
        Tokens of a split, instead.
    balance : bool
        Whether to leave it to the GPU which sequence has how many splits, where there are several and enough keys.

    Returns
    -------
    DecodePlan

    Raises
    ------
    ValueError
        If the device has too little shared memory, or a grid or `MAX_SPLITS` does not allow so many splits.
    """
    config = decode_config(problem, device)
    if config.smem_bytes > device.smem_per_block:
        raise ValueError(
            f"device must give a block {config.smem_bytes} bytes of shared memory for head_dim {problem.head_dim}, "
            f"{device.name} gives {device.smem_per_block}"
        )
    if balance and (plan := _balanced_plan(problem, config, device)) is not None:
        return plan
    if split_size is not None:
        splits = max(1, ceil_div(problem.max_kv_len, split_size))
        plan = DecodePlan(problem, device, config, splits, f"of {split_size} tokens, as asked for", split_size)
        most = min(MAX_SPLITS, MAX_GRID_YZ // plan.row_blocks)
        if splits > most:
            raise ValueError(
                f"split_size must be at least {align(ceil_div(problem.max_kv_len, most), SPLIT_UNIT)} for "
                f"{problem.max_kv_len} tokens a sequence, of which there may be {most} splits, got {split_size}"
            )
        return plan
    if num_splits is not None:
        plan = DecodePlan(problem, device, config, num_splits, "asked for")
        if plan.grid[1] > MAX_GRID_YZ:
            raise ValueError(
                f"num_splits must be at most {MAX_GRID_YZ // plan.row_blocks} for {problem.rows} query rows a KV head, "
                f"as a CUDA grid has at most {MAX_GRID_YZ} blocks in y, got {num_splits}"
            )
        return plan
    return DecodePlan(problem, device, config, *choose_splits(problem, config, device))
