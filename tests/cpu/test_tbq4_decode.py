"""Decode from TBQ4 caches, with means, first tokens and recent tokens: the definition, its roundings, and real data."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import resources
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, Problem
from tolerance import LOG2_E, assert_decode, expected, sizes_of, ulp

import cuattn
from cuattn import Tbq4Array, reference
from cuattn.reference import products

FORMATS = ("raw16", "tbq4")
SIGNS = cuattn._tbq4.SIGNS1, cuattn._tbq4.SIGNS2
problems = partial(
    strategies.problems,
    lengths=strategies.lengths(6),
    head_dims=(64, 128, 256),
    groups=(1, 2, 3),
    kv_heads=(1, 2),
    page_sizes=(None, 4),
    k_formats=FORMATS,
    v_formats=FORMATS,
    means=(False, True),
    nums_sink=(0, 1, 4, 20),
    nums_recent=(0, 1, 3, 20),
    values=("normal", "late_max", "huge", "equal", "tiny_v"),
)
all_tbq4 = partial(problems, k_formats=("tbq4",), v_formats=("tbq4",))


def changed(array: Tbq4Array, **parts: Any) -> Tbq4Array:
    return Tbq4Array(**{name: getattr(array, name) for name in ("codes", "norms", "mean")} | parts)


def decoded(cache: Any) -> np.ndarray:
    """Return the rows of a cache as float64; those without a token as they come."""
    if isinstance(cache, Tbq4Array):
        return reference.dequantize(cache.codes, cache.norms, mean=cache.mean)
    return cache.astype(np.float64)


def assembled(arrays: tuple[Any, ...], options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return dense float64 keys and values ``[batch, longest, ...]``, token by token where the words say they are."""
    _, k_cache, v_cache, kv_len = arrays
    table = options.get("page_table")
    results = []
    for x, cache in (("k", decoded(k_cache)), ("v", decoded(v_cache))):
        sink, recent = options.get(f"{x}_sink"), options.get(f"{x}_recent")
        num_sink, num_recent = (0 if rows is None else rows.shape[1] for rows in (sink, recent))
        dense = np.full((len(kv_len), max(kv_len, default=0), *cache.shape[2:]), np.nan)
        for b, length in enumerate(kv_len):
            for p in range(length):
                if p < num_sink:
                    dense[b, p] = sink[b, p]
                elif p >= length - num_recent:
                    dense[b, p] = recent[b, p % num_recent]
                elif table is None:
                    dense[b, p] = cache[b, p]
                else:
                    dense[b, p] = cache[table[b, p // cache.shape[1]], p % cache.shape[1]]
        results.append(dense)
    return results[0], results[1]


def plain(options: dict[str, Any]) -> dict[str, Any]:
    """Return options without those that say where rows are."""
    names = ("page_table", "k_sink", "v_sink", "k_recent", "v_recent")
    return {name: x for name, x in options.items() if name not in names}


def assert_float64_close(arrays: tuple[Any, ...], options: dict[str, Any], got: Any, want: Any) -> None:
    """Assert agreement to the roundings of float64, as in `test_reference`; a decoded row errs like a score."""
    sizes, head_dim = sizes_of(arrays, options), arrays[0].shape[-1]
    magnitude = max(size.magnitude for size in sizes)
    largest = max(size.largest_value for size in sizes)
    bound = 2 * np.finfo(float).eps * (magnitude * (head_dim + 2) + max(arrays[3]) + 8)
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=2 * bound * max(1.0, largest))  # as derived there
    np.testing.assert_allclose(got[1], want[1], rtol=0, atol=bound)  # as derived there


def check_definition(arrays: tuple[Any, ...], options: dict[str, Any]) -> None:
    got = reference.decode(*arrays, **options, return_lse=True)
    assert not any(np.isnan(x).any() for x in got)
    want = reference.decode(arrays[0], *assembled(arrays, options), arrays[3], **plain(options), return_lse=True)
    assert_float64_close(arrays, options, got, want)


# The definition


@given(problem=problems(dtypes=("float16", "bfloat16", "float32")))
def test_decode_attends_to_the_rows_that_dequantize_gives_and_to_kept_rows(problem: Problem) -> None:
    """Whatever the formats, storage, masks, means; all that holds no token is NaN, infinite, or no page."""
    check_definition(problem.arrays(), problem.options())


@pytest.mark.parametrize("seqlen_q", [1, 4])
@pytest.mark.parametrize("window", [None, (3, None)])
@pytest.mark.parametrize("page_size", [None, 5])
def test_first_and_recent_tokens_meet_at_every_length(
    seqlen_q: int, window: tuple[int, None] | None, page_size: int | None
) -> None:
    """Fewer tokens than are kept, just as many, overlapping, and rings that have gone round several times."""
    for num_sink, num_recent in product((0, 1, 4, 20), (0, 1, 3, 20)):
        problem = Problem(
            kv_len=tuple(range(26)), seqlen_q=seqlen_q, window=window, page_size=page_size, group=2, seed=num_sink,
            num_sink=num_sink, num_recent=num_recent, k_format="tbq4", v_format="tbq4", means=True,
        )  # fmt: skip
        check_definition(problem.arrays(), problem.options())


@pytest.mark.parametrize("k_format", FORMATS)
def test_a_ring_keeps_its_slots_as_tokens_are_appended(k_format: str) -> None:
    """Written as a program would write it: each new token into its slot, nothing is moved."""
    num_sink, num_recent = 2, 4
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((30, heads, 64)).astype(np.float16) for heads in (2, 1, 1))
    stored = [k[None], v[None]] if k_format == "raw16" else [cuattn.quantize(x[None]) for x in (k, v)]
    values = [decoded(x)[0] for x in stored]
    rings = [np.full((1, num_recent, 1, 64), np.nan, np.float16) for _ in range(2)]
    for n in range(1, 31):
        for ring, x in zip(rings, (k, v), strict=True):
            ring[0, (n - 1) % num_recent] = x[n - 1]
        got = cuattn.decode(
            q[n - 1 : n], *stored, [n], k_sink=k[None, :num_sink], v_sink=v[None, :num_sink], k_recent=rings[0],
            v_recent=rings[1],
        )  # fmt: skip
        kept = np.arange(n)[:, None, None]
        kept = (kept < num_sink) | (kept >= n - num_recent)
        rows = [np.where(kept, x[:n], y[:n])[None] for x, y in zip((k, v), values, strict=True)]
        want = reference.decode(q[n - 1 : n].astype(float), *rows, [n])
        np.testing.assert_allclose(got, want, rtol=2.0**-11, atol=2.0**-25)  # half an ulp of float16


