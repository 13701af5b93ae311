"""What is measured: the cases, their arrays on the GPU, and the check that comes before every time."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

import cuattn
from cuattn import _arrays, _plan, reference

from . import roofline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cuattn._arrays import Array

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
# Query heads, KV heads, head_dim: those of Llama 3 8B, and a large head_dim with few KV heads.
SHAPES = ((32, 8, 128), (24, 4, 256))
BATCHES = (1, 16)
CONTEXTS = (8192, 32768, 131072)
# Where the GPU has next to nothing to do.
TINY_CONTEXT = 256

DEFAULT_SPLITS: tuple[int | None, ...] = (None, 8, 11, 16, 22, 29, 33, 44, 57, 66, 99, 132)


@dataclass(frozen=True, slots=True)
class Tile:
    """What `tiles` varies of a row of the tile table; written ``32x3x4``."""

    tile_kv: int
    num_stages: int
    num_warps: int

    def __str__(self) -> str:
        return f"{self.tile_kv}x{self.num_stages}x{self.num_warps}"


# Rings of 64 to 192 KB, with as many bytes in flight in few large tiles as in many small ones.
DEFAULT_TILES = {
    128: (
        *(Tile(16, stages, 4) for stages in (4, 6, 8)),
        *(Tile(16, stages, 8) for stages in (2, 3, 4)),
        *(Tile(32, stages, 4) for stages in (2, 3, 4, 6)),
        *(Tile(32, stages, 8) for stages in (2, 3)),
        *(Tile(64, stages, 4) for stages in (2, 3)),
    ),
    256: (
        *(Tile(16, stages, 2) for stages in (4, 6)),
        *(Tile(16, stages, 4) for stages in (2, 3, 4, 6)),
        *(Tile(16, stages, 8) for stages in (2, 3)),
        *(Tile(32, stages, 4) for stages in (2, 3)),
    ),
}


class WrongResultError(RuntimeError):
    """A result is not that of the reference."""


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One call of decode.

    Attributes
    ----------
    batch, kv_len, num_qo_heads, num_kv_heads, head_dim : int
        All sequences have the same length.
    dtype : {"bfloat16", "float16"}
    page_size : int, optional
        None for dense caches; the pages of paged ones are shuffled.
    seqlen_q : int
    """

    batch: int
    kv_len: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    page_size: int | None = None
    seqlen_q: int = 1

    @property
    def name(self) -> str:
        """Name of the shape, for filters."""
        return f"d{self.head_dim}-b{self.batch}-kv{self.kv_len}"

    @property
    def problem(self) -> _plan.DecodeProblem:
        """The same as a problem for plans."""
        return _plan.DecodeProblem(
            dtype=_plan.Dtype(self.dtype),
            k_format=_plan.KvFormat.RAW16,
            v_format=_plan.KvFormat.RAW16,
            batch=self.batch,
            seqlen_q=self.seqlen_q,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_kv_len=self.kv_len,
        )

    @property
    def q_shape(self) -> tuple[int, ...]:
        """Shape of q and out."""
        tokens = () if self.seqlen_q == 1 else (self.seqlen_q,)
        return (self.batch, *tokens, self.num_qo_heads, self.head_dim)

    @property
    def pages(self) -> int:
        """Pages of a sequence; one if dense."""
        return 1 if self.page_size is None else _plan.ceil_div(self.kv_len, self.page_size)

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """Shape of the K cache and of the V cache."""
        return (self.batch * self.pages, self.page_size or self.kv_len, self.num_kv_heads, self.head_dim)

    @property
    def cache_elements(self) -> int:
        """Elements of both caches."""
        return 2 * math.prod(self.cache_shape)

    @property
    def cache_bytes(self) -> int:
        """Bytes of both caches."""
        return self.cache_elements * int(DTYPES[self.dtype].itemsize)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of K and V that are read, and FLOPs."""
        return roofline.decode_traffic(self.problem)


def decode_cases(dtype: str = "bfloat16", page_size: int | None = None) -> list[DecodeCase]:
    """Return the decode cases, one page size at a time."""
    return [
        DecodeCase(batch, kv_len, *heads, dtype, page_size)
        for heads in SHAPES
        for batch in BATCHES
        for kv_len in CONTEXTS
    ]


def tiny_cases(dtype: str = "bfloat16") -> list[DecodeCase]:
    """Return one case of each shape that costs the GPU next to nothing, for times of the host."""
    return [DecodeCase(1, TINY_CONTEXT, *heads, dtype) for heads in SHAPES]


@cache
def _normal_kernel() -> Any:  # noqa: ANN401  CuPy has no types
    # CuPy's own generators need cuRAND, which cuattn does not depend on. The finalizer of splitmix64 gives 64 random
    # bits of a counter; Box and Muller make a normal number of 24 + 24 of them.
    return _arrays.import_cupy().ElementwiseKernel(
        "uint64 seed",
        "float32 x",
        """
        unsigned long long z = (seed + i + 1) * 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        z ^= z >> 31;
        const float unit = 1.0f / 16777216.0f;
        const float radius = sqrtf(-2.0f * logf(((unsigned)(z >> 40) + 1) * unit));
        x = radius * cospif(2.0f * (((unsigned)z & 0xFFFFFFu) * unit));
        """,
        "cuattn_bench_normal",
    )


_FILL_CHUNK = 2**27


def normal(elements: int, dtype: np.dtype[Any], seed: int = 0) -> Array:
    """Return standard normal numbers on the GPU; the same seed gives the same ones.

    Parameters
    ----------
    elements : int
    dtype : dtype
    seed : int, default 0
        The numbers of seeds that differ by less than `elements` overlap.

    Returns
    -------
    cupy.ndarray, shape (elements,)
    """
    cupy = _arrays.import_cupy()
    result = cupy.empty(elements, dtype)
    wide = cupy.empty(min(elements, _FILL_CHUNK), cupy.float32)
    for start in range(0, elements, _FILL_CHUNK):
        part = wide[: min(_FILL_CHUNK, elements - start)]
        _normal_kernel()(seed + start, part)
        result[start : start + part.size] = part
    return result


class DecodeInputs:
    """Arrays of a case on the GPU, in several sets that rotate.

    Parameters
    ----------
    case : DecodeCase
    buffer : cupy.ndarray, one axis
        Random values; the caches of set ``i`` are its ``i``-th part, V after K.
    sets : int

    Attributes
    ----------
    caches : list of cupy.ndarray
        The part of the buffer of each set, for the read roof.
    """

    def __init__(self, case: DecodeCase, buffer: Array, sets: int) -> None:
        cupy = _arrays.import_cupy()
        self.case = case
        size = case.cache_elements
        self.caches = [buffer[i * size : (i + 1) * size] for i in range(sets)]
        dtype = DTYPES[case.dtype]
        shape = (sets, *case.q_shape)
        # A seed far past the buffer's numbers, so that no query is a key.
        self._q = normal(math.prod(shape), dtype, seed=2**40).reshape(shape)
        self._out = cupy.empty(shape, dtype)
        self._kv_len = cupy.asarray(np.full(case.batch, case.kv_len, np.int32))
        self._page_table = None
        if case.page_size is not None:
            table = np.random.default_rng(0).permutation(case.batch * case.pages).astype(np.int32)
            self._page_table = cupy.asarray(table.reshape(case.batch, case.pages))

    def _arguments(self, index: int) -> tuple[tuple[Array, ...], dict[str, Any]]:
        k, v = self.caches[index].reshape(2, *self.case.cache_shape)
        return (self._q[index], k, v, self._kv_len), {"page_table": self._page_table}

    def calls(self, num_splits: int | None = None) -> list[Callable[[], Array]]:
        """Return one call of `cuattn.decode` for each set; outputs are allocated already."""

        def call(index: int) -> Callable[[], Array]:
            args, options = self._arguments(index)
            return partial(cuattn.decode, *args, **options, num_splits=num_splits, out=self._out[index])

        return [call(index) for index in range(len(self.caches))]

    def plan(self, num_splits: int | None = None) -> _plan.DecodePlan:
        """Return what such a call runs."""
        args, options = self._arguments(0)
        return cuattn.plan_decode(*args, **options, num_splits=num_splits)

    def out_bits(self) -> bytes:
        """Return the output of the first set as it lies in memory."""
        return bytes(_to_host(self._out[0]).tobytes())

    def expected(self) -> DecodeExpected:
        """Compute the reference of the first set's first and last sequence and KV head, on the CPU."""
        case = self.case
        (q, k, v, _), _ = self._arguments(0)
        group = case.num_qo_heads // case.num_kv_heads
        pairs = dict.fromkeys(((0, 0), (case.batch - 1, case.num_kv_heads - 1)))
        problems = []
        for sequence, head in pairs:
            heads = slice(head * group, (head + 1) * group)
            rows = (_to_host(self._rows(x, sequence, head))[None, :, None] for x in (k, v))
            problems.append(((sequence, heads), (_to_host(q[sequence : sequence + 1, ..., heads, :]), *rows)))
        # NumPy drops the interpreter's lock in casts and products.
        with ThreadPoolExecutor() as executor:
            same, ref = (
                executor.map(lambda problem, function=function: function(*problem[1], case.kv_len)[0], problems)
                for function in (reference.decode_same_precision, reference.decode)
            )
            parts = [(place, *results) for (place, _), *results in zip(problems, same, ref, strict=True)]
        return DecodeExpected(parts, DTYPES[case.dtype])

    def _rows(self, x: Array, sequence: int, head: int) -> Array:
        """Keys or values of one head of one sequence."""
        kv_len, head_dim = self.case.kv_len, self.case.head_dim
        if self._page_table is None:
            return x[sequence, :kv_len, head]
        pages = x.view("uint16")[:, :, head][self._page_table[sequence]]
        return pages.reshape(-1, head_dim)[:kv_len].view(x.dtype)

    def check(self, expected: DecodeExpected, num_splits: int | None = None) -> bytes:
        """Run the first set's call on an output full of NaN and compare.

        Parameters
        ----------
        expected : DecodeExpected
        num_splits : int, optional

        Returns
        -------
        bytes
            The output as it lies in memory.

        Raises
        ------
        WrongResultError
            If the result breaks the error law.
        """
        out = self._out[0]
        out.data.memset(0xFF, out.nbytes)
        self.calls(num_splits)[0]()
        expected.check(_to_host(out))
        return self.out_bits()


