"""The product's kernels on the CPU harness, with the checks, plans and parameters of a GPU."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from simt import harness
from strategies import AppendProblem, PrefillProblem, Problem

from cuattn import Fp8Array, _append, _check, _jit, _merge, _plan, _prefill_params, _quantize, _segments, _tbq4, _tiled
from cuattn._plan import decode as decode_plans

H200 = _plan.DEVICES["sm_90a"]
# So few that a warp takes several rounds.
TWO_SMS = _plan.Device("two SMs", "sm_80", 2, 163 * 1024, 164 * 1024)


def build(config: _plan.Config, patches: Sequence[tuple[str, str, str]] = ()) -> harness.Module:
    """Build the kernel of a config for the CPU."""
    return harness.build(
        f"{config.kernel}.cu", prelude=_jit.prelude(config), kernels=[f"{config.kernel}_kernel"], patches=patches
    )


def decode_arrays(
    *arrays: np.ndarray,
    num_splits: int = 1,
    seed: int = 0,
    merge: bool = True,
    device: _plan.Device = H200,
    patches: Sequence[tuple[str, str, str]] = (),
    device_kv_len: np.ndarray | None = None,
    changes: Mapping[str, Any] | None = None,
    asks_ahead: bool = True,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Run decode.cu, and merge.cu if there are splits, on NumPy arrays; results start as NaN.

    `device_kv_len` is what the kernel reads as lengths, without the checks that lengths on the host get. `changes` are
    of the fields of every config of decode.cu. With `asks_ahead` calls count as long
    ones, which ask for keys ahead where their plans allow it.

    Returns
    -------
    out : array, shape (batch, seqlen_q, num_qo_heads, head_dim)
    lse : array, shape (batch, seqlen_q, num_qo_heads)
        Without `merge`: the parts in float32 with a leading axis of splits, and their states (m, l) for lse.
    """
    fixed, balance = "split_size" in options, options.get("balance", False)
    call = _check.decode(*arrays, num_splits=None if fixed or balance else num_splits, **options)
    found = tuple(
        replace(s, plan=replace(s.plan, config=replace(s.plan.config, **(changes or {}))))
        for s in _segments.segments(call, device)
    )
    out = np.full(call.q.shape, np.nan, call.q.dtype)
    lse = np.full(call.q.shape[:-1], np.nan, np.float32)
    shape, parts, states, shares = _segments.partial_shape(found), None, None, None
    if found[0].plan.balanced:
        shares = np.full((len(call.q), 2), -1, np.int32)
    if shape is not None:
        parts = np.full(shape, np.nan, np.float32)
        states = np.full((*shape[:-1], 2), np.nan, np.float32)
    sinks = None if call.sinks is None else call.sinks.astype(np.float32)
    lengths = call.kv_len if device_kv_len is None else device_kv_len
    planes = [x for cache in (call.k_cache, call.v_cache) for x in (cache.rows, cache.norms) if x is not None]
    readable = [call.q, *planes, *(call.sink or ()), *(call.recent or ())]
    # Every call is a long one, or none is.
    with patch.object(decode_plans, "_AHEAD_BYTES", -1 if asks_ahead else math.inf):
        launches = list(
            _segments.launches(
                call, found, out=out, lse=lse, parts=parts, states=states, shares=shares, kv_len=lengths, sinks=sinks
            )
        )
    for plan, params in launches:
        build(plan.config, patches).launch(
            "decode_kernel", plan.grid, plan.block, (params,), smem=plan.config.smem_bytes, seed=seed, memory=readable
        )
    if parts is None:
        return out, lse
    if not merge:
        return parts, states
    merge_arrays(parts, states, out, lse, seed=seed, shares=shares, fixed=fixed)
    return out, lse


def merge_arrays(
    parts: np.ndarray,
    lse_parts: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    seed: int = 0,
    shares: np.ndarray | None = None,
    fixed: bool = False,
) -> None:
    """Run merge.cu on NumPy arrays."""
    config = _merge.config_of(parts, lse_parts, out, fixed=fixed)
    if config.parts is _plan.Parts.LSE:
        _check.merge(parts, lse_parts, out)
    rows = out.size // out.shape[-1]
    build(config).launch(
        "merge_kernel", (rows, 1, 1), (config.num_warps * _plan.WARP, 1, 1),
        (_merge.params_of(parts, lse_parts, out, lse, shares),), smem=config.smem_bytes, seed=seed,
    )  # fmt: skip


