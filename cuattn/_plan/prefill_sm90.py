"""Tiles, stages, shared memory, the order of work and the reach of `prefill_sm90.cu`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product

import numpy as np

from cuattn import _params, _tbq4
from cuattn._device import Device
from cuattn._kinds import Dtype, KvFormat
from cuattn._plan.base import REGISTERS_PER_SM, WARP, align, ceil_div
from cuattn._plan.prefill import PrefillPlan, prefill_plan
from cuattn._problem import PrefillProblem, row_bytes

ARCH = "sm_90a"
# Of a warpgroup.
_GROUP_WARPS, GROUP_ROWS = 4, 64
# The most registers of a thread that the compiler leaves to a consumer; `setmaxnreg` counts in units.
_MOST_REGISTERS, _REGISTER_UNIT = 240, 8
_TILE_ALIGN = 1024
# Columns of a row of 128 bytes in shared memory; TMA has zeros for those behind the last one.
CHUNK = 64
# Of `codes` in common/tiled_producer.cuh: tiles on their way, of K and of V, alignment, and bytes beyond these.
_CODE_SLOTS, _CODE_ALIGN, _NO_CODES = 2, 16, 16
# Of `ItemQueue` in common/prefill_items.cuh: items and their mbarriers, and for each consumer ranges of tiles.
_QUEUE_BYTES, _QUEUE_BYTES_OF_A_CONSUMER = 120, 32
# Of the time of a call, the share in which an SM has work, below which keys are rather cut into splits.
_MIN_BUSY = 0.6


@dataclass(frozen=True, slots=True)
class TiledPrefillConfig:
    """Compile-time choices of ``prefill_sm90.cu``; one cubin per distinct value.

    Attributes
    ----------
    dtype : Dtype
    head_dim, value_dim : int
    consumers : int
        Warpgroups that attend, each with 64 query rows.
    tile_kv : int
        Keys of one step.
    num_stages : int
        Tiles of K, and of V, that are there or on their way.
    take_turns : bool
        Whether consumers begin their products one after the other.
    weigh_first : bool
        Whether a consumer has all weights of a tile before it waits for the values of the one before. That takes a
        maximum of each tile, as scores are not kept.
    producer_registers : int
        Of a thread of the warpgroup that produces tiles; consumers have the others.
    k_format, v_format : KvFormat
        Of keys and values.
    paged : bool
        Whether keys are in pages, which have whole tiles.
    softcap : bool
        Whether scores are capped; the hyperbolic tangent of each takes longer than all else that is done with it.
    """

    dtype: Dtype
    head_dim: int
    value_dim: int
    consumers: int
    tile_kv: int
    num_stages: int = 2
    take_turns: bool = True
    weigh_first: bool = False
    producer_registers: int = field(kw_only=True)
    k_format: KvFormat = KvFormat.RAW16
    v_format: KvFormat = KvFormat.RAW16
    paged: bool = False
    softcap: bool = False

    kernel = "prefill_sm90"
    ctas_per_sm = 1

    def describe(self) -> str:
        """One line for people."""
        formats = f", {self.k_format.value} keys, {self.v_format.value} values" if self.uses_tbq4 else ""
        options = f"{', paged' * self.paged}{', softcap' * self.softcap}"
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        return f"{self.dtype.value}{formats}, head_dim {dims}{options}"

    @property
    def uses_tbq4(self) -> bool:
        """Whether K or V is in TBQ4."""
        return KvFormat.TBQ4 in (self.k_format, self.v_format)

    @property
    def tile_q(self) -> int:
        """Query rows of one CTA, tokens of one head."""
        return self.consumers * GROUP_ROWS

    @property
    def num_warps(self) -> int:
        """Warps of a CTA, the producer's warpgroup included."""
        return (self.consumers + 1) * _GROUP_WARPS

    @property
    def smem_bytes(self) -> int:
        """``sizeof(Smem)`` in prefill_sm90.cu, which asserts it: q, K, V, mbarriers, scales of tiles, items, codes."""
        k_row, v_row = (align(dim, CHUNK) * self.dtype.itemsize for dim in (self.head_dim, self.value_dim))
        barriers, scales = 8 * (2 * self.consumers + 4 * self.num_stages), 4 * 2 * self.num_stages
        queue = _QUEUE_BYTES + _QUEUE_BYTES_OF_A_CONSUMER * self.consumers
        tiles = _CODE_SLOTS * (self.k_format, self.v_format).count(KvFormat.TBQ4)
        codes = _NO_CODES + tiles * self.tile_kv * row_bytes(KvFormat.TBQ4, self.dtype, self.head_dim)
        rest = align(barriers + scales + queue, _CODE_ALIGN) + codes
        rows = self.num_stages * self.tile_kv
        return align((self.tile_q + rows) * k_row + rows * v_row + rest, _TILE_ALIGN)

    @property
    def launch_registers(self) -> int:
        """Registers that each thread has at launch: what warpgroups exchange later is no more than these."""
        return REGISTERS_PER_SM // (self.num_warps * WARP) // _REGISTER_UNIT * _REGISTER_UNIT

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer's thread: what the producer leaves. One that asked for more would wait forever."""
        together = self.launch_registers * (self.consumers + 1)
        share = (together - self.producer_registers) // self.consumers // _REGISTER_UNIT * _REGISTER_UNIT
        return min(share, _MOST_REGISTERS)

    def constants(self) -> dict[str, object]:
        """Values of ``namespace cfg`` in the order printed."""
        return {
            "DTYPE": self.dtype,
            "K_FORMAT": self.k_format,
            "V_FORMAT": self.v_format,
            "HEAD_DIM": self.head_dim,
            "VALUE_DIM": self.value_dim,
            "CONSUMERS": self.consumers,
            "TILE_Q": self.tile_q,
            "TILE_KV": self.tile_kv,
            "NUM_STAGES": self.num_stages,
            "TAKE_TURNS": self.take_turns,
            "WEIGH_FIRST": self.weigh_first,
            "CHUNK": CHUNK,
            "CODE_SLOTS": _CODE_SLOTS,
            "PAGED": self.paged,
            "SOFTCAP": self.softcap,
            "PRODUCER_REGISTERS": self.producer_registers,
            "CONSUMER_REGISTERS": self.consumer_registers,
            "LAUNCH_REGISTERS": self.launch_registers,
            "SMEM_BYTES": self.smem_bytes,
            "PARAMS_BYTES": _params.TILED_PREFILL.itemsize,
        } | (_tbq4.attention_constants(_tbq4.block_of(self.head_dim)) if self.uses_tbq4 else {})


