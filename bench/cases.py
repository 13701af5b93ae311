"""What is measured: the cases. Their arrays are made in `inputs`; sweeps try what is in `tiles`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from cuattn import _plan, _tbq4

from . import roofline

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# Query heads, KV heads, head_dim: those of Llama 3 8B, and a large head_dim with few KV heads.
SHAPES = ((32, 8, 128), (24, 4, 256))
# Of sweeps.
BATCHES = (1, 16)
CONTEXTS = (8192, 32768, 131072)
# Where the GPU has next to nothing to do.
TINY_CONTEXT = 256

RAW16, TBQ4, FP8 = _plan.KvFormat.RAW16, _plan.KvFormat.TBQ4, _plan.KvFormat.FP8
FORMATS = {"raw16": (RAW16, RAW16), "tbq4": (TBQ4, TBQ4), "raw16/tbq4": (RAW16, TBQ4), "tbq4/raw16": (TBQ4, RAW16)}
TBQ4_VARIANTS = tuple(formats for formats in FORMATS if "/" in formats)
FORMATS |= {
    "fp8": (FP8, FP8), "fp8/raw16": (FP8, RAW16), "raw16/fp8": (RAW16, FP8), "fp8/tbq4": (FP8, TBQ4),
    "tbq4/fp8": (TBQ4, FP8),
}  # fmt: skip
FP8_VARIANTS = tuple(formats for formats in FORMATS if "/" in formats and "fp8" in formats)
# Sequences and tokens with caches in TBQ4: one of every length, and batches whose caches have 277 and 554 MB.
TBQ4_SIZES = (
    *((1, kv_len) for kv_len in (8192, 16384, 32768, 131072, 262144)),
    *((batch, size // batch) for batch in (4, 16, 64) for size in (262144, 524288)),
)
# Sequences and tokens with caches in fp8: of 17 MB, and of 268 and 537 MB in one sequence or several.
FP8_SIZES = ((1, 8192), (1, 32768), (1, 131072), (1, 262144), (4, 65536), (16, 16384))
# What normal rows are divided by on their way to fp8; far from its ends.
FP8_SCALE = 2.0**-5
HEADLINE = (1, 262144, 24, 4, 256)
# First and newest tokens that the headline keeps in 16 bits.
KEPT = (4, 128)


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One call of decode.

    Attributes
    ----------
    batch, kv_len, num_qo_heads, num_kv_heads, head_dim : int
        All sequences have the same length, except where `lengths` says otherwise.
    dtype : {"bfloat16", "float16"}
    page_size : int, optional
        None for dense caches; the pages of paged ones are shuffled.
    seqlen_q : int
    formats : str
        Of the caches, one of `FORMATS`; K before V where they differ.
    num_sink, num_recent : int
        First and newest tokens that are kept in 16 bits beside dense caches.
    lengths : tuple of int
        Tokens of each sequence where they differ; in pages, so that memory is only what is used. `kv_len` is the
        largest.
    warm : bool
        Whether calls read the same caches, which L2 holds, rather than some that none of the last calls read.
    """

    batch: int
    kv_len: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    page_size: int | None = None
    seqlen_q: int = 1
    formats: str = "raw16"
    num_sink: int = 0
    num_recent: int = 0
    lengths: tuple[int, ...] = ()
    warm: bool = False

    @property
    def name(self) -> str:
        """Name of shape and formats, for filters."""
        heads = (self.num_qo_heads, self.num_kv_heads, self.head_dim)
        parts = [
            f"d{self.head_dim}",
            "" if heads in SHAPES else f"h{self.num_qo_heads}x{self.num_kv_heads}",
            f"b{self.batch}-kv{self.kv_len}",
            "" if self.seqlen_q == 1 else f"q{self.seqlen_q}",
            "" if self.formats == "raw16" else self.formats.replace("/", "-"),
            f"sink{self.num_sink}-recent{self.num_recent}" if self.has_kept else "",
            f"unequal{sum(self.lengths)}" if self.lengths else "",
            "warm" if self.warm else "",
        ]
        return "-".join(filter(None, parts))

    @property
    def kv(self) -> str:
        """Formats as a record names them."""
        return self.formats.replace("raw16", SHORT_DTYPES[self.dtype])

    @property
    def has_kept(self) -> bool:
        """Whether tokens are kept beside the caches."""
        return self.num_sink + self.num_recent > 0

    @property
    def has_peers(self) -> bool:
        """Whether others take the same arrays: one query token a sequence, dense caches of the same dtype."""
        return self.seqlen_q == 1 and self.page_size is None and self.formats == "raw16" and not self.has_kept

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return self.lengths or (self.kv_len,) * self.batch

    @property
    def problem(self) -> _plan.DecodeProblem:
        """The same as a problem for plans."""
        k_format, v_format = FORMATS[self.formats]
        return _plan.DecodeProblem(
            dtype=_plan.Dtype(self.dtype),
            k_format=k_format,
            v_format=v_format,
            batch=self.batch,
            seqlen_q=self.seqlen_q,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_kv_len=self.kv_len,
            adjacent_heads=math.gcd(self.num_kv_heads, 4) if self.formats == "tbq4" else 1,
        )

    @property
    def q_shape(self) -> tuple[int, ...]:
        """Shape of q and out."""
        tokens = () if self.seqlen_q == 1 else (self.seqlen_q,)
        return (self.batch, *tokens, self.num_qo_heads, self.head_dim)

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of each sequence; one if dense."""
        return tuple(1 if self.page_size is None else _plan.ceil_div(n, self.page_size) for n in self.kv_lens)

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """Shape of the K cache and of the V cache."""
        return (sum(self.pages), self.page_size or self.kv_len, self.num_kv_heads, self.head_dim)

    @property
    def planes(self) -> tuple[int, int, int, int]:
        """Bytes of the rows of K, their norms, the rows of V and their norms, as they lie one after the other."""
        elements = math.prod(self.cache_shape)
        norms = elements // _tbq4.block_of(self.head_dim) * _tbq4.NORM_BYTES if "tbq4" in self.formats else 0
        sizes = {RAW16: (elements * DTYPES[self.dtype].itemsize, 0), TBQ4: (elements // 2, norms), FP8: (elements, 0)}
        k_format, v_format = FORMATS[self.formats]
        return (*sizes[k_format], *sizes[v_format])

    @property
    def cache_bytes(self) -> int:
        """Bytes of both caches."""
        return sum(self.planes)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of K and V that are read, and FLOPs."""
        nbytes, flops = roofline.decode_traffic(replace(self.problem, batch=1, max_kv_len=sum(self.kv_lens)))
        # Kept tokens are read in 16 bits instead.
        kept = replace(self, formats="raw16", num_sink=0, num_recent=0)
        count = min(self.num_sink + self.num_recent, self.kv_len)
        per_token, per_kept = (roofline.decode_traffic(x.problem)[0] // self.kv_len for x in (self, kept))
        return nbytes + count * (per_kept - per_token), flops

    @property
    def token_bytes(self) -> float:
        """Bytes of a token of K and of V of one KV head in the caches."""
        return roofline.decode_traffic(self.problem)[0] / (self.batch * self.kv_len * self.num_kv_heads)


def sweep_cases(dtype: str = "bfloat16", page_size: int | None = None) -> list[DecodeCase]:
    """Return the decode cases of sweeps in 16 bits, one page size at a time."""
    return [
        DecodeCase(batch, kv_len, *heads, dtype, page_size)
        for heads in SHAPES
        for batch in BATCHES
        for kv_len in CONTEXTS
    ]


def tbq4_cases(dtype: str = "bfloat16", page_size: int | None = None) -> list[DecodeCase]:
    """Return decode cases with caches in TBQ4, each with its equal in 16 bits behind it, and variants of the first."""
    headline = DecodeCase(*HEADLINE, dtype, page_size, formats="tbq4")
    cases = [
        DecodeCase(batch, kv_len, *heads, dtype, page_size, formats=formats)
        for heads in reversed(SHAPES)
        for batch, kv_len in TBQ4_SIZES
        for formats in ("tbq4", "raw16")
    ]
    variants = [replace(headline, formats=formats) for formats in TBQ4_VARIANTS]
    if dtype != "float16":
        variants.append(replace(headline, dtype="float16"))
    if page_size is None:
        variants.append(replace(headline, num_sink=KEPT[0], num_recent=KEPT[1]))
    return cases + variants


def fp8_cases(dtype: str = "bfloat16", page_size: int | None = None) -> list[DecodeCase]:
    """Return decode cases with caches in fp8, each with its equal in 16 bits behind it, and variants of one."""
    cases = [
        DecodeCase(batch, kv_len, *heads, dtype, page_size, formats=formats)
        for heads in reversed(SHAPES)
        for batch, kv_len in FP8_SIZES
        for formats in ("fp8", "raw16")
    ]
    return cases + [DecodeCase(*HEADLINE, dtype, page_size, formats=formats) for formats in FP8_VARIANTS]


def tiny_cases(dtype: str = "bfloat16") -> list[DecodeCase]:
    """Return one case of each shape that costs the GPU next to nothing, for times of the host."""
    return [DecodeCase(1, TINY_CONTEXT, *heads, dtype) for heads in SHAPES]


def separate_traffic(case: DecodeCase) -> tuple[int, int]:
    """Return bytes that `dequantize` reads and writes, and that a decode of its results reads.

    Parameters
    ----------
    case : DecodeCase
        With caches in TBQ4.

    Returns
    -------
    copied, read : int
    """
    wide = roofline.decode_traffic(replace(case, formats="raw16").problem)[0]
    return roofline.decode_traffic(case.problem)[0] + wide, wide


@dataclass(frozen=True, slots=True)
class CodecCase:
    """One call of quantize or of dequantize.

    Attributes
    ----------
    op : {"quantize", "dequantize"}
    tokens, num_kv_heads, head_dim : int
        Shape of the rows.
    dtype : {"bfloat16", "float16", "float32"}
        Of the rows.
    has_mean : bool
    """

    op: str
    tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    has_mean: bool = False

    @property
    def name(self) -> str:
        """Name for filters."""
        return f"d{self.head_dim}-{SHORT_DTYPES[self.dtype]}{'-mean' if self.has_mean else ''}"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the rows."""
        return (self.tokens, self.num_kv_heads, self.head_dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows as elements."""
        return math.prod(self.shape) * _plan.Dtype(self.dtype).itemsize

    @property
    def bytes(self) -> int:
        """Bytes read and written: rows, codes and norms."""
        elements = math.prod(self.shape)
        return self.row_bytes + elements // 2 + elements // _tbq4.block_of(self.head_dim) * _tbq4.NORM_BYTES


# Of the rows of a call of quantize or dequantize, as elements.
CODEC_BYTES = 2**30


def codec_cases() -> list[CodecCase]:
    """Return the cases of quantize and dequantize."""

    def case(op: str, heads: tuple[int, int, int], dtype: str, *, has_mean: bool = False) -> CodecCase:
        _, num_kv_heads, head_dim = heads
        tokens = CODEC_BYTES // (num_kv_heads * head_dim * _plan.Dtype(dtype).itemsize)
        return CodecCase(op, tokens, num_kv_heads, head_dim, dtype, has_mean)

    quantize = [case("quantize", heads, dtype) for heads in SHAPES for dtype in ("float16", "bfloat16", "float32")]
    with_mean = case("quantize", SHAPES[0], "bfloat16", has_mean=True)
    dequantize = [case("dequantize", heads, dtype) for heads in SHAPES for dtype in ("float16", "float32")]
    return [*quantize, with_mean, *dequantize]


@dataclass(frozen=True, slots=True)
class AppendCase:
    """One call of append, of K and V.

    Attributes
    ----------
    batch, seqlen_new, num_kv_heads, head_dim : int
    formats : {"raw16", "tbq4"}
        Of the caches.
    dtype : {"bfloat16", "float16"}
        Of new rows and of caches in 16 bits.
    """

    batch: int
    seqlen_new: int
    num_kv_heads: int
    head_dim: int
    formats: str
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Name for filters."""
        return f"d{self.head_dim}-b{self.batch}-new{self.seqlen_new}-{self.formats}"

    @property
    def new_shape(self) -> tuple[int, int, int, int]:
        """Shape of the new keys and of the new values."""
        return (self.batch, self.seqlen_new, self.num_kv_heads, self.head_dim)

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        new = DecodeCase(self.batch, self.seqlen_new, self.num_kv_heads, self.num_kv_heads, self.head_dim, self.dtype)
        return new.cache_bytes + replace(new, formats=self.formats).cache_bytes


def append_cases(dtype: str = "bfloat16") -> list[AppendCase]:
    """Return one step of many sequences and the prompt of one, for caches in TBQ4 and in 16 bits."""
    return [AppendCase(*size, 8, 128, formats, dtype) for size in ((64, 1), (1, 8192)) for formats in ("tbq4", "raw16")]
