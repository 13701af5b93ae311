"""What must not change a result of prefill_mma.cu: schedules, layouts, strides, and memory without a token."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product as combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from simt import harness
from simt.prefill_cases import (
    BASE,
    CODES,
    MIXED,
    SINGLE,
    SMALL_TBQ4,
    assert_same_bits,
    changed,
    every_format,
    run,
)
from strategies import PrefillProblem, with_unused
from tolerance import assert_prefill, assert_prefill_call

from cuattn import Tbq4Array

SEEDS = st.integers(0, 5)


@given(seed=SEEDS, base=st.sampled_from((BASE, CODES)))
@settings(max_examples=8)
def test_the_schedule_does_not_change_a_bit(seed: int, base: PrefillProblem) -> None:
    problem = replace(base, sinks=True, causal=True, kv_layout="paged", values="rising")
    assert_same_bits(run(problem, seed=seed), run(problem))


@every_format
def test_the_layout_does_not_change_a_bit(base: PrefillProblem) -> None:
    problem = replace(base, seqlens=((37, 70),) * 3, causal=True)
    want = run(problem)
    assert_prefill(problem, *want)
    for q_layout, (kv_layout, size) in combinations(
        ("ragged", "dense"),
        (("ragged", 1), ("dense", 1), ("padded", 1), *(("paged", size) for size in (1, 3, 16, 64, 100))),
    ):
        got = run(replace(problem, q_layout=q_layout, kv_layout=kv_layout, page_size=size))
        got = tuple(x.reshape(y.shape) for x, y in zip(got, want, strict=True))
        assert_same_bits(got, want, (q_layout, kv_layout, size))


def test_ragged_keys_lie_as_ragged_queries_by_default() -> None:
    problem = replace(BASE, seqlens=((40, 40), (0, 0), (7, 7)))
    assert_same_bits(run(problem, cu_seqlens_k=None), run(problem))


@every_format
def test_a_sequence_does_not_depend_on_the_others_of_its_batch(base: PrefillProblem) -> None:
    problem = replace(base, seqlens=tuple((21, n) for n in (70, 0, 33)), q_layout="dense", kv_layout="paged")
    q, k, v = problem.arrays()
    options = problem.options()
    want = run(problem)
    for order in ([0], [1], [2], [2, 0, 1]):
        lengths = {name: options[name][order] for name in ("kv_len", "page_table")}
        assert_same_bits(run(problem, (q[order], k, v), **lengths), tuple(x[order] for x in want))


def test_sequences_may_share_pages() -> None:
    """Two continuations of one prefix of two pages."""
    problem = replace(BASE, seqlens=((10, 40), (10, 43)), q_layout="dense", kv_layout="paged", causal=True)
    arrays, options = problem.arrays(), problem.options()
    table = options["page_table"].copy()
    table[1, :2] = table[0, :2]
    options["page_table"] = table
    assert_prefill_call(arrays, options, run(problem, arrays, page_table=table))


@pytest.mark.parametrize("kv_layout", ["padded", "paged"])
@pytest.mark.parametrize("choice", SMALL_TBQ4, ids=str)
def test_codes_and_norms_without_a_token_do_not_matter(choice: tuple[Any, ...], kv_layout: str) -> None:
    names = ("k_format", "v_format", "dtype", "head_dim", "value_dim")
    problem = replace(CODES, kv_layout=kv_layout, seqlens=MIXED[:3], **dict(zip(names, choice, strict=True)))
    q, k, v = problem.arrays()
    unused = ((0, 0), (0xFF, 0x7C00), (0xFF, 0x7E00), (0xFF, 0xFC00), (0x80, 0x7BFF))
    want, *others = (run(problem, (q, *(with_unused(x, *bits) for x in (k, v)))) for bits in unused)
    for other in others:
        assert_same_bits(other, want)


@pytest.mark.parametrize("bits", [0x0000, 0x7C00, 0xFF80, 0x7BFF], ids=hex)
@pytest.mark.parametrize("kv_layout", ["padded", "paged"])
def test_unused_bytes_of_the_caches_do_not_matter(kv_layout: str, bits: int) -> None:
    problem = replace(BASE, kv_layout=kv_layout)
    arrays = problem.arrays()
    want = run(problem, arrays)
    for cache in arrays[1:]:
        cache.view(np.uint16)[np.isnan(cache)] = bits
    assert_same_bits(run(problem, arrays), want)


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "some of fused heads": lambda x: np.concatenate([x[..., :1, :], x, x[..., :2, :]], axis=-2)[..., 1:-2, :],
    "heads first": lambda x: np.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2),
    "backwards": lambda x: np.ascontiguousarray(x[..., ::-1, ::-1, :])[..., ::-1, ::-1, :],
    "every second token": lambda x: x.repeat(2, axis=-3)[..., 1::2, :, :],
    "parts of longer rows": lambda x: np.concatenate([x, x, x, x], axis=-1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "batch last": lambda x: np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 0, -2)), -2, 0),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("layout", ["ragged", "dense", "paged"])
@every_format
def test_views_with_any_outer_strides_are_read_and_written_in_place(
    base: PrefillProblem, layout: str, view: str
) -> None:
    q_layout = "ragged" if layout == "ragged" else "dense"
    problem = replace(base, seqlens=((20, 40),) * 2, q_layout=q_layout, kv_layout=layout, causal=True)
    arrays, look = problem.arrays(), VIEWS[view]
    want = run(problem, arrays)
    viewed = [
        changed(x, codes=look(x.codes), norms=look(x.norms)) if isinstance(x, Tbq4Array) else look(x) for x in arrays
    ]
    out = look(np.full(arrays[0].shape, np.nan, arrays[0].dtype))
    base_of_out = out
    while base_of_out.base is not None:
        base_of_out = base_of_out.base
    assert_same_bits(run(problem, tuple(viewed), out=out), want)
    # Nothing beside out has been written.
    assert np.isfinite(base_of_out).sum() == out.size


def test_tokens_may_be_half_a_gibibyte_apart() -> None:
    """Nine of them, of a whole tile and of another: the distances have more than 32 bits."""
    problem = replace(SINGLE, head_dim=128, seqlens=((3, 9),), num_kv_heads=1, q_layout="dense", kv_layout="dense")
    q, k, v = problem.arrays()
    stride = 2**29 + 16
    try:
        memory = np.empty(8 * stride + 2 * k[0, 0].nbytes, np.uint8)  # of which hardly a page is touched
    except MemoryError:
        pytest.skip(reason="needs 4 GiB of addresses")
    for step in (1, -1):
        far = []
        for i, x in enumerate((k, v)):
            first = memory[i * x[0, 0].nbytes :][: 8 * stride + x[0, 0].nbytes].view(np.float32)
            far.append(as_strided(first, x.shape, (0, stride, *x.strides[2:]))[:, ::step])
            far[-1][...] = x
        assert_same_bits(run(problem, (q, *far)), run(problem, (q, k, v)))
        patch = ("common/tile_loader.cuh", "static_cast<i64>(tokens) * stride_token", "tokens * stride_token")
        with pytest.raises(harness.KernelError):
            run(problem, (q, *far), patches=(patch,))


def test_queries_keys_and_values_may_be_slices_of_one_array() -> None:
    """As a projection gives them: of each token first the heads of q, then those of k, then those of v."""
    problem = replace(BASE, seqlens=((37, 37),) * 2, q_layout="dense", kv_layout="dense", causal=True)
    arrays = problem.arrays()
    fused = np.concatenate(arrays, axis=2)
    slices = np.split(fused, (6, 8), axis=2)
    assert all(x.base is not None for x in slices)
    assert_same_bits(run(problem, tuple(slices)), run(problem, arrays))


@pytest.mark.parametrize(("given_len", "used_len"), [(99, 45), (2**31 - 1, 45), (-3, 0), (-(2**31), 0)])
@every_format
def test_a_device_length_outside_of_the_keys_is_limited_to_them(
    base: PrefillProblem, given_len: int, used_len: int
) -> None:
    problem = replace(base, seqlens=((20, 45),), q_layout="dense", kv_layout="dense", causal=True)
    want = run(problem, kv_len=[used_len])
    got = run(problem, kv_len=[20], device_lengths={"kv_len": np.array([given_len], np.int32)})
    assert_same_bits(got, want)


@pytest.mark.parametrize("bad", [(0, 50, 20, 60), (-7, 2**31 - 1, -(2**31), 12), (90, 91, 92, 93), (60, 40, 20, 0)])
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_device_offsets_that_make_no_sense_reach_no_other_memory(name: str, bad: tuple[int, ...]) -> None:
    """The harness refuses reads outside of the arrays; what is around out is seen here."""
    problem = replace(BASE, seqlens=((20, 20),) * 3, causal=True)
    guarded = np.full((100, 6, 64), 77, np.float16)
    run(problem, out=guarded[20:80], device_lengths={name: np.array(bad, np.int32)})
    assert (guarded[:20] == 77).all()
    assert (guarded[80:] == 77).all()


def test_keys_that_no_row_of_a_call_sees_are_not_read() -> None:
    problem = replace(BASE, seqlens=((20, 200),), q_layout="dense", kv_layout="dense", causal=True, window=(30, None))
    q, k, v = problem.arrays()
    # The first token stands at 180 and sees 150, which is in the tile of 144.
    assert_prefill(problem, *run(problem, (q, k, v), memory=[q, k[:, 144:], v[:, 144:]]))


def test_keys_that_no_row_of_a_tile_sees_are_not_read() -> None:
    """Only half of the keys can be read: an order of blocks that takes the last rows last finishes the first before."""
    problem = replace(BASE, seqlens=((120, 120),), group=1, q_layout="dense", kv_layout="dense", causal=True)
    q, k, v = problem.arrays()
    want, finished = run(problem)[0], np.zeros(120, bool)
    for seed in (0, 1):
        out = np.full_like(q, np.nan)
        with pytest.raises(harness.KernelError):
            run(problem, (q, k, v), out=out, seed=seed, memory=[q, k[:, :64], v[:, :64]])
        rows = np.isfinite(out[0, :, 0]).all(axis=-1)
        np.testing.assert_array_equal(out[0, rows, 0], want[0, rows, 0])
        finished |= rows
    np.testing.assert_array_equal(np.flatnonzero(finished), np.arange(64))