@given(problem=problems(nums_sink=(0,), nums_recent=(0,)))
def test_axes_of_no_kept_tokens_are_no_kept_tokens(problem: Problem) -> None:
    (q, *caches, kv_len), options = problem.arrays(), problem.options()
    nothing = np.zeros((len(kv_len), 0, problem.num_kv_heads, problem.head_dim), q.dtype)
    empty = {f"{x}_{name}": nothing for x in "kv" for name in ("sink", "recent")}
    for function in (cuattn.decode, reference.decode, reference.decode_same_precision):
        want = function(q, *caches, kv_len, **options, return_lse=True)
        got = function(q, *caches, kv_len, **options, **empty, return_lse=True)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w)


@given(problem=problems(dtypes=("float16", "bfloat16", "float32")), num_splits=st.none() | st.integers(1, 512))
def test_decode_on_numpy_is_the_reference_rounded_to_the_dtype_of_q(problem: Problem, num_splits: int | None) -> None:
    arrays, options = problem.arrays(), problem.options()
    out, lse = cuattn.decode(*arrays, **options, num_splits=num_splits, return_lse=True)
    want_out, want_lse = reference.decode(*arrays, **options, return_lse=True)
    with np.errstate(over="ignore"):
        want_out = want_out.astype(DTYPES[problem.dtype])
    assert out.tobytes() == want_out.tobytes()
    assert lse.tobytes() == want_lse.astype(np.float32).tobytes()


