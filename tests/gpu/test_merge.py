"""The merge kernel against the reference, and merging the parts of a decode."""

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import cupy
import numpy as np
import pytest
from gpu.helpers import NAN16, assert_same_bits, busy_gpu, call, nans, occupy, poison, to_device, viewed
from strategies import DTYPES, Problem
from tolerance import assert_merge, assert_rows, expected, score_magnitude

import cuattn
from cuattn import reference

HEAD_DIMS = (64, 96, 128, 192, 256, 512)
# Of the parts and of the result.
DTYPE_PAIRS = (
    ("float32", "float32"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("float32", "float16"),
    ("float32", "bfloat16"),
)
every_dtype = pytest.mark.parametrize(("dtype", "out_dtype"), DTYPE_PAIRS)


def parts_of(
    num_parts: int, *shape: int, dtype: str = "float32", empty: float = 0.0, spread: float = 5.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Draw parts and lse; a fraction of the parts is empty and holds NaN."""
    rng = np.random.default_rng([seed, num_parts, *shape])
    out = rng.standard_normal((num_parts, *shape)).astype(DTYPES[dtype])
    lse = rng.normal(0, spread, out.shape[:-1]).astype(np.float32)
    lse[rng.random(lse.shape) < empty] = -np.inf
    out[np.isneginf(lse)] = np.nan
    return out, lse


def merge(out_partial: Any, lse_partial: Any, out_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Merge on the GPU into NaN, and return the results on the host."""
    out_partial, lse_partial = to_device(out_partial), to_device(lse_partial)
    out = nans(out_partial.shape[1:], DTYPES[out_dtype])
    got, lse = cuattn.merge(out_partial, lse_partial, out=out)
    assert got is out
    assert lse.dtype == np.float32
    return cupy.asnumpy(out), cupy.asnumpy(lse)


def assert_merged(parts: tuple[np.ndarray, np.ndarray], got: tuple[np.ndarray, np.ndarray]) -> None:
    """Assert the error law."""
    assert_merge(parts, *got, context=tuple((x.shape, x.dtype) for x in parts))


@every_dtype
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_any_number_of_parts_obeys_the_error_law(dtype: str, out_dtype: str, head_dim: int) -> None:
    for num_parts in (1, 2, 3, 4, 5, 31, 32, 33, 300):
        parts = parts_of(num_parts, 2, 3, head_dim, dtype=dtype)
        assert_merged(parts, merge(*parts, out_dtype))


@pytest.mark.parametrize("num_parts", [1, 2, 7, 64, 65, 300])
@every_dtype
def test_empty_parts_do_not_matter(dtype: str, out_dtype: str, num_parts: int) -> None:
    """They hold NaN here; and other bytes instead change nothing."""
    out_partial, lse_partial = parts = parts_of(num_parts, 4, 5, 128, dtype=dtype, empty=0.6)
    lse_partial[:, 0], out_partial[:, 0] = -np.inf, np.nan
    got = merge(*parts, out_dtype)
    assert_merged(parts, got)
    assert not got[0][0].any()
    assert np.isneginf(got[1][0]).all()
    for value in (0, np.inf, 7):
        out_partial[np.isneginf(lse_partial)] = value
        assert_same_bits(merge(*parts, out_dtype), got, value)


@every_dtype
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (1, 1, 1)], ids=str)
def test_three_to_five_axes_are_the_same_rows(dtype: str, out_dtype: str, shape: tuple[int, ...]) -> None:
    parts = parts_of(6, *shape, 64, dtype=dtype, empty=0.2)
    got = merge(*parts, out_dtype)
    assert_merged(parts, got)
    flat = merge(parts[0].reshape(6, -1, 64), parts[1].reshape(6, -1), out_dtype)
    assert_same_bits(tuple(x.reshape(y.shape) for x, y in zip(flat, got, strict=True)), got)


