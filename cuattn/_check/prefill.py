"""Checks of the arguments of `prefill`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cuattn import _plan, _tiled
from cuattn._arrays import Array, as_array, dtype_name, is_gpu
from cuattn._cache import Cache
from cuattn._check import cache as check_cache
from cuattn._check.arguments import (
    flag,
    require_head_dim,
    require_one_place,
    require_out,
    require_rank,
    require_rows,
    require_sinks,
    scale_and_cap,
    window_of,
)
from cuattn._check.lengths import cu_seqlens_of, lengths_of, require_page_table, require_pages

# Rows of q (tokens times heads), blocks of a grid and key positions are int32 in the kernel, with room for a tile past
# the end and for position - window.
_MAX_ROWS = 2**30
# Bytes from a token of K or V to the next; int32 in the kernel.
_TOKEN_STRIDES = (-(2**31), 2**31 - 1)
_DENSE_AXES = 4
_RAGGED_AXES = 3


@dataclass(frozen=True, slots=True)
class PrefillCall:
    """Checked arguments of `prefill`. Arrays are NumPy arrays or CuPy arrays, all in one place but the lengths.

    Attributes
    ----------
    q : array, shape (batch, seqlen_q, num_qo_heads, head_dim), or (1, total_q, num_qo_heads, head_dim)
        The latter if `ragged`.
    k, v : Cache
        Rows (num_pages, page_size, num_kv_heads, dim), of which dense ones have a page a sequence, and ragged ones one
        page in all. Of one shape but for dim; the formats are independent.
    cu_seqlens_q, cu_seqlens_k : array, shape (batch + 1,), int32, or None
        Where sequences begin; None: q, or k and v, are not ragged. NumPy arrays also where the others are on a GPU, if
        the caller had them on the host.
    kv_len : array, shape (batch,), int32, or None
        None: ragged, or all that k and v hold. On the host or a GPU as `cu_seqlens_q`.
    page_table : array, shape (batch, max_pages), int32, or None
        None: page b is all of sequence b, or keys are ragged.
    causal, softcap, softmax_scale
        As in `prefill`; `softcap` 0 means none.
    window : tuple of int
        Left and right, -1 for unbounded; not yet narrowed by `causal`.
    sinks : array, shape (num_qo_heads,), float, or None
    out : array, shape of `q` with value_dim for head_dim, or None
        None if it must be allocated.
    """

    q: Array
    k: Cache
    v: Cache
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    kv_len: Array | None
    page_table: Array | None
    causal: bool
    window: tuple[int, int]
    softcap: float
    sinks: Array | None
    softmax_scale: float
    out: Array | None

    @property
    def ragged(self) -> bool:
        """Whether the sequences of q follow each other, in the caller's q without an axis of sequences."""
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        """Sequences."""
        return int(self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1)

    @property
    def max_pages(self) -> int:
        """Pages of a sequence, or of all ragged ones."""
        return 1 if self.page_table is None else int(self.page_table.shape[1])

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the result, with the axes of `q`."""
        return (*self.q.shape[:-1], self.v.head_dim)

    @property
    def problem(self) -> _plan.PrefillProblem:
        """Sizes for the plan; dtypes of the kernel only."""
        _, num_tokens, num_qo_heads, head_dim = self.q.shape
        left, right = self.window[0], 0 if self.causal else self.window[1]
        return _plan.PrefillProblem(
            dtype=_plan.Dtype(dtype_name(self.q)),
            k_format=self.k.kv_format,
            v_format=self.v.kv_format,
            batch=self.batch,
            num_tokens=num_tokens,
            num_qo_heads=num_qo_heads,
            num_kv_heads=self.k.num_kv_heads,
            head_dim=head_dim,
            value_dim=self.v.head_dim,
            max_kv_len=self.max_pages * self.k.page_size,
            ragged=self.ragged,
            page_size=0 if self.page_table is None else self.k.page_size,
            softcap=bool(self.softcap),
            visible_keys=None if min(left, right) < 0 else left + right + 1,
        )

    @property
    def beyond_tiles(self) -> str:
        """Say why `prefill_sm90.cu` does not have a call of these options and layouts; empty if it may."""
        reasons = (
            (self.softmax_scale <= 0, "softmax_scale is not positive"),
            (self.k.mean is not None or self.v.mean is not None, "k or v has a mean"),
        )
        arrays = {"q": self.q, "k": self.k.rows, "v": self.v.rows, "k.norms": self.k.norms, "v.norms": self.v.norms}
        strides = (_tiled.why_not(name, x) for name, x in arrays.items() if x is not None)
        return next((why for holds, why in reasons if holds), "") or next(filter(None, strides), "")


def _queries(q: Array, keys: Cache, values: Cache, *, ragged: bool, for_kernel: bool) -> None:
    of_ragged = "(total_q, num_qo_heads, head_dim) with cu_seqlens_q"
    if ragged:
        require_rank("q", q, (_RAGGED_AXES,), of_ragged)
    else:
        require_rank("q", q, (_DENSE_AXES,), f"(batch, seqlen_q, num_qo_heads, head_dim), or {of_ragged}")
    check_cache.dtype_of_queries(q, {"k": keys, "v": values}, for_kernel=for_kernel)
    require_head_dim("q", q.shape[-1])
    require_rows("q", q)
    if math.prod(q.shape[:-1]) > _MAX_ROWS:
        msg = f"q must have at most {_MAX_ROWS} rows (tokens times heads), got shape {q.shape}"
        raise ValueError(msg)


def _layout(*, ragged: bool, paged: bool, cu_seqlens_k: object) -> tuple[tuple[int, ...], str]:
    """Return the numbers of axes that k and v may have, and the names of the axes, for messages."""
    of_dense, of_ragged = "(batch, seqlen_k, num_kv_heads, {0})", "(total_k, num_kv_heads, {0})"
    if paged:
        return (_DENSE_AXES,), "(num_pages, page_size, num_kv_heads, {0}) with page_table"
    if cu_seqlens_k is not None:
        return (_RAGGED_AXES,), f"{of_ragged} with cu_seqlens_k"
    if ragged:
        return (_RAGGED_AXES, _DENSE_AXES), f"{of_ragged} or {of_dense}"
    return (_DENSE_AXES,), f"{of_dense}, or {of_ragged} with cu_seqlens_k"


def _require_token_strides(name: str, cache: Cache) -> None:
    """Refuse rows, in dtypes that a GPU takes, of which one begins more bytes after the one before than int32 has."""
    low, high = _TOKEN_STRIDES
    for plane, x in check_cache.arrays_of(name, replace(cache, mean=None)).items():
        if x is None or x.size == 0 or x.shape[-3] == 1 or dtype_name(x) == "float64":
            continue
        stride = x.strides[-3]
        if not low <= stride <= high:
            msg = f"{plane} must have tokens that are {low} to {high} bytes apart, got {stride} in strides {x.strides}"
            raise ValueError(msg)


def _keys_and_values(keys: Cache, values: Cache, q: Array, ranks: tuple[int, ...], axes: str) -> None:
    """Refuse keys and values that do not fit `q` or each other; the formats are independent."""
    head_dim = q.shape[-1]
    value_dims = [value for key, value in _plan.PREFILL_DIMS if key == head_dim]
    check_cache.one_cache("k", keys, q, axes.format("head_dim"), ranks=ranks)
    check_cache.one_cache("v", values, q, axes.format("value_dim"), ranks=ranks, value_dims=value_dims)
    if values.shape[:-1] != keys.shape[:-1]:
        wanted = (*keys.shape[:-1], values.head_dim)
        msg = f"v must have shape {wanted} (tokens and heads of k), got {values.shape}"
        raise ValueError(msg)
    _require_token_strides("k", keys)
    _require_token_strides("v", values)
    num_qo_heads, num_kv_heads = q.shape[-2], keys.shape[-2]
    if num_kv_heads == 0 or num_qo_heads == 0 or num_qo_heads % num_kv_heads:
        msg = (
            "q must have one or more query heads per KV head, a whole number, "
            f"got {num_qo_heads} query heads and {num_kv_heads} KV heads of k"
        )
        raise ValueError(msg)


class _Lengths(NamedTuple):
    """Where the sequences of a call lie."""

    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    kv_len: Array | None


def _require_one_source(keys: Cache, *, paged: bool, cu_seqlens_k: object, kv_len: object) -> None:
    """Refuse lengths that would have to be ignored, and pages without lengths."""
    if paged and cu_seqlens_k is not None:
        kind = type(cu_seqlens_k).__name__
        msg = f"cu_seqlens_k must be None with page_table (kv_len counts the keys in pages), got {kind}"
        raise ValueError(msg)
    if paged and kv_len is None:
        raise ValueError("kv_len must be given with page_table, got None")
    if keys.ndim == _RAGGED_AXES and kv_len is not None:
        given = "cu_seqlens_q" if cu_seqlens_k is None else "cu_seqlens_k"
        msg = f"kv_len must be None with ragged k ({given} has its lengths), got {type(kv_len).__name__}"
        raise ValueError(msg)


def _lengths(
    q: Array,
    keys: Cache,
    page_table: Array | None,
    *,
    cu_seqlens_q: object,
    cu_seqlens_k: object,
    kv_len: object,
    contents: bool,
) -> _Lengths:
    """Check lengths against q and k, whose numbers of axes are right, and against each other."""
    paged, ragged, ragged_keys = page_table is not None, cu_seqlens_q is not None, keys.ndim == _RAGGED_AXES
    _require_one_source(keys, paged=paged, cu_seqlens_k=cu_seqlens_k, kv_len=kv_len)
    gpu, begins_q, begins_k, lengths = is_gpu(q), None, None, None
    batch, of_batch = q.shape[0], "q"
    if ragged:
        begins_q = cu_seqlens_of("cu_seqlens_q", cu_seqlens_q, q.shape[0], of="q", gpu=gpu, contents=contents)
        batch, of_batch = begins_q.shape[0] - 1, "cu_seqlens_q"
    if page_table is not None:
        require_page_table(page_table, batch, of=of_batch)
    capacity = keys.shape[0] if ragged_keys else keys.page_size * (1 if page_table is None else page_table.shape[1])
    if capacity > _plan.MAX_KV_LEN:
        msg = f"k must hold at most {_plan.MAX_KV_LEN} tokens{'' if ragged_keys else ' a sequence'}, got {capacity}"
        raise ValueError(msg)
    if cu_seqlens_k is not None:
        begins_k = cu_seqlens_of(
            "cu_seqlens_k", cu_seqlens_k, capacity, of="k", gpu=gpu, batch=batch, contents=contents
        )
    elif ragged_keys:
        begins_k = begins_q
        if capacity != q.shape[0]:
            why = "cu_seqlens_k is None, so that cu_seqlens_q is for both"
            msg = f"k must have {q.shape[0]} tokens as q ({why}), got shape {keys.shape}"
            raise ValueError(msg)
    elif not paged and keys.num_pages != batch:
        msg = f"k must have batch {batch} as {of_batch} (it is dense: page_table is None), got shape {keys.shape}"
        raise ValueError(msg)
    if kv_len is not None:
        lengths = lengths_of(kv_len, batch, capacity, gpu=gpu, of="q", contents=contents, holder="k")
    found = _Lengths(begins_q, begins_k, lengths)
    require_one_place({"q": q, **{name: x for name, x in found._asdict().items() if x is not None and is_gpu(x)}})
    if contents and page_table is not None and lengths is not None and not is_gpu(lengths):
        require_pages(page_table, np.zeros_like(lengths), lengths, keys.num_pages, keys.page_size, of="k")
    return found


def _with_page(cache: Cache) -> Cache:
    """View ragged rows as those of one page."""
    return replace(cache, rows=cache.rows[None], norms=None if cache.norms is None else cache.norms[None])


def prefill(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: object = False,
    window: object = None,
    softcap: object = None,
    sinks: Array | None = None,
    softmax_scale: object = None,
    cu_seqlens_q: object = None,
    cu_seqlens_k: object = None,
    kv_len: object = None,
    page_table: Array | None = None,
    out: Array | None = None,
    contents: bool = True,
) -> PrefillCall:
    """Check the arguments of `prefill`; parameters and errors are documented there.

    Without `contents`, as for a plan, lengths and page-table entries may have any value, and `q` must have a dtype of
    the kernel wherever it is.
    """
    keys, values = check_cache.taken("k", k, fp8=False), check_cache.taken("v", v, fp8=False)
    arrays: dict[str, Array | None] = {
        "q": as_array("q", q),
        **check_cache.arrays_of("k", keys),
        **check_cache.arrays_of("v", values),
        **{
            name: None if x is None else as_array(name, x)
            for name, x in (("page_table", page_table), ("sinks", sinks), ("out", out))
        },
    }
    require_one_place(arrays)
    q, out, page_table, sinks = (arrays[name] for name in ("q", "out", "page_table", "sinks"))
    ragged = cu_seqlens_q is not None
    _queries(q, keys, values, ragged=ragged, for_kernel=is_gpu(q) or not contents)
    ranks, axes = _layout(ragged=ragged, paged=page_table is not None, cu_seqlens_k=cu_seqlens_k)
    _keys_and_values(keys, values, q, ranks, axes)
    lengths = _lengths(
        q, keys, page_table, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, kv_len=kv_len, contents=contents
    )
    num_qo_heads, head_dim = q.shape[-2:]
    if sinks is not None:
        require_sinks(sinks, num_qo_heads, dtype_name(q))
    if out is not None:
        of = "the shape of q" if values.head_dim == head_dim else "with value_dim of v, else the shape of q"
        require_out(out, (*q.shape[:-1], values.head_dim), (dtype_name(q),), of)
    scale, cap = scale_and_cap(softmax_scale, softcap, head_dim)
    if ragged:
        q, out = q[None], None if out is None else out[None]
    if keys.ndim == _RAGGED_AXES:
        keys, values = _with_page(keys), _with_page(values)
    return PrefillCall(
        q=q,
        k=keys,
        v=values,
        cu_seqlens_q=lengths.cu_seqlens_q,
        cu_seqlens_k=lengths.cu_seqlens_k,
        kv_len=lengths.kv_len,
        page_table=page_table,
        causal=flag("causal", causal),
        window=window_of(window),
        softcap=cap,
        sinks=sinks,
        softmax_scale=scale,
        out=out,
    )