def test_queries_in_float64_attend_to_tbq4_too() -> None:
    q, k_cache, v_cache, kv_len = Problem((9, 0), group=2, k_format="tbq4", v_format="tbq4", means=True).arrays()
    q = q.astype(np.float64)
    out = cuattn.decode(q, k_cache, v_cache, kv_len)
    np.testing.assert_array_equal(out, reference.decode(q, k_cache, v_cache, kv_len))
    assert out.dtype == np.float64


@given(problem=problems(nums_sink=(0,), nums_recent=(0,)))
def test_attention_and_prefill_take_rows_in_tbq4(problem: Problem) -> None:
    (q, k, v, kv_len), options = problem.arrays(), problem.options()
    want = reference.decode(q, k, v, kv_len, **options, return_lse=True)
    q = q if q.ndim == 4 else q[:, None]
    got = reference.prefill(q, k, v, kv_len=kv_len, **options, return_lse=True)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.reshape(b.shape), b)
    # With a kernel's roundings they differ, by one of each value to float16: prefill has it, decode has it not.
    same, same_lse = reference.attention_same_precision(q, k, v, kv_len=kv_len, **options)
    assert same.shape == got[0].shape
    assert np.isfinite(same_lse).tolist() == np.isfinite(got[1]).tolist()


# Formats and means


@given(problem=all_tbq4(), fields=st.sampled_from(({"k_format": "raw16"}, {"v_format": "raw16"})))
def test_the_formats_of_keys_and_values_are_independent(problem: Problem, fields: dict[str, str]) -> None:
    """The lse depends on keys alone, and out differs where the other format's errors are."""
    problem, other = (replace(p, values="normal", kv_len=(7, 9)) for p in (problem, replace(problem, **fields)))
    lse, other_lse = (reference.decode(*p.arrays(), **p.options(), return_lse=True)[1] for p in (problem, other))
    uses_cache = problem.num_sink + problem.num_recent < 7
    if "v_format" in fields:
        np.testing.assert_array_equal(lse, other_lse)
    elif uses_cache and problem.window is None:
        assert (lse != other_lse).any()


@given(problem=all_tbq4(means=(True,), nums_sink=(0,), nums_recent=(0,), softcaps=(None,), sinks=(False,)))
def test_a_k_mean_shifts_lse_by_its_dot_product_and_out_not_at_all(problem: Problem) -> None:
    (q, k, v, kv_len), options = problem.arrays(), problem.options()
    want, want_lse = reference.decode(q, k, v, kv_len, **options, return_lse=True)
    got, got_lse = reference.decode(q, Tbq4Array(k.codes, k.norms), v, kv_len, **options, return_lse=True)
    heads = q.astype(float).reshape(*q.shape[:-2], problem.num_kv_heads, problem.group, problem.head_dim)
    shift = np.einsum("...hgd,hd->...hg", heads, k.mean).reshape(got_lse.shape) * problem.head_dim**-0.5
    assert_float64_close((q, k, v, kv_len), options, (got, got_lse + shift), (want, want_lse))


@pytest.mark.parametrize("function", [reference.decode, reference.decode_same_precision])
def test_a_v_mean_joins_with_the_weight_of_the_keys(function: Callable[..., Any]) -> None:
    """All of it without a sink, less with one, nothing for rows without keys; and nothing for kept tokens."""
    problem = Problem((0, 1, 40), seqlen_q=2, group=2, k_format="tbq4", v_format="tbq4", means=True)
    q, k, v, kv_len = problem.arrays()
    bare = Tbq4Array(v.codes, v.norms)
    tiny = 0 if function is reference.decode else 2.0**-8  # half an ulp of float16 at 8, and the rounding of weights
    for sinks in (None, np.array([1.0, -np.inf], np.float32)):
        out, lse = function(q, k, v, kv_len, sinks=sinks, return_lse=True)
        bare_out = function(q, k, bare, kv_len, sinks=sinks)
        is_empty = np.isneginf(reference.decode(q, k, v, kv_len, return_lse=True)[1])
        share = 1.0 if sinks is None else 1 - np.exp(sinks - np.where(is_empty, 0, lse))
        share = np.where(is_empty, 0, share)
        want = bare_out.astype(float) + share[..., None] * v.mean[0]
        np.testing.assert_allclose(out.astype(float), want, rtol=0, atol=1e-13 + 4 * tiny)  # values of up to 20
        assert not out[0].any()
    k_sink, v_sink = (np.ones((3, 40, 1, 64), q.dtype) for _ in range(2))
    kept = function(q, k, v, kv_len, k_sink=k_sink, v_sink=v_sink)
    np.testing.assert_array_equal(kept, function(q, k, bare, kv_len, k_sink=k_sink, v_sink=v_sink))


