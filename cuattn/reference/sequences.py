"""What each sequence of a call reads: rows of K and V, gathered from whatever holds them, and no other row."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from cuattn.reference.fp8 import dequantize_fp8
from cuattn.reference.tbq4 import dequantize

Array: TypeAlias = npt.NDArray[Any]
Window: TypeAlias = tuple[int | None, int | None] | None
# Rows in 16 bits or wider, or an object with the planes `codes` and `norms` and the `mean` of rows in TBQ4, or with
# the `codes` and the `scale` of rows in fp8.
Cache: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Options:
    """What turns scores into weights, the same for every sequence of a call.

    With `rounded`, as a kernel rounds; with `expanded`, rows in TBQ4 are float16 before they are multiplied, as in the
    tiles of prefill, while decode multiplies levels, and scores and weights by norms. `tree_mask` is that of `decode`,
    or of one sequence in a call of `Attend`.
    """

    causal: bool
    window: Window
    softcap: float | None
    sinks: npt.ArrayLike | None
    softmax_scale: float | None
    dtype: npt.DTypeLike = np.float64
    rounded: bool = False
    expanded: bool = False
    tree_mask: npt.ArrayLike | None = None

    @property
    def lse_dtype(self) -> npt.DTypeLike:
        """Dtype of lse: that of the result, but float32 where a kernel's roundings are wanted."""
        return np.float32 if self.rounded else self.dtype

    def scale(self, head_dim: int) -> float:
        """Return `softmax_scale`, by default ``head_dim ** -0.5``."""
        return float(head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale)

    def tree_of(self, queries: range, keys: Array, seqlen_q: int, kv_len: int) -> Array:
        """Return ``[queries, keys]``: whether the tree of a sequence lets a query see the key at each position."""
        column = keys - (kv_len - seqlen_q)
        if self.tree_mask is None:
            return np.ones((len(queries), len(keys)), bool)
        rows = np.asarray(self.tree_mask)[queries.start : queries.stop]
        seen: Array = (column < 0) | rows[:, np.clip(column, 0, seqlen_q - 1)]
        return seen

    def sink_of_each_head(self, num_qo_heads: int, dtype: npt.DTypeLike) -> Array:
        """Return one sink per query head, -inf for none."""
        sinks = -np.inf if self.sinks is None else self.sinks
        return np.broadcast_to(np.asarray(sinks).astype(dtype), num_qo_heads)