@dataclass(frozen=True, slots=True)
class TiledPrefillTile:
    """Tile sizes of a config."""

    consumers: int
    tile_kv: int
    num_stages: int = 2
    take_turns: bool = True
    weigh_first: bool = False
    producer_registers: int = field(kw_only=True)


# By (head_dim, value_dim); docs/prefill.md has the sums and the trials. More keys than 64 gain nothing from 128 on, and
# a causal mask hides more of a larger tile.
_TILES = {
    (64, 64): TiledPrefillTile(3, 96, 4, producer_registers=56),
    (96, 96): TiledPrefillTile(3, 80, 4, producer_registers=56),
    (128, 128): TiledPrefillTile(3, 64, 4, producer_registers=56),
    (192, 128): TiledPrefillTile(3, 64, 3, weigh_first=True, producer_registers=56),
    (192, 192): TiledPrefillTile(2, 64, 3, producer_registers=40),
    (256, 256): TiledPrefillTile(2, 64, weigh_first=True, producer_registers=56),
}
# Of keys in pages, which have whole tiles: a box of TMA does not go on in another page.
PAGED_TILE_KV = 64
_PAGED_TILES = _TILES | {
    (64, 64): TiledPrefillTile(3, PAGED_TILE_KV, 4, producer_registers=56),
    (96, 96): TiledPrefillTile(3, PAGED_TILE_KV, 4, producer_registers=56),
}
# Where K or V is in TBQ4 a whole warpgroup expands codes, which takes registers. Its lanes have 64 rows at once, or 32,
# of which tiles are a multiple. Calls of head_dim 256 go to the kernel of all GPUs, as these tiles were not timed.
_TBQ4_DIMS = ((64, 64), (128, 128))
_TBQ4_TILES = {
    64: TiledPrefillTile(3, 96, 4, producer_registers=80),
    128: TiledPrefillTile(3, 64, 4, producer_registers=80),
    256: TiledPrefillTile(2, 64, weigh_first=True, producer_registers=64),
}
_PAGED_TBQ4_TILES = {
    64: TiledPrefillTile(3, PAGED_TILE_KV, 4, producer_registers=80),
    128: TiledPrefillTile(3, PAGED_TILE_KV, 4, producer_registers=80),
    256: TiledPrefillTile(2, PAGED_TILE_KV, weigh_first=True, producer_registers=64),
}
# With a softcap: the temporaries of hyperbolic tangents take the registers of more keys.
_CAPPED_TILES = {
    (192, 128): TiledPrefillTile(2, 64, 4, producer_registers=40),
    (256, 256): TiledPrefillTile(2, 32, 4, weigh_first=True, producer_registers=56),
}
# Where one of them is, asking TMA takes registers, too. In pages as elsewhere.
_MIXED_TILES = {
    64: TiledPrefillTile(3, PAGED_TILE_KV, 4, producer_registers=56),
    128: TiledPrefillTile(3, PAGED_TILE_KV, 4, producer_registers=80),
    256: TiledPrefillTile(2, PAGED_TILE_KV, weigh_first=True, producer_registers=80),
}