@every_dtype
def test_without_out_the_result_has_the_dtype_of_the_parts(dtype: str, out_dtype: str) -> None:
    parts = parts_of(3, 2, 5, 96, dtype=dtype)
    out, lse = cuattn.merge(*map(to_device, parts))
    assert type(out) is type(lse) is cupy.ndarray
    assert (out.dtype, out.shape, lse.dtype, lse.shape) == (DTYPES[dtype], (2, 5, 96), np.float32, (2, 5))
    assert_same_bits((cupy.asnumpy(out), cupy.asnumpy(lse)), merge(*parts, dtype))
    if out_dtype != dtype:
        assert_merged(parts, merge(*parts, out_dtype))


@pytest.mark.parametrize("spread", [0.0, 50.0, 1e4, 1e30])
@pytest.mark.parametrize("num_parts", [2, 3, 40, 300])
@every_dtype
def test_lse_of_any_size_obey_the_error_law(dtype: str, out_dtype: str, num_parts: int, spread: float) -> None:
    parts = parts_of(num_parts, 3, 2, 64, dtype=dtype, spread=spread)
    assert_merged(parts, merge(*parts, out_dtype))


@every_dtype
def test_a_part_far_above_all_others_is_the_result(dtype: str, out_dtype: str) -> None:
    out_partial, lse_partial = parts = parts_of(9, 3, 2, 64, dtype=dtype)
    for lse in (-1e30, -1e4, 0.0, 1e4, 1e30):
        lse_partial[:] = lse - max(200, abs(lse))
        lse_partial[4] = lse
        out, got = merge(*parts, out_dtype)
        assert_merged(parts, (out, got))
        np.testing.assert_array_equal(out, out_partial[4].astype(DTYPES[out_dtype]))


@every_dtype
def test_equal_parts_give_the_part(dtype: str, out_dtype: str) -> None:
    """Of the value one: the weights sum to one."""
    for num_parts in (1, 2, 7, 64, 300):
        parts = np.ones((num_parts, 2, 3, 64), DTYPES[dtype]), np.full((num_parts, 2, 3), 2.5, np.float32)
        assert_merged(parts, merge(*parts, out_dtype))


@every_dtype
def test_nan_of_a_part_stays_visible_in_its_row_and_channel(dtype: str, out_dtype: str) -> None:
    for num_parts in (1, 3, 65):
        out_partial, lse_partial = parts_of(num_parts, 3, 4, 64, dtype=dtype, empty=0.3)
        lse_partial[-1] = 1
        out_partial[-1] = 0
        clean = merge(out_partial, lse_partial, out_dtype)
        out_partial[-1, 1, 2, 33] = np.nan
        out, lse = merge(out_partial, lse_partial, out_dtype)
        assert np.argwhere(np.isnan(out)).tolist() == [[1, 2, 33]]
        out[1, 2, 33] = clean[0][1, 2, 33]
        assert_same_bits((out, lse), clean)
        lse_partial[-1, 2, 0] = np.nan
        out, lse = merge(out_partial, lse_partial, out_dtype)
        assert np.argwhere(np.isnan(lse)).tolist() == [[2, 0]]
        assert np.isnan(out[2, 0]).all()
        assert np.isnan(out).sum() == 64 + 1


@pytest.mark.parametrize("num_parts", [2, 37])
def test_permuting_parts_changes_nothing_but_rounding(num_parts: int) -> None:
    out_partial, lse_partial = parts = parts_of(num_parts, 4, 2, 128, dtype="float16", empty=0.2)
    order = np.random.default_rng(0).permutation(num_parts)
    assert_merged(parts, merge(out_partial[order], lse_partial[order], "float16"))


@every_dtype
def test_20_merges_on_a_busy_gpu_give_the_same_bits(dtype: str, out_dtype: str) -> None:
    parts = tuple(map(to_device, parts_of(77, 40, 24, 128, dtype=dtype, empty=0.1)))
    first = merge(*parts, out_dtype)
    with busy_gpu():
        for i in range(20):
            assert_same_bits(merge(*parts, out_dtype), first, f"repeat {i}")


