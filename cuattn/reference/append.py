"""New tokens into KV caches, in NumPy: the definition of where each goes and what is stored."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cuattn.reference.fp8 import quantize_fp8
from cuattn.reference.tbq4 import quantize

Array: TypeAlias = npt.NDArray[Any]
# A 16-bit array, or what has codes, norms and a mean, as `cuattn.Tbq4Array`, or codes and a scale, as
# `cuattn.Fp8Array`.
Cache: TypeAlias = Any


def _write(cache: Cache, where: tuple[Any, ...], rows: Array) -> None:
    if isinstance(cache, np.ndarray):
        cache[where] = rows.astype(cache.dtype)
        return
    if not hasattr(cache, "norms"):
        cache.codes[where] = quantize_fp8(rows, scale=cache.scale).codes
        return
    encoded = quantize(rows, mean=cache.mean)
    cache.codes[where], cache.norms[where] = encoded.codes, encoded.norms
    clamped = cache.clamped
    if isinstance(clamped, np.ndarray) and clamped.dtype == np.int32 and clamped.size == 1:
        clamped[...] += encoded.clamped


def append(
    k_new: Array,
    v_new: Array,
    k_cache: Cache,
    v_cache: Cache,
    kv_len: npt.ArrayLike,
    *,
    page_table: Array | None = None,
    k_sink: Array | None = None,
    v_sink: Array | None = None,
    k_recent: Array | None = None,
    v_recent: Array | None = None,
) -> None:
    """Write the newest tokens of each sequence into caches, in place.

    Parameters
    ----------
    k_new, v_new : ndarray, shape (batch, num_kv_heads, head_dim) or (batch, seqlen_new, num_kv_heads, head_dim)
        Token i of sequence b goes to position ``kv_len[b] - seqlen_new + i``.
    k_cache, v_cache : ndarray, Tbq4Array or Fp8Array, shape (batch, capacity, num_kv_heads, head_dim) or \
(num_pages, page_size, num_kv_heads, head_dim)
        Dense, or paged with `page_table`.
    kv_len : int or ndarray, shape (batch,)
        Tokens of each sequence, the new ones included. Tokens at negative positions, and at or past the capacity, are
        not written.
    page_table : ndarray, shape (batch, max_pages), int32, optional
        Entries of pages without a new token are not read.
    k_sink, v_sink : ndarray, shape (batch, num_sink, num_kv_heads, head_dim), optional
        Receive the tokens at positions below num_sink too.
    k_recent, v_recent : ndarray, shape (batch, num_recent, num_kv_heads, head_dim), optional
        Receive the last num_recent tokens too, the one at position p in slot ``p % num_recent``.
    """
    for new, cache, sink, recent in ((k_new, k_cache, k_sink, k_recent), (v_new, v_cache, v_sink, v_recent)):
        tokens = new if new.ndim == 4 else new[:, None]  # noqa: PLR2004  with the axis of tokens
        batch, seqlen_new = tokens.shape[:2]
        page_size = (cache.codes if hasattr(cache, "codes") else cache).shape[1]
        capacity = page_size if page_table is None else page_size * page_table.shape[1]
        for b, length in enumerate(np.broadcast_to(np.asarray(kv_len, np.int64), batch)):
            position = length - seqlen_new + np.arange(seqlen_new)
            has_place = (position >= 0) & (position < capacity)
            position, rows = position[has_place], tokens[b, has_place]
            page = b if page_table is None else page_table[b, position // page_size]
            # A value too large for 16 bits is infinite; what is not finite passes through.
            with np.errstate(over="ignore", invalid="ignore"):
                _write(cache, (page, position % page_size), rows)
                if sink is not None:
                    first = position < sink.shape[1]
                    _write(sink, (b, position[first]), rows[first])
                if recent is not None:
                    last = position >= min(length, capacity) - recent.shape[1]
                    _write(recent, (b, position[last] % max(1, recent.shape[1])), rows[last])
