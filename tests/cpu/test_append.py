"""append on NumPy arrays: the laws of its definition."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, AppendProblem, append_problems

import cuattn
from cuattn import _plan, _tbq4, reference


def run(function, problem, kv_len=None):
    """Return the arrays of a problem after a call."""
    bases = problem.bases()
    (*arrays, lengths), options = problem.arguments(bases)
    function(*arrays, lengths if kv_len is None else kv_len, **options)
    return bases


def assert_same_bytes(got, want):
    for name, base in want.items():
        assert got[name].tobytes() == base.tobytes(), name


def by_hand(problem):
    """Place row after row, each quantized or rounded by itself; in a ring the last one stays."""
    bases = problem.bases()
    views = {name: problem.view(name, base) for name, base in bases.items()}
    for (b, i, position), *slot in zip(problem.places(), *problem.slots(), strict=True):
        for side in "kv":
            row = views[f"{side}_new"][b, i]
            with np.errstate(over="ignore"):
                rounded = row.astype(DTYPES[problem.dtype])
            if f"{side}_cache" in views:
                views[f"{side}_cache"][tuple(slot)] = rounded
            elif f"{side}_scale" in views:
                codes = reference.quantize_fp8(row, scale=views[f"{side}_scale"]).codes
                views[f"{side}_codes"][tuple(slot)] = codes
            else:
                codes, norms, clamped = reference.quantize(row, mean=views.get(f"{side}_mean"))
                views[f"{side}_codes"][tuple(slot)], views[f"{side}_norms"][tuple(slot)] = codes, norms
                views[f"{side}_clamped"] += clamped
            if position < (problem.num_sink or 0):
                views[f"{side}_sink"][b, position] = rounded
            if problem.num_recent:
                views[f"{side}_recent"][b, position % problem.num_recent] = rounded
    return bases


@given(problem=append_problems())
def test_the_reference_places_every_row_as_by_hand_and_touches_nothing_else(problem):
    assert_same_bytes(run(reference.append, problem), by_hand(problem))


@given(problem=append_problems(on_host=True), form=st.sampled_from((np.asarray, list, np.int64)))
def test_append_on_numpy_is_the_reference(problem, form):
    if form is np.int64:  # one length for all sequences
        problem = replace(problem, kv_len=(problem.kv_len[0],) * len(problem.kv_len))
    kv_len = np.int64(problem.kv_len[0]) if form is np.int64 else form(problem.kv_len)
    assert_same_bytes(run(cuattn.append, problem, kv_len), run(reference.append, problem))


@given(problem=append_problems(on_host=True))
def test_token_by_token_is_all_at_once(problem):
    """A sequence whose turn has not come has length 0, and its token is left out."""
    bases = problem.bases()
    (k_new, v_new, *caches, kv_len), options = problem.arguments(bases)
    for i in range(problem.seqlen_new):
        lengths = np.maximum(kv_len - (problem.seqlen_new - 1 - i), 0)
        tokens = (k_new, v_new) if problem.seqlen_new == 1 else (k_new[:, i], v_new[:, i])
        cuattn.append(*tokens, *caches, lengths, **options)
    assert_same_bytes(bases, run(cuattn.append, problem))


def test_sequences_with_fewer_new_tokens_are_aligned_to_the_right():
    problem = AppendProblem(kv_len=(3, 1, 0), seqlen_new=3, capacity=4)
    bases = problem.bases()
    untouched = bases["k_cache"].copy()
    arguments, options = problem.arguments(bases)
    cuattn.append(*arguments, **options)
    k_new, k_cache = bases["k_new"], bases["k_cache"]
    assert k_cache[0, :3].tobytes() == k_new[0].tobytes()
    assert k_cache[1, 0].tobytes() == k_new[1, 2].tobytes()
    for b, used in enumerate((3, 1, 0)):
        assert k_cache[b, used:].tobytes() == untouched[b, used:].tobytes()


def test_sinks_are_the_first_tokens_and_rings_the_last():
    problem = AppendProblem(kv_len=(11,), seqlen_new=11, num_sink=2, num_recent=4, k_format="tbq4", means=True)
    bases = run(cuattn.append, problem)
    for side in "kv":
        rows = bases[f"{side}_new"][0]
        assert bases[f"{side}_sink"][0].tobytes() == rows[:2].tobytes()
        assert bases[f"{side}_recent"][0].tobytes() == rows[[8, 9, 10, 7]].tobytes()


def test_a_prompt_in_pages_is_attended_to_as_if_it_were_dense():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 64)).astype(np.float16)
    k_new, v_new = rng.standard_normal((2, 2, 20, 2, 64)).astype(np.float16)
    k_cache, v_cache = np.full((2, 9, 5, 2, 64), np.nan, np.float16)
    table = np.array([[8, 1, 6, 3], [0, 5, 2, 7]], np.int32)
    cuattn.append(k_new, v_new, k_cache, v_cache, [20, 20], page_table=table)
    got = cuattn.decode(q, k_cache, v_cache, [20, 20], page_table=table)
    assert got.tobytes() == cuattn.decode(q, k_new, v_new, [20, 20]).tobytes()


@pytest.mark.parametrize("shape", [(0, 2, 64), (0, 3, 2, 64), (2, 0, 2, 64), (2, 3, 0, 64)], ids=str)
@pytest.mark.parametrize("tbq4", [False, True])
def test_nothing_new_writes_nothing(shape, tbq4):
    new = np.zeros(shape, np.float16)
    cache = np.full((shape[0], 5, shape[-2], 64), 7, np.float16)
    caches = [cache, cache.copy()]
    if tbq4:
        caches = [cuattn.quantize(x) for x in caches]
    codes = [x.codes if tbq4 else x for x in caches]
    before = [x.tobytes() for x in codes]
    cuattn.append(new, new, *caches, np.full(shape[0], 4, np.int32))
    assert [x.tobytes() for x in codes] == before


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_clamped_norms_are_counted_where_there_is_a_counter(dtype):
    new = np.full((1, 1, 128), 6000).astype(DTYPES.get(dtype, dtype))
    caches = [cuattn.quantize(np.zeros((1, 2, 1, 128), np.float16)) for _ in "kv"]
    counter = np.array([3], np.int32)
    k_cache = replace(caches[0], clamped=counter)
    cuattn.append(new, new, k_cache, caches[1], 1)
    assert counter.tolist() == [4]
    assert caches[1].clamped == 0
    assert k_cache.norms.ravel().tolist() == [65504, 0]


@pytest.mark.parametrize("clamped", [np.zeros(2, np.int32), np.zeros(1, np.int64)], ids=str)
def test_an_array_of_another_kind_counts_nothing(clamped):
    new = np.full((1, 1, 128), 6000, np.float16)
    caches = [replace(cuattn.quantize(np.zeros((1, 2, 1, 128), np.float16)), clamped=clamped) for _ in "kv"]
    cuattn.append(new, new, *caches, 1)
    assert not clamped.any()


def test_entries_of_pages_without_a_new_token_may_be_anything():
    new = np.ones((2, 1, 64), np.float16)
    k_cache, v_cache = np.zeros((2, 5, 4, 1, 64), np.float16)
    table = np.array([[-1, 4, 2**31 - 1], [99, -7, 2]], np.int32)
    cuattn.append(new, new, k_cache, v_cache, [8, 9], page_table=table)
    written = {(int(page), int(slot)) for page, slot, *_ in np.argwhere(k_cache)}
    assert written == {(4, 3), (2, 0)}
    cuattn.append(new, new, k_cache, v_cache, [0, 0], page_table=table)
    cuattn.append(new[:, :0, None, :0].reshape(2, 0, 1, 64), np.zeros((2, 0, 1, 64), np.float16), k_cache, v_cache,
                  [4, 1], page_table=table)  # fmt: skip


@pytest.mark.parametrize("head_dim", _plan.HEAD_DIMS)
def test_eight_lanes_hold_a_block_and_pieces_fill_a_row(head_dim):
    config = _plan.AppendConfig(_plan.Dtype.FP16, _plan.Dtype.FP16, *[_plan.KvFormat.RAW16] * 2, head_dim)
    assert head_dim % config.piece == 0
    assert config.piece % 32 == 0  # 8 bytes a lane
    if head_dim in _tbq4.HEAD_DIMS:
        assert config.piece == _tbq4.block_of(head_dim)


def test_a_launch_covers_all_rows_or_fills_the_device():
    config = _plan.AppendConfig(_plan.Dtype.FP16, _plan.Dtype.FP16, _plan.KvFormat.TBQ4, _plan.KvFormat.RAW16, 256)
    device = _plan.DEVICES["sm_90a"]
    assert config.grid(1, device) == (1, 2, 1)
    assert config.grid(8, device) == (1, 2, 1)
    assert config.grid(9, device) == (2, 2, 1)
    x, y, _ = config.grid(2**28, device)
    assert x * y == config.ctas_per_sm * device.num_sms
