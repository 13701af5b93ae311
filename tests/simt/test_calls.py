"""Calls with GPU arrays, whole: a form that was met before runs on other arrays without another look at them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simt import product
from simt.numpy_gpu import GpuArray, _Cuda, download, gpu, on_gpu
from strategies import AppendProblem, PrefillProblem, Problem
from tolerance import assert_append, assert_call, assert_decode, assert_merge, assert_prefill

import cuattn
from cuattn import _append, _check, _decode, _dispatch, _prefill, _prefill_launches, _segments

__all__ = ["gpu"]  # the fixture

PLAIN = Problem(kv_len=(40, 0, 131), num_kv_heads=2, group=3)
SPLIT = replace(PLAIN, kv_len=(700, 131, 0), page_size=16, sinks=True, window=(600, None))
KEPT = replace(PLAIN, kv_len=(131, 3, 700), head_dim=128, k_format="tbq4", v_format="tbq4", means=True, num_sink=2,
               num_recent=5, page_size=16)  # fmt: skip
TOKENS = replace(PLAIN, seqlen_q=2, softcap=5.0, dtype="bfloat16")


pytestmark = pytest.mark.usefixtures("gpu")


@pytest.fixture(autouse=True)
def _no_forms(monkeypatch):
    """Nothing was called before."""
    monkeypatch.setattr(_decode, "_FORMS", _dispatch.Forms())
    monkeypatch.setattr(_append, "_FORMS", _dispatch.Forms())
    monkeypatch.setattr(_prefill, "_FORMS", _dispatch.Forms())


@pytest.fixture
def checks(monkeypatch):
    """Names of the functions that are checked, in their order."""
    seen = []
    for name in ("decode", "append", "prefill"):
        check = getattr(_check, name)

        def logged(*args, _check=check, _name=name, **options):
            seen.append(_name)
            return _check(*args, **options)

        monkeypatch.setattr(_check, name, logged)
    return seen


def _decoded(problem: Problem, ordinal: int = 0, *, kv_len: Any = None, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    arrays, options = problem.arrays(), problem.options()
    arrays = [on_gpu(x, ordinal) for x in arrays]
    options = {name: on_gpu(x, ordinal) for name, x in options.items()}
    if kv_len is not None:
        arrays[3] = kv_len
    out, lse = cuattn.decode(*arrays, **options, return_lse=True, **more)
    assert out.device.id == ordinal
    return out.host, lse.host


@pytest.mark.parametrize(("problem", "num_launches"), [(PLAIN, 1), (SPLIT, 2), (KEPT, 4), (TOKENS, 1)])
def test_a_form_is_checked_once_and_runs_on_other_arrays(gpu, checks, problem, num_launches):
    splits = {"num_splits": 3} if num_launches > 1 else {}
    for seed in range(3):
        other = replace(problem, seed=seed)
        assert_decode(other, *_decoded(other, **splits))
    assert checks == ["decode"]
    assert len(gpu) == 3 * num_launches


def test_parts_that_follow_the_lengths_obey_the_error_law(gpu):
    """Lengths may change from call to call: the GPU looks at them."""
    problem = Problem(kv_len=(700, 3, 0, 131), num_kv_heads=2, group=3)
    q, k, v, _ = problem.arrays()
    k, v = np.nan_to_num(k), np.nan_to_num(v)
    given = [on_gpu(x) for x in (q, k, v)]
    for lengths in (problem.kv_len, (131, 700, 600, 1), (0, 0, 0, 5)):
        kv_len = np.array(lengths, np.int32)
        out, lse = cuattn.decode(*given, on_gpu(kv_len), balance=True, return_lse=True)
        assert_call((q, k, v, kv_len), {}, (out.host, lse.host))
    assert [config.kernel for config, _ in gpu] == 3 * ["decode", "merge"]


def test_splits_of_a_given_size_give_the_bits_of_the_harness_by_itself():
    problem = replace(SPLIT, num_sink=2, num_recent=5, window=None)
    got = _decoded(problem, split_size=128)
    want = product.decode_arrays(*problem.arrays(), **problem.options(), split_size=128)
    for a, b in zip(got, want, strict=True):
        assert a.tobytes() == b[:, 0].tobytes()


def test_a_workspace_that_is_given_is_used_and_must_be_large_enough(checks, monkeypatch):
    problem = replace(SPLIT, kv_len=(700, 131, 5))
    plan = cuattn.plan_decode(*problem.arrays(), page_table=problem.options()["page_table"], num_splits=3)
    checks.clear()
    memory = GpuArray((plan.workspace_bytes + 100,), np.uint8)
    monkeypatch.setattr(_Cuda, "alloc", lambda _: pytest.fail("there is a workspace"))
    for seed in range(2):
        memory.host[...] = 0xFF
        other = replace(problem, seed=seed)
        assert_decode(other, *_decoded(other, num_splits=3, workspace=memory))
        assert (memory.host[-100:] == 0xFF).all()
    assert len(checks) == 1
    with pytest.raises(ValueError, match=rf"workspace must have at least {plan.workspace_bytes} bytes .* got 16"):
        _decoded(problem, num_splits=3, workspace=GpuArray((16,), np.uint8))
    with pytest.raises(ValueError, match="workspace must have rows that start at multiples of 16 bytes"):
        _decoded(problem, num_splits=3, workspace=memory[8:])


def test_results_land_in_out_whatever_its_strides(checks):
    for seed in range(2):
        problem = replace(PLAIN, seed=seed)
        base = GpuArray((3, 6, 2, 64), np.float16).host
        view = GpuArray(base[:, :, 1])
        q, k, v, kv_len = map(on_gpu, problem.arrays())
        result = cuattn.decode(q, k, v, kv_len, out=view)
        assert result is view
        _, lse = _decoded(problem)
        assert_decode(problem, base[:, :, 1], lse)
        assert np.isnan(base[:, :, 0]).all()
    assert checks == ["decode", "decode"]  # with out, and without


def test_another_form_is_checked(checks):
    """One difference at a time."""
    q, k, v, kv_len = PLAIN.arrays()
    wide = np.zeros((3, 6, 128), np.float16)[..., :64]
    arrays = {
        "first": {},
        "dtype": {"q": q.astype("bfloat16"), "k": k.astype("bfloat16"), "v": v.astype("bfloat16")},
        "strides": {"q": wide},
        "fewer heads": {"q": q[:, :4]},
        "capacity": {"k": k[:, :132], "v": v[:, :132]},
        "lengths on the host": {"kv_len": kv_len.tolist()},
        "one batch": {"q": q[:1], "k": k[:1], "v": v[:1], "kv_len": kv_len[:1]},
    }
    options = (
        {"causal": False}, {"window": (5, None)}, {"window": (5, 3)}, {"softcap": 3.0}, {"softcap": 2.0},
        {"softmax_scale": 0.5}, {"num_splits": 2}, {"split_size": 64}, {"split_size": 128}, {"balance": True},
        {"return_lse": True},
    )  # fmt: skip
    given = {"q": q, "k": k, "v": v, "kv_len": kv_len}
    for changed, more in [*((x, {}) for x in arrays.values()), *(({}, x) for x in options)]:
        now = given | changed
        for _ in range(2):
            cuattn.decode(*(on_gpu(now[name]) for name in given), **more)
    assert checks == ["decode"] * (len(arrays) + len(options))


def test_an_address_with_other_low_bits_is_another_form(checks):
    """Rows of 16 bytes whose begin is not such a multiple are refused, after a call of the form in all else."""
    q, k, v, kv_len = map(on_gpu, PLAIN.arrays())
    cuattn.decode(q, k, v, kv_len)
    moved = GpuArray(GpuArray((q.size + 4,), np.float16).host[4:].reshape(q.shape))
    with pytest.raises(ValueError, match="q must have rows that start at multiples of 16 bytes"):
        cuattn.decode(moved, k, v, kv_len)
    assert len(checks) == 2


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ({"causal": True}, {"causal": 1}, "causal must be True or False"),
        ({"num_splits": 1}, {"num_splits": True}, "num_splits must be 1 to"),
        ({"window": (1, 0)}, {"window": (True, 0)}, "window left must be"),
        ({"softcap": 1.0}, {"softcap": True}, "softcap must be"),
        ({"return_lse": False}, {"return_lse": 0}, "return_lse must be True or False"),
    ],
)
def test_options_that_are_equal_but_of_another_type_are_refused_after_good_ones(good, bad, message):
    arrays = [on_gpu(x) for x in PLAIN.arrays()]
    cuattn.decode(*arrays, **good)
    with pytest.raises((TypeError, ValueError), match=message):
        cuattn.decode(*arrays, **bad)


def test_options_that_have_no_hash_are_checked_each_time(checks):
    arrays = [on_gpu(x) for x in PLAIN.arrays()]
    want = cuattn.decode(*arrays, window=(5, None)).host
    for _ in range(2):
        assert np.array_equal(cuattn.decode(*arrays, window=[5, None]).host, want)
    assert len(checks) == 3


def test_lengths_on_the_host_are_checked_at_every_call(checks):
    q, k, v, kv_len = PLAIN.arrays()
    given = [on_gpu(x) for x in (q, k, v)]
    for lengths in (kv_len, kv_len.tolist(), kv_len.astype(np.uint8)):
        problem_out = cuattn.decode(*given, lengths, return_lse=True)
        assert_decode(PLAIN, *(x.host for x in problem_out))
    capacity = k.shape[1]
    for bad, message in (
        ([40, 0, capacity + 1], rf"kv_len\[2\] must be 0 to {capacity}"), ([1, 2], "kv_len must have shape"),
        (None, "kv_len must be an int"), (1.0, "kv_len must be an int"), (-1, "kv_len must be 0 to"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=message):
            cuattn.decode(*given, bad, return_lse=True)
    assert checks == ["decode"]


def test_numpy_beside_gpu_arrays_is_refused_also_after_a_good_call():
    arrays = PLAIN.arrays()
    cuattn.decode(*map(on_gpu, arrays))
    with pytest.raises(ValueError, match="all arrays must be on one device"):
        cuattn.decode(*map(on_gpu, arrays[:2]), arrays[2], on_gpu(arrays[3]))


def test_a_call_runs_on_the_device_of_its_arrays_and_forms_are_of_a_device(gpu, checks):
    for ordinal in (1, 0, 1):
        assert_decode(SPLIT, *_decoded(SPLIT, ordinal, num_splits=3))
    assert [ordinal for _, ordinal in gpu] == [1, 1, 0, 0, 1, 1]
    assert len(checks) == 2


def test_the_scale_of_fp8_is_of_the_form_as_a_number_and_read_anew_as_an_array(checks):
    q, k, v, kv_len = PLAIN.arrays()
    codes = [on_gpu(cuattn.quantize_fp8(np.nan_to_num(x), scale=1.0).codes) for x in (k, v)]
    given, lengths = on_gpu(q), on_gpu(kv_len)

    def out(*scales):
        caches = (cuattn.Fp8Array(x, scale) for x, scale in zip(codes, scales, strict=True))
        return cuattn.decode(given, *caches, lengths).host.astype(float)

    def heads(*sizes):
        return on_gpu(np.array(sizes, np.float32))

    one = out(1.0, 1.0)
    assert np.array_equal(out(1.0, 2.0), 2 * one)  # powers of two change no rounding
    assert np.array_equal(out(1.0, heads(1, 1)), one)
    assert np.array_equal(out(1.0, heads(2, 4)), one * np.repeat((2, 4), 3)[:, None])
    assert not np.array_equal(out(4.0, 1.0), one)
    assert len(checks) == 4


def test_sinks_in_16_bits_are_taken_anew_at_every_call(checks):
    """A copy in float32 must not outlive the call."""
    for seed in (0, 1):
        problem = replace(PLAIN, sinks=True, seed=seed)
        options = problem.options()
        sinks = options["sinks"].astype(np.float16)
        q, k, v, kv_len = map(on_gpu, problem.arrays())
        got = cuattn.decode(q, k, v, kv_len, sinks=on_gpu(sinks), return_lse=True)
        want = cuattn.decode(q, k, v, kv_len, sinks=on_gpu(sinks.astype(np.float32)), return_lse=True)
        for a, b in zip(got, want, strict=True):
            assert np.array_equal(a.host, b.host)
    assert len(checks) == 2


def test_a_call_without_a_query_launches_nothing(gpu):
    q, k, v, kv_len = PLAIN.arrays()
    for _ in range(2):
        out, lse = cuattn.decode(*map(on_gpu, (q[:0], k[:0], v[:0], kv_len[:0])), return_lse=True)
        assert (out.shape, lse.shape) == ((0, 6, 64), (0, 6))
    assert not gpu


def test_merge_runs_on_gpu_arrays():
    rng = np.random.default_rng(0)
    parts, lse_parts = rng.standard_normal((3, 2, 4, 64)).astype(np.float16), rng.standard_normal((3, 2, 4))
    lse_parts = lse_parts.astype(np.float32)
    out, lse = cuattn.merge(on_gpu(parts), on_gpu(lse_parts))
    assert_merge((parts, lse_parts), out.host, lse.host)


APPEND = AppendProblem(
    kv_len=(40, 3, 19), seqlen_new=21, num_kv_heads=2, head_dim=128, k_format="raw16", v_format="tbq4",
    in_dtype="bfloat16", dtype="bfloat16", page_size=5, capacity=33, means=True, num_sink=4, num_recent=6, views=True,
)  # fmt: skip


def test_append_is_checked_once_and_writes_to_other_arrays(gpu, checks):
    for seed in range(3):
        problem = replace(APPEND, seed=seed)
        bases = problem.bases()
        arrays, options = problem.arguments(bases)
        given, kept = [on_gpu(x) for x in arrays], {name: on_gpu(x) for name, x in options.items()}
        cuattn.append(*given, **kept)
        for target, source in zip((*arrays, *options.values()), (*given, *kept.values()), strict=True):
            download(target, source)
        assert_append(problem, bases)
    assert checks == ["append"]
    assert len(gpu) == 3


def test_append_refuses_one_array_for_two_outputs_also_after_a_good_call():
    problem = AppendProblem(kv_len=(3,), head_dim=64)
    bases = problem.bases()
    (k_new, v_new, k_cache, v_cache, kv_len), options = problem.arguments(bases)
    given = [on_gpu(x) for x in (k_new, v_new, k_cache, v_cache, kv_len)]
    cuattn.append(*given, **options)
    with pytest.raises(ValueError, match="v_cache must not be the memory of k_cache"):
        cuattn.append(*given[:2], given[2], given[2], given[4], **options)


PROMPTS = PrefillProblem(
    seqlens=((150, 150), (170, 200), (130, 131)), num_kv_heads=2, group=2, head_dim=128, kv_layout="paged",
    page_size=64, causal=True, sinks=True,
)  # fmt: skip
# By kernel: wgmma with tiles that are counted; mma; mma with parts of the keys; wgmma on codes.
PREFILLS = {
    "prefill_sm90": PROMPTS,
    "prefill_mma": replace(PROMPTS, page_size=16),
    "splits": replace(PROMPTS, seqlens=((40, 2500),), q_layout="dense", group=1, page_size=16),
    "codes": replace(PROMPTS, k_format="tbq4", v_format="tbq4", sinks=False),
}


def _prefilled(problem: PrefillProblem, *, on_host: bool = False, ordinal: int = 0) -> None:
    lengths = {"kv_len", "cu_seqlens_q", "cu_seqlens_k"} if on_host else set()
    options = {name: x if name in lengths else on_gpu(x, ordinal) for name, x in problem.options().items()}
    out, lse = cuattn.prefill(*(on_gpu(x, ordinal) for x in problem.arrays()), **options, return_lse=True)
    assert_prefill(problem, out.host, lse.host)


@pytest.mark.parametrize("name", PREFILLS)
def test_a_form_of_prefill_is_checked_once_and_runs_on_other_arrays(gpu, checks, name):
    """Tensor maps are those of the arrays of the call."""
    for seed in range(2):
        _prefilled(replace(PREFILLS[name], seed=seed))
    assert checks == ["prefill"]
    kernels = [config.kernel for config, _ in gpu]
    assert kernels == 2 * {"splits": ["prefill_mma", "merge"], "codes": ["prefill_sm90"]}.get(name, [name])


def test_prefill_with_lengths_on_the_host_is_checked_at_every_call(checks):
    for _ in range(2):
        _prefilled(PREFILLS["prefill_mma"], on_host=True)
    assert len(checks) == 2
    _prefilled(PREFILLS["prefill_mma"])
    assert len(checks) == 3


def test_prefill_runs_on_the_device_of_its_arrays(gpu):
    _prefilled(PREFILLS["prefill_sm90"], ordinal=1)
    assert [ordinal for _, ordinal in gpu] == [1]


def test_ragged_results_land_in_out(checks):
    problem = replace(PREFILLS["prefill_mma"], kv_layout="ragged")
    q, k, v = problem.arrays()
    options = {name: on_gpu(x) for name, x in problem.options().items()}
    base = GpuArray((*q.shape[:-1], 2 * q.shape[-1]), q.dtype).host
    for _ in range(2):
        base[...] = np.nan
        view = GpuArray(base[..., : q.shape[-1]])
        assert cuattn.prefill(*map(on_gpu, (q, k, v)), **options, out=view) is view
        assert_prefill(problem, view.host)
        assert np.isnan(base[..., q.shape[-1] :]).all()
    assert len(checks) == 1


def test_a_prefill_without_a_query_launches_nothing(gpu):
    q, k = np.zeros((2, 0, 4, 64), np.float16), np.zeros((2, 5, 2, 64), np.float16)
    for _ in range(2):
        out, lse = cuattn.prefill(*map(on_gpu, (q, k, k)), return_lse=True)
        assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
    assert not gpu


def test_the_number_of_forms_is_bounded(monkeypatch):
    monkeypatch.setattr(_dispatch, "_MAX_FORMS", 3)
    forms = _dispatch.Forms()

    def found(i):
        return forms.look_up((), [], (i,))[2]

    for i in range(10):
        assert forms.put(forms.look_up((), [], (i,))[1], -i) == -i
        assert found(i) == -i
        assert sum(found(j) is not None for j in range(10)) <= 3
    assert forms.put(None, 5) == 5
    assert forms.look_up((), [], ([],))[1:] == (None, None)


def test_names_of_arrays_and_parameters_agree():
    """A launch takes the address of an array from the place of its name."""
    assert _segments.ARRAYS[-6:-5] == ("workspace",)
    assert _segments.ARRAYS[-5:] == ("out", "lse", "parts", "states", "shares")
    assert _prefill_launches.ARRAYS[-5:] == ("out", "lse", "parts", "states", "items_claimed")
    assert len(set(_append._ARRAYS)) == 18
