"""Attention in NumPy with the roundings of a GPU kernel: the yardstick of the error law."""

from collections.abc import Callable
from functools import reduce

import numpy as np
import numpy.typing as npt

from cuattn.reference.attention import decode_each, visible_keys
from cuattn.reference.merge import SoftmaxState
from cuattn.reference.products import scores, weighted_sums
from cuattn.reference.sequences import Array, Cache, Kept, Options, Part, Window, attend_each, chosen

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# Bounds memory, changes no result: queries of an attention that are taken at once.
QUERY_BLOCK = 64


def _base(m: Array) -> Array:
    return np.where(np.isneginf(m), 0, m)


def _attend_part(
    rows: Array, part: Part, kv_head: int, ranges: Array, *, options: Options, tree_of: Callable[[Array], Array]
) -> SoftmaxState:
    """Attend from query rows of one KV head to what they see of a part; scores in base-2 units."""
    start, stop = int(ranges[:, 0].min()), int(ranges[:, 1].max())
    k, v = part.of_head(kv_head, start, stop)
    keys = max(start, part.start) + np.arange(len(k))
    visible = (keys >= ranges[:, :1]) & (keys < ranges[:, 1:]) & tree_of(keys)
    if options.tree_mask is not None and not part.has_finite_values:
        # Keys that the tree hides from a single query, whose values count no more than others that are hidden.
        seen = np.asarray(visible.any(axis=0))
        k, v, visible = chosen(k, seen), chosen(v, seen), visible[:, seen]
    scale = options.scale(rows.shape[-1])
    x = scores(rows, k, expanded=options.expanded)
    if options.softcap is None:
        x = x * np.float32(scale * LOG2_E)
    else:
        x = np.float32(options.softcap * LOG2_E) * np.tanh(x * np.float32(scale / options.softcap))
    x = np.where(visible, x, np.float32(-np.inf))
    m = x.max(axis=1, initial=-np.inf)
    weights = np.exp2(x - _base(m)[:, None])
    out = weighted_sums(weights, v, rows.dtype, expanded=options.expanded)
    return SoftmaxState(m, weights.sum(axis=1, dtype=np.float32), out)


def _join(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """Merge two states as partial results of splits are merged."""
    m = np.maximum(a.m, b.m)
    weights = np.exp2(a.m - _base(m)), np.exp2(b.m - _base(m))
    total, sums = (
        x * weights[0].reshape(shape) + y * weights[1].reshape(shape)
        for x, y, shape in ((a.l, b.l, (-1,)), (a.o, b.o, (-1, 1)))
    )
    return SoftmaxState(m, total, sums)


# As in `_attend_exactly`; float32 and 16-bit results may also overflow to infinity, as they do on a GPU.
@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def attend_rounded(q: Array, parts: list[Part], options: Options) -> tuple[Array, Array]:
    """Attend as `_attend_exactly` does, rounding where a kernel rounds: to each part by itself, then all together."""
    seqlen_q, num_qo_heads, head_dim = q.shape
    kv_len = max(part.stop for part in parts)
    num_kv_heads, value_dim = parts[0].value_shape
    group = num_qo_heads // num_kv_heads
    sinks = options.sink_of_each_head(num_qo_heads, np.float32) * np.float32(LOG2_E)
    out = np.zeros((seqlen_q, num_qo_heads, value_dim), q.dtype)
    lse = np.full((seqlen_q, num_qo_heads), -np.inf, np.float32)
    # One query at a time has no hidden keys in its range, so that no hidden value is multiplied by zero.
    step = QUERY_BLOCK if all(part.has_finite_values for part in parts) else 1
    for first in range(0, seqlen_q, step):
        queries = range(first, min(first + step, seqlen_q))
        ranges = np.repeat(
            [visible_keys(i, seqlen_q, kv_len, causal=options.causal, window=options.window) for i in queries],
            group,
            axis=0,
        )

        def tree_of(keys: Array, queries: range = queries) -> Array:
            return np.repeat(options.tree_of(queries, keys, seqlen_q, kv_len), group, axis=0)

        for kv_head in range(num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            rows = q[first : first + step, heads].reshape(-1, head_dim)
            state = reduce(
                _join, (_attend_part(rows, part, kv_head, ranges, options=options, tree_of=tree_of) for part in parts)
            )
            sink = np.tile(sinks[heads], len(queries))
            with_sink = np.maximum(state.m, sink)
            base = _base(with_sink)
            rescale = np.exp2(state.m - base)
            total = state.l * rescale + np.exp2(sink - base)
            row_out = state.o * (rescale / np.where(total == 0, 1, total))[:, None]
            row_lse = np.float32(LN_2) * (with_sink + np.log2(total))
            out[first : first + step, heads] = row_out.reshape(len(queries), group, value_dim).astype(q.dtype)
            lse[first : first + step, heads] = row_lse.reshape(len(queries), group)
    return out, lse


def attention_same_precision(
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
) -> tuple[Array, Array]:
    """Attend as `attention` and `prefill` do, rounding where a kernel rounds; the yardstick of the error law.

    Scores and the product with v are sums as `tensor_core`, or for float32 `products_of_floats`, makes them. Scaling,
    softcap, maximum, base-2 exponentials and their sum are float32. The weights are rounded to the dtype of `q` for the
    second product only, and the quotient is rounded to that dtype. The sink joins after the last key. Rows in TBQ4 are
    multiplied in the rotated domain, with levels in float16 and norms in float32; see `scores` and `weighted_sums` of
    `cuattn.reference.products`.

    Parameters
    ----------
    q, k, v : ndarray, float16, bfloat16 or float32
        Shapes as in `prefill`; k and v may be rows in TBQ4 beside q in 16 bits.
    causal, window, softcap, sinks, softmax_scale, cu_seqlens_q, cu_seqlens_k, kv_len, page_table
        As in `prefill`.

    Returns
    -------
    out : ndarray, dtype of `q`
        Shape as in `prefill`.
    lse : ndarray, float32
        Shape as in `prefill`.
    """
    options = Options(causal, window, softcap, sinks, softmax_scale, dtype=q.dtype, rounded=True, expanded=True)
    return attend_each(
        attend_rounded,
        q,
        k,
        v,
        options,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        kv_len=kv_len,
        page_table=page_table,
    )


def decode_same_precision(
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
    num_splits: int | None = None,  # noqa: ARG001  the same arguments as `decode`
    k_sink: Array | None = None,
    v_sink: Array | None = None,
    k_recent: Array | None = None,
    v_recent: Array | None = None,
    return_lse: bool = False,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """Attend as `decode` does, rounding as `attention_same_precision` does.

    The caches, the first tokens and the recent tokens give a partial result each, which are merged in this order in
    float32.

    Parameters
    ----------
    q, k_cache, v_cache : ndarray, float16, bfloat16 or float32
        Shapes as in `decode`; the caches may be rows in TBQ4 or fp8 beside q in 16 bits.
    kv_len, page_table, causal, window, tree_mask, softcap, sinks, softmax_scale, num_splits, k_sink, v_sink, \
k_recent, v_recent, return_lse, out
        As in `decode`.

    Returns
    -------
    out : ndarray, dtype of `q`
        Shape as in `decode`.
    lse : ndarray, float32
        Shape as in `decode`. Only if `return_lse`.
    """
    options = Options(
        causal, window, softcap, sinks, softmax_scale, dtype=q.dtype, rounded=True, tree_mask=tree_mask
    )  # fmt: skip
    return decode_each(
        attend_rounded,
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
