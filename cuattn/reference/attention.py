"""Exact attention in NumPy, in float64: the definition.

Every entry point cuts its arrays into sequences, gathers the rows that a sequence uses and no others, and calls
a function on each: `_attend_exactly` here, another with the roundings of a GPU kernel in `same_precision`.
"""

import numpy as np
import numpy.typing as npt

from cuattn.reference.sequences import Array, Attend, Cache, Kept, Options, Part, Window, attend_each, exact_rows


def visible_keys(query: int, seqlen_q: int, kv_len: int, *, causal: bool, window: Window) -> tuple[int, int]:
    """Return the range of keys that a query sees; a mask is never anything but a range.

    The queries stand at the end of the sequence (aligned bottom-right)::

        seqlen_q = 2, kv_len = 4    full     causal   window (1, 0)
        query 0 (position 2)        1 1 1 1  1 1 1 0  0 1 1 0
        query 1 (position 3)        1 1 1 1  1 1 1 1  0 0 1 1

    Parameters
    ----------
    query : int
        Index of the query among the `seqlen_q` of its sequence.
    seqlen_q, kv_len : int
        Queries and keys of the sequence.
    causal : bool
        Hide the keys after the query's own position.
    window : tuple of (int or None, int or None), optional
        Keys to keep left and right of the query's position, both ends included; None or -1 is unbounded.

    Returns
    -------
    start, stop : int
        Keys ``start <= key < stop`` are visible; ``start == stop`` if none is.
    """
    position = kv_len - seqlen_q + query
    left, right = (None, None) if window is None else window
    start, stop = 0, kv_len
    if causal:
        stop = min(stop, position + 1)
    if left is not None and left >= 0:
        start = max(start, position - left)
    if right is not None and right >= 0:
        stop = min(stop, position + right + 1)
    return start, max(start, stop)


# A sequence with infinite or NaN scores has the result that IEEE arithmetic gives; log 0 is an empty row.
@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def _attend_exactly(q: Array, parts: list[Part], options: Options) -> tuple[Array, Array]:
    """Attend within one sequence: to all of its tokens in order, whatever the format of their rows."""
    parts = sorted(parts, key=lambda part: part.start)
    k = np.concatenate([exact_rows(part.k, options.dtype) for part in parts])
    v = np.concatenate([exact_rows(part.v, options.dtype) for part in parts])
    seqlen_q, num_qo_heads, head_dim = q.shape
    kv_len, num_kv_heads, value_dim = v.shape
    group = num_qo_heads // num_kv_heads
    sinks = options.sink_of_each_head(num_qo_heads, options.dtype)
    out = np.zeros((seqlen_q, num_qo_heads, value_dim), options.dtype)
    lse = np.full((seqlen_q, num_qo_heads), -np.inf, options.dtype)
    for kv_head in range(num_kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        queries, keys, values = q[:, heads].astype(options.dtype), k[:, kv_head], v[:, kv_head]
        for query in range(seqlen_q):
            # A choice of what is visible, rather than a mask: zero times a hidden NaN would be NaN.
            start, stop = visible_keys(query, seqlen_q, kv_len, causal=options.causal, window=options.window)
            visible = np.arange(start, stop)
            visible = visible[options.tree_of(range(query, query + 1), visible, seqlen_q, kv_len)[0]]
            scores = queries[query] @ keys[visible].T * options.scale(head_dim)
            if options.softcap is not None:
                scores = options.softcap * np.tanh(scores / options.softcap)
            scores = np.concatenate([scores, sinks[heads, None]], axis=1)
            largest = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - np.where(np.isneginf(largest), 0, largest))
            total = weights.sum(axis=1, keepdims=True)
            # The sink is the last weight; its value is zero, so it stands in the total only.
            out[query, heads] = weights[:, :-1] @ values[visible] / np.where(total == 0, 1, total)
            lse[query, heads] = (largest + np.log(total))[:, 0]
    return out, lse


# Storing float64 in a 16-bit `out` may overflow to infinity, as a kernel's store does.
@np.errstate(over="ignore", invalid="ignore")
def _store(result: Array, out: Array | None) -> Array:
    """Write `result` to `out` if there is one, and return what holds it."""
    if out is None:
        return result
    if out.shape != result.shape:
        raise ValueError(f"out must have shape {result.shape}, got {out.shape}")
    out[...] = result
    return out


