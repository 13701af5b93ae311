"""Checks of the lengths of sequences and of the pages that hold them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cuattn._arrays import Array, as_array, dtype_name, is_gpu, place
from cuattn._check.arguments import integer, require_dtype, require_rank, require_shape, require_words

# What NumPy would make an array of that holds no integers.
_NO_INTEGERS = (bool, str, bytes, float, np.floating)


def _integers(name: str, values: object, accepted: str) -> Array:
    """Take a sequence or an array over, of any shape and dtype."""
    if not isinstance(values, Sequence):
        return as_array(name, values)
    try:
        return np.asarray(values) if values else np.zeros(0, np.int32)
    except ValueError:
        msg = f"{name} must be {accepted}, got {values!r}"
        raise ValueError(msg) from None


def _stays_on_gpu(name: str, values: Array, *, gpu: bool, of: str) -> bool:
    """Refuse another dtype or place; whether integers lie on a GPU, where only the kernel reads them."""
    if is_gpu(values):
        if not gpu:
            msg = f"{name} is on {place(values)}, {of} on cpu; all arrays must be on one device"
            raise ValueError(msg)
        require_dtype(name, values, ("int32",))
        require_words(name, values)
        return True
    if values.dtype.kind not in "iu":
        msg = f"{name} must be of an integer dtype, got {dtype_name(values)}"
        raise TypeError(msg)
    return False


def lengths_of(
    kv_len: object, batch: int, capacity: int, *, gpu: bool, of: str, contents: bool = True, holder: str = "the cache"
) -> Array:
    """Return a `kv_len` argument as an int32 array: the caller's own if it is on a GPU, else checked and copied.

    `of` is the array that says where all must be, and `holder` what holds `capacity` tokens of a sequence. Without
    `contents`, lengths may have any value.
    """
    accepted = "an int, a sequence of int or an integer array"
    if kv_len is None or isinstance(kv_len, _NO_INTEGERS):
        msg = f"kv_len must be {accepted}, got {kv_len!r} ({type(kv_len).__name__})"
        raise TypeError(msg)
    if isinstance(kv_len, (int, np.integer)):
        high = capacity if contents else 2**63 - 1
        lengths = np.full(batch, integer("kv_len", kv_len, 0 if contents else -(2**63), high), np.int64)
    else:
        lengths = _integers("kv_len", kv_len, accepted)
    require_shape("kv_len", lengths, (batch,), "one length a sequence")
    if _stays_on_gpu("kv_len", lengths, gpu=gpu, of=of):
        return lengths
    bad = np.flatnonzero((lengths < 0) | (lengths > capacity))
    if contents and bad.size:
        msg = f"kv_len[{bad[0]}] must be 0 to {capacity}, what {holder} holds of a sequence, got {lengths[bad[0]]}"
        raise ValueError(msg)
    return lengths.astype(np.int32)


def cu_seqlens_of(
    name: str, cu_seqlens: object, total: int, *, of: str, gpu: bool, batch: int | None = None, contents: bool = True
) -> Array:
    """Return where sequences begin as an int32 array: the caller's own if it is on a GPU, else checked and copied.

    `of` is the array that has `total` tokens, and `gpu` whether `q` is on one. Without `batch`, the entries say what it
    is. Without `contents`, they may have any value.
    """
    accepted = "a sequence of int or an integer array"
    if isinstance(cu_seqlens, (*_NO_INTEGERS, int, np.integer)):
        msg = f"{name} must be {accepted}, got {cu_seqlens!r} ({type(cu_seqlens).__name__})"
        raise TypeError(msg)
    entries = _integers(name, cu_seqlens, accepted)
    if batch is not None:
        require_shape(name, entries, (batch + 1,), "one entry more than the batch")
    elif entries.ndim != 1 or entries.size == 0:
        msg = f"{name} must have shape (batch + 1,), got {entries.shape}"
        raise ValueError(msg)
    if entries.size == 1 and total > 0:
        msg = (
            f"{name} must have an entry more than there are sequences, for {total} tokens of {of}, got {entries.shape}"
        )
        raise ValueError(msg)
    if _stays_on_gpu(name, entries, gpu=gpu, of="q"):
        return entries
    if contents:
        _require_cumulative(name, entries, total, of)
    return entries.astype(np.int32)


def _require_cumulative(name: str, entries: Array, total: int, of: str) -> None:
    """Refuse entries that do not go from 0 to `total` without a step back."""
    bad = np.flatnonzero((entries < 0) | (entries > total))
    if bad.size:
        msg = f"{name}[{bad[0]}] must be 0 to {total}, the tokens of {of}, got {entries[bad[0]]}"
        raise ValueError(msg)
    entries = entries.astype(np.int64)  # differences of unsigned numbers would wrap
    if entries[0] != 0:
        msg = f"{name}[0] must be 0, where the first sequence begins, got {entries[0]}"
        raise ValueError(msg)
    falls = np.flatnonzero(np.diff(entries) < 0)
    if falls.size:
        before = falls[0]
        msg = f"{name}[{before + 1}] must be at least {entries[before]}, the entry before it, got {entries[before + 1]}"
        raise ValueError(msg)
    if entries[-1] != total:
        msg = f"{name}[{entries.size - 1}], the last entry, must be {total}, the tokens of {of}, got {entries[-1]}"
        raise ValueError(msg)


def require_page_table(page_table: Array, batch: int, *, of: str) -> None:
    """Refuse a table of another shape or dtype; `of` is the array that has the batch."""
    require_rank("page_table", page_table, (2,), "(batch, max_pages)")
    if page_table.shape[0] != batch:
        msg = f"page_table must have shape ({batch}, max_pages), batch as in {of}, got {page_table.shape}"
        raise ValueError(msg)
    require_dtype("page_table", page_table, ("int32",))
    require_words("page_table", page_table)


def require_pages(
    page_table: Array, begin: Array, end: Array, num_pages: int, page_size: int, *, of: str = "k_cache"
) -> None:
    """Refuse entries on the host that are no pages of `of`, where they hold tokens ``begin[b] <= token < end[b]``."""
    if is_gpu(page_table) or is_gpu(end):
        return
    begin, end = begin[:, None].astype(np.int64), end[:, None].astype(np.int64)
    tokens = np.arange(page_table.shape[1]) * page_size
    used = (begin < end) & (tokens < end) & (tokens + page_size > begin)
    bad = np.argwhere(used & ((page_table < 0) | (page_table >= num_pages)))
    if bad.size:
        row, column = bad[0]
        msg = f"page_table[{row}, {column}] must be 0 to {num_pages - 1}, the pages of {of}, got "
        raise ValueError(msg + str(page_table[row, column]))
