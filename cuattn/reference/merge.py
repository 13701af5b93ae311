"""The online softmax: how partial results over disjoint sets of keys become one.

A partial result is (m, l, o): the largest score, the sum of ``exp(score - m)``, and that sum weighted with the
values. `update` adds keys to it, `finish` turns it into out and lse, and `merge` joins finished results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from cuattn.reference.attention import visible_keys

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class SoftmaxState:
    """Attention of some rows to the keys seen so far.

    Attributes
    ----------
    m : ndarray, shape (...)
        Largest score, -inf before the first visible key.
    l : ndarray, shape (...)
        Sum of ``exp(score - m)``.
    o : ndarray, shape (..., value_dim)
        Sum of ``exp(score - m) * value``.
    """

    m: Array
    l: Array  # noqa: E741  the name that the literature uses
    o: Array

    @classmethod
    def empty(cls, shape: tuple[int, ...], value_dim: int, dtype: npt.DTypeLike = np.float64) -> Self:
        """Return the state of rows that have seen no key."""
        return cls(np.full(shape, -np.inf, dtype), np.zeros(shape, dtype), np.zeros((*shape, value_dim), dtype))


def _base(m: Array) -> Array:
    """Return what to subtract from scores: `m`, but 0 where nothing is visible, as -inf - -inf is NaN."""
    return np.where(np.isneginf(m), np.zeros_like(m), m)


# Infinite and NaN scores, and values of either kind, give what IEEE arithmetic gives.
@np.errstate(invalid="ignore", over="ignore")
def update(state: SoftmaxState, scores: Array, v: Array) -> SoftmaxState:
    """Add keys to a state.

    Parameters
    ----------
    state : SoftmaxState, rows of shape (...)
    scores : ndarray, shape (..., num_keys)
        Scaled scores, -inf where a row does not see a key.
    v : ndarray, shape (..., num_keys, value_dim)
        Broadcast against `scores`. The value of a hidden key does not matter, NaN included.

    Returns
    -------
    SoftmaxState
    """
    m = np.maximum(state.m, scores.max(axis=-1, initial=-np.inf))
    rescale = np.exp(state.m - _base(m))
    weights = np.exp(scores - _base(m)[..., None])
    is_hidden = np.isneginf(scores)[..., None]
    products = np.where(is_hidden, np.zeros_like(v), weights[..., None] * v)
    return SoftmaxState(
        m, state.l * rescale + weights.sum(axis=-1), state.o * rescale[..., None] + products.sum(axis=-2)
    )


# log 0 is the lse of an empty row.
@np.errstate(invalid="ignore", divide="ignore")
def finish(state: SoftmaxState, sink: npt.ArrayLike | None = None) -> tuple[Array, Array]:
    """Turn a state into a result.

    Parameters
    ----------
    state : SoftmaxState, rows of shape (...)
    sink : ndarray, broadcast to (...), optional
        Score of one extra key whose value is zero; -inf is no sink.

    Returns
    -------
    out : ndarray, shape (..., value_dim)
        Zero where no key was visible.
    lse : ndarray, shape (...)
        -inf where there was neither key nor sink.
    """
    score = np.broadcast_to(np.asarray(-np.inf if sink is None else sink, state.m.dtype), state.m.shape)
    state = update(state, score[..., None], np.zeros((1, 1), state.o.dtype))
    return state.o / np.where(state.l == 0, np.ones_like(state.l), state.l)[..., None], state.m + np.log(state.l)


def online_softmax(
    q: Array,
    k: Array,
    v: Array,
    tiles: Sequence[tuple[int, int]],
    *,
    kv_len: npt.ArrayLike | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: npt.ArrayLike | None = None,
    softmax_scale: float | None = None,
    dtype: npt.DTypeLike = np.float64,
) -> tuple[Array, Array]:
    """Attend as `attention` does, but tile by tile: the rule that the kernels follow.

    Parameters
    ----------
    q, k, v : ndarray
        As in `attention`.
    tiles : sequence of (start, stop)
        Ranges of keys, in any order and of any size, that together hold every key once.
    kv_len, causal, window, softcap, sinks, softmax_scale, dtype
        As in `attention`.

    Returns
    -------
    out, lse : ndarray
        As in `attention`.
    """
    batch, seqlen_q, num_qo_heads, head_dim = q.shape
    value_dim = v.shape[-1]
    head = np.arange(num_qo_heads) // (num_qo_heads // k.shape[2])
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    lengths = np.broadcast_to(np.asarray(k.shape[1] if kv_len is None else kv_len), batch)
    out = np.zeros((batch, seqlen_q, num_qo_heads, value_dim), dtype)
    lse = np.zeros((batch, seqlen_q, num_qo_heads), dtype)
    for sequence, length in enumerate(lengths.tolist()):
        ranges = np.array([visible_keys(i, seqlen_q, length, causal=causal, window=window) for i in range(seqlen_q)])
        state = SoftmaxState.empty((num_qo_heads, seqlen_q), value_dim, dtype)
        for start, stop in tiles:
            # NaN in a key or an overflow of a score is the concern of the rows that see it.
            with np.errstate(invalid="ignore", over="ignore"):
                keys, values = (x[sequence, start:stop, head].astype(dtype) for x in (k, v))
                scores = np.einsum("ihd,hkd->hik", q[sequence].astype(dtype), keys) * scale
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
            key = np.arange(start, stop)
            visible = (key >= ranges[:, :1]) & (key < ranges[:, 1:])
            scores = np.where(visible, scores, np.asarray(-np.inf, dtype))
            state = update(state, scores, values[:, None])
        row_out, row_lse = finish(state, None if sinks is None else np.asarray(sinks)[:, None])
        out[sequence], lse[sequence] = row_out.swapaxes(0, 1), row_lse.T
    return out, lse


# Parts without keys have lse = -inf and weight exp(-inf) = 0; log 0 is the lse of a row that is empty in every part.
@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def merge(
    out_partial: Array, lse_partial: Array, *, out: Array | None = None, dtype: npt.DTypeLike = np.float64
) -> tuple[Array, Array]:
    """Merge attention over disjoint sets of keys into attention over their union.

    Parameters
    ----------
    out_partial : ndarray, shape (num_parts, ..., num_qo_heads, value_dim)
        Results over each set. Where `lse_partial` is -inf they do not matter, NaN included.
    lse_partial : ndarray, shape (num_parts, ..., num_qo_heads)
        Their natural-log sums of exponentials; a NaN stays visible.
    out : ndarray, shape of the result, optional
    dtype : dtype, default float64
        Of all arithmetic and, without `out`, of the results.

    Returns
    -------
    out : ndarray, shape (..., num_qo_heads, value_dim)
        Zero where every part is empty.
    lse : ndarray, shape (..., num_qo_heads)
        -inf where every part is empty.
    """
    parts, part_lse = out_partial.astype(dtype), lse_partial.astype(dtype)
    m = part_lse.max(axis=0, initial=-np.inf)
    weights = np.exp(part_lse - _base(m))
    total = weights.sum(axis=0)
    weighted = np.where(np.isneginf(part_lse)[..., None], np.zeros_like(parts), weights[..., None] * parts)
    result = weighted.sum(axis=0) / np.where(total == 0, np.ones_like(total), total)[..., None]
    lse = m + np.log(total)
    if out is not None:
        if out.shape != result.shape:
            raise ValueError(f"out must have shape {result.shape}, got {out.shape}")
        out[...] = result
        result = out
    return result, lse
