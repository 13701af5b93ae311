"""Tiles, stages, shared memory, the order of work and the reach of `prefill_sm90.cu`."""

from __future__ import annotations

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
# What a warp keeps of its work, `Item` in common/prefill_items.cuh.
_ITEM_BYTES = 52
# Of CTAs that read the same K and V at a time the first one finds them in memory, and the others in L2. If each were
# the first, an H200 would read 5 to 7 TB/s (128 rows, 650 TFLOP/s); of six it is a quarter of its bandwidth.
_CTAS_OF_A_STREAM = 6
# From so many to so few the order is chosen that leaves CTAs the least apart. With many rounds any does.
_CTAS_OF_STREAMS, _MANY_ROUNDS = (12, 4), 64
# What an item costs beside its tiles of keys, in such.
_STEPS_OF_AN_ITEM = 1.5
# Of the time of a call, the share in which an SM has work, below which keys are rather cut into splits.
_MIN_BUSY = 0.6


@dataclass(frozen=True, slots=True)
class TiledPrefillConfig:
    """Compile-time choices of ``prefill_sm90.cu``; one cubin per distinct value.

    Attributes
    ----------
    dtype : Dtype
    head_dim : int
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
        return f"{self.dtype.value}{formats}, head_dim {self.head_dim}{options}"

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
        """``sizeof(Smem)`` in prefill_sm90.cu, which asserts it: q, K, V, mbarriers, scales of tiles, and items."""
        row = self.head_dim * self.dtype.itemsize
        barriers, scales = 8 * (2 * self.consumers + 4 * self.num_stages), 4 * 2 * self.num_stages
        items = self.consumers * _GROUP_WARPS * _ITEM_BYTES
        rest = barriers + scales + items
        return align((self.tile_q + 2 * self.num_stages * self.tile_kv) * row + rest, _TILE_ALIGN)

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
            "CONSUMERS": self.consumers,
            "TILE_Q": self.tile_q,
            "TILE_KV": self.tile_kv,
            "NUM_STAGES": self.num_stages,
            "TAKE_TURNS": self.take_turns,
            "WEIGH_FIRST": self.weigh_first,
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


# By head_dim; docs/prefill.md has the sums and the trials.
_TILES = {
    64: TiledPrefillTile(3, 96, 4, producer_registers=56),
    128: TiledPrefillTile(3, 80, 3, producer_registers=56),
    256: TiledPrefillTile(2, 80, weigh_first=True, producer_registers=40),
}
# Of keys in pages, which have whole tiles: a box of TMA does not go on in another page.
PAGED_TILE_KV = 64
_PAGED_TILES = {
    64: TiledPrefillTile(3, PAGED_TILE_KV, 4, producer_registers=56),
    128: TiledPrefillTile(3, PAGED_TILE_KV, 4, producer_registers=56),
    256: TiledPrefillTile(2, PAGED_TILE_KV, weigh_first=True, producer_registers=56),
}
# Where K or V is in TBQ4 a whole warpgroup expands codes, which takes registers. Calls of head_dim 256 go to the kernel
# of all GPUs, as these tiles were not timed.
_TBQ4_DIMS = (64, 128)
_TBQ4_TILES = {
    64: TiledPrefillTile(3, 96, 4, producer_registers=56),
    128: TiledPrefillTile(3, 80, 3, producer_registers=56),
    256: TiledPrefillTile(2, 64, weigh_first=True, producer_registers=64),
}
_PAGED_TBQ4_TILES = {
    64: TiledPrefillTile(3, PAGED_TILE_KV, 4, producer_registers=56),
    128: TiledPrefillTile(3, PAGED_TILE_KV, 4, producer_registers=72),
    256: TiledPrefillTile(2, PAGED_TILE_KV, weigh_first=True, producer_registers=64),
}
# With a softcap: the temporaries of hyperbolic tangents take the registers of more keys.
_CAPPED_TILES = {256: TiledPrefillTile(2, 32, 4, weigh_first=True, producer_registers=40)}
# Where one of them is, asking TMA takes registers, too. In pages as elsewhere.
_MIXED_TILES = {
    64: TiledPrefillTile(3, PAGED_TILE_KV, 4, producer_registers=56),
    128: TiledPrefillTile(3, PAGED_TILE_KV, 4, producer_registers=72),
    256: TiledPrefillTile(2, PAGED_TILE_KV, weigh_first=True, producer_registers=80),
}


def _tile_of(head_dim: int, k_format: KvFormat, v_format: KvFormat, *, paged: bool, softcap: bool) -> TiledPrefillTile:
    if KvFormat.TBQ4 not in (k_format, v_format):
        return ((_PAGED_TILES if paged else _TILES) | (_CAPPED_TILES if softcap else {}))[head_dim]
    if k_format is not v_format:
        return _MIXED_TILES[head_dim]
    return (_PAGED_TBQ4_TILES if paged else _TBQ4_TILES)[head_dim]


def tiled_prefill_config(
    dtype: Dtype,
    head_dim: int,
    k_format: KvFormat = KvFormat.RAW16,
    v_format: KvFormat = KvFormat.RAW16,
    *,
    paged: bool = False,
    softcap: bool = False,
) -> TiledPrefillConfig:
    """Return the config of a head_dim that `prefill_sm90.cu` has, for keys in pages or for others."""
    tile = _tile_of(head_dim, k_format, v_format, paged=paged, softcap=softcap)
    return TiledPrefillConfig(
        dtype, head_dim, **asdict(tile), k_format=k_format, v_format=v_format, paged=paged, softcap=softcap
    )


def tiled_config_of(problem: PrefillProblem) -> TiledPrefillConfig:
    """Return the config of a call that `prefill_sm90.cu` has."""
    p = problem
    return tiled_prefill_config(p.dtype, p.head_dim, p.k_format, p.v_format, paged=p.page_size > 0, softcap=p.softcap)


def tiled_prefill_configs(device: Device) -> list[TiledPrefillConfig]:
    """Every config that `prefill` can ask for on a device."""
    if device.arch != ARCH:
        return []
    formats = tuple(product((KvFormat.RAW16, KvFormat.TBQ4), repeat=2))
    choices = product((Dtype.FP16, Dtype.BF16), _TILES, formats, (False, True), (False, True))
    return [
        tiled_prefill_config(dtype, dim, *of, paged=paged, softcap=softcap)
        for dtype, dim, of, paged, softcap in choices
        if KvFormat.TBQ4 not in of or (dim in _TBQ4_DIMS and not softcap)
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
    workspace_bytes = 0

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
        """KV heads (of sequences, unless these are ragged) whose tiles are worked on together.

        Those of the last rows come first. As many as have K and V in half of the L2 cache; and where these are few, so
        many that each has some CTAs at once, which read the same keys at about the same time. Whenever others begin,
        tiles are long again, and CTAs that have the longest of two rounds are behind: near that number the one is taken
        with which they are the least.
        """
        p = self.problem
        row = sum(row_bytes(f, p.dtype, p.head_dim) for f in (p.k_format, p.v_format))
        fit = self.device.l2_bytes // 2 // (p.max_kv_len * row) if self.device.l2_bytes else self.num_streams
        usual = max(1, min(self.num_streams, max(fit, self.device.num_sms // _CTAS_OF_A_STREAM)))
        rounds = self.num_items / self.device.num_sms
        if p.ragged or self.num_tiles == 1 or not 1 < rounds < _MANY_ROUNDS:
            return usual
        least, most = (max(1, self.device.num_sms // ctas) for ctas in _CTAS_OF_STREAMS)
        others = range(min(self.num_streams, least), min(self.num_streams, most) + 1)
        found: int = min({usual, *others}, key=lambda streams: (self._imbalance(streams), abs(streams - usual)))
        return found

    def _imbalance(self, streams_at_once: int) -> float:
        """Return how much longer than the others the last CTA works under a causal mask, in steps of a per cent."""
        ctas, group = self.device.num_sms, self.problem.group
        index = np.arange(self.num_items)
        per_turn = streams_at_once * group * self.num_tiles
        turn, in_turn = np.divmod(index, per_turn)
        heads = np.minimum(streams_at_once, self.num_streams - turn * streams_at_once) * group
        after = (in_turn // heads + 1 - self.num_tiles) * -self.config.tile_q  # tokens before the tile
        hidden = np.maximum(0, self.problem.num_tokens - after - self.config.tile_q)
        steps = np.ceil(np.maximum(0, self.problem.max_kv_len - hidden) / self.config.tile_kv) + _STEPS_OF_AN_ITEM
        turns, cta = np.divmod(index, ctas)
        cta = np.where(turns % 2 == 0, cta, ctas - 1 - cta)
        work = np.bincount(cta, weights=steps, minlength=ctas)
        return round(float(work.max() / work.mean()), 2)

    @cached_property
    def num_items(self) -> int:
        """Tiles of query tokens of all heads; of ragged sequences the most that there can be."""
        return self.num_tiles * self.num_streams * self.problem.group

    @cached_property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of prefill_sm90.cu: one an SM, each for several items."""
        return (min(self.device.num_sms, self.num_items), 1, 1)

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
        lines[1] += f"head_dim {p.head_dim}, {p.dtype.value}, up to {p.max_kv_len} keys"
        lines[2] += f"{GROUP_ROWS} rows, {c.num_stages} stages, {c.smem_bytes} bytes of shared memory"
        return "\n".join(lines)


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
    tbq4 = KvFormat.TBQ4 in (p.k_format, p.v_format)
    reasons = (
        (device.arch != ARCH, f"{device.arch} has no wgmma of {ARCH}"),
        (p.dtype is Dtype.FP32, "q is not in 16 bits"),
        (tbq4 and p.softcap, "there is a softcap beside TBQ4"),
        (tbq4 and p.head_dim not in _TBQ4_DIMS, f"head_dim beside TBQ4 is none of {', '.join(map(str, _TBQ4_DIMS))}"),
        (p.head_dim != p.value_dim or p.head_dim not in _TILES, f"head_dim is none of {', '.join(map(str, _TILES))}"),
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
