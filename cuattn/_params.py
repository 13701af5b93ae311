"""NumPy mirrors of the kernels' parameter structs, field for field as in ``cuda_src/common/params.cuh``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_POINTER = np.uint64
_I64 = np.int64
_I32 = np.int32
_U32 = np.uint32
_F32 = np.float32
_TENSOR_MAP = np.dtype("V128")
# Axes of arrays whose strides the kernels of attention take.
_AXES = {
    **dict.fromkeys(("q", "out"), ("batch", "token", "head")),
    **dict.fromkeys(("k", "v", "k_norms", "v_norms"), ("page", "token", "head")),
    "page_table": ("batch", "page"),
    "tree_mask": ("batch", "token", "key"),
}


def _struct(**fields: type[np.generic] | np.dtype[Any]) -> np.dtype[np.void]:
    return np.dtype(list(fields.items()), align=True)


def reciprocal(divisor: int) -> int:
    """Return that of ``common/divisor.cuh``, rounded down; 0 of 0, by which nothing is divided."""
    return 0xFFFFFFFF // divisor if divisor else 0


DECODE = _struct(
    q=_POINTER,
    k=_POINTER,
    v=_POINTER,
    k_norms=_POINTER,
    v_norms=_POINTER,
    k_mean=_POINTER,
    v_mean=_POINTER,
    out=_POINTER,
    lse=_POINTER,
    out_partial=_POINTER,
    state_partial=_POINTER,
    kv_len=_POINTER,
    page_table=_POINTER,
    sinks=_POINTER,
    shares=_POINTER,
    q_stride_batch=_I64,
    q_stride_token=_I64,
    q_stride_head=_I64,
    k_stride_page=_I64,
    k_stride_token=_I64,
    k_stride_head=_I64,
    k_stride_step=_I64,
    v_stride_page=_I64,
    v_stride_token=_I64,
    v_stride_head=_I64,
    v_stride_step=_I64,
    k_norms_stride_page=_I64,
    k_norms_stride_token=_I64,
    k_norms_stride_head=_I64,
    k_norms_stride_step=_I64,
    v_norms_stride_page=_I64,
    v_norms_stride_token=_I64,
    v_norms_stride_head=_I64,
    v_norms_stride_step=_I64,
    out_stride_batch=_I64,
    out_stride_token=_I64,
    out_stride_head=_I64,
    kv_len_stride=_I64,
    page_table_stride_batch=_I64,
    page_table_stride_page=_I64,
    seqlen_q=_I32,
    num_qo_heads=_I32,
    group=_I32,
    page_size=_I32,
    capacity=_I32,
    num_splits=_I32,
    first_key=_I32,
    last_keys=_I32,
    end_key=_I32,
    skip_last=_I32,
    window_left=_I32,
    window_right=_I32,
    softmax_scale_log2=_F32,
    softcap_log2=_F32,
    scale_over_softcap=_F32,
    split_size=_I32,
    batch=_I32,
    asks_ahead=_I32,
    page_reciprocal=_U32,
    reserved=_I32,
    tree_mask=_POINTER,
    tree_mask_stride_batch=_I64,
    tree_mask_stride_token=_I64,
    tree_mask_stride_key=_I64,
    k_scales=_POINTER,
    v_scales=_POINTER,
    k_scale=_F32,
    v_scale=_F32,
)

MERGE = _struct(
    out_partial=_POINTER,
    lse_partial=_POINTER,
    out=_POINTER,
    lse=_POINTER,
    shares=_POINTER,
    out_partial_stride_part=_I64,
    out_partial_stride_dim0=_I64,
    out_partial_stride_dim1=_I64,
    out_partial_stride_head=_I64,
    lse_partial_stride_part=_I64,
    lse_partial_stride_dim0=_I64,
    lse_partial_stride_dim1=_I64,
    lse_partial_stride_head=_I64,
    out_stride_dim0=_I64,
    out_stride_dim1=_I64,
    out_stride_head=_I64,
    num_parts=_I32,
    dim1=_I32,
    heads=_I32,
    reserved=_I32,
)

PREFILL = _struct(
    q=_POINTER,
    k=_POINTER,
    v=_POINTER,
    k_norms=_POINTER,
    v_norms=_POINTER,
    k_mean=_POINTER,
    v_mean=_POINTER,
    out=_POINTER,
    lse=_POINTER,
    out_partial=_POINTER,
    state_partial=_POINTER,
    cu_seqlens_q=_POINTER,
    cu_seqlens_k=_POINTER,
    kv_len=_POINTER,
    page_table=_POINTER,
    sinks=_POINTER,
    q_stride_batch=_I64,
    q_stride_token=_I64,
    q_stride_head=_I64,
    k_stride_page=_I64,
    k_stride_token=_I64,
    k_stride_head=_I64,
    v_stride_page=_I64,
    v_stride_token=_I64,
    v_stride_head=_I64,
    k_norms_stride_page=_I64,
    k_norms_stride_token=_I64,
    k_norms_stride_head=_I64,
    v_norms_stride_page=_I64,
    v_norms_stride_token=_I64,
    v_norms_stride_head=_I64,
    out_stride_batch=_I64,
    out_stride_token=_I64,
    out_stride_head=_I64,
    kv_len_stride=_I64,
    page_table_stride_batch=_I64,
    page_table_stride_page=_I64,
    batch=_I32,
    num_tokens=_I32,
    num_qo_heads=_I32,
    num_kv_heads=_I32,
    group=_I32,
    page_size=_I32,
    capacity=_I32,
    window_left=_I32,
    window_right=_I32,
    num_tiles=_I32,
    streams_at_once=_I32,
    num_splits=_I32,
    softmax_scale_log2=_F32,
    softcap_log2=_F32,
    scale_over_softcap=_F32,
    reserved=_I32,
)

TILED_PREFILL = _struct(
    q_map=_TENSOR_MAP,
    k_map=_TENSOR_MAP,
    v_map=_TENSOR_MAP,
    q=_POINTER,
    k=_POINTER,
    v=_POINTER,
    k_norms=_POINTER,
    v_norms=_POINTER,
    out=_POINTER,
    lse=_POINTER,
    cu_seqlens_q=_POINTER,
    cu_seqlens_k=_POINTER,
    kv_len=_POINTER,
    page_table=_POINTER,
    sinks=_POINTER,
    items_claimed=_POINTER,
    q_stride_batch=_I64,
    q_stride_token=_I64,
    q_stride_head=_I64,
    k_stride_page=_I64,
    k_stride_token=_I64,
    k_stride_head=_I64,
    v_stride_page=_I64,
    v_stride_token=_I64,
    v_stride_head=_I64,
    k_norms_stride_page=_I64,
    k_norms_stride_token=_I64,
    k_norms_stride_head=_I64,
    v_norms_stride_page=_I64,
    v_norms_stride_token=_I64,
    v_norms_stride_head=_I64,
    out_stride_batch=_I64,
    out_stride_token=_I64,
    out_stride_head=_I64,
    kv_len_stride=_I64,
    page_table_stride_batch=_I64,
    page_table_stride_page=_I64,
    batch=_I32,
    num_tokens=_I32,
    num_qo_heads=_I32,
    num_kv_heads=_I32,
    group=_I32,
    page_size=_I32,
    capacity=_I32,
    window_left=_I32,
    window_right=_I32,
    num_tiles=_I32,
    num_streams=_I32,
    streams_at_once=_I32,
    num_items=_I32,
    softmax_scale_log2=_F32,
    softcap_log2=_F32,
    scale_over_softcap=_F32,
    reserved=np.dtype((_I32, 12)),
)

QUANTIZE = _struct(
    x=_POINTER,
    mean=_POINTER,
    codes=_POINTER,
    norms=_POINTER,
    clamped=_POINTER,
    x_stride_dim0=_I64,
    x_stride_dim1=_I64,
    x_stride_head=_I64,
    num_rows=_I64,
    dim1=_I32,
    heads=_I32,
)

DEQUANTIZE = _struct(
    codes=_POINTER,
    norms=_POINTER,
    mean=_POINTER,
    out=_POINTER,
    codes_stride_dim0=_I64,
    codes_stride_dim1=_I64,
    codes_stride_head=_I64,
    norms_stride_dim0=_I64,
    norms_stride_dim1=_I64,
    norms_stride_head=_I64,
    num_rows=_I64,
    dim1=_I32,
    heads=_I32,
)

APPEND_SIDE = _struct(
    rows=_POINTER,
    cache=_POINTER,
    norms=_POINTER,
    mean=_POINTER,
    clamped=_POINTER,
    sink=_POINTER,
    recent=_POINTER,
    rows_stride_batch=_I64,
    rows_stride_token=_I64,
    rows_stride_head=_I64,
    cache_stride_page=_I64,
    cache_stride_token=_I64,
    cache_stride_head=_I64,
    norms_stride_page=_I64,
    norms_stride_token=_I64,
    norms_stride_head=_I64,
    sink_stride_batch=_I64,
    sink_stride_token=_I64,
    sink_stride_head=_I64,
    recent_stride_batch=_I64,
    recent_stride_token=_I64,
    recent_stride_head=_I64,
    scales=_POINTER,
    scale=_F32,
    reserved=_I32,
)

APPEND = _struct(
    k=APPEND_SIDE,
    v=APPEND_SIDE,
    kv_len=_POINTER,
    page_table=_POINTER,
    kv_len_stride=_I64,
    page_table_stride_batch=_I64,
    page_table_stride_page=_I64,
    num_rows=_I64,
    seqlen_new=_I32,
    num_kv_heads=_I32,
    page_size=_I32,
    capacity=_I32,
    num_sink=_I32,
    num_recent=_I32,
)


def strides(arrays: Mapping[str, Any]) -> dict[str, int]:
    """Return the strides, in bytes, that the kernels of attention take of these arrays; zeros where one is None."""
    values: dict[str, int] = {}
    for name, axes in _AXES.items():
        if name not in arrays:
            continue
        array = arrays[name]
        found = (0,) * len(axes) if array is None else array.strides
        values.update((f"{name}_stride_{axis}", stride) for axis, stride in zip(axes, found, strict=False))
    return values


def fill(struct: np.dtype[np.void], values: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return one parameter struct, as an array of one element; fields that `values` does not name are 0."""
    names = struct.names or ()
    if unknown := values.keys() - set(names):
        raise KeyError(f"no such parameter: {', '.join(sorted(unknown))}")
    return np.array([tuple(values.get(name, 0) for name in names)], struct)
