"""What the topic prefill measures. Arrays are made in `prefill_inputs`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cuattn import _plan
from cuattn._problem import norm_bytes, row_bytes

from .cases import FORMATS, SHORT_DTYPES

# Query heads, KV heads, head_dim, value_dim. Prompts are of the shapes of decode, and of a small head_dim, where the
# exponentials cost as much as the products.
PROMPT_SHAPES = ((32, 8, 64, 64), (32, 8, 128, 128), (24, 4, 256, 256))
# Prompts of as many tokens in all, as others measure them: the same traffic for 1 to 8 times the work.
PROMPT_TOKENS = 16384
PROMPT_LENGTHS = (2048, 4096, 8192, 16384)
# Length of the prompts in the other dtype, whose probabilities are rounded elsewhere: time should be the same.
OTHER_DTYPE_LENGTH = 8192
# The remaining shapes, and lengths of their prompts: rows that are no power of two; keys longer than values, with a KV
# head for each query head as in DeepSeek's prompts; and rows so long that two warps share one, at half the length.
OTHER_SHAPES = (
    ((32, 8, 96, 96), 8192),
    ((16, 16, 192, 192), 8192),
    ((16, 16, 192, 128), 8192),
    ((16, 4, 512, 512), 4096),
)
# float32, whose products take three of TF32: without others, which multiply as they like.
FLOAT_SHAPES, FLOAT_LENGTHS = PROMPT_SHAPES[:2], (4096, 8192)
# Where a window saves most of the work: cost is to go by the window, not by the prompt.
LONG_PROMPT, WINDOW = 32768, (1024, None)
# Chunks of a long prompt, or a further turn of a conversation: new tokens, and what the cache holds, these included.
CHUNKS = (512, 2048, 4096)
CACHES = (32768, 131072)
CHUNK_SHAPES = PROMPT_SHAPES[1:]
PAGE_SIZE = 64


def visible_pairs(
    seqlen_q: int, kv_len: int, *, causal: bool, window: tuple[int | None, int | None] | None = None
) -> int:
    """Return how many keys the query tokens of a sequence see together; they are the last of it.

    Parameters
    ----------
    seqlen_q, kv_len : int
    causal, window
        As in `cuattn.prefill`, with None for unbounded.
    """
    position = np.arange(kv_len - seqlen_q, kv_len)
    left, right = (None, None) if window is None else window
    start = np.zeros_like(position) if left is None else np.maximum(position - left, 0)
    stop = np.full_like(position, kv_len) if right is None else np.minimum(position + right + 1, kv_len)
    if causal:
        stop = np.minimum(stop, position + 1)
    return int(np.maximum(stop - start, 0).sum())


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """One call of prefill.

    Attributes
    ----------
    batch, seqlen_q, kv_len : int
        All sequences have the same lengths.
    num_qo_heads, num_kv_heads, head_dim, value_dim : int
    causal : bool
    window : tuple (left, right), optional
    dtype : {"bfloat16", "float16", "float32"}
    page_size : int, optional
        None for dense keys and values; pages are shuffled.
    formats : {"raw16", "tbq4"}
        Of keys and values; rows of elements are of the dtype.
    has_peers : bool
        Whether others are timed too; `seqlen_q` is `kv_len` then, since they align masks differently.
    """

    batch: int
    seqlen_q: int
    kv_len: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    dtype: str = "bfloat16"
    page_size: int | None = None
    formats: str = "raw16"
    has_peers: bool = False

    @property
    def name(self) -> str:
        """Name for filters."""
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}v{self.value_dim}"
        parts = [f"d{dims}-b{self.batch}-q{self.seqlen_q}-kv{self.kv_len}", self.mask.replace(":", "").split(",")[0]]
        if self.formats != "raw16":
            parts.append(self.formats)
        if self.page_size is not None:
            parts.append(f"page{self.page_size}")
        if self.dtype != "bfloat16":
            parts.append(SHORT_DTYPES[self.dtype])
        return "-".join(parts)

    @property
    def mask(self) -> str:
        """Mask as a record names it."""
        if self.window is None:
            return "causal" if self.causal else "full"
        left, right = (-1 if side is None else side for side in self.window)
        return f"window:{left},{0 if self.causal else right}"

    @property
    def kv(self) -> str:
        """Formats as a record names them."""
        return self.formats.replace("raw16", SHORT_DTYPES[self.dtype])

    @property
    def problem(self) -> _plan.PrefillProblem:
        """The same as a problem for plans."""
        dtype = _plan.Dtype(self.dtype)
        k_format, v_format = _plan.formats_of(dtype) * 2 if self.dtype == "float32" else FORMATS[self.formats]
        return _plan.PrefillProblem(
            dtype=dtype,
            k_format=k_format,
            v_format=v_format,
            batch=self.batch,
            num_tokens=self.seqlen_q,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            max_kv_len=self.pages * (self.page_size or self.kv_len),
            page_size=self.page_size or 0,
        )

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Shape of q, and of out with value_dim for head_dim."""
        return (self.batch, self.seqlen_q, self.num_qo_heads, self.head_dim)

    @property
    def pages(self) -> int:
        """Pages of a sequence; one if dense."""
        return 1 if self.page_size is None else _plan.ceil_div(self.kv_len, self.page_size)

    @property
    def cache_axes(self) -> tuple[int, int, int]:
        """Shape of keys and values but for the rows."""
        return (self.batch * self.pages, self.page_size or self.kv_len, self.num_kv_heads)

    @property
    def read_bytes(self) -> int:
        """Bytes of q, K and V."""
        p = self.problem
        token = sum(
            row_bytes(kv_format, p.dtype, dim) + norm_bytes(kv_format, dim)
            for kv_format, dim in ((p.k_format, self.head_dim), (p.v_format, self.value_dim))
        )
        queries = self.batch * self.seqlen_q * self.num_qo_heads * self.head_dim * p.dtype.itemsize
        return queries + self.batch * self.kv_len * self.num_kv_heads * token

    @property
    def bytes(self) -> int:
        """Bytes of q, K, V, out and lse, each once."""
        rows = self.batch * self.seqlen_q * self.num_qo_heads
        return self.read_bytes + rows * (self.value_dim * _plan.Dtype(self.dtype).itemsize + 4)

    @property
    def flops(self) -> int:
        """Multiply-adds of both products, counted as two, for the keys that the mask leaves."""
        pairs = visible_pairs(self.seqlen_q, self.kv_len, causal=self.causal, window=self.window)
        return 2 * self.batch * pairs * (self.head_dim + self.value_dim) * self.num_qo_heads


