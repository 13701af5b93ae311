"""The only generators of test problems.

A problem is described by a few numbers and a seed, so that its repr in a failure is the whole reproduction and
hypothesis shrinks shapes rather than megabytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from cuattn import Tbq4Array, reference

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
SPARE_TOKENS = 5
SPARE_PAGES = 3
# What a page table may hold past its used entries: both are far outside of every cache.
UNUSED_ENTRIES = (-1, 2**31 - 1)
# Keys at the end of a "late_max" sequence whose scores rise above all before them.
LATE_KEYS = 8
# What stands in TBQ4 where no token is: the highest codes, and norms that are NaN or infinite.
UNUSED_CODE = 0xFF
UNUSED_NORMS = np.array((0x7E00, 0x7E00, 0x7C00), np.uint16).view(np.float16)
# Deviations of the means of K and V; those of their rows are 1.
MEAN_SIZE = 3.0
# Norms of rows of V that are "tiny_v": a subnormal float16 and nearly the largest.
TINY_NORM, LARGE_NORM = 5e-6, 6e4


@dataclass(frozen=True, slots=True)
class Problem:
    """One call of decode.

    Attributes
    ----------
    kv_len : tuple of int
        Valid tokens of each sequence; its length is the batch.
    seqlen_q : int
        Query tokens per sequence; with 1, q has no such dimension.
    num_kv_heads, group, head_dim : int
    value_dim : int, optional
        Default: `head_dim`.
    page_size : int, optional
        None for a dense cache.
    dtype : {"float16", "bfloat16", "float32"}
    causal, window, softcap, sinks
        As in `cuattn.decode`; with more than one query head, the last of the sinks is -inf.
    values : {"normal", "late_max", "huge", "equal", "tiny_v"}
        Standard normal; the largest scores in the last keys; scores of size 1e4; all scores of a row equal; rows of V
        with norms from 5e-6 to 6e4, in one of three sequences all tiny, in one the last of them large.
    seed : int
    k_format, v_format : {"raw16", "tbq4"}
    means : bool
        Whether K and V have channels with an offset each, which rows in TBQ4 are stored without.
    num_sink, num_recent : int
        First tokens and slots of the ring of newest tokens that are kept in 16 bits; their rows in the caches are
        unused.
    """

    kv_len: tuple[int, ...]
    seqlen_q: int = 1
    num_kv_heads: int = 1
    group: int = 1
    head_dim: int = 64
    value_dim: int | None = None
    page_size: int | None = None
    dtype: str = "float16"
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: bool = False
    values: str = "normal"
    seed: int = 0
    k_format: str = "raw16"
    v_format: str = "raw16"
    means: bool = False
    num_sink: int = 0
    num_recent: int = 0

    @property
    def num_qo_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.group

    def _mean(self, stream: int) -> np.ndarray | None:
        """Return the mean of K (1) or V (2); that of tiny values is zero."""
        if not self.means:
            return None
        rng = np.random.default_rng([self.seed, len(self.kv_len), stream])
        size = 0 if stream == 2 and self.values == "tiny_v" else MEAN_SIZE
        return (size * rng.standard_normal((self.num_kv_heads, self.head_dim))).astype(np.float32)

    def sequences(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield q ``[seqlen_q, num_qo_heads, head_dim]``, k and v ``[kv_len, num_kv_heads, ...]`` per sequence.

        These are the rows as drawn, before any are quantized.
        """
        for sequence, kv_len in enumerate(self.kv_len):
            rng = np.random.default_rng([self.seed, sequence])
            q = rng.standard_normal((self.seqlen_q, self.num_qo_heads, self.head_dim))
            k = rng.standard_normal((kv_len, self.num_kv_heads, self.head_dim))
            v = rng.standard_normal((kv_len, self.num_kv_heads, self.value_dim or self.head_dim))
            if self.values == "late_max":
                late = min(kv_len, LATE_KEYS)
                q = np.abs(q)
                k[kv_len - late :] = np.abs(k[kv_len - late :]) * np.arange(1, late + 1)[:, None, None]
            elif self.values == "huge":
                # The default scale leaves scores of the size of one product.
                q, k = 100 * q, 100 * k
            elif self.values == "equal":
                k[:] = k[:1]
            elif self.values == "tiny_v":
                sizes = np.full(kv_len, TINY_NORM)
                if (sequence + self.seed) % 3 == 1:
                    sizes[kv_len - min(kv_len, LATE_KEYS) :] = LARGE_NORM
                elif (sequence + self.seed) % 3 == 2:
                    sizes = rng.choice((TINY_NORM, 1.0, LARGE_NORM), kv_len)
                v *= (sizes / np.linalg.norm(v, axis=-1).T).T[:, :, None]
            if self.means:
                k, v = k + self._mean(1), v + self._mean(2)
            dtype = DTYPES[self.dtype]
            yield q.astype(dtype), k.astype(dtype), v.astype(dtype)

    def _body(self, kv_len: int) -> tuple[int, int]:
        """Return the range of tokens that the caches hold."""
        start = min(kv_len, self.num_sink)
        return start, max(start, kv_len - self.num_recent)

    def _page_table(self) -> tuple[np.ndarray, int]:
        """Return the table and the number of pages; used pages are shuffled among spare ones."""
        used = []
        for kv_len in self.kv_len:
            start, stop = self._body(kv_len)
            used.append(range(start // self.page_size, -(-stop // self.page_size) if start < stop else 0))
        num_pages = sum(map(len, used)) + SPARE_PAGES
        pages = iter(np.random.default_rng([self.seed, len(used)]).permutation(num_pages))
        longest = -(-max(self.kv_len, default=0) // self.page_size)
        table = np.resize(np.array(UNUSED_ENTRIES, np.int32), (len(used), longest + 2))
        for row, entries in zip(table, used, strict=True):
            for entry in entries:
                row[entry] = next(pages)
        return table, num_pages

    def _stored(self, cache: np.ndarray, kv_format: str, mean: np.ndarray | None) -> np.ndarray | Tbq4Array:
        """Return a cache in its format; rows that are NaN hold no token."""
        if kv_format == "raw16":
            return cache
        unused = np.isnan(cache).all(axis=-1)
        rows = reference.quantize(np.nan_to_num(cache.astype(np.float32)), mean=mean)
        norms = np.where(unused[..., None], np.resize(UNUSED_NORMS, rows.norms.shape), rows.norms)
        return Tbq4Array(np.where(unused[..., None], np.uint8(UNUSED_CODE), rows.codes), norms, mean)

    def arrays(self) -> tuple[np.ndarray, np.ndarray | Tbq4Array, np.ndarray | Tbq4Array, np.ndarray]:
        """Return q, k_cache, v_cache and kv_len; whatever of a cache holds no token is NaN, codes excepted."""
        dtype = DTYPES[self.dtype]
        batch, value_dim = len(self.kv_len), self.value_dim or self.head_dim
        if self.page_size is None:
            rows = (batch, max(self.kv_len, default=0) + SPARE_TOKENS)
        else:
            table, num_pages = self._page_table()
            rows = (num_pages, self.page_size)
        k_cache = np.full((*rows, self.num_kv_heads, self.head_dim), np.nan, dtype)
        v_cache = np.full((*rows, self.num_kv_heads, value_dim), np.nan, dtype)
        q = np.zeros((batch, self.seqlen_q, self.num_qo_heads, self.head_dim), dtype)
        for sequence, (q_rows, k_rows, v_rows) in enumerate(self.sequences()):
            q[sequence] = q_rows
            token = np.arange(*self._body(len(k_rows)))
            if self.page_size is None:
                where = (sequence, token)
            else:
                where = (table[sequence, token // self.page_size], token % self.page_size)
            k_cache[where], v_cache[where] = k_rows[token], v_rows[token]
        stored = (
            self._stored(k_cache, self.k_format, self._mean(1)),
            self._stored(v_cache, self.v_format, self._mean(2)),
        )
        return q[:, 0] if self.seqlen_q == 1 else q, *stored, np.array(self.kv_len, np.int32)

    def _kept(self) -> dict[str, np.ndarray]:
        """Return first and recent tokens; rows and slots without one are NaN."""
        kept = {}
        for which, (name, num) in enumerate((("sink", self.num_sink), ("recent", self.num_recent))):
            if num == 0:
                continue
            shape = (len(self.kv_len), num, self.num_kv_heads)
            k = np.full((*shape, self.head_dim), np.nan, DTYPES[self.dtype])
            v = np.full((*shape, self.value_dim or self.head_dim), np.nan, DTYPES[self.dtype])
            for sequence, (_, k_rows, v_rows) in enumerate(self.sequences()):
                start, stop = self._body(len(k_rows))
                token = np.arange(start) if which == 0 else np.arange(stop, len(k_rows))
                k[sequence, token % num], v[sequence, token % num] = k_rows[token], v_rows[token]
            kept |= {f"k_{name}": k, f"v_{name}": v}
        return kept

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of decode."""
        options = {"causal": self.causal, "window": self.window, "softcap": self.softcap}
        if self.page_size is not None:
            options["page_table"] = self._page_table()[0]
        if self.sinks:
            sinks = np.random.default_rng([self.seed, len(self.kv_len) + 1]).standard_normal(self.num_qo_heads)
            if self.num_qo_heads > 1:
                sinks[-1] = -np.inf
            options["sinks"] = sinks.astype(np.float32)
        return options | self._kept()


def lengths(tile: int) -> st.SearchStrategy[int]:
    """Draw a length on or beside an edge of a tile, nothing included, or any up to six tiles."""
    edges = sorted({n for k in (0, 1, 2, 5) for n in (k * tile - 1, k * tile, k * tile + 1) if n >= 0})
    return st.sampled_from(edges) | st.integers(0, 6 * tile)


_LENGTHS_OF_16 = lengths(16)
_SIDES = st.sampled_from((None, -1, 0, 1, 7, 16, 33))
_WINDOWS = st.none() | st.tuples(_SIDES, _SIDES)


def problems(
    *,
    lengths: st.SearchStrategy[int] = _LENGTHS_OF_16,
    batch_max: int = 3,
    seqlens_q: Sequence[int] = (1, 2, 5),
    kv_heads: Sequence[int] = (1, 2, 3),
    groups: Sequence[int] = (1, 2, 3, 8),
    head_dims: Sequence[int] = (64, 128),
    value_dims: Sequence[int | None] = (None,),
    page_sizes: Sequence[int | None] = (None, 16, 64),
    dtypes: Sequence[str] = ("float16", "bfloat16"),
    causal: Sequence[bool] = (True, False),
    windows: st.SearchStrategy[tuple[int | None, int | None] | None] = _WINDOWS,
    softcaps: Sequence[float | None] = (None, 5.0),
    sinks: Sequence[bool] = (False, True),
    values: Sequence[str] = ("normal", "late_max", "huge", "equal"),
    k_formats: Sequence[str] = ("raw16",),
    v_formats: Sequence[str] = ("raw16",),
    means: Sequence[bool] = (False,),
    nums_sink: Sequence[int] = (0,),
    nums_recent: Sequence[int] = (0,),
) -> st.SearchStrategy[Problem]:
    """Draw a `Problem`; every argument restricts one of its fields."""
    return st.builds(
        Problem,
        kv_len=st.lists(lengths, min_size=1, max_size=batch_max).map(tuple),
        seqlen_q=st.sampled_from(seqlens_q),
        num_kv_heads=st.sampled_from(kv_heads),
        group=st.sampled_from(groups),
        head_dim=st.sampled_from(head_dims),
        value_dim=st.sampled_from(value_dims),
        page_size=st.sampled_from(page_sizes),
        dtype=st.sampled_from(dtypes),
        causal=st.sampled_from(causal),
        window=windows,
        softcap=st.sampled_from(softcaps),
        sinks=st.sampled_from(sinks),
        values=st.sampled_from(values),
        k_format=st.sampled_from(k_formats),
        v_format=st.sampled_from(v_formats),
        means=st.sampled_from(means),
        num_sink=st.sampled_from(nums_sink),
        num_recent=st.sampled_from(nums_recent),
        seed=st.integers(0, 2**32 - 1),
    )
