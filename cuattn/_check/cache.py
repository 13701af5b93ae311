"""Checks of KV caches, and of rows that are kept beside them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cuattn import _plan, _tbq4
from cuattn._arrays import ACCEPTED, Array, as_array, contiguous, dtype_name, is_gpu
from cuattn._cache import Cache
from cuattn._check.arguments import (
    CPU_DTYPES,
    GPU_DTYPES,
    KERNEL_DTYPES,
    integer,
    listed,
    require_dtype,
    require_rank,
    require_rows,
    require_shape,
)
from cuattn._check.fp8 import fp8_parts
from cuattn._check.lengths import require_page_table, require_pages
from cuattn._check.tbq4 import planes

Pair = tuple[Array, Array]
# A kernel reads the norms of a row at once, eight bytes at most.
_NORM_READ = 8


def taken(name: str, x: Array, *, fp8: bool = True) -> Cache:
    """Take a cache argument of any format over; `fp8` is whether there is a kernel for rows in fp8."""
    if hasattr(x, "codes") and hasattr(x, "scale"):
        if not fp8:
            msg = f"{name} must be {ACCEPTED}, or a Tbq4Array, got {type(x).__name__}: fp8 is for decode and append"
            raise TypeError(msg)
        codes, scale = fp8_parts(x.codes, x.scale, prefix=f"{name}.")
        scale = scale if isinstance(scale, float) else contiguous(scale)
        return Cache(codes, kv_format=_plan.KvFormat.FP8, scale=scale)
    if not hasattr(x, "codes") or not hasattr(x, "norms") or not hasattr(x, "mean"):
        return Cache.of_elements(as_array(name, x, also=", a Tbq4Array or an Fp8Array" if fp8 else ", or a Tbq4Array"))
    codes, norms, mean = planes(x.codes, x.norms, x.mean, prefix=f"{name}.")
    return Cache(codes, norms, None if mean is None else contiguous(mean), _plan.KvFormat.TBQ4)


def arrays_of(name: str, cache: Cache) -> dict[str, Array | None]:
    """Arrays of a cache by the names that messages use."""
    if cache.scale is not None:
        return {f"{name}.codes": cache.rows} | (
            {} if isinstance(cache.scale, float) else {f"{name}.scale": cache.scale}
        )
    if cache.norms is None:
        return {name: cache.rows}
    return {f"{name}.codes": cache.rows, f"{name}.norms": cache.norms, f"{name}.mean": cache.mean}


def dtype_of_queries(q: Array, beside: dict[str, Cache], *, for_kernel: bool) -> None:
    """Refuse queries of a dtype that no kernel has beside such keys and values; the reference has more."""
    require_dtype("q", q, KERNEL_DTYPES if for_kernel else CPU_DTYPES)
    for name, cache in beside.items():
        if for_kernel and not cache.has_elements:
            require_dtype("q", q, GPU_DTYPES, f" with {name} in {'TBQ4' if cache.scale is None else 'fp8'}")


def one_cache(
    name: str,
    cache: Cache,
    q: Array,
    axes: str,
    *,
    ranks: tuple[int, ...] = (4,),
    value_dims: Sequence[int] | None = None,
) -> None:
    """Refuse keys or values that do not fit `q`; `value_dims` are what values may have, if not only its head_dim."""
    require_rank(name, cache, ranks, axes)
    head_dim = q.shape[-1]
    if cache.has_elements:
        require_dtype(name, cache.rows, (dtype_name(q),), " (the dtype of q)")
    elif cache.scale is None and head_dim not in _tbq4.HEAD_DIMS:
        msg = f"q has head_dim {head_dim}; supported with {name} in TBQ4: {listed(_tbq4.HEAD_DIMS)}"
        raise ValueError(msg)
    if cache.head_dim not in (value_dims or (head_dim,)):
        wanted = f"head_dim {head_dim} as q"
        if value_dims:
            wanted = f"value_dim {' or '.join(map(str, value_dims))}, for head_dim {head_dim} of q"
        msg = f"{name} must have {wanted}, got {cache.head_dim} in shape {cache.shape}"
        raise ValueError(msg)
    require_rows(name if cache.has_elements else f"{name}.codes", cache.rows)
    if cache.norms is not None:
        require_rows(f"{name}.norms", cache.norms, min(_NORM_READ, cache.norms.shape[-1] * _tbq4.NORM_BYTES))


def caches(k_cache: Cache, v_cache: Cache, q: Array, *, paged: bool) -> None:
    """Refuse caches that do not fit `q` or each other; the formats are independent."""
    batch, num_qo_heads = q.shape[0], q.shape[-2]
    leading = "(num_pages, page_size" if paged else "(batch, capacity"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        one_cache(name, cache, q, f"{leading}, num_kv_heads, head_dim)")
    if v_cache.shape != k_cache.shape:
        msg = f"v_cache must have shape {k_cache.shape} (the shape of k_cache), got {v_cache.shape}"
        raise ValueError(msg)
    num_kv_heads = k_cache.num_kv_heads
    if num_kv_heads == 0 or num_qo_heads % num_kv_heads or not 1 <= num_qo_heads // num_kv_heads <= _plan.MAX_GROUP:
        msg = (
            f"q must have 1 to {_plan.MAX_GROUP} query heads per KV head, a whole number, "
            f"got {num_qo_heads} query heads and {num_kv_heads} KV heads of k_cache"
        )
        raise ValueError(msg)
    if batch > _plan.MAX_GRID_YZ:
        msg = f"q must have a batch of at most {_plan.MAX_GRID_YZ}, the limit of a CUDA grid, got {batch}"
        raise ValueError(msg)
    if not paged and k_cache.num_pages != batch:
        msg = f"k_cache must have batch {batch} as q (it is dense: page_table is None), got shape {k_cache.shape}"
        raise ValueError(msg)


def kept(name: str, k: Array | None, v: Array | None, q: Array, num_kv_heads: int) -> Pair | None:
    """Check ``k_{name}`` and ``v_{name}``; None if there are no such rows."""
    if k is None and v is None:
        return None
    if k is None or v is None:
        given, missing = (f"v_{name}", f"k_{name}") if k is None else (f"k_{name}", f"v_{name}")
        msg = f"{missing} must be given with {given}, got None"
        raise ValueError(msg)
    axes = f"(batch, num_{name}, num_kv_heads, head_dim)"
    require_rank(f"k_{name}", k, (4,), axes)
    wanted = (q.shape[0], k.shape[1], num_kv_heads, q.shape[-1])
    require_shape(f"k_{name}", k, wanted, axes[1:-1])
    require_shape(f"v_{name}", v, wanted, f"the shape of k_{name}")
    for x, of in ((k, f"k_{name}"), (v, f"v_{name}")):
        require_dtype(of, x, (dtype_name(q),), " (the dtype of q)")
        require_rows(of, x)
    integer(f"num_{name}, the second axis of k_{name},", k.shape[1], 0, _plan.MAX_KV_LEN)
    return (k, v) if k.shape[1] else None


def page_table(
    page_table: Array, kv_len: Array, cache: Cache, *, sink: Pair | None, recent: Pair | None, contents: bool
) -> None:
    """Refuse a table of another form and, with `contents`, entries of used pages that are no pages of `cache`."""
    require_page_table(page_table, kv_len.shape[0], of="q")
    if not contents or is_gpu(kv_len):
        return
    begin = np.minimum(kv_len, 0 if sink is None else sink[0].shape[1])
    end = np.maximum(begin, kv_len - (0 if recent is None else recent[0].shape[1]))
    require_pages(page_table, begin, end, cache.num_pages, cache.page_size)