def test_merge_runs_in_order_in_the_current_stream() -> None:
    """The parts are NaN until late in the stream."""
    host = parts_of(5, 3, 4, 128, dtype="float16")
    want = merge(*host, "float16")
    ready = tuple(map(to_device, host))
    late = tuple(map(cupy.empty_like, ready))
    poison(*late)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        occupy(rounds=300)
        for x, y in zip(late, ready, strict=True):
            x.view(cupy.uint8)[...] = y.view(cupy.uint8)
        out, lse = cuattn.merge(*late)
        copies = out.copy(), lse.copy()
        poison(*late, out, lse)
    stream.synchronize()
    assert_same_bits(tuple(map(cupy.asnumpy, copies)), want)


def test_merge_changes_none_of_its_arguments() -> None:
    host = parts_of(5, 3, 4, 128, dtype="bfloat16", empty=0.3)
    device = tuple(map(to_device, host))
    cuattn.merge(*device)
    assert_same_bits(tuple(map(cupy.asnumpy, device)), host)


@pytest.mark.parametrize("rows", [(70000, 1), (1, 70000), (3, 7, 3700)], ids=str)
def test_more_rows_than_a_grid_has_blocks_along_y_are_merged(rows: tuple[int, ...]) -> None:
    """CUDA's limit on the second and third axis of a grid is 65535."""
    out_partial, lse_partial = parts_of(2, 1, 7, 64, dtype="float16", empty=0.2)
    small = merge(out_partial, lse_partial, "float16")
    count = int(np.prod(rows))
    wide = np.resize(out_partial.swapaxes(0, 2), (count, 1, 2, 64)).swapaxes(0, 2).reshape(2, *rows, 64)
    lse = np.resize(lse_partial[:, 0].T, (count, 2)).T.reshape(2, *rows)
    out, got = merge(np.ascontiguousarray(wide), np.ascontiguousarray(lse), "float16")
    want = np.resize(small[0][0], (count, 64)).reshape(*rows, 64), np.resize(small[1][0], count).reshape(rows)
    assert_same_bits((out, got), want)


def test_an_empty_batch_merges_to_an_empty_result() -> None:
    out, lse = merge(np.zeros((3, 0, 4, 64), np.float16), np.zeros((3, 0, 4), np.float32), "float16")
    assert (out.shape, lse.shape) == ((0, 4, 64), (0, 4))


# Name: shape around one of shape s, and the view that has shape s; of all axes but the last of out and out_partial.
VIEWS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "axes reversed": (lambda s: s[::-1], lambda x, n: x.transpose(*range(n)[::-1], *range(n, x.ndim))),
    "backwards": (lambda s: s, lambda x, n: x[(slice(None, None, -1),) * n]),
    "every second": (lambda s: (2 * s[0], *s[1:]), lambda x, _: x[::2]),
    "a slice of more heads": (
        lambda s: (*s[:-1], s[-1] + 5),
        lambda x, n: x[(slice(None),) * (n - 1) + (slice(2, -3),)],
    ),
    "parts after heads": (lambda s: (*s[1:], s[0]), lambda x, n: x.transpose(n - 1, *range(n - 1), *range(n, x.ndim))),
}


@pytest.mark.parametrize("argument", ["out_partial", "lse_partial", "out"])
@pytest.mark.parametrize("view", VIEWS)
@every_dtype
def test_strides_are_honored_and_nothing_around_is_touched(
    dtype: str, out_dtype: str, view: str, argument: str
) -> None:
    around, select = VIEWS[view]
    out_partial, lse_partial = parts_of(5, 3, 4, 64, dtype=dtype, empty=0.2)
    want = merge(out_partial, lse_partial, out_dtype)
    out = np.full((3, 4, 64), np.nan, DTYPES[out_dtype])
    host = {"out_partial": out_partial, "lse_partial": lse_partial, "out": out}
    device = {name: to_device(x) for name, x in host.items()}
    x = host[argument]
    rows = x.shape if argument == "lse_partial" else x.shape[:-1]
    shape = (*around(rows), *x.shape[len(rows) :])
    base, device[argument] = viewed(x, shape, lambda b: select(b, len(rows)), fill=77)
    got, lse = cuattn.merge(device["out_partial"], device["lse_partial"], out=device["out"])
    assert got is device["out"]
    assert_same_bits((cupy.asnumpy(got), cupy.asnumpy(lse)), want)
    untouched = np.full(shape, 77, x.dtype)
    select(untouched, len(rows))[...] = want[0] if argument == "out" else x
    assert cupy.asnumpy(base).tobytes() == untouched.tobytes()


