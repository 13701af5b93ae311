"""Splits and launches of `decode.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from cuattn._device import KIB, Device
from cuattn._kinds import KvFormat
from cuattn._plan.base import MAX_GRID_YZ, MAX_SPLITS, SPLIT_UNIT, WARP, align, ceil_div
from cuattn._plan.decode_config import DecodeConfig, decode_config
from cuattn._problem import DecodeProblem

# Bytes of K and V an SM up to which a call asks for none ahead: an H200 reads them in about ten microseconds, of which
# it would wait for two.
_AHEAD_BYTES = 256 * KIB
# Warps that take two steps of a split at least, so that the pipeline fills.
_FEW_WARPS = 4
# Parts of a balanced batch for each sequence: a short one has a single part, and no part is to be long beside it.
_PARTS = 3


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
    def asks_ahead(self) -> bool:
        """Whether a CTA asks for its first keys and values while the kernel before it ends.

        Measured on an H200 (docs/decode.md): 1 to 2 % less time of long calls, but short ones wait for it, and rows
        with norms, of which each is a line of its own. Nor where registers are few, or parts are known to the GPU only.
        """
        p = self.problem
        is_long = p.kv_bytes > _AHEAD_BYTES * self.device.num_sms
        simple = not self.balanced and self.config.q_in_registers
        return is_long and simple and KvFormat.TBQ4 not in (p.k_format, p.v_format)

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

    As many as run at once, of those that keep the SMs within 5 % as busy as the best number does. Where none of those
    runs at once, the fewest of them. A split has at least two steps a warp where warps are few, so that the pipeline
    fills; else one, as with TBQ4, whose steps take longer.

    Parameters
    ----------
    problem, config, device : DecodeProblem, DecodeConfig, Device

    Returns
    -------
    num_splits : int
    reason : str
    """
    ctas = problem.batch * problem.num_kv_heads // config.tile_heads * ceil_div(problem.rows, config.head_rows)
    steps = 1 if config.uses_tbq4 or config.num_warps > _FEW_WARPS else 2
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
    """Plan parts of a whole batch, None where there is nothing to give: whole rounds, at least `_PARTS` a sequence.

    Of unequal sequences the long ones have most; equal ones have more than they would by themselves.
    """
    if problem.batch == 1 or problem.num_kv_heads == 0:
        return None
    row_blocks = ceil_div(problem.rows, config.head_rows)
    ctas = problem.num_kv_heads // config.tile_heads * row_blocks
    at_once = config.ctas_per_sm * device.num_sms
    rounds = ceil_div(_PARTS * problem.batch * ctas, at_once)
    most = problem.batch * (problem.max_kv_len // config.min_split)
    parts = min(rounds * at_once // ctas, most, MAX_GRID_YZ // row_blocks)
    if parts <= problem.batch:
        return None
    reason = f"given to {problem.batch} sequences by their lengths, in {rounds} rounds"
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