def attention(
    q: Array,
    k: Cache,
    v: Cache,
    *,
    kv_len: npt.ArrayLike | None = None,
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    sinks: npt.ArrayLike | None = None,
    softmax_scale: float | None = None,
    dtype: npt.DTypeLike = np.float64,
) -> tuple[Array, Array]:
    """Attend from every query of a dense batch to the keys that it sees.

    Computes ``softmax(softmax_scale * q @ k.T) @ v`` over the visible keys, see `visible_keys`. Query head ``h``
    reads KV head ``h // group``, where ``group = num_qo_heads // num_kv_heads``.

    Parameters
    ----------
    q : ndarray, shape (batch, seqlen_q, num_qo_heads, head_dim)
    k : ndarray, shape (batch, seqlen_k, num_kv_heads, head_dim)
    v : ndarray, shape (batch, seqlen_k, num_kv_heads, value_dim)
        `k` and `v` may be rows in TBQ4 instead, as in `decode`.
    kv_len : int or ndarray, shape (batch,), optional
        Valid keys per sequence; rows past it are never read. Default: all.
    causal : bool, default False
        Query i sees keys up to ``kv_len - seqlen_q + i``.
    window : tuple of (int or None, int or None), optional
        Keys to keep left and right of the query's position, both ends included; None or -1 is unbounded.
    softcap : float, optional
        Replace each scaled score s by ``softcap * tanh(s / softcap)``, before masks.
    sinks : ndarray, shape (num_qo_heads,), optional
        Score of one extra key per query head whose value is zero; -inf is no sink.
    softmax_scale : float, optional
        Default ``head_dim ** -0.5``.
    dtype : dtype, default float64
        Of all arithmetic and of the results.

    Returns
    -------
    out : ndarray, shape (batch, seqlen_q, num_qo_heads, value_dim)
        Zero where no key is visible.
    lse : ndarray, shape (batch, seqlen_q, num_qo_heads)
        Natural logarithm of the sum of exponentials of the scores, -inf where there is neither key nor sink.
    """
    options = Options(causal, window, softcap, sinks, softmax_scale, dtype)
    return attend_each(_attend_exactly, q, k, v, options, kv_len=kv_len)


def prefill(
    q: Array,
    k: Cache,
    v: Cache,
    *,
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    sinks: npt.ArrayLike | None = None,
    softmax_scale: float | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    kv_len: npt.ArrayLike | None = None,
    page_table: Array | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    dtype: npt.DTypeLike = np.float64,
) -> Array | tuple[Array, Array]:
    """Attend within whole sequences, dense, padded, ragged or from a paged cache.

    Parameters
    ----------
    q : ndarray, shape (batch, seqlen_q, num_qo_heads, head_dim) or (total_q, num_qo_heads, head_dim)
        Ragged with `cu_seqlens_q`.
    k, v : ndarray, shape (batch, seqlen_k, num_kv_heads, ...) or (total_k, num_kv_heads, ...) or \
(num_pages, page_size, num_kv_heads, ...)
        Dense, ragged with `cu_seqlens_k`, or paged with `page_table`; the last dimension is head_dim for k and
        value_dim for v. Each may be rows in TBQ4 instead, as in `decode`.
    causal, window, softcap, sinks, softmax_scale
        As in `attention`.
    cu_seqlens_q, cu_seqlens_k : ndarray, shape (batch + 1,), int32, optional
        Sequence b holds rows ``cu_seqlens[b]`` up to ``cu_seqlens[b + 1]``. Default for ragged k and v:
        `cu_seqlens_q`.
    kv_len : int or ndarray, shape (batch,), optional
        Valid keys per sequence; rows past it are never read. Default: all; needed with `page_table`.
    page_table : ndarray, shape (batch, max_pages), int32, optional
        Page ``page_table[b, i]`` holds keys ``i * page_size`` and following of sequence ``b``. Entries past
        ``kv_len`` are never read.
    return_lse : bool, default False
    out : ndarray, shape of the result, optional
    dtype : dtype, default float64
        Of all arithmetic and, without `out`, of the result.

    Returns
    -------
    out : ndarray, shape (batch, seqlen_q, num_qo_heads, value_dim) or (total_q, num_qo_heads, value_dim)
    lse : ndarray, shape (batch, seqlen_q, num_qo_heads) or (total_q, num_qo_heads)
        As in `attention`. Only if `return_lse`.
    """
    options = Options(causal, window, softcap, sinks, softmax_scale, dtype)
    result, lse = attend_each(
        _attend_exactly,
        q,
        k,
        v,
        options,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        kv_len=kv_len,
        page_table=page_table,
    )
    result = _store(result, out)
    return (result, lse) if return_lse else result


