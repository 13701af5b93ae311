"""Tiles, stages, shared memory and the order of work of `prefill_mma.cu`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

from cuattn import _params, _tbq4
from cuattn._device import KIB, Device
from cuattn._kinds import Dtype, KvFormat, formats_of
from cuattn._plan.base import HEAD_DIMS, REGISTERS_PER_SM, WARP, align, ceil_div
from cuattn._problem import PrefillProblem, norm_bytes, row_bytes

# Splits of keys: more of them take memory and time to merge; a shorter one would do little between its first copy and
# its last store; and fewer are as good as the best within so much.
_MAX_SPLITS, _MIN_SPLIT_KEYS, _NEAR_BEST = 16, 1024, 1.1
# Rounds of CTAs after which a last one that is not full no longer matters.
_MANY_ROUNDS = 4
# See `PrefillConfig.hold_base`.
_MANY_WARPS, _SHORT_ROW = 8, 64
# (head_dim, value_dim) of rows of elements.
PREFILL_DIMS = (*((dim, dim) for dim in HEAD_DIMS), (192, 128))
# Norms of three tiles: of the one that is expanded, the one before for warps that are behind, and the one on its way.
# The power of two of a tile is asked for when its scores are there.
_NORM_TILES, _SCALE_TILES = 3, 4
# Of ``struct Work``, and of the flag behind it, and of two mbarriers.
_WORK_BYTES = 100 + 16
# Expanded tiles: the one that is attended to, and the next.
_EXPANDED_TILES = 2


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Compile-time choices of ``prefill_mma.cu``; one cubin per distinct value.

    Attributes
    ----------
    dtype : Dtype
        Of q and out.
    k_format, v_format : KvFormat
        Of keys and values.
    head_dim, value_dim : int
        One of `PREFILL_DIMS`.
    tile_q : int
        Query rows (query tokens times query heads of the group) of one CTA.
    tile_kv : int
        Keys of one step.
    num_stages : int
        Tiles of K, and of V, that are there or on their way.
    num_warps : int
        Warps of a CTA; `dim_splits` of them share their rows.
    dim_splits : int
        Parts of value_dim, each of a warp of its own, where one has no registers for all of it.
    ctas_per_sm : int
        CTAs that must fit on an SM together; bounds the registers.
    """

    dtype: Dtype
    k_format: KvFormat
    v_format: KvFormat
    head_dim: int
    value_dim: int
    tile_q: int
    tile_kv: int
    num_stages: int
    num_warps: int
    dim_splits: int = 1
    ctas_per_sm: int = 1

    kernel = "prefill_mma"

    def describe(self) -> str:
        """One line for people."""
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        return f"{self.dtype.value}, {self.k_format.value} keys, {self.v_format.value} values, head_dim {dims}"

    @property
    def uses_tbq4(self) -> bool:
        """Whether K or V is in TBQ4."""
        return KvFormat.TBQ4 in (self.k_format, self.v_format)

    def _buffer_bytes(self, kv_format: KvFormat, dim: int) -> int:
        """Tiles of K or V; of TBQ4 the codes, expanded tiles, norms, and the power of two of each tile."""
        elements = self.tile_kv * dim * self.dtype.itemsize
        if kv_format is not KvFormat.TBQ4:
            return self.num_stages * elements
        codes = self.num_stages * self.tile_kv * row_bytes(kv_format, self.dtype, dim)
        norms = _NORM_TILES * self.tile_kv * norm_bytes(kv_format, dim)
        return align(align(_EXPANDED_TILES * elements, 128) + align(codes, 128) + norms + _SCALE_TILES * 4, 128)

    @property
    def smem_bytes(self) -> int:
        """``sizeof(Smem)`` in prefill_mma.cu, which asserts it: q, later o; K; V; scales and biases of q; the work."""
        q = self.tile_q * max(self.head_dim, self.value_dim) * self.dtype.itemsize
        kv = self._buffer_bytes(self.k_format, self.head_dim) + self._buffer_bytes(self.v_format, self.value_dim)
        scales = 2 * 4 * (self.tile_q if self.k_format is KvFormat.TBQ4 else 1)
        return align(q + kv + scales + _WORK_BYTES, 128)

    @property
    def hold_base(self) -> bool:
        """Whether threads keep the address of shared memory in a register rather than ask for it in each step.

        Worth some per cent with one CTA of eight warps an SM; with more, or short rows, other values have more of it,
        and floats have no register left.
        """
        return self.dtype is not Dtype.FP32 and self.num_warps >= _MANY_WARPS and self.head_dim > _SHORT_ROW

    def constants(self) -> dict[str, object]:
        """Values of ``namespace cfg`` in the order printed."""
        return {
            "DTYPE": self.dtype,
            "K_FORMAT": self.k_format,
            "V_FORMAT": self.v_format,
            "HEAD_DIM": self.head_dim,
            "VALUE_DIM": self.value_dim,
            "TILE_Q": self.tile_q,
            "TILE_KV": self.tile_kv,
            "NUM_STAGES": self.num_stages,
            "NUM_WARPS": self.num_warps,
            "DIM_SPLITS": self.dim_splits,
            "CTAS_PER_SM": self.ctas_per_sm,
            "HOLD_BASE": self.hold_base,
            "SMEM_BYTES": self.smem_bytes,
            "PARAMS_BYTES": _params.PREFILL.itemsize,
        } | self._format_constants()

    def _format_constants(self) -> dict[str, object]:
        if not self.uses_tbq4:
            return {}
        return {
            "NORM_TILES": _NORM_TILES,
            "SCALE_TILES": _SCALE_TILES,
            "EXPANDED_TILES": _EXPANDED_TILES,
            **_tbq4.attention_constants(_tbq4.block_of(self.head_dim)),
        }


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Tile sizes of a config, and the CTAs that are to run on an SM at once."""

    tile_q: int
    tile_kv: int
    num_stages: int
    num_warps: int
    ctas: int = 1
    dim_splits: int = 1
    spills_on: tuple[str, ...] = ()  # architectures for which the compiler has too few registers


# The first that fits a device is taken. Measured on an H200 (docs/prefill.md) are the first of each; the others are for
# GPUs with less shared memory, by analogy. Four warps of 32 rows read half as much of K and V from shared memory as
# eight of 16 rows, and two CTAs fill each other's gaps.
_TILES = {
    (64, 64): (PrefillTile(128, 128, 2, 4, 2, spills_on=("sm_100a",)), PrefillTile(128, 64, 2, 4, 2)),
    (96, 96): (PrefillTile(128, 64, 2, 4, 2), PrefillTile(128, 32, 2, 4, 2)),
    (128, 128): (PrefillTile(128, 64, 2, 4, 2), PrefillTile(128, 32, 2, 4, 2), PrefillTile(128, 64, 2, 8)),
    (192, 192): (PrefillTile(128, 64, 2, 8), PrefillTile(128, 32, 2, 8)),
    (192, 128): (PrefillTile(128, 64, 2, 8), PrefillTile(128, 32, 2, 8)),
    (256, 256): (PrefillTile(128, 64, 2, 8), PrefillTile(128, 32, 2, 8), PrefillTile(64, 32, 2, 4)),
    # Accumulators of half a row fill the registers of a warp.
    (512, 512): (PrefillTile(64, 32, 2, 8, dim_splits=2), PrefillTile(32, 16, 2, 4, dim_splits=2)),
}
# Floats take twice the memory, and three products for one. The parts of an element of K or V serve all rows of a warp:
# 32 where there are registers for them. Few of these tiles have two CTAs an SM, so eight warps are better than four.
_FLOAT_TILES = {
    (64, 64): (PrefillTile(128, 32, 2, 4, 2), PrefillTile(128, 32, 2, 8)),
    (96, 96): (PrefillTile(128, 32, 2, 4, 2, spills_on=("sm_100a",)), PrefillTile(128, 32, 2, 8)),
    (128, 128): (
        PrefillTile(256, 16, 2, 8, spills_on=("sm_90a", "sm_100a")),
        PrefillTile(128, 32, 2, 8, spills_on=("sm_100a",)),
        PrefillTile(128, 16, 2, 8),
    ),
    (192, 192): (PrefillTile(128, 16, 2, 8), PrefillTile(64, 16, 2, 4)),
    (192, 128): (
        PrefillTile(128, 32, 2, 8, spills_on=("sm_100a",)),
        PrefillTile(128, 16, 2, 8),
        PrefillTile(64, 16, 2, 4),
    ),
    (256, 256): (
        PrefillTile(128, 16, 2, 8, spills_on=("sm_100a",)),
        PrefillTile(64, 16, 2, 8, dim_splits=2),
        PrefillTile(32, 16, 2, 4, dim_splits=2),
    ),
    (512, 512): (
        PrefillTile(32, 16, 2, 4, dim_splits=2, spills_on=("sm_90a", "sm_100a")),
        PrefillTile(16, 16, 2, 4, dim_splits=4),
        PrefillTile(16, 8, 2, 4, dim_splits=4),
    ),
}
# Codes are expanded once for all rows of a CTA, so that one with more rows takes less time for each. Expanding takes
# registers, which leaves fewer for scores.
_TBQ4_TILES = {
    (64, 64): (PrefillTile(256, 64, 2, 8), PrefillTile(128, 64, 2, 8)),
    (128, 128): (PrefillTile(256, 64, 2, 8), PrefillTile(256, 32, 2, 8), PrefillTile(128, 32, 2, 8)),
    (256, 256): (PrefillTile(128, 64, 2, 8), PrefillTile(128, 32, 2, 8), PrefillTile(64, 16, 2, 4)),
    (512, 512): (
        PrefillTile(64, 32, 2, 8, dim_splits=2),
        PrefillTile(32, 16, 2, 4, dim_splits=2),
        PrefillTile(16, 16, 2, 2, dim_splits=2),
    ),
}
# Where one of K and V is in TBQ4.
_MIXED_TILES = _TBQ4_TILES | {
    (64, 64): (PrefillTile(256, 128, 2, 8), PrefillTile(256, 64, 2, 8), PrefillTile(128, 64, 2, 8)),
}


def _tiles(k_format: KvFormat, v_format: KvFormat) -> Mapping[tuple[int, int], tuple[PrefillTile, ...]]:
    if k_format is not v_format:
        return _MIXED_TILES
    return {KvFormat.RAW16: _TILES, KvFormat.RAW32: _FLOAT_TILES, KvFormat.TBQ4: _TBQ4_TILES}[k_format]


def prefill_config(
    dtype: Dtype, k_format: KvFormat, v_format: KvFormat, dims: tuple[int, int], device: Device
) -> PrefillConfig:
    """Return the config for a device; `dims` are head_dim and value_dim.

    Raises
    ------
    ValueError
        If it has too little shared memory.
    """
    for t in _tiles(k_format, v_format)[dims]:
        config = PrefillConfig(
            dtype, k_format, v_format, *dims, t.tile_q, t.tile_kv, t.num_stages, t.num_warps, t.dim_splits
        )
        if device.arch in t.spills_on:
            continue
        if config.smem_bytes > device.smem_per_block or t.ctas * (config.smem_bytes + KIB) > device.smem_per_sm:
            continue
        # A thread may have 255 registers, allocated as 256.
        by_registers = REGISTERS_PER_SM // (256 * t.num_warps * WARP)
        by_smem = device.smem_per_sm // (config.smem_bytes + KIB)
        return replace(config, ctas_per_sm=max(1, min(by_smem, by_registers)))
    raise ValueError(
        f"device must give a block {config.smem_bytes} bytes of shared memory for head_dim {dims[0]}, "
        f"{device.name} gives {device.smem_per_block}"
    )


def prefill_configs(device: Device) -> list[PrefillConfig]:
    """Every config that `prefill` can ask for on a device."""
    configs = []
    for dtype in Dtype:
        for formats in product(formats_of(dtype), formats_of(dtype)):
            configs += [prefill_config(dtype, *formats, dims, device) for dims in _tiles(*formats)]
    return configs


@dataclass(frozen=True)
class PrefillPlan:
    """One prefill call: what will run, and why. ``str(plan)`` explains it.

    Attributes
    ----------
    problem : PrefillProblem
    device : Device
    config : PrefillConfig
    num_splits : int
        Parts into which the keys of a tile of query rows are cut; more than one needs `merge`.
    reason : str
        Why it is not `prefill_sm90.cu`; empty: it was not asked for.
    """

    problem: PrefillProblem
    device: Device
    config: PrefillConfig
    num_splits: int = 1
    reason: str = ""

    @cached_property
    def num_tiles(self) -> int:
        """Tiles of query rows of a sequence; of ragged ones, the most that all of them together can have."""
        p, tile_q = self.problem, self.config.tile_q
        if not p.ragged:
            return ceil_div(p.num_tokens * p.group, tile_q)
        # A sequence with tokens has less than one tile that is not full.
        return p.num_tokens * p.group // tile_q + min(p.batch, p.num_tokens)

    @cached_property
    def streams_at_once(self) -> int:
        """KV heads of sequences whose tiles are worked on together, those of the last rows first.

        As many as have their keys and values in half of the L2 cache, since the tiles of a stream read the same ones.
        """
        p = self.problem
        streams = p.num_kv_heads if p.ragged else p.num_kv_heads * p.batch
        row = sum(row_bytes(f, p.dtype, dim) for f, dim in ((p.k_format, p.head_dim), (p.v_format, p.value_dim)))
        fit = self.device.l2_bytes // 2 // max(1, p.max_kv_len * row) if self.device.l2_bytes else streams
        return max(1, min(streams, fit))

    @cached_property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of prefill_mma.cu."""
        p = self.problem
        return (self.num_tiles * p.num_kv_heads * (1 if p.ragged else p.batch), self.num_splits, 1)

    @cached_property
    def out_partial_shape(self) -> tuple[int, ...]:
        """Shape of the float32 partial outputs; their softmax states (m, l) have 2 for value_dim."""
        p = self.problem
        return (self.num_splits, p.batch, p.num_tokens, p.num_qo_heads, p.value_dim)

    @cached_property
    def block(self) -> tuple[int, int, int]:
        """Threads of prefill_mma.cu."""
        return (self.config.num_warps * WARP, 1, 1)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of partial outputs and their states; 0 for one split: scores and probabilities stay in registers."""
        if self.num_splits == 1:
            return 0
        p = self.problem
        return self.num_splits * p.total_tokens * p.num_qo_heads * (p.value_dim + 2) * 4

    def __str__(self) -> str:
        p, c = self.problem, self.config
        tokens = f"{p.num_tokens} query tokens" + (" in all" if p.ragged else "")
        dims = f"head_dim {p.head_dim}" + ("" if p.head_dim == p.value_dim else f", value_dim {p.value_dim}")
        kv = f", K {p.k_format.value}, V {p.v_format.value}" if c.uses_tbq4 else ""
        rows = c.tile_q * c.dim_splits // c.num_warps
        lines = [
            f"prefill on {self.device.name} ({self.device.arch}, {self.device.num_sms} SMs)",
            f"  problem    batch {p.batch}, {tokens}, {p.num_qo_heads}/{p.num_kv_heads} heads, {dims}, ",
            f"  kernel     prefill_mma: {c.tile_q} query rows x {c.tile_kv} keys, {c.num_warps} warps of {rows} rows, ",
            f"  launch     grid {self.grid}, block {self.block[0]}, up to {c.ctas_per_sm} CTAs an SM",
            f"  order      tiles of {self.streams_at_once} KV heads at once, the last rows of a sequence first",
            f"  splits     {self.num_splits}, {self.workspace_bytes} bytes of workspace",
            f"  work       {p.flops / 1e9:.2f} GFLOP without masks",
        ]
        lines[1] += f"{p.dtype.value}{kv}, up to {p.max_kv_len} keys"
        lines[2] += f"{c.num_stages} stages, {c.smem_bytes} bytes of shared memory"
        if self.reason:
            lines.insert(3, f"  not sm90   {self.reason}")
        return "\n".join(lines)


def choose_splits(problem: PrefillProblem, config: PrefillConfig, device: Device) -> int:
    """Choose into how many parts the keys are cut: the fewest that keep the GPU busy where query rows do not.

    Where a sequence has few keys but those of its tokens, as in a prompt, a causal mask leaves most rows a part of
    them: CTAs that end early make place for others, so that only a GPU that is not full is reason to cut. Parts of
    ragged sequences would be merged for rows that have no result, so these are not cut.
    """
    rows = ceil_div(problem.num_tokens * problem.group, config.tile_q)
    ctas = rows * problem.num_kv_heads * problem.batch
    at_once = config.ctas_per_sm * device.num_sms
    keys = problem.max_kv_len
    if problem.visible_keys is not None:
        keys = min(keys, problem.visible_keys + ceil_div(config.tile_q, problem.group))
    longest = min(_MAX_SPLITS, keys // _MIN_SPLIT_KEYS)
    is_chunk = problem.max_kv_len >= 2 * problem.num_tokens
    enough = at_once * (_MANY_ROUNDS if is_chunk else 1)
    if problem.ragged or ctas == 0 or ctas >= enough or longest <= 1:
        return 1

    def time(splits: int) -> float:  # of parts of equal length, one after the other on each place
        return ceil_div(splits * ctas, at_once) / splits

    best = min(time(s) for s in range(1, longest + 1))
    return next(s for s in range(1, longest + 1) if time(s) <= _NEAR_BEST * best)


@lru_cache(maxsize=1024)
def prefill_plan(problem: PrefillProblem, device: Device, num_splits: int | None = None) -> PrefillPlan:
    """Plan one prefill call, with `num_splits` or with as many as `choose_splits` says.

    Raises
    ------
    ValueError
        If the device has too little shared memory.
    """
    dims = (problem.head_dim, problem.value_dim)
    config = prefill_config(problem.dtype, problem.k_format, problem.v_format, dims, device)
    return PrefillPlan(problem, device, config, num_splits or choose_splits(problem, config, device))
