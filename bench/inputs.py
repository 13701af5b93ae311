"""Arrays of the decode cases on the GPU, and the check that comes before every time."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

import cuattn
from cuattn import _arrays, _plan, reference
from cuattn._cache import Codes, Planes

from . import exact
from .cases import DTYPES, FORMATS, FP8, FP8_SCALE, RAW16, DecodeCase
from .checks import ByExact, ByRaw16, ByReference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cuattn._arrays import Array

    from .checks import Expected


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
# Seeds far apart, so that no query and no kept token is one of a cache.
_SEED_OF_Q, _SEED_OF_KEPT = 2**40, 2**41
# Multiply-adds of a KV head's scores from which on the reference, which rounds as tensor cores do, takes seconds.
_REFERENCE_SIZE = 2**26


def normal(elements: int, dtype: np.dtype[Any], seed: int = 0, out: Array | None = None) -> Array:
    """Return standard normal numbers on the GPU; the same seed gives the same ones.

    Parameters
    ----------
    elements : int
    dtype : dtype
    seed : int, default 0
        The numbers of seeds that differ by less than `elements` overlap.
    out : cupy.ndarray, shape (elements,), `dtype`, optional
        Receives them.

    Returns
    -------
    cupy.ndarray, shape (elements,)
    """
    cupy = _arrays.import_cupy()
    result = cupy.empty(elements, dtype) if out is None else out
    wide = cupy.empty(min(elements, _FILL_CHUNK), cupy.float32)
    for start in range(0, elements, _FILL_CHUNK):
        part = wide[: min(_FILL_CHUNK, elements - start)]
        _normal_kernel()(seed + start, part)
        result[start : start + part.size] = part
    return result


def to_host(x: Array) -> np.ndarray[Any, Any]:
    """Copy a CuPy array; 16-bit ones as integers, which every CuPy function takes."""
    cupy = _arrays.import_cupy()
    if x.dtype.itemsize != 2:  # noqa: PLR2004
        return np.asarray(cupy.asnumpy(x))
    bits: np.ndarray[Any, Any] = cupy.asnumpy(x.view(np.uint16))
    return bits.view(x.dtype)


def as_float16(x: Array) -> Array:
    """Round a 16-bit array to float16; from bfloat16 through float32, whose upper half it is."""
    if x.dtype == np.float16:
        return x
    return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float16)


def random_caches(case: DecodeCase, sets: int) -> list[Array]:
    """Return the bytes of K and V of each set, V behind K and norms behind codes, all normal rows.

    Parameters
    ----------
    case : DecodeCase
    sets : int

    Returns
    -------
    list of cupy.ndarray, shape (case.cache_bytes,), uint8
    """
    everything = _arrays.import_cupy().empty(sets * case.cache_bytes, np.uint8)
    parts = [everything[i * case.cache_bytes : (i + 1) * case.cache_bytes] for i in range(sets)]
    elements, seed = math.prod(case.cache_shape), 0
    for part in parts:
        start = 0
        for kv_format, (num_rows, num_norms) in zip(FORMATS[case.formats], _pairs(case.planes), strict=True):
            rows = part[start : start + num_rows]
            norms = part[start + num_rows : start + num_rows + num_norms]
            if kv_format is RAW16:
                normal(elements, DTYPES[case.dtype], seed, out=rows.view(DTYPES[case.dtype]))
            elif kv_format is FP8:
                _fill_fp8(rows.reshape(-1, case.head_dim), seed)
            else:
                _fill_tbq4(rows.reshape(-1, case.head_dim // 2), norms, case.head_dim, seed)
            start, seed = start + num_rows + num_norms, seed + elements
    return parts


def _pairs(planes: tuple[int, int, int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    return planes[:2], planes[2:]


def _fill_tbq4(codes: Array, norms: Array, head_dim: int, seed: int) -> None:
    norms = norms.view(np.float16).reshape(len(codes), -1)
    step = _FILL_CHUNK // head_dim
    for first in range(0, len(codes), step):
        rows = slice(first, min(first + step, len(codes)))
        count = rows.stop - rows.start
        x = normal(count * head_dim, np.dtype(np.float16), seed + first * head_dim)
        encoded = cuattn.quantize(x.reshape(count, head_dim))
        codes[rows], norms[rows] = encoded.codes, encoded.norms


def _fill_fp8(codes: Array, seed: int) -> None:
    count, head_dim = codes.shape
    step = _FILL_CHUNK // head_dim
    for first in range(0, count, step):
        rows = codes[first : first + step]
        x = normal(rows.size, np.dtype(np.float16), seed + first * head_dim)
        rows[...] = cuattn.quantize_fp8(x.reshape(rows.shape), scale=FP8_SCALE).codes


class DecodeInputs:
    """Arrays of a case on the GPU, in several sets that rotate.

    Parameters
    ----------
    case : DecodeCase
    sets : int

    Attributes
    ----------
    caches : list of cupy.ndarray
        The bytes of K and V of each set, for the read roof.
    """

    def __init__(self, case: DecodeCase, sets: int) -> None:
        cupy = _arrays.import_cupy()
        self.case = case
        self.caches = random_caches(case, sets)
        dtype = DTYPES[case.dtype]
        shape = (sets, *case.q_shape)
        self._q = normal(math.prod(shape), dtype, seed=_SEED_OF_Q).reshape(shape)
        self._out = cupy.empty(shape, dtype)
        self._kv_len = cupy.asarray(np.array(case.kv_lens, np.int32))
        self._page_table = None
        if case.page_size is not None:
            table = np.full((case.batch, max(case.pages)), -1, np.int32)
            used = np.arange(max(case.pages)) < np.array(case.pages)[:, None]
            table[used] = np.random.default_rng(0).permutation(sum(case.pages))
            self._page_table = cupy.asarray(table)
        self._kept: dict[str, Array] = {}
        for name, count in (("sink", case.num_sink), ("recent", case.num_recent)):
            shape = (2, case.batch, count, case.num_kv_heads, case.head_dim)
            if count:
                k, v = normal(math.prod(shape), dtype, seed=_SEED_OF_KEPT + count).reshape(shape)
                self._kept |= {f"k_{name}": k, f"v_{name}": v}

    def _caches(self, index: int) -> tuple[Any, Any]:
        """K and V of a set: arrays, `Tbq4Array` or `Fp8Array`."""
        *axes, head_dim = self.case.cache_shape
        found, start = [], 0
        for kv_format, (num_rows, num_norms) in zip(FORMATS[self.case.formats], _pairs(self.case.planes), strict=True):
            rows = self.caches[index][start : start + num_rows]
            norms = self.caches[index][start + num_rows : start + num_rows + num_norms]
            start += num_rows + num_norms
            if kv_format is RAW16:
                found.append(rows.view(DTYPES[self.case.dtype]).reshape(*axes, head_dim))
            elif kv_format is FP8:
                found.append(cuattn.Fp8Array(rows.reshape(*axes, head_dim), FP8_SCALE))
            else:
                found.append(cuattn.Tbq4Array(rows.reshape(*axes, -1), norms.view(np.float16).reshape(*axes, -1)))
        return found[0], found[1]

    def _call(self, index: int, options: Mapping[str, Any]) -> Callable[[], Array]:
        args = (self._q[index], *self._caches(index), self._kv_len)
        return partial(
            cuattn.decode, *args, page_table=self._page_table, **self._kept, **options, out=self._out[index]
        )  # fmt: skip

    def calls(self, **options: Any) -> list[Callable[[], Array]]:  # noqa: ANN401  those of `decode`
        """Return one call of `cuattn.decode` for each set; outputs are allocated already."""
        return [self._call(index, options) for index in range(len(self.caches))]

    def arguments(self) -> list[tuple[Array, Any, Any, Array]]:
        """Return q, K, V and the lengths of each set, for others."""
        return [(self._q[index], *self._caches(index), self._kv_len) for index in range(len(self.caches))]

    def separate_calls(self) -> list[Callable[[], Array]]:
        """Return calls that dequantize K and V, each into a new array of 16 bits, and decode these."""

        def call(index: int) -> Callable[[], Array]:
            caches, out, dtype = self._caches(index), self._out[index], DTYPES[self.case.dtype]

            def run() -> Array:
                k, v = (cuattn.dequantize(x, dtype=dtype) for x in caches)
                return cuattn.decode(self._q[index], k, v, self._kv_len, page_table=self._page_table, out=out)

            return run

        return [call(index) for index in range(len(self.caches))]

    def plan(self, **options: Any) -> _plan.DecodePlan:  # noqa: ANN401  those of `plan_decode`
        """Return what such a call runs for the caches."""
        arguments = (self._q[0], *self._caches(0), self._kv_len)
        return cuattn.plan_decode(*arguments, page_table=self._page_table, **options)

    def out_bits(self) -> bytes:
        """Return the output of the first set as it lies in memory."""
        return bytes(to_host(self._out[0]).tobytes())

    def expected(self) -> Expected:
        """Compute what the first set's output is compared with.

        For caches in 16 bits that is the reference, on the CPU, for the first and the last sequence and KV head, or
        for long ones float64 on the GPU; for others `decode` itself on the dequantized caches, for everything.
        """
        case = self.case
        if case.formats != "raw16":
            return self.by_raw16()
        rows = case.seqlen_q * case.num_qo_heads // case.num_kv_heads
        return self.by_reference() if rows * case.kv_len * case.head_dim < _REFERENCE_SIZE else self.by_exact()

    def _pairs(self) -> list[tuple[int, int]]:
        """Return the first and the last sequence, each with a KV head."""
        return list(dict.fromkeys(((0, 0), (self.case.batch - 1, self.case.num_kv_heads - 1))))

    def by_reference(self) -> ByReference:
        """Compute the reference of the first set's first and last sequence and KV head, on the CPU."""
        case = self.case
        caches = self._caches(0)
        group = case.num_qo_heads // case.num_kv_heads
        problems = []
        for sequence, head in self._pairs():
            heads = slice(head * group, (head + 1) * group)
            q = to_host(self._q[0][sequence : sequence + 1, ..., heads, :])
            k, v = (self._host_rows(x, sequence, head) for x in caches)
            kept = {name: to_host(x[sequence : sequence + 1, :, head : head + 1]) for name, x in self._kept.items()}
            problems.append(((sequence, heads), (q, k, v, case.kv_lens[sequence]), kept))
        # NumPy drops the interpreter's lock in casts and products.
        with ThreadPoolExecutor() as executor:
            same, ref = (
                executor.map(lambda problem, function=function: function(*problem[1], **problem[2])[0], problems)
                for function in (reference.decode_same_precision, reference.decode)
            )
            parts = [(place, *results) for (place, _, _), *results in zip(problems, same, ref, strict=True)]
        # A rotated query is rounded once more, and the rounding may fall the other way in one of its values: far less
        # than an ulp of the output (tests/tolerance.py).
        return ByReference(parts, DTYPES[case.dtype], ulps=1 if case.formats == "raw16" else 2)

    def _host_rows(self, x: Any, sequence: int, head: int) -> Any:  # noqa: ANN401  an array, or codes
        """Keys or values of one head of one sequence, with axes of length 1 for both."""
        if isinstance(x, cuattn.Tbq4Array):
            codes, norms = (self._host_rows(plane, sequence, head) for plane in (x.codes, x.norms))
            return Planes(codes, norms, None)
        if isinstance(x, cuattn.Fp8Array):
            return Codes(self._host_rows(x.codes, sequence, head), x.scale)
        return to_host(self._rows(x, sequence, head))[None, :, None]

    def _rows(self, x: Array, sequence: int, head: int) -> Array:
        """Rows of one head of one sequence, in order."""
        kv_len = self.case.kv_lens[sequence]
        if self._page_table is None:
            return x[sequence, :kv_len, head]
        bits = x.view(np.uint16) if x.dtype.itemsize == 2 else x  # noqa: PLR2004
        pages = bits[:, :, head][self._page_table[sequence, : self.case.pages[sequence]]]
        return pages.reshape(-1, x.shape[-1])[:kv_len].view(x.dtype)

    def by_exact(self) -> ByExact:
        """Attend from the first set's first and last sequence and KV head in float64, on the GPU; 16 bits only."""
        case = self.case
        caches = self._caches(0)
        group = case.num_qo_heads // case.num_kv_heads
        q = self._q[0].reshape(case.batch, case.seqlen_q, case.num_qo_heads, case.head_dim)
        parts = []
        for sequence, head in self._pairs():
            heads = slice(head * group, (head + 1) * group)
            k, v = (exact.as_float64(self._rows(x, sequence, head)) for x in caches)
            for token in range(case.seqlen_q):
                seen = len(k) - case.seqlen_q + token + 1
                rows = exact.as_float64(q[sequence, token, heads])
                out, _ = exact.attend(rows, k[:seen], v[:seen], case.head_dim**-0.5)
                parts.append(((sequence, token, heads), to_host(out)))
        return ByExact(parts, case.dtype)

    def by_raw16(self) -> ByRaw16:
        """Decode the first set's caches, dequantized to float16 and with the kept tokens in their places."""
        case = self.case
        caches = []
        for side, x in zip("kv", self._caches(0), strict=True):
            coded = isinstance(x, (cuattn.Tbq4Array, cuattn.Fp8Array))
            wide = cuattn.dequantize(x, dtype=np.float16) if coded else as_float16(x)
            # A copy, as the kept tokens are written into it.
            wide = wide.copy() if case.has_kept and wide is x else wide
            if case.num_sink:
                wide[:, : case.num_sink] = as_float16(self._kept[f"{side}_sink"])
            for position in range(max(case.num_sink, case.kv_len - case.num_recent), case.kv_len):
                wide[:, position] = as_float16(self._kept[f"{side}_recent"][:, position % case.num_recent])
            caches.append(wide)
        k, v = caches
        out = cuattn.decode(as_float16(self._q[0]), k, v, self._kv_len, page_table=self._page_table)
        return ByRaw16(to_host(out).astype(np.float64), case.dtype)

    def check(
        self,
        expected: Expected,
        call: Callable[[], object] | None = None,
        **options: Any,  # noqa: ANN401  those of `decode`
    ) -> bytes:
        """Run the first set's call on an output full of NaN and compare.

        Parameters
        ----------
        expected : ByReference, ByExact or ByRaw16
        call : callable, optional
            Instead of `decode`.
        **options
            Of `decode`.

        Returns
        -------
        bytes
            The output as it lies in memory.

        Raises
        ------
        WrongResultError
            If the result breaks the law or the bound.
        """
        self._out[0].view(np.uint16).fill(0xFFFF)
        (call or self._call(0, options))()
        expected.check(to_host(self._out[0]))
        return self.out_bits()