def _tile_of(
    dims: tuple[int, int], k_format: KvFormat, v_format: KvFormat, *, paged: bool, softcap: bool
) -> TiledPrefillTile:
    if KvFormat.TBQ4 not in (k_format, v_format):
        return ((_PAGED_TILES if paged else _TILES) | (_CAPPED_TILES if softcap else {}))[dims]
    if k_format is not v_format:
        return _MIXED_TILES[dims[0]]
    return (_PAGED_TBQ4_TILES if paged else _TBQ4_TILES)[dims[0]]


def tiled_prefill_config(
    dtype: Dtype,
    dims: tuple[int, int],
    k_format: KvFormat = KvFormat.RAW16,
    v_format: KvFormat = KvFormat.RAW16,
    *,
    paged: bool = False,
    softcap: bool = False,
) -> TiledPrefillConfig:
    """Return the config of a (head_dim, value_dim) that `prefill_sm90.cu` has, for keys in pages or for others."""
    tile = _tile_of(dims, k_format, v_format, paged=paged, softcap=softcap)
    return TiledPrefillConfig(
        dtype, *dims, **asdict(tile), k_format=k_format, v_format=v_format, paged=paged, softcap=softcap
    )


def tiled_config_of(problem: PrefillProblem) -> TiledPrefillConfig:
    """Return the config of a call that `prefill_sm90.cu` has."""
    p = problem
    dims = (p.head_dim, p.value_dim)
    return tiled_prefill_config(p.dtype, dims, p.k_format, p.v_format, paged=p.page_size > 0, softcap=p.softcap)


def tiled_prefill_configs(device: Device) -> list[TiledPrefillConfig]:
    """Every config that `prefill` can ask for on a device."""
    if device.arch != ARCH:
        return []
    formats = tuple(product((KvFormat.RAW16, KvFormat.TBQ4), repeat=2))
    choices = product((Dtype.FP16, Dtype.BF16), _TILES, formats, (False, True), (False, True))
    return [
        tiled_prefill_config(dtype, dims, *of, paged=paged, softcap=softcap)
        for dtype, dims, of, paged, softcap in choices
        if KvFormat.TBQ4 not in of or (dims in _TBQ4_DIMS and not softcap)
    ]