def test_rows_may_be_parts_of_longer_rows() -> None:
    parts = parts_of(5, 3, 4, 64, dtype="float16")
    longer = viewed(parts[0], (5, 3, 4, 80), lambda b: b[..., 8:-8])[1]
    assert_same_bits(merge(longer, parts[1], "float16"), merge(*parts, "float16"))


# --- Parts of a decode ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "seqlen_q"), list(product(("float16", "bfloat16"), (1, 4))))
@pytest.mark.parametrize("cuts", [(100,), (0, 1), (64, 64, 300), (299,)], ids=str)
def test_merging_decodes_of_disjoint_keys_equals_decode_of_all(
    dtype: str, seqlen_q: int, cuts: tuple[int, ...]
) -> None:
    """Empty parts and an empty sequence included; each part is rounded to 16 bits on both sides."""
    problem = Problem(
        kv_len=(300, 0, 17, 100), seqlen_q=seqlen_q, num_kv_heads=2, group=3, dtype=dtype, causal=False, seed=1
    )
    q, k_cache, v_cache, kv_len = problem.arrays()
    bounds = [0, *cuts, k_cache.shape[1]]
    halves = [
        (q, k_cache[:, a:b], v_cache[:, a:b], np.clip(kv_len - a, 0, b - a).astype(np.int32))
        for a, b in pairwise(bounds)
    ]
    stacked = [np.stack(x) for x in zip(*(call(half, {"causal": False}) for half in halves), strict=True)]
    out, lse = merge(*stacked, dtype)
    rounded = [reference.decode_same_precision(*half, causal=False, return_lse=True) for half in halves]
    same_out, same_lse = reference.merge(*(np.stack(x) for x in zip(*rounded, strict=True)), dtype=np.float32)
    want = expected(problem)
    for b, magnitude in enumerate(want.magnitudes):
        assert_rows(
            (out[b], lse[b]),
            (same_out[b].astype(out.dtype), same_lse[b]),
            (want.ref[0][b], want.ref[1][b]),
            dtype=out.dtype,
            magnitude=magnitude,
            context=(problem, b, cuts),
        )


def test_a_suffix_decoded_causally_merges_with_a_prefix() -> None:
    """As in the docstring; the prefix is shared by a stride of zero, and the sinks are in it alone."""
    problem = Problem(kv_len=(200,) * 3, seqlen_q=3, num_kv_heads=2, group=3, head_dim=128, dtype="bfloat16", seed=2)
    q, k_cache, v_cache, kv_len = problem.arrays()
    k_cache[:, :128], v_cache[:, :128] = k_cache[:1, :128], v_cache[:1, :128]
    shared = [cupy.broadcast_to(to_device(x[:1, :128]), (3, *x[0, :128].shape)) for x in (k_cache, v_cache)]
    sinks = np.linspace(-1, 3, 6).astype(np.float32)
    on_gpu, lengths = to_device(q), to_device(kv_len - 128)
    prefix = cuattn.decode(on_gpu, *shared, 128, causal=False, sinks=to_device(sinks), return_lse=True)
    suffix = cuattn.decode(on_gpu, *(to_device(x[:, 128:]) for x in (k_cache, v_cache)), lengths, return_lse=True)
    out, lse = cuattn.merge(*(cupy.stack(x) for x in zip(prefix, suffix, strict=True)))
    rounded = (
        reference.decode_same_precision(
            q, k_cache[:, :128], v_cache[:, :128], 128, causal=False, sinks=sinks, return_lse=True
        ),
        reference.decode_same_precision(q, k_cache[:, 128:], v_cache[:, 128:], kv_len - 128, return_lse=True),
    )
    same_out, same_lse = reference.merge(*(np.stack(x) for x in zip(*rounded, strict=True)), dtype=np.float32)
    ref = reference.decode(q, k_cache, v_cache, kv_len, sinks=sinks, return_lse=True)
    for b in range(3):
        rows = (
            (cupy.asnumpy(out)[b], cupy.asnumpy(lse)[b]),
            (same_out[b].astype(q.dtype), same_lse[b]),
            (ref[0][b], ref[1][b]),
        )
        magnitude = score_magnitude(q[b], k_cache[b, :200], causal=True)
        assert_rows(*rows, dtype=q.dtype, magnitude=magnitude, context=b)