def _prompt(
    shape: tuple[int, int, int, int], length: int, *, causal: bool, dtype: str, has_peers: bool = False
) -> PrefillCase:
    batch = max(1, PROMPT_TOKENS // length)
    return PrefillCase(batch, length, length, *shape, causal=causal, dtype=dtype, has_peers=has_peers)


def prefill_cases(dtype: str = "bfloat16", page_size: int | None = None) -> list[PrefillCase]:
    """Return the cases; `page_size` is that of paged caches."""
    prompts = [
        _prompt(shape, length, causal=causal, dtype=dtype, has_peers=True)
        for shape in PROMPT_SHAPES
        for causal in (True, False)
        for length in PROMPT_LENGTHS
    ]
    other_dtype = "float16" if dtype == "bfloat16" else "bfloat16"
    prompts += [
        _prompt(PROMPT_SHAPES[1], OTHER_DTYPE_LENGTH, causal=causal, dtype=other_dtype, has_peers=True)
        for causal in (True, False)
    ]
    prompts += [
        _prompt(shape, length, causal=causal, dtype="float32")
        for shape in FLOAT_SHAPES
        for causal in (True, False)
        for length in FLOAT_LENGTHS
    ]
    others = [
        _prompt(shape, length, causal=causal, dtype=dtype) for shape, length in OTHER_SHAPES for causal in (True, False)
    ]
    long = _prompt(PROMPT_SHAPES[1], LONG_PROMPT, causal=True, dtype=dtype, has_peers=True)
    chunks = [
        PrefillCase(1, chunk, cached, *shape, dtype=dtype, page_size=size, formats=formats)
        for shape in CHUNK_SHAPES
        for cached in CACHES
        for chunk in CHUNKS
        for formats in ("raw16", "tbq4")
        # Dense ones show what pages cost: with the shorter cache, in little time.
        for size in ((page_size or PAGE_SIZE, None) if cached == CACHES[0] else (page_size or PAGE_SIZE,))
    ]
    return [*prompts, *others, long, replace(long, window=WINDOW, has_peers=False), *chunks]
