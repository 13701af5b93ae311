"""Attention in NumPy with the roundings of a GPU kernel: the yardstick of the error law."""

import numpy as np
import numpy.typing as npt

from cuattn.reference.attention import Array, Options, Window, attend_each, decode_each, visible_keys

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# Products that one tensor-core instruction adds for 16-bit inputs.
MMA_DEPTH = 16
_FLOAT32_BITS = 23
_GUARD_BITS = 2
# Of zero: below all products, above what would underflow a float64.
_NO_EXPONENT = -500
# Bound memory, change no result: rows of a product, and queries of an attention, that are taken at once.
_ROWS_AT_ONCE = 16
QUERY_BLOCK = 64


def truncate_to_float32(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Round toward zero, as the accumulators of Hopper's tensor cores do."""
    nearest = x.astype(np.float32)
    # Sign and magnitude: one less in the bits is one step toward zero.
    return (nearest.view(np.uint32) - (np.abs(nearest) > np.abs(x))).view(np.float32)


def _exponent(x: npt.NDArray[np.float64]) -> npt.NDArray[np.int16]:
    """Return floor(log2 |x|), and a very small number for zero."""
    return np.where(x == 0, _NO_EXPONENT, np.frexp(x)[1] - 1).astype(np.int16)


def tensor_core(a: Array, b: Array) -> npt.NDArray[np.float32]:
    """Multiply ``[rows, depth]`` by ``[depth, columns]`` of 16-bit values as ``mma.sync.m16n8k16`` does on an H200.

    An instruction adds 16 products and its float32 accumulator: all 17 are shifted to the largest exponent among them
    (a product counts with the sum of its factors' exponents), cut off 2 bits below a float32's last one, added, and the
    sum is cut off to float32. Found by comparison with the chip, whose results it gives bit for bit
    (``tests/gpu/test_tensor_core.py``); the truncation to one direction is what makes it matter.

    Parameters
    ----------
    a, b : ndarray, float16 or bfloat16

    Returns
    -------
    ndarray, float32
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    a_exponent, b_exponent = _exponent(a), _exponent(b)
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for row in range(0, a.shape[0], _ROWS_AT_ONCE):
        rows = slice(row, row + _ROWS_AT_ONCE)
        for start in range(0, a.shape[1], MMA_DEPTH):
            depth = slice(start, start + MMA_DEPTH)
            exponents = a_exponent[rows, depth, None] + b_exponent[None, depth]
            accumulator = total[rows].astype(np.float64)
            exponent = np.maximum(exponents.max(axis=1), _exponent(accumulator))
            unit = np.ldexp(1.0, np.maximum(exponent, _NO_EXPONENT) - (_FLOAT32_BITS + _GUARD_BITS))
            products = a[rows, depth, None] * b[None, depth]
            products /= unit[:, None]
            np.trunc(products, out=products)
            total[rows] = truncate_to_float32((products.sum(axis=1) + np.trunc(accumulator / unit)) * unit)
    return total


# As in `_attend_exactly`; float32 and 16-bit results may also overflow to infinity, as they do on a GPU.
@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def attend_rounded(q: Array, k: Array, v: Array, options: Options) -> tuple[Array, Array]:
    """Attend as `_attend_exactly` does, rounding where a kernel rounds."""
    seqlen_q, num_qo_heads, head_dim = q.shape
    kv_len, num_kv_heads, value_dim = v.shape
    group = num_qo_heads // num_kv_heads
    sinks = options.sink_of_each_head(num_qo_heads, np.float32) * np.float32(LOG2_E)
    out = np.zeros((seqlen_q, num_qo_heads, value_dim), q.dtype)
    lse = np.full((seqlen_q, num_qo_heads), -np.inf, np.float32)
    # One query at a time has no hidden keys in its range, so that no hidden value is multiplied by zero.
    step = QUERY_BLOCK if np.isfinite(v).all() else 1
    for first in range(0, seqlen_q, step):
        queries = range(first, min(first + step, seqlen_q))
        ranges = np.array(
            [visible_keys(i, seqlen_q, kv_len, causal=options.causal, window=options.window) for i in queries]
        )
        start, stop = ranges[:, 0].min(), ranges[:, 1].max()
        keys = np.arange(start, stop)
        visible = (keys >= ranges[:, :1]) & (keys < ranges[:, 1:])
        for kv_head in range(num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            rows = q[first : first + step, heads].reshape(-1, head_dim)
            scores = tensor_core(rows, k[start:stop, kv_head].T)
            scale = options.scale(head_dim)
            if options.softcap is None:
                scores = scores * np.float32(scale * LOG2_E)
            else:
                capped = np.tanh(scores * np.float32(scale / options.softcap))
                scores = np.float32(options.softcap * LOG2_E) * capped
            scores = np.where(np.repeat(visible, group, axis=0), scores, np.float32(-np.inf))
            largest = scores.max(axis=1, initial=-np.inf)
            weights = np.exp2(scores - np.where(np.isneginf(largest), 0, largest)[:, None])
            total = weights.sum(axis=1, dtype=np.float32)
            product = tensor_core(weights.astype(q.dtype), v[start:stop, kv_head])
            sink = np.tile(sinks[heads], len(queries))
            with_sink = np.maximum(largest, sink)
            base = np.where(np.isneginf(with_sink), 0, with_sink)
            rescale = np.exp2(largest - base)
            total = total * rescale + np.exp2(sink - base)
            row_out = product * (rescale / np.where(total == 0, 1, total))[:, None]
            row_lse = np.float32(LN_2) * (with_sink + np.log2(total))
            out[first : first + step, heads] = row_out.reshape(len(queries), group, value_dim).astype(q.dtype)
            lse[first : first + step, heads] = row_lse.reshape(len(queries), group)
    return out, lse


def attention_same_precision(
    q: Array,
    k: Array,
    v: Array,
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

    Scores and the product with v are sums as `tensor_core` makes them. Scaling, softcap,
    maximum, base-2 exponentials and their sum are float32. The weights are rounded to the dtype of `q` for the
    second product only, and the quotient is rounded to that dtype. The sink joins after the last key.

    Parameters
    ----------
    q, k, v : ndarray, float16 or bfloat16
        Shapes as in `prefill`.
    causal, window, softcap, sinks, softmax_scale, cu_seqlens_q, cu_seqlens_k, kv_len, page_table
        As in `prefill`.

    Returns
    -------
    out : ndarray, dtype of `q`
        Shape as in `prefill`.
    lse : ndarray, float32
        Shape as in `prefill`.
    """
    options = Options(causal, window, softcap, sinks, softmax_scale, dtype=q.dtype, rounded=True)
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
    k_cache: Array,
    v_cache: Array,
    kv_len: npt.ArrayLike,
    *,
    page_table: Array | None = None,
    causal: bool = True,
    window: Window = None,
    softcap: float | None = None,
    sinks: npt.ArrayLike | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,  # noqa: ARG001  the same arguments as `decode`
    return_lse: bool = False,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """Attend as `decode` does, rounding as `attention_same_precision` does.

    Parameters
    ----------
    q, k_cache, v_cache : ndarray, float16 or bfloat16
        Shapes as in `decode`.
    kv_len, page_table, causal, window, softcap, sinks, softmax_scale, num_splits, return_lse, out
        As in `decode`.

    Returns
    -------
    out : ndarray, dtype of `q`
        Shape as in `decode`.
    lse : ndarray, float32
        Shape as in `decode`. Only if `return_lse`.
    """
    options = Options(causal, window, softcap, sinks, softmax_scale, dtype=q.dtype, rounded=True)
    return decode_each(
        attend_rounded,
        q,
        k_cache,
        v_cache,
        options,
        kv_len=kv_len,
        page_table=page_table,
        return_lse=return_lse,
        out=out,
    )