@dataclass(frozen=True, slots=True)
class Tbq4Rows:
    """Rows in TBQ4, of all KV heads or of one: the axis of heads is missing in all three arrays then.

    Attributes
    ----------
    codes : ndarray, shape (tokens, num_kv_heads, head_dim / 2), uint8
    norms : ndarray, shape (tokens, num_kv_heads, head_dim / block), float16
    mean : ndarray, shape (num_kv_heads, head_dim), or None
    """

    codes: Array
    norms: Array
    mean: Array | None

    def __len__(self) -> int:
        return len(self.codes)

    def decoded(self, dtype: npt.DTypeLike) -> Array:
        """Return the rows that these are, with their mean."""
        return dequantize(self.codes, self.norms, mean=self.mean, dtype=dtype)

    def of_head(self, tokens: slice, kv_head: int) -> "Tbq4Rows":
        """Return some rows of one head."""
        mean = None if self.mean is None else self.mean[kv_head]
        return Tbq4Rows(self.codes[tokens, kv_head], self.norms[tokens, kv_head], mean)

    @property
    def value_shape(self) -> tuple[int, int]:
        """Numbers of KV heads and of elements of a row."""
        return int(self.codes.shape[1]), 2 * int(self.codes.shape[2])

    @property
    def is_finite(self) -> bool:
        """Whether zero times any element is zero."""
        return bool(np.isfinite(self.norms).all())


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows in fp8, of all KV heads or of one: the axis of heads has one element in both arrays then.

    Attributes
    ----------
    codes : ndarray, shape (tokens, num_kv_heads, head_dim), uint8
    scale : ndarray, shape (num_kv_heads,), float32
    """

    codes: Array
    scale: Array

    def __len__(self) -> int:
        return len(self.codes)

    def decoded(self, dtype: npt.DTypeLike) -> Array:
        """Return the rows that these are."""
        return dequantize_fp8(self.codes, self.scale, dtype=dtype)

    def of_head(self, tokens: slice, kv_head: int) -> "Fp8Rows":
        """Return some rows of one head."""
        return Fp8Rows(self.codes[tokens, kv_head : kv_head + 1], self.scale[kv_head : kv_head + 1])

    @property
    def value_shape(self) -> tuple[int, int]:
        """Numbers of KV heads and of elements of a row."""
        return int(self.codes.shape[1]), int(self.codes.shape[2])

    @property
    def is_finite(self) -> bool:
        """Whether zero times any element is zero."""
        return bool(np.isfinite(self.decoded(np.float32)).all())


Rows: TypeAlias = Array | Tbq4Rows | Fp8Rows
_CODED = (Tbq4Rows, Fp8Rows)


def exact_rows(rows: Rows, dtype: npt.DTypeLike) -> Array:
    """Return rows of any format as numbers."""
    return rows.decoded(dtype) if isinstance(rows, _CODED) else rows.astype(dtype)


def _of_head(rows: Rows, tokens: slice, kv_head: int) -> Rows:
    return rows.of_head(tokens, kv_head) if isinstance(rows, _CODED) else rows[tokens, kv_head]


def chosen(rows: Rows, keys: Array) -> Rows:
    """Return some rows of one KV head."""
    if isinstance(rows, Tbq4Rows):
        return replace(rows, codes=rows.codes[keys], norms=rows.norms[keys])
    return replace(rows, codes=rows.codes[keys]) if isinstance(rows, Fp8Rows) else rows[keys]


@dataclass(frozen=True, slots=True)
class Part:
    """Keys and values of successive tokens of a sequence, the first of which stands at position `start`."""

    start: int
    k: Rows
    v: Rows

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.k)

    @property
    def value_shape(self) -> tuple[int, int]:
        """Numbers of KV heads and of elements of a value."""
        return self.v.value_shape if isinstance(self.v, _CODED) else (int(self.v.shape[1]), int(self.v.shape[2]))

    @property
    def has_finite_values(self) -> bool:
        """Whether zero times any value is zero."""
        return self.v.is_finite if isinstance(self.v, _CODED) else bool(np.isfinite(self.v).all())

    def of_head(self, kv_head: int, start: int, stop: int) -> tuple[Rows, Rows]:
        """Return keys and values ``[tokens, ...]`` of the positions from `start` to `stop` that are in here."""
        start = max(start, self.start)
        tokens = slice(start - self.start, max(start, min(stop, self.stop)) - self.start)
        return _of_head(self.k, tokens, kv_head), _of_head(self.v, tokens, kv_head)


@dataclass(frozen=True, slots=True)
class Kept:
    """Rows of the first tokens and of the newest, kept beside the caches and read instead of them.

    Attributes
    ----------
    sink : tuple of ndarray, shape (batch, num_sink, num_kv_heads, ...), optional
        Keys and values of the tokens at positions below num_sink.
    recent : tuple of ndarray, shape (batch, num_recent, num_kv_heads, ...), optional
        Rings: keys and values of the last num_recent tokens; that at position p is in slot ``p % num_recent``.
    """

    sink: tuple[Array, Array] | None = None
    recent: tuple[Array, Array] | None = None

    @classmethod
    def of(cls, k_sink: Array | None, v_sink: Array | None, k_recent: Array | None, v_recent: Array | None) -> Self:
        """Pair keys with values."""
        pairs = []
        for name, k, v in (("sink", k_sink, v_sink), ("recent", k_recent, v_recent)):
            if (k is None) != (v is None):
                raise ValueError(f"k_{name} and v_{name} must be given together")
            pairs.append(None if k is None or v is None or k.shape[1] == 0 else (k, v))
        return cls(*pairs)


# Called with q ``[seqlen_q, num_qo_heads, head_dim]`` and the parts of a sequence, which together are its tokens.
Attend: TypeAlias = Callable[[Array, list[Part], Options], tuple[Array, Array]]
_NOTHING_KEPT = Kept()


def _has_norms(x: Cache) -> bool:
    """Whether rows are given as the planes of TBQ4."""
    return hasattr(x, "norms")


def _rows_or_codes(x: Cache) -> Array:
    rows: Array = x.codes if hasattr(x, "codes") else x
    return rows


def _value_dim(x: Cache) -> int:
    return int(_rows_or_codes(x).shape[-1]) * (2 if _has_norms(x) else 1)


def _length(x: Cache, sequence: int, length: int | None, cu_seqlens: Array | None, page_table: Array | None) -> int:
    """Return the number of tokens of a sequence: all that `x` holds, or `length` if it holds as many."""
    x = _rows_or_codes(x)
    if page_table is not None:
        if length is None:
            raise ValueError("kv_len must be given with page_table")
        capacity = page_table.shape[1] * x.shape[1]
    elif cu_seqlens is not None:
        capacity = int(cu_seqlens[sequence + 1] - cu_seqlens[sequence])
    else:
        capacity = x.shape[1]
    if length is not None and not 0 <= length <= capacity:
        raise ValueError(f"kv_len must lie in 0 .. {capacity} for sequence {sequence}, got {length}")
    return capacity if length is None else length


def _gather(x: Array, sequence: int, tokens: range, cu_seqlens: Array | None, page_table: Array | None) -> Array:
    """Return some rows of one sequence as ``[tokens, num_kv_heads, ...]``, touching no other row."""
    if page_table is not None:
        size = max(1, x.shape[1])
        first = tokens.start // size
        pages = page_table[sequence, first : -(-tokens.stop // size) if tokens else first]
        return x[pages].reshape(-1, *x.shape[2:])[tokens.start - first * size : tokens.stop - first * size]
    if cu_seqlens is not None:
        return x[cu_seqlens[sequence] + tokens.start : cu_seqlens[sequence] + tokens.stop]
    rows: Array = x[sequence, tokens.start : tokens.stop]
    return rows


def _rows(x: Cache, sequence: int, tokens: range, cu_seqlens: Array | None, page_table: Array | None) -> Rows:
    if not hasattr(x, "codes"):
        return _gather(x, sequence, tokens, cu_seqlens, page_table)
    if not _has_norms(x):
        codes = _gather(x.codes, sequence, tokens, cu_seqlens, page_table)
        return Fp8Rows(codes, np.broadcast_to(np.asarray(x.scale, np.float32), codes.shape[1]))
    codes, norms = (_gather(plane, sequence, tokens, cu_seqlens, page_table) for plane in (x.codes, x.norms))
    return Tbq4Rows(codes, norms, x.mean)


def attend_each(
    attend: Attend,
    q: Array,
    k: Cache,
    v: Cache,
    options: Options,
    *,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    kv_len: npt.ArrayLike | None = None,
    page_table: Array | None = None,
    kept: Kept = _NOTHING_KEPT,
) -> tuple[Array, Array]:
    """Call `attend` on every sequence and put the results together in the layout of `q`."""
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    is_ragged = cu_seqlens_q is not None and page_table is None and _rows_or_codes(k).ndim == q.ndim
    if is_ragged and cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    lengths = [None] * batch if kv_len is None else [int(n) for n in np.broadcast_to(np.asarray(kv_len), batch)]
    out = np.zeros((*q.shape[:-1], _value_dim(v)), options.dtype)
    lse = np.full(q.shape[:-1], -np.inf, options.lse_dtype)
    for sequence in range(batch):
        rows: Any = sequence if cu_seqlens_q is None else slice(cu_seqlens_q[sequence], cu_seqlens_q[sequence + 1])
        length = _length(k, sequence, lengths[sequence], cu_seqlens_k, page_table)
        # The caches hold what lies between the first tokens and the newest.
        start = 0 if kept.sink is None else min(length, kept.sink[0].shape[1])
        stop = length if kept.recent is None else max(start, length - kept.recent[0].shape[1])
        tokens = range(start, stop)
        parts = [Part(start, *(_rows(x, sequence, tokens, cu_seqlens_k, page_table) for x in (k, v)))]
        if kept.sink is not None:
            parts.append(Part(0, *(x[sequence, :start] for x in kept.sink)))
        if kept.recent is not None:
            slots = np.arange(stop, length) % kept.recent[0].shape[1]
            parts.append(Part(stop, *(x[sequence, slots] for x in kept.recent)))
        tree_mask = None if options.tree_mask is None else np.asarray(options.tree_mask)[sequence] != 0
        out[rows], lse[rows] = attend(q[rows], parts, replace(options, tree_mask=tree_mask))
    return out, lse
