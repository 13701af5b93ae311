"""Checks of the lengths of sequences and of the pages that hold them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cuattn._arrays import Array, as_array, dtype_name, is_gpu, place
from cuattn._check.arguments import integer, require_dtype, require_rank, require_shape, require_words


def lengths_of(kv_len: object, batch: int, capacity: int, *, gpu: bool, of: str, contents: bool = True) -> Array:
    """Return a `kv_len` argument as an int32 array: the caller's own if it is on a GPU, else checked and copied.

    `of` is the array that says where all must be. Without `contents`, lengths may have any value.
    """
    if kv_len is None or isinstance(kv_len, (bool, str, bytes, float, np.floating)):
        msg = f"kv_len must be an int, a sequence of int or an integer array, got {kv_len!r} ({type(kv_len).__name__})"
        raise TypeError(msg)
    if isinstance(kv_len, (int, np.integer)):
        high = capacity if contents else 2**63 - 1
        lengths = np.full(batch, integer("kv_len", kv_len, 0 if contents else -(2**63), high), np.int64)
    elif isinstance(kv_len, Sequence):
        try:
            lengths = np.asarray(kv_len) if kv_len else np.zeros(0, np.int32)
        except ValueError:
            msg = f"kv_len must be an int, a sequence of int or an integer array, got {kv_len!r}"
            raise ValueError(msg) from None
    else:
        lengths = as_array("kv_len", kv_len)
    require_shape("kv_len", lengths, (batch,), "one length a sequence")
    if is_gpu(lengths):
        if not gpu:
            msg = f"kv_len is on {place(lengths)}, {of} on cpu; all arrays must be on one device"
            raise ValueError(msg)
        require_dtype("kv_len", lengths, ("int32",))
        require_words("kv_len", lengths)
        return lengths
    if lengths.dtype.kind not in "iu":
        msg = f"kv_len must be of an integer dtype, got {dtype_name(lengths)}"
        raise TypeError(msg)
    bad = np.flatnonzero((lengths < 0) | (lengths > capacity))
    if contents and bad.size:
        msg = f"kv_len[{bad[0]}] must be 0 to {capacity}, what the cache holds of a sequence, got {lengths[bad[0]]}"
        raise ValueError(msg)
    return lengths.astype(np.int32)


def require_page_table(page_table: Array, batch: int, *, of: str) -> None:
    """Refuse a table of another shape or dtype; `of` is the array that has the batch."""
    require_rank("page_table", page_table, (2,), "(batch, max_pages)")
    if page_table.shape[0] != batch:
        msg = f"page_table must have shape ({batch}, max_pages), batch as in {of}, got {page_table.shape}"
        raise ValueError(msg)
    require_dtype("page_table", page_table, ("int32",))
    require_words("page_table", page_table)


def require_pages(page_table: Array, begin: Array, end: Array, num_pages: int, page_size: int) -> None:
    """Refuse entries on the host that are no pages, of those that hold tokens ``begin[b] <= token < end[b]``."""
    if is_gpu(page_table) or is_gpu(end):
        return
    begin, end = begin[:, None].astype(np.int64), end[:, None].astype(np.int64)
    tokens = np.arange(page_table.shape[1]) * page_size
    used = (begin < end) & (tokens < end) & (tokens + page_size > begin)
    bad = np.argwhere(used & ((page_table < 0) | (page_table >= num_pages)))
    if bad.size:
        row, column = bad[0]
        msg = f"page_table[{row}, {column}] must be 0 to {num_pages - 1}, the pages of k_cache, got "
        raise ValueError(msg + str(page_table[row, column]))