def _to_host(x: Array) -> np.ndarray[Any, Any]:
    """Copy a 16-bit CuPy array; as integers, which every CuPy function takes."""
    bits: np.ndarray[Any, Any] = _arrays.import_cupy().asnumpy(x.view("uint16"))
    return bits.view(x.dtype)


@dataclass(frozen=True, slots=True)
class DecodeExpected:
    """Results of some rows of q, each with its place: same-precision, and float64.

    Attributes
    ----------
    parts : sequence of ((int, slice), ndarray, ndarray)
        Sequence and query heads; the result that rounds where a kernel rounds; the reference.
    dtype : dtype
        That of the output.
    """

    parts: Sequence[tuple[tuple[int, slice], np.ndarray[Any, Any], np.ndarray[Any, Any]]]
    dtype: np.dtype[Any]

    def check(self, out: np.ndarray[Any, Any]) -> None:
        """Raise `WrongResultError` unless ``max|out - ref| <= 2 max|same - ref| + 1 ulp(max|ref|)`` in every part."""
        for (sequence, heads), same, ref in self.parts:
            got = out[sequence, ..., heads, :].astype(np.float64)
            error = np.abs(got - ref).max()
            ulp = float(np.spacing(self.dtype.type(np.abs(ref).max())))
            allowed = 2 * np.abs(same.astype(np.float64) - ref).max() + ulp
            # In this form a NaN fails, too.
            if not error <= allowed:
                place = f"sequence {sequence}, query heads {heads.start} to {heads.stop - 1}"
                msg = f"{place}: error {error:.3g}, allowed {allowed:.3g}"
                raise WrongResultError(msg)


@contextmanager
def substituted_tile(config: _plan.DecodeConfig, tile: Tile | None, device: _plan.Device) -> Iterator[None]:
    """Put another tile in place of the one that a config came from; None leaves it as it is.

    Parameters
    ----------
    config : DecodeConfig
    tile : Tile, optional
    device : Device
        Whose table is changed.

    Yields
    ------
    None
    """
    if tile is None:
        yield
        return
    table, key = _plan.decode_tiles(device), (config.head_dim, config.row_tiles)
    row = table[key]
    table[key] = replace(row, tile_kv=tile.tile_kv, num_stages=tile.num_stages, num_warps=tile.num_warps)
    _plan.decode_plan.cache_clear()
    try:
        yield
    finally:
        table[key] = row
        _plan.decode_plan.cache_clear()