def decode(problem: Problem, **choices: Any) -> tuple[np.ndarray, np.ndarray]:
    """Run a problem; shapes as `cuattn.decode` would return them."""
    out, lse = decode_arrays(*problem.arrays(), **problem.options(), **choices)
    return (out[:, 0], lse[:, 0]) if problem.seqlen_q == 1 else (out, lse)


def prefill_arrays(
    *arrays: Any,
    seed: int = 0,
    device: _plan.Device = H200,
    patches: Sequence[tuple[str, str, str]] = (),
    device_lengths: Mapping[str, np.ndarray] | None = None,
    memory: Sequence[np.ndarray] | None = None,
    changes: Mapping[str, Any] | None = None,
    num_splits: int | None = None,
    merge: bool = True,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Run prefill_mma.cu, and merge.cu if there are splits, on NumPy arrays; results, if not in `out`, start as NaN.

    `device_lengths` are what the kernel reads as kv_len or cu_seqlens, without the checks that lengths on the host get.
    `memory` is what it may read instead of all of q, k and v. `changes` are of fields of its config.

    Returns
    -------
    out, lse : array
        Shapes as `cuattn.prefill` would return them. Without `merge`: the parts in float32 with a leading axis of
        splits, and their states (m, l).
    """
    call = _check.prefill(*arrays, **options)
    plan = _plan.prefill_plan(call.problem, device, num_splits)
    plan = replace(plan, config=replace(plan.config, **(changes or {})))
    out = np.full(call.out_shape, np.nan, call.q.dtype) if call.out is None else call.out
    lse = np.full(call.out_shape[:-1], np.nan, np.float32)
    lengths = {name: getattr(call, name) for name in ("kv_len", "cu_seqlens_q", "cu_seqlens_k")}
    sinks = None if call.sinks is None else call.sinks.astype(np.float32)
    parts = states = None
    if plan.num_splits > 1:
        parts = np.full(plan.out_partial_shape, np.nan, np.float32)
        states = np.full((*parts.shape[:-1], 2), np.nan, np.float32)
    params = _prefill_params.params_of(
        call, plan, out=out, lse=lse, parts=parts, states=states, sinks=sinks, **(lengths | dict(device_lengths or {}))
    )
    if out.size:
        planes = [x for cache in (call.k, call.v) for x in (cache.rows, cache.norms) if x is not None]
        build(plan.config, patches).launch(
            "prefill_mma_kernel", plan.grid, plan.block, (params,), smem=plan.config.smem_bytes, seed=seed,
            memory=[call.q, *planes] if memory is None else memory,
        )  # fmt: skip
        if parts is not None and merge:
            merge_arrays(parts, states, out, lse, seed=seed)
    if not merge:
        return parts, states
    return (out[0], lse[0]) if call.ragged else (out, lse)


def tensor_map(tiles: _tiled.TensorTiles) -> np.void:
    """Encode a tensor map for the harness; any of its builds can."""
    module = build(_plan.merge_config(_plan.Dtype.FP16, _plan.Dtype.FP16, 64, _plan.Parts.LSE, 1))
    return np.frombuffer(module.tensor_map_of(tiles.pointer, tiles.shape, tiles.strides, tiles.box, 128), "V128")[0]


def tiled_prefill_arrays(
    *arrays: np.ndarray,
    seed: int = 0,
    patches: Sequence[tuple[str, str, str]] = (),
    changes: Mapping[str, Any] | None = None,
    num_ctas: int = 2,
    device_lengths: Mapping[str, np.ndarray] | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Run prefill_sm90.cu on NumPy arrays, whatever the plan would choose; results, if not in `out`, start as NaN.

    `changes` are of fields of its config. `num_ctas` share the work. `device_lengths` are what the kernel reads
    as kv_len or cu_seqlens, without the checks that lengths on the host get.

    Returns
    -------
    out, lse : array
        Shapes as `cuattn.prefill` would return them.
    """
    call = _check.prefill(*arrays, **options)
    if call.beyond_tiles:
        raise ValueError(call.beyond_tiles)
    config = replace(_plan.tiled_config_of(call.problem), **(changes or {}))
    plan = _plan.TiledPrefillPlan(call.problem, replace(H200, num_sms=num_ctas), config)
    out = np.full(call.out_shape, np.nan, call.q.dtype) if call.out is None else call.out
    lse = np.full(call.out_shape[:-1], np.nan, np.float32)
    module = build(config, patches)
    lengths = {name: getattr(call, name) for name in ("kv_len", "cu_seqlens_q", "cu_seqlens_k")}
    lengths |= dict(device_lengths or {})
    sinks = None if call.sinks is None else call.sinks.astype(np.float32)
    claimed = np.zeros(1, np.int32) if plan.counts_items else None
    params = _prefill_params.tiled_params_of(
        call, plan, out=out, lse=lse, items_claimed=claimed, sinks=sinks, encode=tensor_map, **lengths
    )
    module.launch(
        "prefill_sm90_kernel", plan.grid, plan.block, (params,), smem=config.smem_bytes, seed=seed,
        memory=[call.q, *(x for cache in (call.k, call.v) for x in (cache.rows, cache.norms) if x is not None)],
    )  # fmt: skip
    return (out[0], lse[0]) if call.ragged else (out, lse)


def tiled_prefill(problem: PrefillProblem, **choices: Any) -> tuple[np.ndarray, np.ndarray]:
    """Run a problem; shapes as `cuattn.prefill` would return them."""
    return tiled_prefill_arrays(*problem.arrays(), **problem.options(), **choices)


def prefill(problem: PrefillProblem, **choices: Any) -> tuple[np.ndarray, np.ndarray]:
    """Run a problem; shapes as `cuattn.prefill` would return them."""
    return prefill_arrays(*problem.arrays(), **problem.options(), **choices)


def config_of(rows: np.ndarray, **choices: bool) -> _plan.QuantizeConfig:
    """Config of quantize.cu or dequantize.cu."""
    return _quantize.config_of(rows, TWO_SMS, **choices)


def _launch(rows: np.ndarray, params: np.ndarray, seed: int, **choices: bool) -> None:
    config = config_of(rows, **choices)
    threads = (config.num_warps * _plan.WARP, 1, 1)
    grid = config.grid(rows.size // config.block, TWO_SMS)
    build(config).launch(f"{config.kernel}_kernel", grid, threads, (params,), smem=config.smem_bytes, seed=seed)


def quantize(x: np.ndarray, mean: np.ndarray | None = None, seed: int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    """Run quantize.cu; codes start as 0xee bytes and norms as NaN, so that what is not written shows."""
    block = _tbq4.block_of(x.shape[-1])
    codes = np.full((*x.shape[:-1], x.shape[-1] // 2), 0xEE, np.uint8)
    norms = np.full((*x.shape[:-1], x.shape[-1] // block), np.nan, np.float16)
    clamped = np.zeros(1, np.int32)
    params = _quantize.quantize_params(x, codes, norms, clamped, mean)
    _launch(x, params, seed, encode=True, with_mean=mean is not None)
    return codes, norms, int(clamped[0])


def dequantize(
    codes: np.ndarray, norms: np.ndarray, dtype: np.dtype, mean: np.ndarray | None = None, seed: int = 0
) -> np.ndarray:
    """Run dequantize.cu; the result starts as NaN."""
    out = np.full((*codes.shape[:-1], 2 * codes.shape[-1]), np.nan, dtype)
    params = _quantize.dequantize_params(codes, norms, out, mean)
    _launch(out, params, seed, encode=False, with_mean=mean is not None)
    return out


def quantize_fp8(x: np.ndarray, scale: Any, seed: int = 0) -> np.ndarray:
    """Run append.cu as `cuattn.quantize_fp8` does on a GPU; codes start as NaN."""
    target = Fp8Array(np.full(x.shape, 0xFF, np.uint8), scale)
    call = _append.encode_call(x, target, np.full)
    config = _append.append_config(call)
    grid, threads = (config.grid(call.num_rows, TWO_SMS)[0], 1, 1), (config.num_warps * _plan.WARP, 1, 1)
    params = _append.append_params(call, call.kv_len)
    build(config).launch("append_kernel", grid, threads, (params,), smem=config.smem_bytes, seed=seed)
    return target.codes


def append(
    problem: AppendProblem, seed: int = 0, patches: Sequence[tuple[str, str, str]] = ()
) -> dict[str, np.ndarray]:
    """Run append.cu on `problem.bases()`."""
    return append_arrays(problem, problem.bases(), seed, patches)


def append_arrays(
    problem: AppendProblem,
    bases: dict[str, np.ndarray],
    seed: int = 0,
    patches: Sequence[tuple[str, str, str]] = (),
) -> dict[str, np.ndarray]:
    """Run append.cu on arrays such as `problem.bases()`; lengths are those of a device, which are not checked."""
    (*arrays, kv_len), options = problem.arguments(bases)
    call = _check.append(*arrays, 0, **options)
    config = _append.append_config(call)
    params = _append.append_params(call, kv_len)
    grid, threads = config.grid(call.num_rows, TWO_SMS), (config.num_warps * _plan.WARP, 1, 1)
    build(config, patches).launch("append_kernel", grid, threads, (params,), smem=config.smem_bytes, seed=seed)
    return bases
