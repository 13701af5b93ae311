"""Checks of the arguments of `append`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuattn import _arrays, _plan, _tbq4
from cuattn._arrays import Array, as_array, dtype_name, is_gpu, place
from cuattn._cache import Cache
from cuattn._check.arguments import (
    CPU_DTYPES,
    GPU_DTYPES,
    KERNEL_DTYPES,
    listed,
    require_dtype,
    require_head_dim,
    require_one_place,
    require_rank,
    require_rows,
    require_shape,
    require_writable,
)
from cuattn._check.cache import arrays_of, taken
from cuattn._check.lengths import lengths_of, require_page_table, require_pages


@dataclass(frozen=True, slots=True)
class AppendSide:
    """What is written of K, or of V.

    Attributes
    ----------
    rows : array, shape (batch, seqlen_new, num_kv_heads, head_dim)
    cache : Cache
    clamped : array of one int32, or None
        What counts the norms too large for float16.
    sink : array, shape (batch, num_sink, num_kv_heads, head_dim), or None
    recent : array, shape (batch, num_recent, num_kv_heads, head_dim), or None
    given : array or Tbq4Array
        The cache as the caller has it.
    """

    rows: Array
    cache: Cache
    clamped: Array | None
    sink: Array | None
    recent: Array | None
    given: Any

    @property
    def target(self) -> Any:  # noqa: ANN401  an array or a Tbq4Array
        """What the reference writes to: a view of the caller's array, fp8 codes, or the `Tbq4Array` and its counter."""
        return self.cache.given if self.cache.norms is None else self.given


@dataclass(frozen=True, slots=True)
class AppendCall:
    """Checked arguments of `append`. Arrays are NumPy arrays or CuPy arrays, all in one place but `kv_len`.

    Attributes
    ----------
    k, v : AppendSide
    kv_len : array, shape (batch,), int32
        A NumPy array also where the others are on a GPU, if the caller had the lengths on the host.
    page_table : array, shape (batch, max_pages), int32, or None
        None: page b is all of sequence b.
    capacity : int
        Tokens that the caches hold of a sequence.
    """

    k: AppendSide
    v: AppendSide
    kv_len: Array
    page_table: Array | None
    capacity: int

    @property
    def num_rows(self) -> int:
        """Rows of K, and of V."""
        return math.prod(self.k.rows.shape[:-1])

    @property
    def dtype(self) -> str:
        """Dtype of the 16-bit arrays; that of the rows, or float16, where there are none."""
        sides = (self.k, self.v)
        raw = [s.cache.rows if s.cache.has_elements else None for s in sides]
        given = [x for x in (*raw, *(x for s in sides for x in (s.sink, s.recent))) if x is not None]
        name = dtype_name(given[0] if given else self.k.rows)
        return name if name in GPU_DTYPES else GPU_DTYPES[0]


def _new_rows(k_new: Array, v_new: Array) -> None:
    require_rank(
        "k_new", k_new, (3, 4), "(batch, num_kv_heads, head_dim) or (batch, seqlen_new, num_kv_heads, head_dim)"
    )
    require_dtype("k_new", k_new, KERNEL_DTYPES if is_gpu(k_new) else CPU_DTYPES)
    require_head_dim("k_new", k_new.shape[-1])
    require_shape("v_new", v_new, k_new.shape, "the shape of k_new")
    require_dtype("v_new", v_new, (dtype_name(k_new),), " (the dtype of k_new)")
    for name, rows in (("k_new", k_new), ("v_new", v_new)):
        require_rows(name, rows)
    if math.prod(k_new.shape[:-1]) > _plan.MAX_APPEND_ROWS:
        msg = f"k_new must have at most {_plan.MAX_APPEND_ROWS} rows, got shape {k_new.shape}"
        raise ValueError(msg)


def _cache(name: str, cache: Cache, k_new: Array, *, paged: bool) -> None:
    heads, head_dim = k_new.shape[-2:]
    leading = "(num_pages, page_size" if paged else "(batch, capacity"
    if cache.norms is not None:
        require_rank(f"{name}.codes", cache.rows, (4,), f"{leading}, num_kv_heads, head_dim / 2)")
        if head_dim not in _tbq4.HEAD_DIMS:
            msg = f"k_new has head_dim {head_dim}; supported for TBQ4, the format of {name}: {listed(_tbq4.HEAD_DIMS)}"
            raise ValueError(msg)
        require_rows(f"{name}.codes", cache.rows)
    elif cache.scale is not None:
        require_rank(f"{name}.codes", cache.rows, (4,), f"{leading}, num_kv_heads, head_dim)")
        require_rows(f"{name}.codes", cache.rows)
    else:
        require_rank(name, cache.rows, (4,), f"{leading}, num_kv_heads, head_dim)")
        require_dtype(name, cache.rows, GPU_DTYPES)
        require_rows(name, cache.rows)
    if cache.shape[2:] != (heads, head_dim):
        msg = f"{name} must have {heads} KV heads and head_dim {head_dim} as k_new, got shape {cache.shape}"
        raise ValueError(msg)
    for part, x in _written(name, cache).items():
        require_writable(part, x)


def _written(name: str, cache: Cache) -> dict[str, Array]:
    """Arrays of a cache that are written, by the names that messages use."""
    return {
        part: x
        for part, x in arrays_of(name, cache).items()
        if x is not None and x is not cache.mean and x is not cache.scale
    }