def decode_each(
    attend: Attend,
    q: Array,
    k_cache: Cache,
    v_cache: Cache,
    options: Options,
    *,
    kv_len: npt.ArrayLike,
    page_table: Array | None,
    kept: Kept,
    return_lse: bool,
    out: Array | None,
) -> Array | tuple[Array, Array]:
    """Call `attend` on the sequences of a decode, whose q may lack the axis of query tokens."""
    has_one_token = q.ndim == 3  # noqa: PLR2004  batch, heads, head_dim
    tokens = q[:, None] if has_one_token else q
    result, lse = attend_each(
        attend, tokens, k_cache, v_cache, options, kv_len=kv_len, page_table=page_table, kept=kept
    )
    if has_one_token:
        result, lse = result[:, 0], lse[:, 0]
    result = _store(result, out)
    return (result, lse) if return_lse else result


def decode(
    q: Array,
    k_cache: Cache,
    v_cache: Cache,
    kv_len: npt.ArrayLike,
    *,
    page_table: Array | None = None,
    causal: bool = True,
    window: Window = None,
    tree_mask: Array | None = None,
    softcap: float | None = None,
    sinks: npt.ArrayLike | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,  # noqa: ARG001  how a kernel cuts the keys is no part of the definition
    split_size: int | None = None,  # noqa: ARG001  likewise
    balance: bool = False,  # noqa: ARG001  likewise
    k_sink: Array | None = None,
    v_sink: Array | None = None,
    k_recent: Array | None = None,
    v_recent: Array | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    workspace: Array | None = None,  # noqa: ARG001  nothing is kept in parts
    dtype: npt.DTypeLike = np.float64,
) -> Array | tuple[Array, Array]:
    """Attend from the newest tokens of each sequence to its cached keys and values.

    Parameters
    ----------
    q : ndarray, shape (batch, num_qo_heads, head_dim) or (batch, seqlen_q, num_qo_heads, head_dim)
        The last token of each sequence, or its last `seqlen_q`; their keys and values are in the cache.
    k_cache, v_cache : ndarray, shape (batch, capacity, num_kv_heads, ...) or \
(num_pages, page_size, num_kv_heads, ...), or rows in TBQ4 or fp8
        Dense, or paged with `page_table`; the last dimension is head_dim for keys and value_dim for values. Each may be
        a `Tbq4Array` instead, or any object with its `codes`, `norms` and `mean`: the rows are those of `dequantize`,
        with the mean. Or an `Fp8Array`, or any object with its `codes` and `scale`.
    kv_len : int or ndarray, shape (batch,)
        Valid tokens per sequence, those of `q` included. Rows past it are never read.
    page_table : ndarray, shape (batch, max_pages), int32, optional
        Page ``page_table[b, i]`` holds tokens ``i * page_size`` and following of sequence ``b``. Entries past
        ``kv_len`` are never read.
    causal : bool, default True
        Query i of ``seqlen_q`` sees tokens up to ``kv_len - seqlen_q + i``.
    tree_mask : ndarray, shape (batch, seqlen_q, seqlen_q), optional
        Zero where query i does not see the token at position ``kv_len - seqlen_q + j``, which the other masks may hide,
        too.
    window, softcap, sinks, softmax_scale
        As in `attention`.
    num_splits, split_size, balance, workspace : optional
        Without effect on the result.
    k_sink, v_sink : ndarray, shape (batch, num_sink, num_kv_heads, ...), optional
        Rows of the tokens at positions below num_sink, read instead of the caches. Not to be confused with `sinks`.
    k_recent, v_recent : ndarray, shape (batch, num_recent, num_kv_heads, ...), optional
        Rows of the newest tokens, in rings: the token at position p, where ``p >= kv_len - num_recent`` and
        ``p >= num_sink``, has slot ``p % num_recent``. Slots of other tokens are never read.
    return_lse : bool, default False
    out : ndarray, shape of the result, optional
    dtype : dtype, default float64
        Of all arithmetic and, without `out`, of the result.

    Returns
    -------
    out : ndarray, shape of `q` with value_dim for head_dim
    lse : ndarray, shape of `q` without head_dim
        As in `attention`. Only if `return_lse`.
    """
    options = Options(causal, window, softcap, sinks, softmax_scale, dtype, tree_mask=tree_mask)
    return decode_each(
        _attend_exactly,
        q,
        k_cache,
        v_cache,
        options,
        kv_len=kv_len,
        page_table=page_table,
        kept=Kept.of(k_sink, v_sink, k_recent, v_recent),
        return_lse=return_lse,
        out=out,
    )
