"""Parameters of the kernels of prefill, from the arrays of a call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from . import _arrays, _check, _params, _plan, _tiled
from ._arrays import Array
from ._plan.prefill_sm90 import GROUP_ROWS


def params_of(
    call: _check.PrefillCall,
    plan: _plan.PrefillPlan,
    *,
    out: Array,
    lse: Array | None,
    parts: Array | None,
    states: Array | None,
    kv_len: Array | None,
    cu_seqlens_q: Array | None,
    cu_seqlens_k: Array | None,
    sinks: Array | None,
) -> np.ndarray[Any, Any]:
    """Fill the parameters of the kernel from arrays in one place.

    Parameters
    ----------
    call : PrefillCall
    plan : PrefillPlan
        Of ``call.problem``.
    out : array, shape ``call.out_shape``
    lse : array, shape of `out` without value_dim, float32, contiguous, or None
    parts : array, shape ``plan.out_partial_shape``, float32, contiguous; or None for one split
    states : array, shape of `parts` with 2 for value_dim, float32, contiguous, or None
    kv_len, cu_seqlens_q, cu_seqlens_k : array, int32, or None
        Those of `call`, where the kernel can read them; the latter two contiguous.
    sinks : array, shape (num_qo_heads,), float32, contiguous, or None

    Returns
    -------
    numpy.ndarray, size 1, dtype `_params.PREFILL`
    """
    left, right = call.window
    log2_e = math.log2(math.e)
    k, v, problem = call.k, call.v, plan.problem
    values: dict[str, float] = {
        "batch": problem.batch,
        "num_tokens": problem.num_tokens,
        "num_qo_heads": problem.num_qo_heads,
        "num_kv_heads": problem.num_kv_heads,
        "group": problem.group,
        "page_size": k.page_size,
        "capacity": problem.max_kv_len,
        "window_left": left,
        "window_right": 0 if call.causal else right,  # causal is a window that ends at the query's own position
        "num_tiles": plan.num_tiles,
        "streams_at_once": plan.streams_at_once,
        "num_splits": plan.num_splits,
        "softmax_scale_log2": call.softmax_scale * log2_e,
        "softcap_log2": call.softcap * log2_e,
        "scale_over_softcap": call.softmax_scale / call.softcap if call.softcap else 0.0,
        "kv_len_stride": 0 if kv_len is None else kv_len.strides[0],
    }
    arrays = {
        "q": call.q, "k": k.rows, "v": v.rows, "k_norms": k.norms, "v_norms": v.norms, "k_mean": k.mean,
        "v_mean": v.mean, "out": out, "lse": lse, "out_partial": parts, "state_partial": states,
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "kv_len": kv_len, "page_table": call.page_table,
        "sinks": sinks,
    }  # fmt: skip
    values.update((name, _arrays.pointer(array)) for name, array in arrays.items())
    values |= _params.strides(arrays)
    # Ragged arrays have their first axis from a view, with whatever stride.
    if call.ragged:
        values |= dict.fromkeys(("q_stride_batch", "out_stride_batch"), 0)
    if cu_seqlens_k is not None:
        values |= {f"{name}_stride_page": 0 for name in ("k", "v", "k_norms", "v_norms")}
    return _params.fill(_params.PREFILL, values)


def tiled_params_of(
    call: _check.PrefillCall,
    plan: _plan.TiledPrefillPlan,
    *,
    out: Array,
    lse: Array | None,
    items_claimed: Array | None,
    kv_len: Array | None,
    cu_seqlens_q: Array | None,
    cu_seqlens_k: Array | None,
    sinks: Array | None,
    encode: Callable[[_tiled.TensorTiles], np.void],
) -> np.ndarray[Any, Any]:
    """Fill the parameters of `prefill_sm90.cu`; arrays as in `params_of`.

    Parameters
    ----------
    call : PrefillCall
    plan : TiledPrefillPlan
        Of ``call.problem``.
    out : array, shape ``call.out_shape``
    lse : array, shape of `out` without value_dim, float32, contiguous, or None
    items_claimed : array, shape (1,), int32, or None
        Zero when the kernel begins; if ``plan.counts_items``.
    encode : callable
        Makes a tensor map.

    Returns
    -------
    numpy.ndarray, size 1, dtype `_params.TILED_PREFILL`
    """
    problem, config = plan.problem, plan.config
    values: dict[str, Any] = {
        "batch": problem.batch,
        "num_tokens": problem.num_tokens,
        "num_qo_heads": problem.num_qo_heads,
        "num_kv_heads": problem.num_kv_heads,
        "group": problem.group,
        "page_size": call.k.page_size,
        "capacity": problem.max_kv_len,
        "window_left": call.window[0],
        "window_right": 0 if call.causal else call.window[1],
        "num_tiles": plan.num_tiles,
        "num_streams": plan.num_streams,
        "streams_at_once": plan.streams_at_once,
        "num_items": plan.num_items,
        "softmax_scale_log2": call.softmax_scale * math.log2(math.e),
        "softcap_log2": call.softcap * math.log2(math.e),
        "scale_over_softcap": call.softmax_scale / call.softcap if call.softcap else 0.0,
        "kv_len_stride": 0 if kv_len is None else kv_len.strides[0],
    }
    arrays = {
        "q": call.q, "k": call.k.rows, "v": call.v.rows, "k_norms": call.k.norms, "v_norms": call.v.norms, "out": out,
        "lse": lse, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "kv_len": kv_len,
        "page_table": call.page_table, "sinks": sinks, "items_claimed": items_claimed,
    }  # fmt: skip
    values.update((name, _arrays.pointer(array)) for name, array in arrays.items())
    values |= _params.strides(arrays)
    for name, tokens in (("q", GROUP_ROWS), ("k", config.tile_kv), ("v", config.tile_kv)):
        is_raw = arrays.get(f"{name}_norms") is None  # codes do not come by TMA
        values[f"{name}_map"] = encode(_tiled.tiles_of(arrays[name], tokens)) if is_raw else _tiled.NO_MAP
    return _params.fill(_params.TILED_PREFILL, values)