# Roundings


@given(problem=problems(values=("normal", "late_max", "equal", "tiny_v")))
def test_the_same_precision_result_is_within_its_roundings_of_float64(problem: Problem) -> None:
    """A bound from the sizes alone, for the worst case of every rounding.

    As that of `test_reference_contract`, with u the half ulp of 1 in float16 for a rotated query and once more for the
    levels of K, so that a score errs by 2 u of its products' magnitudes besides what it did. A weight times a norm is
    rounded by u, or by half of the smallest float16 relative to the largest of its row, and levels of V by u. Those
    errors are in the rotated domain: there and after the rotation back they are bounded by the length of a block.
    """
    want, dtype = expected(problem), DTYPES[problem.dtype]
    arrays, options = problem.arrays(), problem.options()
    u, e = 2.0**-11, 2.0**-23
    _, values = assembled(arrays, options)
    walk = np.sqrt(problem.head_dim / 16 + np.log2(min(problem.head_dim, 128)) + 2)
    for b, size in enumerate(want.sizes):
        n = int(arrays[3][b])
        magnitude = size.magnitude if problem.k_format == "raw16" else size.magnitude / min(walk, 1.0)
        s = magnitude * (2.02 * u + (problem.head_dim / 16 + 16) * e) + 8 * e * LOG2_E * (problem.softcap or 0)
        rounding = max(u, ulp(1.0, dtype) / 2)
        relative = (2.0 ** (2 * s) - 1) + 3.03 * rounding + 2 * e * (n + 16) + n * 2.0**-24
        block = min(problem.head_dim, 128)
        rows = values[b, :n].reshape(n, problem.num_kv_heads, problem.head_dim // block, block)
        length = np.linalg.norm(rows, axis=-1).max(initial=0.0)
        if problem.means:
            length += np.linalg.norm(arrays[2].mean if problem.v_format == "tbq4" else 0.0)
        out, ref = want.same[0][b].astype(float), want.ref[0][b]
        assert np.abs(out - ref).max() <= relative * length + ulp(np.abs(ref).max(), dtype)
        seen = np.isfinite(want.ref[1][b])
        np.testing.assert_array_equal(np.isneginf(want.same[1][b]), ~seen)
        same_lse, ref_lse = (x[1][b][seen].astype(float) for x in (want.same, want.ref))
        bound = s + e * (n + 16 + 4 * np.abs(ref_lse).max(initial=0.0))
        assert np.abs(same_lse - ref_lse).max(initial=0.0) <= bound


def butterflies(x: np.ndarray, signs: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Rotate rows block by block in float32, by stages of sums and differences of pairs."""
    block = min(x.shape[-1], 128)
    y = (x.astype(np.float32).reshape(-1, block) * signs[0][:block]).astype(np.float32)
    half = 1
    while half < block:
        pairs = y.reshape(len(y), -1, 2, half)
        y = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(-1, block)
        half *= 2
    return (y * signs[1][:block] * np.float32(block**-0.5)).reshape(x.shape)


def tiles_of(arrays: tuple[Any, ...], options: dict[str, Any], problem: Problem, b: int) -> Iterator[tuple[Any, ...]]:
    """Yield positions, keys and values of at most 16 tokens, from the last to the first; rows in TBQ4 as planes."""
    _, k_cache, v_cache, kv_len = arrays
    start, stop = problem._body(int(kv_len[b]))
    for last in range(int(kv_len[b]), 0, -16):
        for first, end in ((max(last - 16, stop), last), (max(last - 16, start), min(last, stop)), (last - 16, start)):
            tokens = np.arange(max(first, 0), min(end, last))
            if len(tokens) == 0:
                continue
            if first >= stop:
                yield tokens, *(options[f"{x}_recent"][b, tokens % problem.num_recent] for x in "kv")
            elif end <= start:
                yield tokens, *(options[f"{x}_sink"][b, tokens] for x in "kv")
            else:
                where = (b, tokens)
                if problem.page_size is not None:
                    where = (options["page_table"][b, tokens // problem.page_size], tokens % problem.page_size)
                yield (
                    tokens,
                    *(
                        changed(x, codes=x.codes[where], norms=x.norms[where]) if isinstance(x, Tbq4Array) else x[where]
                        for x in (k_cache, v_cache)
                    ),
                )


class TiledRow:
    """One query row that sees its keys tile by tile; sums of float32, in base-2 units, in NumPy's order."""

    # Powers of two: the largest product of a weight and a norm so far is kept below one, the factor below the other.
    TOP, MAX_FACTOR = 9, 96

    def __init__(self, q: np.ndarray, softcap: float | None) -> None:
        self.q, self.softcap = q.astype(np.float32), softcap
        self.block = min(len(q), 128)
        self.levels = cuattn._tbq4.codebook(self.block).astype(np.float16).astype(np.float32)
        turned = butterflies(self.q[None], SIGNS)[0]
        self.exponent = 15 - int(np.frexp(np.abs(turned).max())[1])
        q16 = (turned * np.float32(2.0**self.exponent)).astype(np.float16)
        self.q16 = q16.astype(np.float32).reshape(-1, self.block)
        self.m, self.l, self.weight_of_mean = np.float32(-np.inf), np.float32(0), np.float32(0)
        self.raw, self.rotated, self.factor = np.zeros_like(self.q), np.zeros_like(self.q), np.float32(1)
        self.mean = np.zeros_like(self.q)

    def level_rows(self, codes: np.ndarray) -> np.ndarray:
        return self.levels[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(len(codes), -1, self.block)

    def scores(self, k: Any, seen: tuple[np.ndarray, int]) -> np.ndarray:
        if isinstance(k, Tbq4Array):
            dots = np.einsum("bj,kbj->kb", self.q16, self.level_rows(k.codes[seen])) * k.norms[seen].astype(np.float32)
            x = dots.sum(axis=1, dtype=np.float32) * np.float32(2.0**-self.exponent)
            x += np.float32(0) if k.mean is None else self.q @ k.mean[seen[1]]
        else:
            x = k[seen].astype(np.float32) @ self.q
        x *= np.float32(len(self.q) ** -0.5 * LOG2_E)
        if self.softcap is None:
            return x
        cap = np.float32(self.softcap * LOG2_E)
        return cap * np.tanh(x / cap)

    def raise_to(self, m: np.float32) -> None:
        factor = np.exp2(self.m - m) if np.isfinite(self.m) else np.float32(0)
        self.m = m
        for name in ("l", "weight_of_mean", "raw", "rotated"):
            setattr(self, name, getattr(self, name) * factor)

    def see(self, k: Any, v: Any, seen: tuple[np.ndarray, int], dtype: Any) -> None:
        x = self.scores(k, seen)
        self.raise_to(max(self.m, x.max()))
        p = np.exp2(x - self.m)
        self.l += p.sum(dtype=np.float32)
        if not isinstance(v, Tbq4Array):
            self.raw = self.raw + p.astype(dtype).astype(np.float32) @ v[seen].astype(np.float32)
            return
        if v.mean is not None:
            self.mean = v.mean[seen[1]]
            self.weight_of_mean += p.sum(dtype=np.float32)
        w = p[:, None] * v.norms[seen].astype(np.float32)
        top = w.max() * self.factor
        if top > 0 and (top > 2.0**self.TOP or not self.rotated.any()):
            most = self.MAX_FACTOR + 1 - int(np.frexp(self.factor)[1])
            step = np.float32(2.0 ** min(self.TOP - int(np.frexp(top)[1]), most))
            self.factor, self.rotated = self.factor * step, self.rotated * step
        w16 = (w * self.factor).astype(np.float16).astype(np.float32)
        self.rotated = self.rotated + np.einsum("kb,kbj->bj", w16, self.level_rows(v.codes[seen])).ravel()

    def finish(self, sink: np.float32) -> tuple[np.ndarray, np.float32]:
        total = self.raw + butterflies((self.rotated / self.factor)[None], SIGNS[::-1])[0]
        self.raw, self.rotated = total + self.weight_of_mean * self.mean, np.zeros_like(total)
        if sink > -np.inf:
            self.raise_to(max(self.m, sink))
            self.l += np.exp2(sink - self.m)
        if self.l == 0:
            return self.raw, np.float32(-np.inf)
        return self.raw / self.l, np.float32(np.log(2)) * (self.m + np.log2(self.l))


def decode_in_tiles(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Decode as a kernel might, without the arithmetic of the reference."""
    arrays, options = problem.arrays(), problem.options()
    q = arrays[0] if arrays[0].ndim == 4 else arrays[0][:, None]
    out, lse = np.zeros(q.shape, q.dtype), np.full(q.shape[:-1], -np.inf, np.float32)
    sinks = options.get("sinks", np.full(problem.num_qo_heads, -np.inf, np.float32)) * np.float32(LOG2_E)
    for b, i, h in np.ndindex(lse.shape):
        row = TiledRow(q[b, i, h], problem.softcap)
        length = int(arrays[3][b])
        start, stop = reference.visible_keys(i, problem.seqlen_q, length, causal=problem.causal, window=problem.window)
        for tokens, k, v in tiles_of(arrays, options, problem, b):
            visible = (tokens >= start) & (tokens < stop)
            if visible.any():
                row.see(k, v, (np.flatnonzero(visible), h // problem.group), q.dtype)
        total, lse[b, i, h] = row.finish(sinks[h])
        out[b, i, h] = total.astype(q.dtype)
    return (out, lse) if arrays[0].ndim == 4 else (out[:, 0], lse[:, 0])


@given(problem=problems())
def test_the_law_accepts_another_order_of_float32_sums(problem: Problem) -> None:
    assert_decode(problem, *decode_in_tiles(problem))


CASE = Problem(
    (64, 37), seqlen_q=2, num_kv_heads=2, group=2, head_dim=256, sinks=True, k_format="tbq4", v_format="tbq4",
    means=True, num_sink=3, num_recent=8,
)  # fmt: skip


def swapped(codes: np.ndarray) -> np.ndarray:
    return codes << 4 | codes >> 4


# What a wrong kernel would compute, as the right one on other arguments.
WRONG_CACHES: dict[str, Callable[[Tbq4Array], Tbq4Array]] = {
    "every norm is that of the first block": lambda x: changed(x, norms=x.norms[..., :1].repeat(2, axis=-1)),
    "norms of the next token": lambda x: changed(x, norms=np.roll(x.norms, -1, axis=1)),
    "norms of the other head": lambda x: changed(x, norms=x.norms[:, :, ::-1]),
    "no norms": lambda x: changed(x, norms=np.ones_like(x.norms)),
    "no mean": lambda x: changed(x, mean=None),
    "the mean of the other head": lambda x: changed(x, mean=x.mean[::-1]),
    "nibbles exchanged": lambda x: changed(x, codes=swapped(x.codes)),
    "codes of the next token": lambda x: changed(x, codes=np.roll(x.codes, 1, axis=1)),
}
WRONG_OPTIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "the ring is one slot off": lambda o: {x: np.roll(o[x], 1, axis=1) for x in ("k_recent", "v_recent")},
    "values of the ring are one slot off": lambda o: {"v_recent": np.roll(o["v_recent"], 1, axis=1)},
    "the first tokens are those of the other sequence": lambda o: {x: o[x][::-1] for x in ("k_sink", "v_sink")},
    "a first token too few": lambda o: {x: o[x][:, :2] for x in ("k_sink", "v_sink")},
    "heads of the first tokens exchanged": lambda o: {x: o[x][:, :, ::-1] for x in ("k_sink", "v_sink")},
    "no sinks": lambda _: {"sinks": None},
}


def refused(got: tuple[np.ndarray, np.ndarray], *, in_out_only: bool = False) -> None:
    """Assert that the law refuses each result beside the other right one."""
    want = expected(CASE).same
    mixed = [(got[0], want[1])] if in_out_only else [(got[0], want[1]), (want[0], got[1])]
    for result in mixed:
        with pytest.raises(AssertionError, match=r"exceeds|in other places"):
            assert_decode(CASE, *result)


@pytest.mark.parametrize("wrong", WRONG_CACHES.values(), ids=WRONG_CACHES.keys())
@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
def test_the_law_refuses_a_cache_that_is_read_wrongly(wrong: Callable[[Tbq4Array], Tbq4Array], which: str) -> None:
    q, k, v, kv_len = CASE.arrays()
    assert_decode(CASE, *expected(CASE).same)
    caches = (wrong(k), v) if which == "k_cache" else (k, wrong(v))
    got = reference.decode_same_precision(q, *caches, kv_len, **CASE.options(), return_lse=True)
    refused(got, in_out_only=which == "v_cache")


@pytest.mark.parametrize("wrong", WRONG_OPTIONS.values(), ids=WRONG_OPTIONS.keys())
def test_the_law_refuses_kept_tokens_that_are_read_wrongly(
    wrong: Callable[[dict[str, Any]], dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    options = CASE.options()
    got = reference.decode_same_precision(*CASE.arrays(), **options | wrong(options), return_lse=True)
    refused(got, in_out_only="values" in request.node.name)


def test_the_law_refuses_a_v_mean_for_the_weight_of_a_sink_or_of_kept_tokens() -> None:
    q, k, v, kv_len = CASE.arrays()
    out, lse = reference.decode_same_precision(q, k, changed(v, mean=None), kv_len, **CASE.options(), return_lse=True)
    everywhere = (out + v.mean.repeat(CASE.group, axis=0)).astype(out.dtype)
    refused((everywhere, lse), in_out_only=True)


def test_the_law_refuses_weights_times_norms_without_a_common_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of norm 5e-6 are below the normal numbers of float16 already before they meet small weights."""
    problem = Problem(
        (200,), group=2, head_dim=128, k_format="tbq4", v_format="tbq4", values="tiny_v", dtype="bfloat16"
    )
    want = expected(problem)
    assert_decode(problem, *want.same)
    monkeypatch.setattr(products, "_factor", lambda x, _: np.ones((len(x), *(1,) * (x.ndim - 1))))
    got = reference.decode_same_precision(*problem.arrays(), **problem.options(), return_lse=True)
    with pytest.raises(AssertionError, match="exceeds"):
        assert_decode(problem, *got)


# Means


@given(
    shape=st.sampled_from(((7, 2, 64), (3, 7, 2, 64), (1, 1, 80))),
    skip=st.integers(0, 6),
    dtype=st.sampled_from((np.float16, ml_dtypes.bfloat16, np.float32, np.float64)),
    seed=st.integers(0, 2**32 - 1),
)
def test_channel_mean_is_the_mean_over_tokens_and_sequences(
    shape: tuple[int, ...], skip: int, dtype: Any, seed: int
) -> None:
    x = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    skip = min(skip, shape[-3] - 1)
    got = cuattn.channel_mean(x, skip=skip)
    assert (got.shape, got.dtype) == (shape[-2:], np.float32)
    rows = x[..., skip:, :, :].astype(float).reshape(-1, *shape[-2:])
    np.testing.assert_allclose(got, sum(rows) / len(rows), rtol=2.0**-23, atol=1e-15)  # float64, rounded to float32
    np.testing.assert_array_equal(cuattn.channel_mean(x.swapaxes(0, -1).copy().swapaxes(0, -1), skip=skip), got)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_channel_mean_of_a_nan_is_nan_in_its_channel_alone(dtype: Any) -> None:
    x = np.ones((5, 2, 64), dtype)
    x[3, 1, 7], x[2, 0, 1], x[4, 0, 1] = np.nan, np.inf, -np.inf
    mean = cuattn.channel_mean(x)
    assert np.argwhere(np.isnan(mean)).tolist() == [[0, 1], [1, 7]]
    assert (mean[np.isfinite(mean)] == 1).all()
    assert (cuattn.channel_mean(x, skip=4)[1] == 1).all()


def diffuse_problem(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return 64 queries and 1024 keys and values whose scores have deviation 1, with offsets in 4 channels of K."""
    rng = np.random.default_rng(seed)
    k, v, q = (rng.standard_normal((n, 128)) for n in (1024, 1024, 64))
    scores = q @ (k - k.mean(axis=0)).T * 128**-0.5
    k[:, [5, 37, 70, 101]] += [15, -15, 12, -18]
    return tuple(x.astype(np.float32) for x in (q / scores.std(axis=1, keepdims=True), k, v))


def test_offsets_of_k_cost_a_quarter_of_the_attention_output_unless_their_mean_is_removed() -> None:
    """Values are exact; 64 query heads share the keys."""
    errors = []
    for seed in range(8):
        q, k, v = diffuse_problem(seed)
        k, v = k[None, :, None], v[None, :, None]
        want = cuattn.decode(q[None], k, v, 1024)
        means = None, cuattn.channel_mean(k[:, :512])
        got = [cuattn.decode(q[None], cuattn.quantize(k, mean=mean), v, 1024) for mean in means]
        errors.append([(np.linalg.norm(x - want, axis=-1) / np.linalg.norm(want, axis=-1)).mean() for x in got])
    # One seed ranges over .25 to .28 and .089 to .098; the mean of eight has a deviation of .004 and .001.
    assert np.mean(errors, axis=0) == pytest.approx([0.264, 0.094], abs=0.01)


# Real data


@pytest.mark.parametrize(
    ("layer", "plain", "with_mean", "with_mean_and_sink"),
    [("00", 0.057, 0.050, 0.050), ("15", 0.139, 0.184, 0.083), ("29", 0.133, 0.117, 0.081)],
)
def test_decoding_a_real_text_has_the_measured_error(
    layer: str, plain: float, with_mean: float, with_mean_and_sink: float
) -> None:
    """Keys and values in TBQ4, each of the last 64 of 512 tokens against its own prefix; mean over tokens and heads.

    As they are; with the mean of the 448 tokens before those removed from K; and with token 0 in 16 bits besides.
    """
    with resources.files("cuattn.examples").joinpath("smollm2_qkv.npz").open("rb") as file, np.load(file) as data:
        q, k, v = (data[f"l{layer}_{name}"] for name in "qkv")
    kv_len = np.arange(449, 513, dtype=np.int32)

    def shared(x: np.ndarray) -> np.ndarray:
        return np.broadcast_to(x, (len(kv_len), *x.shape))

    def error(keys: Any, values: Any, **kept: np.ndarray) -> float:
        got, want = (
            cuattn.decode(q[-64:].astype(np.float32), *caches, kv_len, **options)
            for caches, options in (((keys, values), kept), ([shared(x.astype(np.float32)) for x in (k, v)], {}))
        )
        return float((np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)).mean())

    def stored(x: np.ndarray, mean: np.ndarray | None = None) -> Tbq4Array:
        rows = cuattn.quantize(x, mean=mean)
        return Tbq4Array(shared(rows.codes), shared(rows.norms), mean)

    centered, values = stored(k, cuattn.channel_mean(k[:448])), stored(v)
    kept = {"k_sink": shared(k[:1].astype(np.float32)), "v_sink": shared(v[:1].astype(np.float32))}
    got = [error(stored(k), values), error(centered, values), error(centered, values, **kept)]
    assert got == pytest.approx([plain, with_mean, with_mean_and_sink], abs=0.0006)  # three digits were written down
