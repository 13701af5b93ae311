"""The only generators of test problems.

A problem is described by a few numbers and a seed, so that its repr in a failure is the whole reproduction and
hypothesis shrinks shapes rather than megabytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from cuattn import Fp8Array, Tbq4Array, reference

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
SPARE_TOKENS = 5
SPARE_PAGES = 3
# What a page table may hold past its used entries: both are far outside of every cache.
UNUSED_ENTRIES = (-1, 2**31 - 1)
# Keys at the end of a "late_max" sequence whose scores rise above all before them.
LATE_KEYS = 8
# By how much the keys of a "rising" sequence grow: scores by up to 60 in base-2 units, a few in each tile.
RISE = 8.0
# The same from the last key to the first, for kernels that go that way.
MIRRORED = {"early_max": "late_max", "falling": "rising"}
# What stands in TBQ4 where no token is: the highest codes, and norms that are NaN or infinite.
UNUSED_CODE = 0xFF  # NaN in fp8
UNUSED_NORMS = np.array((0x7E00, 0x7E00, 0x7C00), np.uint16).view(np.float16)
# Deviations of the means of K and V; those of their rows are 1.
MEAN_SIZE = 3.0
# Norms of rows of V that are "tiny_v": a subnormal float16 and nearly the largest.
TINY_NORM, LARGE_NORM = 5e-6, 6e4


class _Call:
    """What calls of decode and of prefill have in common: rows as they are drawn, formats, pages and masks."""

    __slots__ = ()

    seqlens: tuple[tuple[int, int], ...]
    num_kv_heads: int
    group: int
    head_dim: int
    value_dim: int | None
    page_size: int | None
    dtype: str
    causal: bool
    window: tuple[int | None, int | None] | None
    softcap: float | None
    sinks: bool
    values: str
    seed: int
    k_format: str
    v_format: str
    means: bool

    @property
    def num_qo_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.group

    @property
    def dims(self) -> tuple[int, int]:
        """Elements of a key and of a value."""
        return self.head_dim, self.value_dim or self.head_dim

    def _mean(self, stream: int) -> np.ndarray | None:
        """Return the mean of K (1) or V (2); that of tiny values is zero."""
        if not self.means:
            return None
        rng = np.random.default_rng([self.seed, len(self.seqlens), stream])
        size = 0 if stream == 2 and self.values == "tiny_v" else MEAN_SIZE
        return (size * rng.standard_normal((self.num_kv_heads, self.dims[stream - 1]))).astype(np.float32)

    def _distorted(
        self, sequence: int, rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return normal rows as `values` wants them."""
        kv_len, values = len(k), MIRRORED.get(self.values, self.values)
        if values == "late_max":
            late = min(kv_len, LATE_KEYS)
            q = np.abs(q)
            k[kv_len - late :] = np.abs(k[kv_len - late :]) * np.arange(1, late + 1)[:, None, None]
        elif values == "rising":
            q = np.abs(q)
            k = np.abs(k) * np.linspace(0, RISE, kv_len)[:, None, None]
        elif values == "huge":
            # The default scale leaves scores of the size of one product.
            q, k = 100 * q, 100 * k
        elif values == "equal":
            k[:] = k[:1]
        elif values == "tiny_v":
            sizes = np.full(kv_len, TINY_NORM)
            if (sequence + self.seed) % 3 == 1:
                sizes[kv_len - min(kv_len, LATE_KEYS) :] = LARGE_NORM
            elif (sequence + self.seed) % 3 == 2:
                sizes = rng.choice((TINY_NORM, 1.0, LARGE_NORM), kv_len)
            v *= (sizes / np.linalg.norm(v, axis=-1).T).T[:, :, None]
        return (q, k[::-1], v[::-1]) if self.values in MIRRORED else (q, k, v)

    def sequences(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield q ``[seqlen_q, num_qo_heads, head_dim]``, k and v ``[kv_len, num_kv_heads, ...]`` per sequence.

        These are the rows as drawn, before any are quantized.
        """
        head_dim, value_dim = self.dims
        for sequence, (seqlen_q, kv_len) in enumerate(self.seqlens):
            rng = np.random.default_rng([self.seed, sequence])
            q = rng.standard_normal((seqlen_q, self.num_qo_heads, head_dim))
            k = rng.standard_normal((kv_len, self.num_kv_heads, head_dim))
            v = rng.standard_normal((kv_len, self.num_kv_heads, value_dim))
            q, k, v = self._distorted(sequence, rng, q, k, v)
            if self.means:
                k, v = k + self._mean(1), v + self._mean(2)
            dtype = DTYPES[self.dtype]
            yield q.astype(dtype), k.astype(dtype), v.astype(dtype)

    def _table(self, used: Sequence[range]) -> tuple[np.ndarray, int]:
        """Return the table and the number of pages; pages of used entries are shuffled among spare ones."""
        num_pages = sum(map(len, used)) + SPARE_PAGES
        pages = iter(np.random.default_rng([self.seed, len(used)]).permutation(num_pages))
        longest = -(-max((kv_len for _, kv_len in self.seqlens), default=0) // self.page_size)
        table = np.resize(np.array(UNUSED_ENTRIES, np.int32), (len(used), longest + 2))
        for row, entries in zip(table, used, strict=True):
            for entry in entries:
                row[entry] = next(pages)
        return table, num_pages

    def _stored(self, cache: np.ndarray, kv_format: str, mean: np.ndarray | None) -> Any:
        """Return a cache in its format; rows that are NaN hold no token. In fp8 each head has a scale, or all one."""
        if kv_format not in {"tbq4", "fp8"}:
            return cache
        unused = np.isnan(cache).all(axis=-1)
        if kv_format == "fp8":
            of_heads = reference.quantize_fp8(cache).scale
            scale = float(of_heads.max()) if self.seed % 3 == 1 else of_heads
            codes = reference.quantize_fp8(cache, scale=scale).codes
            return Fp8Array(np.where(unused[..., None], np.uint8(UNUSED_CODE), codes), scale)
        rows = reference.quantize(np.nan_to_num(cache.astype(np.float32)), mean=mean)
        norms = np.where(unused[..., None], np.resize(UNUSED_NORMS, rows.norms.shape), rows.norms)
        return Tbq4Array(np.where(unused[..., None], np.uint8(UNUSED_CODE), rows.codes), norms, mean)

    def _gathered(
        self, shape: tuple[int, ...], places: Sequence[tuple[np.ndarray, tuple[Any, ...]]]
    ) -> tuple[list[np.ndarray], Any, Any]:
        """Return q of each sequence, and K and V with axes `shape` of tokens: NaN, codes excepted, but for tokens.

        `places` are the tokens of each sequence that are there, and their indices.
        """
        k, v = (np.full((*shape, self.num_kv_heads, dim), np.nan, DTYPES[self.dtype]) for dim in self.dims)
        q = []
        for (q_rows, k_rows, v_rows), (token, where) in zip(self.sequences(), places, strict=True):
            q.append(q_rows)
            k[where], v[where] = k_rows[token], v_rows[token]
        return q, self._stored(k, self.k_format, self._mean(1)), self._stored(v, self.v_format, self._mean(2))

    def _masks(self) -> dict[str, Any]:
        """Return the keyword arguments of masks and scores."""
        options = {"causal": self.causal, "window": self.window, "softcap": self.softcap}
        if self.sinks:
            sinks = np.random.default_rng([self.seed, len(self.seqlens) + 1]).standard_normal(self.num_qo_heads)
            if self.num_qo_heads > 1:
                sinks[-1] = -np.inf
            options["sinks"] = sinks.astype(np.float32)
        return options


@dataclass(frozen=True, slots=True)
class Problem(_Call):
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
    k_format, v_format : {"raw16", "raw32", "tbq4", "fp8"}
        Rows of elements have the dtype, whichever of the first two stands here.
    means : bool
        Whether K and V have channels with an offset each, which rows in TBQ4 are stored without.
    tree : bool
        Whether the query tokens are branches of a tree, each of which sees its ancestors and itself.
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
    tree: bool = False

    @property
    def seqlens(self) -> tuple[tuple[int, int], ...]:
        """Lengths of q and of K of each sequence."""
        return tuple((self.seqlen_q, kv_len) for kv_len in self.kv_len)

    def _body(self, kv_len: int) -> tuple[int, int]:
        """Return the range of tokens that the caches hold."""
        start = min(kv_len, self.num_sink)
        return start, max(start, kv_len - self.num_recent)

    def _page_table(self) -> tuple[np.ndarray, int]:
        """Return the table and the number of pages."""
        bodies = map(self._body, self.kv_len)
        return self._table([range(a // self.page_size, -(-b // self.page_size) if a < b else 0) for a, b in bodies])

    def arrays(self) -> tuple[np.ndarray, Any, Any, np.ndarray]:
        """Return q, k_cache, v_cache and kv_len; whatever of a cache holds no token is NaN, codes excepted."""
        tokens = [np.arange(*self._body(kv_len)) for kv_len in self.kv_len]
        if self.page_size is None:
            shape = (len(self.kv_len), max(self.kv_len, default=0) + SPARE_TOKENS)
            places = [(token, (sequence, token)) for sequence, token in enumerate(tokens)]
        else:
            table, num_pages = self._page_table()
            shape, size = (num_pages, self.page_size), self.page_size
            places = [(token, (row[token // size], token % size)) for row, token in zip(table, tokens, strict=True)]
        q_rows, k_cache, v_cache = self._gathered(shape, places)
        q = np.zeros((len(q_rows), self.seqlen_q, self.num_qo_heads, self.head_dim), DTYPES[self.dtype])
        for sequence, rows in enumerate(q_rows):
            q[sequence] = rows
        return q[:, 0] if self.seqlen_q == 1 else q, k_cache, v_cache, np.array(self.kv_len, np.int32)

    def _kept(self) -> dict[str, np.ndarray]:
        """Return first and recent tokens; rows and slots without one are NaN."""
        kept = {}
        for which, (name, num) in enumerate((("sink", self.num_sink), ("recent", self.num_recent))):
            if num == 0:
                continue
            shape = (len(self.kv_len), num, self.num_kv_heads)
            k, v = (np.full((*shape, dim), np.nan, DTYPES[self.dtype]) for dim in self.dims)
            for sequence, (_, k_rows, v_rows) in enumerate(self.sequences()):
                start, stop = self._body(len(k_rows))
                token = np.arange(start) if which == 0 else np.arange(stop, len(k_rows))
                k[sequence, token % num], v[sequence, token % num] = k_rows[token], v_rows[token]
            kept |= {f"k_{name}": k, f"v_{name}": v}
        return kept

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of decode."""
        options = self._masks()
        if self.page_size is not None:
            options["page_table"] = self._page_table()[0]
        if self.tree:
            options["tree_mask"] = self._tree_mask()
        return options | self._kept()

    def _tree_mask(self) -> np.ndarray:
        """Return which tokens see which, of a random tree for each sequence; a view with a stride of its own."""
        rng = np.random.default_rng([self.seed, len(self.kv_len), 3])
        mask = np.zeros((len(self.kv_len), self.seqlen_q, 2 * self.seqlen_q), bool)[..., ::2]
        for of_sequence in mask:
            for token in range(self.seqlen_q):
                parent = int(rng.integers(-1, token)) if token else -1
                if parent >= 0:
                    of_sequence[token] = of_sequence[parent]
                of_sequence[token, token] = True
        return mask


def _sequences(x: Any, rows: slice, capacity: int) -> Any:
    """Return some sequences of a dense cache, with another capacity; its new tokens are NaN, in TBQ4 too."""
    if isinstance(x, Tbq4Array):
        return Tbq4Array(_sequences(x.codes, rows, capacity), _sequences(x.norms, rows, capacity), x.mean)
    shape = (1, max(0, capacity - x.shape[1]), *x.shape[2:])
    unused = np.full(shape, UNUSED_CODE if x.dtype == np.uint8 else np.nan).astype(x.dtype)
    return np.concatenate((x[rows, :capacity], unused), axis=1)


def only(problem: Problem, sequence: int, capacity: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arrays and options of decode for one sequence of a problem, where `capacity` tokens have a place."""
    rows = slice(sequence, sequence + 1)
    q, k_cache, v_cache, kv_len = problem.arrays()
    options = problem.options()
    for name in options.keys() & {"k_sink", "v_sink", "k_recent", "v_recent", "tree_mask"}:
        options[name] = options[name][rows]
    if problem.page_size is None:
        k_cache, v_cache = (_sequences(x, rows, capacity) for x in (k_cache, v_cache))
    else:
        pages = np.full((1, -(-capacity // problem.page_size)), UNUSED_ENTRIES[0], np.int32)
        used = options["page_table"][rows, : -(-problem.kv_len[sequence] // problem.page_size)]
        pages[:, : used.shape[1]] = used
        options["page_table"] = pages
    return (q[rows], k_cache, v_cache, kv_len[rows]), options


def with_unused(cache: Any, code: int, norm: int) -> Any:
    """Return a cache of a `Problem` with other bytes, and bits of norms, where no token is; 16-bit ones as they are."""
    if isinstance(cache, Fp8Array):
        unused = (cache.codes == UNUSED_CODE).all(axis=-1, keepdims=True)
        return Fp8Array(np.where(unused, np.uint8(code), cache.codes), cache.scale)
    if not isinstance(cache, Tbq4Array):
        return cache
    unused = ~np.isfinite(cache.norms)
    codes = np.where(unused.all(axis=-1, keepdims=True), np.uint8(code), cache.codes)
    return Tbq4Array(codes, np.where(unused, np.array(norm, np.uint16).view(np.float16), cache.norms), cache.mean)


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
    trees: Sequence[bool] = (False,),
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
        tree=st.sampled_from(trees),
        seed=st.integers(0, 2**32 - 1),
    )


@dataclass(frozen=True, slots=True)
class PrefillProblem(_Call):
    """One call of prefill.

    Attributes
    ----------
    seqlens : tuple of (int, int)
        Query tokens and keys of each sequence; its length is the batch.
    num_kv_heads, group, head_dim : int
    value_dim : int, optional
        Default: `head_dim`.
    q_layout : {"ragged", "dense"}
        Dense: all sequences have as many query tokens.
    kv_layout : {"ragged", "dense", "padded", "paged"}
        Dense: all sequences have as many keys. Padded: with lengths. Paged: the pages of a sequence are scattered.
    page_size : int
        If paged.
    dtype : {"float16", "bfloat16", "float32"}
    causal, window, softcap, sinks
        As in `cuattn.prefill`; with more than one query head, the last of the sinks is -inf.
    values : {"normal", "late_max", "early_max", "rising", "falling", "huge", "equal", "tiny_v"}
        As in `Problem`, or the largest scores in the first keys, or scores that grow or shrink from key to key.
    seed : int
    k_format, v_format : {"raw16", "tbq4"}
    means : bool
        As in `Problem`.
    """

    seqlens: tuple[tuple[int, int], ...]
    num_kv_heads: int = 1
    group: int = 1
    head_dim: int = 64
    value_dim: int | None = None
    q_layout: str = "ragged"
    kv_layout: str = "ragged"
    page_size: int = 16
    dtype: str = "float16"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: bool = False
    values: str = "normal"
    seed: int = 0
    k_format: str = "raw16"
    v_format: str = "raw16"
    means: bool = False

    def _lengths(self, of: int) -> tuple[int, ...]:
        return tuple(lengths[of] for lengths in self.seqlens)

    def _cu_seqlens(self, of: int) -> np.ndarray:
        return np.cumsum((0, *self._lengths(of)), dtype=np.int32)

    def _page_table(self) -> tuple[np.ndarray, int]:
        """Return the table and the number of pages."""
        return self._table([range(-(-kv_len // self.page_size)) for _, kv_len in self.seqlens])

    def rows(self) -> list[Any]:
        """Return what selects the query tokens of each sequence in q and in results."""
        if self.q_layout == "dense":
            return list(range(len(self.seqlens)))
        edges = map(int, self._cu_seqlens(0))
        return [slice(*pair) for pair in pairwise(edges)]

    def arrays(self) -> tuple[np.ndarray, np.ndarray | Tbq4Array, np.ndarray | Tbq4Array]:
        """Return q, k and v; whatever of k and v holds no token is NaN, codes excepted."""
        for name, layout, of in (("q", self.q_layout, 0), ("k", self.kv_layout, 1)):
            if layout == "dense" and len(set(self._lengths(of))) > 1:
                raise ValueError(f"dense {name} must have sequences of one length, got {self.seqlens}")
        tokens = [np.arange(kv_len) for kv_len in self._lengths(1)]
        if self.kv_layout == "ragged":
            starts = self._cu_seqlens(1)
            shape = (int(starts[-1]),)
            places = [(token, (start + token,)) for start, token in zip(starts, tokens, strict=False)]
        elif self.kv_layout == "paged":
            table, num_pages = self._page_table()
            shape, size = (num_pages, self.page_size), self.page_size
            places = [(token, (row[token // size], token % size)) for row, token in zip(table, tokens, strict=True)]
        else:
            shape = (len(tokens), max(self._lengths(1)) + (SPARE_TOKENS if self.kv_layout == "padded" else 0))
            places = [(token, (sequence, token)) for sequence, token in enumerate(tokens)]
        q_rows, k, v = self._gathered(shape, places)
        return (np.stack if self.q_layout == "dense" else np.concatenate)(q_rows), k, v

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of prefill."""
        options = self._masks()
        if self.q_layout == "ragged":
            options["cu_seqlens_q"] = self._cu_seqlens(0)
        if self.kv_layout == "ragged":
            options["cu_seqlens_k"] = self._cu_seqlens(1)
        if self.kv_layout in {"padded", "paged"}:
            options["kv_len"] = np.array(self._lengths(1), np.int32)
        if self.kv_layout == "paged":
            options["page_table"] = self._page_table()[0]
        return options


_ROWS = lengths(16) | lengths(32)


@st.composite
def prefill_problems(
    draw: st.DrawFn,
    *,
    rows: st.SearchStrategy[int] = _ROWS,
    lengths: st.SearchStrategy[int] = _LENGTHS_OF_16,
    batch_max: int = 3,
    kv_heads: Sequence[int] = (1, 2),
    groups: Sequence[int] = (1, 2, 3, 6, 8, 12),
    q_layouts: Sequence[str] = ("ragged", "dense"),
    kv_layouts: Sequence[str] = ("ragged", "dense", "padded", "paged"),
    page_sizes: Sequence[int] = (1, 3, 16, 64, 100),
    causal: Sequence[bool] = (True, False),
    windows: st.SearchStrategy[tuple[int | None, int | None] | None] = _WINDOWS,
    softcaps: Sequence[float | None] = (None, 5.0),
    sinks: Sequence[bool] = (False, True),
    values: Sequence[str] = ("normal", "late_max", "early_max", "rising", "falling", "huge", "equal"),
    choices: Sequence[tuple[str, str, str, int, int | None]] = (("raw16", "raw16", "float16", 64, None),),
) -> PrefillProblem:
    """Draw a `PrefillProblem`.

    `rows` are the query rows of a KV head, which a tile has of all heads of a group together, and `lengths` those of
    keys; a `choice` is a format of K, one of V, a dtype, head_dim and value_dim. Every other argument restricts one of
    the fields.
    """
    k_format, v_format, dtype, head_dim, value_dim = draw(st.sampled_from(choices))
    group = draw(st.sampled_from(groups))
    tokens = st.builds(lambda row, more: row // group + more, rows, st.integers(0, 1) if group > 1 else st.just(0))
    # A prompt by itself has as many keys as queries.
    sequence = st.tuples(tokens, lengths) | tokens.map(lambda n: (n, n))
    seqlens = draw(st.lists(sequence, min_size=1, max_size=batch_max))
    q_layout, kv_layout = draw(st.sampled_from(q_layouts)), draw(st.sampled_from(kv_layouts))
    if q_layout == "dense":
        seqlens = [(seqlens[0][0], n) for _, n in seqlens]
    if kv_layout == "dense":
        seqlens = [(n, seqlens[0][1]) for n, _ in seqlens]
    tbq4 = "tbq4" in (k_format, v_format)
    return PrefillProblem(
        seqlens=tuple(seqlens),
        num_kv_heads=draw(st.sampled_from(kv_heads)),
        group=group,
        head_dim=head_dim,
        value_dim=value_dim,
        q_layout=q_layout,
        kv_layout=kv_layout,
        page_size=draw(st.sampled_from(page_sizes)) if kv_layout == "paged" else 16,
        dtype=dtype,
        causal=draw(st.sampled_from(causal)),
        window=draw(windows),
        softcap=draw(st.sampled_from(softcaps)),
        sinks=draw(st.sampled_from(sinks)),
        values=draw(st.sampled_from((*values, "tiny_v") if tbq4 else values)),
        seed=draw(st.integers(0, 2**32 - 1)),
        k_format=k_format,
        v_format=v_format,
        means=tbq4 and draw(st.booleans()),
    )


@dataclass(frozen=True, slots=True)
class AppendProblem:
    """One call of append.

    Attributes
    ----------
    kv_len : tuple of int
        Tokens of each sequence, the new ones included; its length is the batch. What has no place in the cache is left
        out: any numbers will do for lengths on the device.
    seqlen_new, num_kv_heads, head_dim : int
    k_format, v_format : {"raw16", "tbq4", "fp8"}
    in_dtype, dtype : str
        Of the new rows, and of 16-bit arrays.
    page_size : int, optional
        None for a dense cache.
    capacity : int
        At least so many tokens fit a sequence: whole pages.
    means : bool
        Whether TBQ4 caches have a mean.
    num_sink, num_recent : int, optional
    views : bool
        Whether arrays are parts of larger ones, with axes in another order.
    scale : float
        Size of the values.
    seed : int
    """

    kv_len: tuple[int, ...]
    seqlen_new: int = 1
    num_kv_heads: int = 1
    head_dim: int = 64
    k_format: str = "raw16"
    v_format: str = "raw16"
    in_dtype: str = "float16"
    dtype: str = "float16"
    page_size: int | None = None
    capacity: int = 32
    means: bool = False
    num_sink: int | None = None
    num_recent: int | None = None
    views: bool = False
    scale: float = 1.0
    seed: int = 0

    @property
    def pages_of_sequence(self) -> int:
        """Columns of the page table."""
        return 1 if self.page_size is None else -(-self.capacity // self.page_size)

    @property
    def tokens_of_page(self) -> int:
        """Tokens of a page; a dense cache is one page a sequence."""
        return self.capacity if self.page_size is None else self.page_size

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Yield sequence, new token and position of every new token that has a place."""
        for b, kv_len in enumerate(self.kv_len):
            for i in range(self.seqlen_new):
                position = kv_len - self.seqlen_new + i
                if 0 <= position < self.pages_of_sequence * self.tokens_of_page:
                    yield b, i, position

    def page_table(self) -> np.ndarray:
        """Return the pages of each sequence; entries of pages without a new token are no pages."""
        shape = (len(self.kv_len), self.pages_of_sequence)
        table = np.resize(np.array(UNUSED_ENTRIES, np.int32), shape)
        pages = iter(np.random.default_rng([self.seed, 1]).permutation(table.size + SPARE_PAGES))
        for b, column in sorted({(b, position // self.tokens_of_page) for b, _, position in self.places()}):
            table[b, column] = next(pages)
        return table

    def slots(self) -> tuple[np.ndarray, np.ndarray]:
        """Return page and slot of every new token that has a place, in the order of `places`."""
        table = np.arange(len(self.kv_len))[:, None] if self.page_size is None else self.page_table()
        places = [(table[b, p // self.tokens_of_page], p % self.tokens_of_page) for b, _, p in self.places()]
        pages, slots = np.array(places, int).reshape(-1, 2).T
        return pages, slots

    def view(self, name: str, base: Any) -> Any:
        """Return the argument that lies in an array of `bases`, which may have been copied to a GPU."""
        if not self.views or name.endswith("clamped"):
            return base
        if name in {"kv_len", "page_table"}:
            return base[..., ::2]
        if name.endswith(("mean", "scale")):
            return base[1::2]
        if name.endswith("new"):
            return base[:, :, 1]
        return base[::-1].swapaxes(1, 2)[:, :, 1:-1]

    def _base(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return random bytes that hold an argument."""
        if not self.views or name.endswith("clamped"):
            return array.copy()
        shape = list(array.shape)
        if name in {"kv_len", "page_table"}:
            shape[-1] *= 2
        elif name.endswith(("mean", "scale")):
            shape[0] *= 2
        elif name.endswith("new"):
            shape.insert(2, 3)
        else:
            shape[1:3] = shape[2] + 2, shape[1]
        base = self._noise(name, tuple(shape), array.dtype)
        self.view(name, base)[...] = array
        return base

    def _noise(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        rng = np.random.default_rng([self.seed, *name.encode()])
        return rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]

    def bases(self) -> dict[str, np.ndarray]:
        """Return all arrays, with random bytes wherever something may be written; `view` makes arguments of them."""
        batch, heads, head_dim = len(self.kv_len), self.num_kv_heads, self.head_dim
        rng = np.random.default_rng(self.seed)
        block = 64 if head_dim == 64 else 128
        num_pages = batch if self.page_size is None else batch * self.pages_of_sequence + SPARE_PAGES
        arrays: dict[str, np.ndarray] = {"kv_len": np.array(self.kv_len, np.int32)}
        if self.page_size is not None:
            arrays["page_table"] = self.page_table()
        for side, kv_format in (("k", self.k_format), ("v", self.v_format)):
            new = self.scale * rng.standard_normal((batch, self.seqlen_new, heads, head_dim))
            with np.errstate(over="ignore"):
                arrays[f"{side}_new"] = new.astype(DTYPES[self.in_dtype])
            shapes: dict[str, tuple[tuple[int, ...], Any]] = {}
            rows = (num_pages, self.tokens_of_page, heads)
            if kv_format == "tbq4":
                shapes["codes"] = (*rows, head_dim // 2), np.uint8
                shapes["norms"] = (*rows, head_dim // block), np.float16
                arrays[f"{side}_clamped"] = np.array([5], np.int32)
                if self.means:
                    arrays[f"{side}_mean"] = (self.scale * rng.standard_normal((heads, head_dim))).astype(np.float32)
            elif kv_format == "fp8":
                shapes["codes"] = (*rows, head_dim), np.uint8
                # With some of these values are too large.
                arrays[f"{side}_scale"] = (self.scale * rng.uniform(0.002, 0.02, heads)).astype(np.float32)
            else:
                shapes["cache"] = (*rows, head_dim), DTYPES[self.dtype]
            for name, tokens in (("sink", self.num_sink), ("recent", self.num_recent)):
                if tokens is not None:
                    shapes[name] = (batch, tokens, heads, head_dim), DTYPES[self.dtype]
            for name, (shape, dtype) in shapes.items():
                arrays[f"{side}_{name}"] = self._noise(f"{side}_{name}", shape, dtype)
        return {name: self._base(name, array) for name, array in arrays.items()}

    def arguments(self, bases: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of append over such arrays; with one new token, the rows have no axis of tokens."""
        views = {name: self.view(name, base) for name, base in bases.items()}
        if self.seqlen_new == 1:
            views |= {name: views[name][:, 0] for name in ("k_new", "v_new")}
        for side in "kv":
            if f"{side}_scale" in views:
                views[f"{side}_cache"] = Fp8Array(views[f"{side}_codes"], views[f"{side}_scale"])
            elif f"{side}_codes" in views:
                parts = (views.get(f"{side}_{part}") for part in ("codes", "norms", "mean", "clamped"))
                views[f"{side}_cache"] = Tbq4Array(*parts)
        positional = tuple(views[name] for name in ("k_new", "v_new", "k_cache", "v_cache", "kv_len"))
        options = ("page_table", "k_sink", "v_sink", "k_recent", "v_recent")
        return positional, {name: views[name] for name in options if name in views}


# Arrays that end where the last token, page or length ends.
EXACT_APPENDS = (
    AppendProblem(kv_len=(33, 5, 0), seqlen_new=7, num_kv_heads=3, head_dim=96, k_format="fp8", dtype="bfloat16",
                  capacity=33, num_sink=2, num_recent=3),
    AppendProblem(kv_len=(48, 17), seqlen_new=20, num_kv_heads=2, head_dim=256, v_format="tbq4", page_size=16,
                  capacity=48, means=True, num_sink=30, num_recent=1),
    AppendProblem(kv_len=(2**31 - 1, -(2**31), 9), num_kv_heads=2, k_format="tbq4", v_format="tbq4",
                  in_dtype="float32", page_size=3, capacity=9),
)  # fmt: skip

# Formats of K and V, dtypes of new rows and of 16-bit arrays, head_dim: so few that builds are shared.
APPEND_CHOICES = (
    ("raw16", "raw16", "float16", "float16", 64),
    ("raw16", "raw16", "float32", "bfloat16", 96),
    ("raw16", "raw16", "bfloat16", "bfloat16", 96),
    ("raw16", "raw16", "float32", "float16", 192),
    ("raw16", "raw16", "bfloat16", "float16", 512),
    ("raw16", "tbq4", "bfloat16", "bfloat16", 128),
    ("tbq4", "raw16", "float32", "float16", 64),
    ("tbq4", "tbq4", "float16", "float16", 64),
    ("tbq4", "tbq4", "float16", "bfloat16", 128),
    ("tbq4", "tbq4", "bfloat16", "bfloat16", 256),
    ("tbq4", "tbq4", "float32", "float16", 512),
    ("fp8", "raw16", "float32", "bfloat16", 96),
    ("tbq4", "fp8", "bfloat16", "bfloat16", 128),
)


@st.composite
def append_problems(draw: st.DrawFn, *, on_host: bool = False) -> AppendProblem:
    """Draw an `AppendProblem`; lengths that `on_host` would be refused are drawn unless it is set."""
    k_format, v_format, in_dtype, dtype, head_dim = draw(st.sampled_from(APPEND_CHOICES))
    capacity = draw(st.sampled_from((1, 7, 33)))
    page_size = draw(st.sampled_from((None, 1, 3, 16)))
    held = capacity if page_size is None else -(-capacity // page_size) * page_size
    length = st.integers(0, held)
    if not on_host:
        length |= st.integers(-3, held + 5) | st.sampled_from((-(2**31), 2**31 - 1))
    rings = st.none() | st.sampled_from((0, 1, 2, 5, 64))
    return AppendProblem(
        kv_len=tuple(draw(st.lists(length, min_size=1, max_size=3))),
        seqlen_new=draw(st.sampled_from((1, 1, 2, 5, 37))),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=head_dim,
        k_format=k_format,
        v_format=v_format,
        in_dtype=in_dtype,
        dtype=dtype,
        page_size=page_size,
        capacity=capacity,
        means=draw(st.booleans()),
        num_sink=draw(rings),
        num_recent=draw(rings),
        views=draw(st.booleans()),
        scale=draw(st.sampled_from((1.0, 1e-3, 1e4))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


# Formats of K and V, dtype, head_dim: every format, dtype and head_dim that TBQ4 has, so few that builds are shared.
DECODE_CHOICES = (
    ("tbq4", "tbq4", "float16", 64),
    ("tbq4", "tbq4", "bfloat16", 128),
    ("tbq4", "tbq4", "float16", 256),
    ("tbq4", "tbq4", "bfloat16", 512),
    ("tbq4", "raw16", "float16", 128),
    ("raw16", "tbq4", "bfloat16", 64),
    ("tbq4", "raw16", "bfloat16", 256),
    ("raw16", "tbq4", "float16", 512),
)


def tbq4_problems(
    choices: Sequence[tuple[str, str, str, int]] = DECODE_CHOICES, **fields: Any
) -> st.SearchStrategy[Problem]:
    """Draw a `Problem` with K, V or both in TBQ4; `fields` are those of `problems`."""
    drawn = {
        "page_sizes": (None, 1, 5, 16, 33),
        "values": ("normal", "late_max", "huge", "equal", "tiny_v"),
        "means": (False, True),
        "nums_sink": (0, 0, 1, 4, 40),
        "nums_recent": (0, 0, 1, 7, 300),
        **fields,
    }
    return st.one_of(
        [
            problems(k_formats=(k,), v_formats=(v,), dtypes=(dtype,), head_dims=(head_dim,), **drawn)
            for k, v, dtype, head_dim in choices
        ]
    )


# The same with fp8 in K, V or both, beside every other format.
FP8_CHOICES = (
    ("fp8", "fp8", "float16", 128),
    ("raw16", "fp8", "float16", 128),
    ("fp8", "raw16", "bfloat16", 64),
    ("fp8", "tbq4", "float16", 64),
    ("tbq4", "fp8", "bfloat16", 128),
)


def fp8_problems(
    choices: Sequence[tuple[str, str, str, int]] = FP8_CHOICES, **fields: Any
) -> st.SearchStrategy[Problem]:
    """Draw a `Problem` with K, V or both in fp8; `fields` are those of `problems`."""
    return tbq4_problems(choices, **fields)