# --- Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out_partial": lambda: cupy.zeros((3, 2, 4, 64), np.float64)}, ("out_partial", "float64", "float32")),
        ({"lse_partial": lambda: cupy.zeros((3, 2, 4), np.float16)}, ("lse_partial", "float16", "float32")),
        ({"lse_partial": lambda: cupy.zeros((3, 2, 5), np.float32)}, ("lse_partial", "(3, 2, 5)", "(3, 2, 4)")),
        ({"out_partial": lambda: cupy.zeros((3, 2, 4, 80), np.float32)}, ("out_partial", "80", "64", "512")),
        ({"out_partial": lambda: cupy.zeros((3, 2, 4, 128), np.float32)[..., ::2]}, ("out_partial", "contiguous", "8")),
        ({"out_partial": lambda: cupy.zeros((3, 2, 4, 65), np.float32)[..., 1:]}, ("out_partial", "16 bytes", "260")),
        ({"out_partial": lambda: np.zeros((3, 2, 4, 64), np.float32)}, ("out_partial", "cpu", "cuda:0")),
        ({"lse_partial": lambda: np.zeros((3, 2, 4), np.float32)}, ("lse_partial", "cpu", "cuda:0")),
        ({"out": lambda: np.zeros((2, 4, 64), np.float32)}, ("out", "cpu", "cuda:0")),
        ({"out": lambda: cupy.zeros((3, 4, 64), np.float32)}, ("out", "(3, 4, 64)", "(2, 4, 64)")),
        ({"out": lambda: cupy.zeros((2, 4, 64), np.float64)}, ("out", "float64", "float32", "float16", "bfloat16")),
    ],
)
def test_wrong_gpu_arrays_are_named_and_nothing_is_written(
    changes: dict[str, Callable[[], Any]], words: tuple[str, ...]
) -> None:
    arguments = {
        "out_partial": cupy.zeros((3, 2, 4, 64), np.float32),
        "lse_partial": cupy.zeros((3, 2, 4), np.float32),
        "out": cupy.full((2, 4, 64), 77, np.float32),
    }
    out = arguments["out"]
    arguments |= {name: make() for name, make in changes.items()}
    with pytest.raises((TypeError, ValueError)) as caught:
        cuattn.merge(arguments["out_partial"], arguments["lse_partial"], out=arguments["out"])
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)
    assert (out == 77).all()
    assert not arguments["out"].any() or arguments["out"] is out


def test_offsets_beyond_4_gib_are_merged() -> None:
    """Two parts, and the second begins 6 GiB after the first."""
    gib = 1 << 30
    free = cupy.cuda.runtime.memGetInfo()[0]
    if free < 13 * gib:
        pytest.skip(reason=f"needs 13 GiB of free GPU memory, there are {free / gib:.0f}")
    out_partial, lse_partial = parts = parts_of(2, 5, 4, 128, dtype="float16")
    pool = cupy.empty((2, 6 * gib // (2 * 128), 128), np.uint16)
    pool.fill(NAN16)
    far = pool[:, -20:]
    far[...] = cupy.asarray(out_partial.view(np.uint16).reshape(2, 20, 128))
    flat = merge(far.view(np.float16), lse_partial.reshape(2, 20), "float16")
    want = merge(*parts, "float16")
    assert_same_bits(tuple(x.reshape(y.shape) for x, y in zip(flat, want, strict=True)), want)
