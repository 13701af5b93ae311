"""Times of `prefill_sm90.cu` with TBQ4 keys and values, for trials: ``python -m bench.sm90_codes_trials [--rounds 5]``.

A chunk of 2048 query tokens, causal, in bfloat16 against 32,768 tokens of cache, dense and in pages of 64: in 16 bits,
in TBQ4, and mixed, each in several tiles, stages and splits of registers. All variants take turns, so that a GPU that
gets slower does so for all; the largest difference from `prefill_mma.cu`, whose time is there too, stands beside each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import cupy
import ml_dtypes
import numpy as np

import cuattn
from cuattn import _arrays, _check, _jit, _plan, _prefill_params, _tiled
from cuattn._kinds import KvFormat

from .sm90_trials import last_rows, milliseconds_in_turn

_TOKENS, _KEYS, _PAGE, _BATCH_MS = 2048, 32768, 64, 60.0
_HEADS = {64: (32, 8), 128: (32, 8), 256: (24, 4)}
_RAW, _TBQ4 = KvFormat.RAW16, KvFormat.TBQ4
_FORMATS = ((_RAW, _RAW), (_TBQ4, _TBQ4), (_RAW, _TBQ4), (_TBQ4, _RAW))
# By head_dim, beside what ships: consumers, tile_kv, num_stages, producer_registers. None spills with NVRTC 13.0.
_DENSE_ONLY = 96, 128
_TILES = {
    64: ((3, 64, 4, 56), (3, 64, 6, 56), (3, 96, 3, 56), (3, 96, 4, 56), (3, 96, 4, 80)),
    128: ((3, 64, 3, 56), (3, 64, 4, 56), (3, 64, 4, 80), (2, 128, 2, 80)),
    256: ((2, 32, 4, 64), (2, 64, 2, 64)),
}


@dataclass(frozen=True, slots=True)
class Case:
    """Arrays of a call, and where the time of a launch of it goes."""

    arrays: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def call(self) -> Any:  # noqa: ANN401  CuPy has no types
        """The checked call."""
        return _check.prefill(*self.arrays, causal=True, **self.options)

    def empty(self) -> tuple[Any, Any]:
        """Return arrays for out and lse."""
        call = self.call
        return cupy.empty(call.out_shape, call.q.dtype), cupy.empty(call.out_shape[:-1], cupy.float32)

    def portable(self) -> tuple[Callable[[], None], Any]:
        """Return a launch of `prefill_mma.cu` without splits, and its out."""
        call, device = self.call, _arrays.device(0)
        plan = _plan.prefill_plan(call.problem, device, 1)
        out, lse = self.empty()
        params = _prefill_params.params_of(
            call, plan, out=out, lse=lse, parts=None, states=None, kv_len=call.kv_len, cu_seqlens_q=None,
            cu_seqlens_k=None, sinks=None,
        )  # fmt: skip
        kernel = _jit.kernel(plan.config, 0, device.arch)
        keep = (self, out, lse)  # whose memory the parameters point to
        return lambda: (kernel.launch(plan.grid, plan.block, params), keep)[0], out

    def tiled(self, config: _plan.TiledPrefillConfig) -> tuple[Callable[[], None], Any]:
        """Return a launch of `prefill_sm90.cu`, and its out."""
        call, device = self.call, _arrays.device(0)
        plan = _plan.TiledPrefillPlan(call.problem, device, config)
        out, lse = self.empty()
        claimed = cupy.zeros(1, cupy.int32)
        params = _prefill_params.tiled_params_of(
            call, plan, out=out, lse=lse, items_claimed=claimed, kv_len=call.kv_len, cu_seqlens_q=None,
            cu_seqlens_k=None, sinks=None, encode=_tiled.tensor_map,
        )  # fmt: skip
        kernel = _jit.kernel(config, 0, device.arch)
        keep = (self, out, lse)  # whose memory the parameters point to

        def launch() -> None:
            claimed.data.memset_async(0, claimed.nbytes)
            kernel.launch(plan.grid, plan.block, params)
            _ = keep

        return launch, out


def _rows(tokens: int, heads: int, head_dim: int, seed: int) -> Any:  # noqa: ANN401
    rows = np.random.default_rng(seed).standard_normal((1, tokens, heads, head_dim), np.float32)
    return cupy.asarray(rows.astype(ml_dtypes.bfloat16))


def _cache(rows: Any, kv_format: KvFormat, *, paged: bool) -> Any:  # noqa: ANN401
    """Return rows in a format, in pages whose order is that of the tokens."""
    shape = (-1, _PAGE, *rows.shape[2:]) if paged else rows.shape
    rows = rows.reshape(shape)
    return rows if kv_format is _RAW else cuattn.quantize(rows)


def _configs(head_dim: int, formats: tuple[KvFormat, KvFormat], *, paged: bool) -> dict[str, _plan.TiledPrefillConfig]:
    shipped = _plan.tiled_prefill_config(_plan.Dtype.BF16, (head_dim, head_dim), *formats, paged=paged)
    configs = {"shipped": shipped}
    if formats == (_RAW, _RAW):
        return configs
    for consumers, tile_kv, stages, registers in _TILES[head_dim]:
        if paged and tile_kv in _DENSE_ONLY:
            continue
        for first in (False, True):
            config = replace(
                shipped, consumers=consumers, tile_kv=tile_kv, num_stages=stages, producer_registers=registers,
                weigh_first=first,
            )  # fmt: skip
            if config != shipped:
                name = f"{64 * consumers} x {tile_kv} keys, {stages} stages, {registers} registers"
                configs[f"{name}{', weigh first' if first else ''}"] = config
    return configs


def main() -> None:
    """Print a line for each variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--head-dim", type=int, action="append", choices=tuple(_HEADS))
    parser.add_argument("--shipped", action="store_true", help="no other tiles")
    options = parser.parse_args()
    for head_dim, paged in product(options.head_dim or _HEADS, (False, True)):
        heads, kv_heads = _HEADS[head_dim]
        q, k, v = (_rows(n, of, head_dim, i) for i, (n, of) in enumerate(((_TOKENS, heads), *[(_KEYS, kv_heads)] * 2)))
        pages = cupy.arange(_KEYS // _PAGE, dtype=cupy.int32)[None]
        layout = {"page_table": pages, "kv_len": cupy.array([_KEYS], cupy.int32)} if paged else {}
        launches: dict[str, tuple[Callable[[], None], float]] = {}
        for formats in _FORMATS:
            case = Case((q, *(_cache(x, f, paged=paged) for x, f in zip((k, v), formats, strict=True))), layout)
            name = "/".join(f.value for f in formats)
            portable, want = case.portable()
            portable()
            launches[f"{name} prefill_mma"] = portable, 0.0
            configs = _configs(head_dim, formats, paged=paged)
            for choice, config in list(configs.items())[: 1 if options.shipped else None]:
                try:
                    launch, out = case.tiled(config)
                except cuattn.CompileError as error:
                    print(f"{name} {choice}: {str(error).splitlines()[0]}", flush=True)
                    continue
                launch()
                launches[f"{name} {choice}"] = launch, float(np.abs(last_rows(out) - last_rows(want)).max())
        flops = 4 * heads * head_dim * sum(range(_KEYS - _TOKENS + 1, _KEYS + 1))
        times = milliseconds_in_turn(
            {name: launch for name, (launch, _) in launches.items()}, options.rounds, _BATCH_MS
        )
        base = times["raw16/raw16 shipped"]
        for name, ms in times.items():
            line = f"{head_dim} {'paged' if paged else 'dense'} {flops / ms / 1e9:6.1f} TFLOP/s"
            print(f"{line} {base / ms:6.1%} difference {launches[name][1]:.1e}  {name}", flush=True)


if __name__ == "__main__":
    main()