@dataclass(frozen=True)
class TiledPrefillPlan:
    """One prefill call by `prefill_sm90.cu`: what will run, and why. ``str(plan)`` explains it.

    Attributes
    ----------
    problem : PrefillProblem
    device : Device
    config : TiledPrefillConfig
    """

    problem: PrefillProblem
    device: Device
    config: TiledPrefillConfig

    num_splits = 1

    @cached_property
    def num_tiles(self) -> int:
        """Tiles of query tokens of a sequence; of ragged ones, the most that all of them together can have."""
        p, tile_q = self.problem, self.config.tile_q
        if not p.ragged:
            return ceil_div(p.num_tokens, tile_q)
        # A sequence with tokens has less than one tile that is not full.
        return p.num_tokens // tile_q + min(p.batch, p.num_tokens)

    @cached_property
    def num_streams(self) -> int:
        """KV heads, of sequences unless these are ragged."""
        return self.problem.num_kv_heads * (1 if self.problem.ragged else self.problem.batch)

    @cached_property
    def streams_at_once(self) -> int:
        """KV heads (of sequences, unless these are ragged) whose tiles are worked on together, of the last rows first.

        At least as many as have K and V in half of the L2 cache and a tile of query tokens for each SM. Of twice as
        many the number that leaves the last turn as long as the others, for otherwise its longest tiles begin late.
        """
        p = self.problem
        row = sum(row_bytes(f, p.dtype, dim) for f, dim in ((p.k_format, p.head_dim), (p.v_format, p.value_dim)))
        fit = self.device.l2_bytes // 2 // (p.max_kv_len * row) if self.device.l2_bytes else self.num_streams
        least = min(self.num_streams, max(fit, ceil_div(self.device.num_sms, p.group * self.num_tiles)))
        return min(range(least, min(self.num_streams, 2 * least) + 1), key=lambda streams: -self.num_streams % streams)

    @cached_property
    def num_items(self) -> int:
        """Tiles of query tokens of all heads; of ragged sequences the most that there can be."""
        return self.num_tiles * self.num_streams * self.problem.group

    @cached_property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of prefill_sm90.cu: one an SM, each for several items."""
        return (min(self.device.num_sms, self.num_items), 1, 1)

    @property
    def counts_items(self) -> bool:
        """Whether CTAs have items to claim beyond the one that each begins with."""
        return self.num_items > self.grid[0]

    @property
    def workspace_bytes(self) -> int:
        """Bytes that a call takes beside its results: the number of items claimed."""
        return np.dtype(np.int32).itemsize if self.counts_items else 0

    @cached_property
    def block(self) -> tuple[int, int, int]:
        """Threads of prefill_sm90.cu."""
        return (self.config.num_warps * WARP, 1, 1)

    @property
    def busy(self) -> float:
        """Share of the time in which an SM has work, if all items take as long."""
        rounds = ceil_div(self.num_items, self.device.num_sms)
        return self.num_items / (rounds * self.device.num_sms) if rounds else 1.0

    def __str__(self) -> str:
        p, c = self.problem, self.config
        tokens = f"{p.num_tokens} query tokens" + (" in all" if p.ragged else "")
        lines = [
            f"prefill on {self.device.name} ({self.device.arch}, {self.device.num_sms} SMs)",
            f"  problem    batch {p.batch}, {tokens}, {p.num_qo_heads}/{p.num_kv_heads} heads, ",
            f"  kernel     prefill_sm90: {c.tile_q} query tokens x {c.tile_kv} keys, {c.consumers} warpgroups of ",
            f"  launch     grid {self.grid}, block {self.block[0]}, {self.num_items} items",
            f"  order      tiles of {self.streams_at_once} KV heads at once, the last rows of a sequence first",
            f"  work       {p.flops / 1e9:.2f} GFLOP without masks",
        ]
        dims = f"head_dim {p.head_dim}" + ("" if p.head_dim == p.value_dim else f", value_dim {p.value_dim}")
        lines[1] += f"{dims}, {p.dtype.value}, up to {p.max_kv_len} keys"
        lines[3] += f", {self.workspace_bytes} bytes of workspace"
        lines[2] += f"{GROUP_ROWS} rows, {c.num_stages} stages, {c.smem_bytes} bytes of shared memory"
        return "\n".join(lines)


def _names(dims: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{k}" if k == v else f"{k} with value_dim {v}" for k, v in dims)


@lru_cache(maxsize=1024)
def choose_prefill(problem: PrefillProblem, device: Device, beyond_tiles: str = "") -> PrefillPlan | TiledPrefillPlan:
    """Plan one prefill call by the kernel that is made for it.

    `beyond_tiles` says why `prefill_sm90.cu` does not have the options or layouts of the call; it is empty if it has.

    Raises
    ------
    ValueError
        If the device has too little shared memory.
    """
    p, plan = problem, prefill_plan(problem, device)
    tbq4, dims = KvFormat.TBQ4 in (p.k_format, p.v_format), (p.head_dim, p.value_dim)
    reasons = (
        (device.arch != ARCH, f"{device.arch} has no wgmma of {ARCH}"),
        (p.dtype is Dtype.FP32, "q is not in 16 bits"),
        (tbq4 and p.softcap, "there is a softcap beside TBQ4"),
        (tbq4 and dims not in _TBQ4_DIMS, f"head_dim beside TBQ4 is none of {_names(_TBQ4_DIMS)}"),
        (dims not in _TILES, f"head_dim is none of {_names(_TILES)}"),
        (min(p.max_kv_len, p.total_tokens, p.num_qo_heads) == 0, "there are no keys, or no queries"),
        (p.page_size % PAGED_TILE_KV != 0, f"pages of {p.page_size} tokens are no whole tiles of {PAGED_TILE_KV} keys"),
        (beyond_tiles != "", beyond_tiles),
    )
    if reason := next((why for holds, why in reasons if holds), ""):
        return replace(plan, reason=reason)
    tiled = TiledPrefillPlan(problem, device, tiled_config_of(p))
    rows = tiled.config.tile_q
    if tiled.config.smem_bytes > device.smem_per_block:
        return replace(plan, reason=f"{tiled.config.smem_bytes} bytes of shared memory do not fit this GPU")
    if 2 * p.total_tokens < rows * p.batch:
        return replace(plan, reason=f"fewer query tokens than half of a tile of {rows}")
    if plan.num_splits > 1 and tiled.busy < _MIN_BUSY:
        return replace(plan, reason=f"{tiled.num_items} tiles of query tokens: keys are rather cut into splits")
    return tiled
