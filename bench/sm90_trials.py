"""Times of variants of `prefill_sm90.cu`, for trials: ``python -m bench.sm90_trials [--rounds 3] [--head-dim 128]``.

Prompts of 16,384 tokens in bfloat16 with lse, full and causal, as in the record of prefill; of each variant one warm-up
and `rounds` batches of calls, all variants in turn, so that a GPU that gets slower does so for all. Results are
compared with those of `prefill_mma.cu` before any time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import cupy
import ml_dtypes
import numpy as np

from cuattn import _arrays, _check, _jit, _plan, _prefill_params, _tiled

_TOKENS, _BATCH_MS = 16384, 150.0
_HEADS = {64: (32, 8), 128: (32, 8), 256: (24, 4)}
# By head_dim: (consumers, tile_kv, num_stages); what ships comes first in each run.
_TILES = {
    64: ((3, 96, 4), (3, 128, 4), (3, 128, 2), (2, 128, 4), (2, 192, 3)),
    128: ((3, 64, 4), (3, 80, 3), (2, 128, 3), (2, 176, 2), (2, 160, 2)),
    256: ((2, 64, 2), (2, 80, 2), (2, 80, 1)),
}
_CHOICES: tuple[dict[str, bool], ...] = (
    {},
    {"take_turns": False},
    {"weigh_first": False},
    {"take_turns": False, "weigh_first": False},
)
_ORDERS = ("", "all heads at once", "a CTA an item")

_NO_LENGTHS = dict.fromkeys(("kv_len", "cu_seqlens_q", "cu_seqlens_k"))


def _arrays_of(head_dim: int) -> tuple[Any, ...]:
    heads, kv_heads = _HEADS[head_dim]
    rng = np.random.default_rng(0)
    return tuple(
        cupy.asarray(rng.standard_normal((1, _TOKENS, n, head_dim), np.float32).astype(ml_dtypes.bfloat16))
        for n in (heads, kv_heads, kv_heads)
    )


def _variant(
    arrays: tuple[Any, ...], config: _plan.TiledPrefillConfig, *, causal: bool, order: str
) -> tuple[Callable[[], None], Any]:
    """Return a launch and its out; `order` is one of `_ORDERS`."""
    device = _arrays.device(0)
    call = _check.prefill(*arrays, causal=causal)
    plan = _plan.TiledPrefillPlan(call.problem, device, config)
    out, lse = cupy.empty(call.out_shape, call.q.dtype), cupy.empty(call.out_shape[:-1], cupy.float32)
    claimed = cupy.zeros(1, cupy.int32)
    params = _prefill_params.tiled_params_of(
        call, plan, out=out, lse=lse, items_claimed=claimed, sinks=None, encode=_tiled.tensor_map, **_NO_LENGTHS
    )
    if order == "all heads at once":
        params["streams_at_once"] = plan.num_streams
    grid = (plan.num_items, 1, 1) if order == "a CTA an item" else plan.grid
    kernel = _jit.kernel(config, 0, device.arch)
    keep = (arrays, out, lse)  # whose memory the parameters point to

    def launch() -> None:
        claimed.data.memset_async(0, claimed.nbytes)
        kernel.launch(grid, plan.block, params)
        _ = keep

    return launch, out


def _by_prefill_mma(arrays: tuple[Any, ...], *, causal: bool) -> Any:  # noqa: ANN401  CuPy has no types
    device, call = _arrays.device(0), _check.prefill(*arrays, causal=causal)
    plan, out = _plan.prefill_plan(call.problem, device, 1), cupy.empty(call.out_shape, call.q.dtype)
    params = _prefill_params.params_of(
        call, plan, out=out, lse=None, parts=None, states=None, sinks=None, **_NO_LENGTHS
    )
    _jit.kernel(plan.config, 0, device.arch).launch(plan.grid, plan.block, params)
    return out


def last_rows(out: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401  CuPy has no types
    """Return the last query tokens, which see the most keys, on the CPU."""
    return cupy.asnumpy(out[:, -512:]).astype(np.float32)


def _milliseconds(launch: Callable[[], None], count: int) -> float:
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    for _ in range(count):
        launch()
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(begin, end) / count


def milliseconds_in_turn(launches: dict[str, Callable[[], None]], rounds: int, batch_ms: float) -> dict[str, float]:
    """Return the median of each over rounds in which all take turns, a batch of calls each."""
    times: dict[str, list[float]] = {name: [] for name in launches}
    for name, launch in (item for _ in range(rounds) for item in launches.items()):
        count = max(1, round(batch_ms / _milliseconds(launch, 1)))
        times[name].append(_milliseconds(launch, count))
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Print a line for each variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--head-dim", type=int, action="append", choices=tuple(_HEADS))
    parser.add_argument("--all-choices", action="store_true", help="of every tile, not of the shipped one alone")
    options = parser.parse_args()
    for head_dim, causal in product(options.head_dim or _HEADS, (False, True)):
        arrays = _arrays_of(head_dim)
        want = _by_prefill_mma(arrays, causal=causal)
        launches: dict[str, Callable[[], None]] = {}
        shipped = _plan.tiled_prefill_config(_plan.Dtype.BF16, (head_dim, head_dim))
        for n, tile in enumerate(_TILES[head_dim]):
            for choice, order in product(_CHOICES, _ORDERS):
                if (choice or order) and n > 0 and not options.all_choices:
                    continue
                fields = dict(zip(("consumers", "tile_kv", "num_stages"), tile, strict=True))
                config = replace(shipped, **fields, **choice)
                launch, out = _variant(arrays, config, causal=causal, order=order)
                launch()
                error = float(np.abs(last_rows(out) - last_rows(want)).max())
                name = f"{tile} {choice or ''} {order} error {error:.1e}"
                launches[name] = launch
        flops = 4 * _TOKENS**2 * _HEADS[head_dim][0] * head_dim / (2 if causal else 1)
        for name, ms in milliseconds_in_turn(launches, options.rounds, _BATCH_MS).items():
            print(
                f"{head_dim} {'causal' if causal else 'full'} {flops / ms / 1e9:6.1f} TFLOP/s {ms:7.3f} ms  {name}",
                flush=True,
            )


if __name__ == "__main__":
    main()