def _counter(name: str, given: Any, cache: Cache) -> Array | None:  # noqa: ANN401  an array or a Tbq4Array
    """Return what counts clamped norms, if it is an array in which they can be counted."""
    if cache.norms is None or isinstance(given.clamped, (int, np.integer)):
        return None
    counter = as_array(f"{name}.clamped", given.clamped)
    if dtype_name(counter) != "int32" or counter.size != 1 or place(counter) != place(cache.rows):
        return None
    require_writable(f"{name}.clamped", counter)
    return counter


def _pair(name: str, k: Array | None, v: Array | None, k_new: Array) -> None:
    """Check `k_sink` and `v_sink`, or `k_recent` and `v_recent`."""
    if (k is None) != (v is None):
        missing, given = (f"k_{name}", f"v_{name}") if k is None else (f"v_{name}", f"k_{name}")
        msg = f"{missing} must be an array where {given} is one, got None: both or neither"
        raise ValueError(msg)
    if k is None or v is None:
        return
    batch, heads, head_dim = k_new.shape[0], k_new.shape[-2], k_new.shape[-1]
    require_rank(f"k_{name}", k, (4,), f"(batch, num_{name}, num_kv_heads, head_dim)")
    require_shape(f"k_{name}", k, (batch, k.shape[1], heads, head_dim), "batch, heads and head_dim as in k_new")
    require_shape(f"v_{name}", v, k.shape, f"the shape of k_{name}")
    for side, x in (("k", k), ("v", v)):
        require_dtype(f"{side}_{name}", x, GPU_DTYPES)
        require_rows(f"{side}_{name}", x)
        require_writable(f"{side}_{name}", x)


def _require_apart(outputs: dict[str, Array]) -> None:
    """Refuse the same array for two outputs, the one mistake in sharing memory that is told from addresses alone."""
    seen: dict[int, str] = {}
    for name, x in outputs.items():
        if x.size and (other := seen.setdefault(_arrays.pointer(x), name)) != name:
            msg = f"{name} must not be the memory of {other}, got arrays that both begin at {_arrays.pointer(x):#x}"
            raise ValueError(msg)


def append(
    k_new: Array,
    v_new: Array,
    k_cache: Any,  # noqa: ANN401  an array or a Tbq4Array
    v_cache: Any,  # noqa: ANN401  an array or a Tbq4Array
    kv_len: object,
    *,
    page_table: Array | None = None,
    k_sink: Array | None = None,
    v_sink: Array | None = None,
    k_recent: Array | None = None,
    v_recent: Array | None = None,
) -> AppendCall:
    """Check the arguments of `append`; parameters and errors are documented there."""
    k_new, v_new = as_array("k_new", k_new), as_array("v_new", v_new)
    keys, values = taken("k_cache", k_cache), taken("v_cache", v_cache)
    k_sink, v_sink, k_recent, v_recent, page_table = (
        None if x is None else as_array(name, x)
        for name, x in (
            ("k_sink", k_sink), ("v_sink", v_sink), ("k_recent", k_recent), ("v_recent", v_recent),
            ("page_table", page_table),
        )
    )  # fmt: skip
    copies = {"k_sink": k_sink, "v_sink": v_sink, "k_recent": k_recent, "v_recent": v_recent}
    outputs = _written("k_cache", keys) | _written("v_cache", values)
    outputs |= {name: x for name, x in copies.items() if x is not None}
    require_one_place({"k_new": k_new, "v_new": v_new, **outputs, "page_table": page_table})
    _new_rows(k_new, v_new)
    batch, paged = k_new.shape[0], page_table is not None
    for name, cache in (("k_cache", keys), ("v_cache", values)):
        _cache(name, cache, k_new, paged=paged)
    if values.shape != keys.shape:
        msg = f"v_cache must have shape {keys.shape} (the shape of k_cache), got {values.shape}"
        raise ValueError(msg)
    if not paged and keys.num_pages != batch:
        msg = f"k_cache must have batch {batch} as k_new (it is dense: page_table is None), got shape {keys.shape}"
        raise ValueError(msg)
    _pair("sink", k_sink, v_sink, k_new)
    _pair("recent", k_recent, v_recent, k_new)
    halves = [(name, x) for name, x in outputs.items() if "." not in name]
    for name, x in halves[1:]:
        require_dtype(name, x, (dtype_name(halves[0][1]),), f" (the dtype of {halves[0][0]})")
    _require_apart(outputs)
    capacity = keys.page_size * (1 if page_table is None else page_table.shape[-1])
    if capacity > _plan.MAX_KV_LEN:
        msg = f"k_cache must hold at most {_plan.MAX_KV_LEN} tokens a sequence, got {capacity}"
        raise ValueError(msg)
    lengths = lengths_of(kv_len, batch, capacity, gpu=is_gpu(k_new), of="k_new")
    require_one_place({"k_new": k_new, "kv_len": lengths if is_gpu(lengths) else k_new})
    k_rows, v_rows = (x if x.ndim == 4 else x[:, None] for x in (k_new, v_new))  # noqa: PLR2004  with tokens
    if page_table is not None:
        require_page_table(page_table, batch, of="k_new")
        if not is_gpu(lengths):
            require_pages(page_table, lengths - k_rows.shape[1], lengths, keys.num_pages, keys.page_size)
    return AppendCall(
        k=AppendSide(k_rows, keys, _counter("k_cache", k_cache, keys), k_sink, k_recent, k_cache),
        v=AppendSide(v_rows, values, _counter("v_cache", v_cache, values), v_sink, v_recent, v_cache),
        kv_len=lengths,
        page_table=page_table,
        capacity=capacity,
    )
