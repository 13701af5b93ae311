"""`prefill` and `plan_prefill` on NumPy arrays, and the parameters that a kernel gets."""

import ctypes
import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, PrefillProblem, lengths, prefill_problems

import cuattn
from cuattn import _check, _params, _plan, _prefill_params, reference
from cuattn._plan import DEVICES

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Formats of K and V, dtype, head_dim, value_dim.
CHOICES = (
    ("raw16", "raw16", "float16", 64, None),
    ("raw16", "raw16", "bfloat16", 192, 128),
    ("tbq4", "tbq4", "bfloat16", 64, None),
    ("tbq4", "raw16", "float16", 128, None),
    ("raw16", "tbq4", "float16", 256, None),
)
# The laws of layouts do not depend on tiles, and short sequences leave time for more examples.
SMALL = {"rows": st.integers(0, 20), "lengths": lengths(6), "page_sizes": (1, 3, 4), "choices": CHOICES}
LAYOUTS = [(q, k) for q in ("dense", "ragged") for k in ("dense", "padded", "ragged", "paged")]
of_both_layouts_of_q = pytest.mark.parametrize("q_layout", ["dense", "ragged"])
of_all_layouts = pytest.mark.parametrize(("q_layout", "kv_layout"), LAYOUTS)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def example(q_layout: str, kv_layout: str, **fields: Any) -> PrefillProblem:
    """Three sequences in any layout, one of them without keys or without tokens if lengths may differ."""
    tokens = (3, 3, 3) if q_layout == "dense" else (4, 0, 7)
    num_keys = (9, 9, 9) if kv_layout == "dense" else (5, 9, 0)
    seqlens = tuple(zip(tokens, num_keys, strict=True))
    fields = {"num_kv_heads": 2, "group": 3, "page_size": 4, "causal": True, "seed": 5, **fields}
    return PrefillProblem(seqlens=seqlens, q_layout=q_layout, kv_layout=kv_layout, **fields)


@given(problem=prefill_problems(**SMALL))
def test_prefill_on_numpy_is_the_reference_rounded_to_the_dtype_of_q(problem: PrefillProblem) -> None:
    arrays, options = problem.arrays(), problem.options()
    out, lse = cuattn.prefill(*arrays, **options, return_lse=True)
    want_out, want_lse = reference.prefill(*arrays, **options, return_lse=True)
    assert same_bits(out, want_out.astype(DTYPES[problem.dtype]))
    assert same_bits(lse, want_lse.astype(np.float32))
    assert same_bits(cuattn.prefill(*arrays, **options), out)


@given(problem=prefill_problems(**{**SMALL, "choices": CHOICES[:2]}))
def test_in_every_layout_a_sequence_has_the_result_that_it_has_alone(problem: PrefillProblem) -> None:
    """Whatever stands beside it, past its length or in other pages."""
    options = problem.options()
    alone = {name: options[name] for name in ("causal", "window", "softcap", "sinks") if name in options}
    results = cuattn.prefill(*problem.arrays(), **options, return_lse=True)
    for rows, sequence in zip(problem.rows(), problem.sequences(), strict=True):
        want = cuattn.prefill(*(x[None] for x in sequence), **alone, return_lse=True)
        assert all(same_bits(got[rows], x[0]) for got, x in zip(results, want, strict=True))


@given(problem=prefill_problems(**SMALL), softmax_scale=st.floats(-2, 2).filter(lambda x: x == 0 or abs(x) > 1e-18))
def test_prefill_on_numpy_passes_the_scale_on(problem: PrefillProblem, softmax_scale: float) -> None:
    arrays, options = problem.arrays(), {**problem.options(), "softmax_scale": softmax_scale}
    out = cuattn.prefill(*arrays, **options)
    assert same_bits(out, reference.prefill(*arrays, **options).astype(DTYPES[problem.dtype]))


@given(problem=prefill_problems(**SMALL))
def test_prefill_fills_out_and_returns_it_and_changes_no_other_argument(problem: PrefillProblem) -> None:
    arrays, options = problem.arrays(), problem.options()
    given_arrays = [x for x in (*arrays, *options.values()) if isinstance(x, np.ndarray)]
    given_arrays += [x for rows in arrays if isinstance(rows, cuattn.Tbq4Array) for x in (rows.codes, rows.norms)]
    before = [x.copy() for x in given_arrays]
    want, want_lse = cuattn.prefill(*arrays, **options, return_lse=True)
    out = np.full_like(want, np.nan)
    got, lse = cuattn.prefill(*arrays, **options, out=out, return_lse=True)
    assert got is out
    assert same_bits(out, want)
    assert same_bits(lse, want_lse)
    assert all(same_bits(a, b) for a, b in zip(given_arrays, before, strict=True))


@of_all_layouts
def test_prefill_writes_through_strides_of_out_and_nothing_else(q_layout: str, kv_layout: str) -> None:
    problem = example(q_layout, kv_layout)
    arrays, options = problem.arrays(), problem.options()
    want = cuattn.prefill(*arrays, **options)
    base = np.full((*(2 * n + 1 for n in want.shape[:-1]), 64), 77, np.float16)
    part = (*(slice(n, None, -1) if axis == 0 else slice(0, n) for axis, n in enumerate(want.shape[:-1])),)
    out = base[part][: want.shape[0]]
    assert cuattn.prefill(*arrays, **options, out=out) is out
    assert same_bits(out, want)
    is_guard = np.ones(base.shape, bool)
    is_guard[part][: want.shape[0]] = False
    assert (base[is_guard] == 77).all()


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (192, 192), (192, 128)], ids=str)
@of_both_layouts_of_q
def test_results_have_the_shape_and_dtype_of_q_and_the_value_dim_of_v(dtype: Any, dims: tuple, q_layout: str) -> None:
    """Every key has the same score and the value 1."""
    q, k, v = (
        np.ones((2, n, heads, dim), dtype) for n, heads, dim in zip((5, 8, 8), (4, 2, 2), (dims[0], *dims), strict=True)
    )
    options = {}
    if q_layout == "ragged":
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        options = {"cu_seqlens_q": [0, 5, 10], "cu_seqlens_k": [0, 8, 16]}
    alone = cuattn.prefill(q, k, v, **options)
    out, lse = cuattn.prefill(q, k, v, **options, return_lse=True)
    assert type(alone) is type(out) is type(lse) is np.ndarray
    assert same_bits(alone, out)
    assert (out.shape, out.dtype) == ((*q.shape[:-1], dims[1]), np.dtype(dtype))
    assert (out == 1).all()
    want = np.full(q.shape[:-1], dims[0] * dims[0] ** -0.5 + math.log(8))
    np.testing.assert_allclose(lse, want, rtol=np.finfo(np.float32).eps)  # rounded to float32 once
    assert lse.dtype == np.float32


@pytest.mark.parametrize("group", [1, 65, 100])
def test_any_number_of_query_heads_shares_a_kv_head(group: int) -> None:
    problem = PrefillProblem(seqlens=((2, 5),), num_kv_heads=2, group=group, kv_layout="dense")
    arrays, options = problem.arrays(), problem.options()
    assert same_bits(cuattn.prefill(*arrays, **options), reference.prefill(*arrays, **options).astype(np.float16))
    assert cuattn.plan_prefill(*arrays, cu_seqlens_q=options["cu_seqlens_q"]).problem.group == group


@pytest.mark.parametrize("k_format", ["raw16", "tbq4"])
def test_cu_seqlens_k_is_cu_seqlens_q_by_default(k_format: str) -> None:
    problem = PrefillProblem(seqlens=((4, 4), (0, 0), (7, 7)), causal=True, k_format=k_format)
    options = problem.options()
    want = cuattn.prefill(*problem.arrays(), **options)
    del options["cu_seqlens_k"]
    assert same_bits(cuattn.prefill(*problem.arrays(), **options), want)


def strided(values: list[int]) -> np.ndarray:
    return np.repeat(np.int32(values), 2)[::2]


@pytest.mark.parametrize("form", [list, tuple, np.array, np.uint8, np.int64, strided], ids=lambda f: f.__name__)
def test_lengths_come_as_a_sequence_or_an_array_of_any_integers(form: Any) -> None:
    for q_layout, kv_layout in (("ragged", "ragged"), ("ragged", "padded"), ("dense", "paged")):
        problem = example(q_layout, kv_layout)
        options = problem.options()
        want = cuattn.prefill(*problem.arrays(), **options)
        for name in ("cu_seqlens_q", "cu_seqlens_k", "kv_len"):
            if name in options:
                options[name] = form(options[name].tolist())
        assert same_bits(cuattn.prefill(*problem.arrays(), **options), want)


def test_one_length_is_for_all_sequences() -> None:
    problem = PrefillProblem(seqlens=((3, 7), (3, 7)), q_layout="dense", kv_layout="padded")
    options = problem.options()
    want = cuattn.prefill(*problem.arrays(), **options)
    for kv_len in (7, np.int64(7)):
        assert same_bits(cuattn.prefill(*problem.arrays(), **{**options, "kv_len": kv_len}), want)


def test_an_array_of_the_host_that_speaks_dlpack_runs_there() -> None:
    class Dlpack:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

    for layout in LAYOUTS:
        problem = example(*layout, sinks=True)
        want = cuattn.prefill(*problem.arrays(), **problem.options(), return_lse=True)
        options = {name: Dlpack(x) if isinstance(x, np.ndarray) else x for name, x in problem.options().items()}
        got = cuattn.prefill(*map(Dlpack, problem.arrays()), **options, return_lse=True)
        assert all(type(x) is np.ndarray for x in got)
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("keys", ["dense", "ragged", "paged"])
@of_both_layouts_of_q
def test_an_empty_batch_gives_an_empty_result(q_layout: str, keys: str) -> None:
    q = np.zeros((0, 4, 64) if q_layout == "ragged" else (0, 7, 4, 64), np.float16)
    options: dict[str, Any] = {"cu_seqlens_q": [0]} if q_layout == "ragged" else {}
    k = np.zeros({"dense": (0, 10, 2, 64), "ragged": (0, 2, 64), "paged": (3, 10, 2, 64)}[keys], np.float16)
    if keys == "ragged":
        options["cu_seqlens_k"] = np.zeros(1, np.int32)
    elif keys == "paged":
        options |= {"page_table": np.zeros((0, 2), np.int32), "kv_len": []}
    out, lse = cuattn.prefill(q, k, k, **options, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:-1], np.float32)
    assert "batch 0" in str(cuattn.plan_prefill(q, k, k, **options))


@of_both_layouts_of_q
def test_no_query_token_gives_an_empty_result(q_layout: str) -> None:
    q, k = (
        np.zeros((0, 4, 64) if q_layout == "ragged" else (2, 0, 4, 64), np.float16),
        np.zeros((2, 10, 2, 64), np.float16),
    )
    out, lse = cuattn.prefill(q, k, k, cu_seqlens_q=[0, 0, 0] if q_layout == "ragged" else None, return_lse=True)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])


@pytest.mark.parametrize(
    ("shape", "entries"),
    [((2, 0, 2, 64), None), ((0, 2, 64), None), ((0, 4, 2, 64), 0), ((3, 4, 2, 64), 0), ((3, 0, 2, 64), 4)],
    ids=["dense", "ragged", "no page", "no entry", "no token"],
)
@of_both_layouts_of_q
def test_no_keys_give_zeros_and_an_lse_of_the_sink_alone(
    shape: tuple[int, ...], entries: int | None, q_layout: str
) -> None:
    q = np.ones((10, 4, 64) if q_layout == "ragged" else (2, 5, 4, 64), np.float16)
    k = np.zeros(shape, np.float16)
    options: dict[str, Any] = {"cu_seqlens_q": [0, 3, 10]} if q_layout == "ragged" else {}
    if entries is not None:
        options |= {"page_table": np.zeros((2, entries), np.int32), "kv_len": 0}
    elif len(shape) == 3:
        options["cu_seqlens_k"] = [0, 0, 0]
    out, lse = cuattn.prefill(q, k, k, **options, return_lse=True)
    assert same_bits(out, np.zeros_like(q))
    assert np.isneginf(lse).all()
    sinks = np.array([0.5, -np.inf, 2, -1], np.float32)
    out, lse = cuattn.prefill(q, k, k, **options, sinks=sinks, return_lse=True)
    assert same_bits(out, np.zeros_like(q))
    np.testing.assert_array_equal(lse, np.broadcast_to(sinks, q.shape[:-1]))


def test_values_that_overflow_the_dtype_of_out_are_infinite() -> None:
    q, k = np.zeros((1, 1, 1, 64), np.float16), np.zeros((1, 1, 1, 64), np.float16)
    v = cuattn.Tbq4Array(
        np.full((1, 1, 1, 32), 0xFF, np.uint8),
        np.full((1, 1, 1, 1), 65504, np.float16),
        np.full((1, 64), 1e6, np.float32),
    )
    assert np.isinf(cuattn.prefill(q, k, v)).all()


@pytest.mark.parametrize("device", [None, *DEVICES])
@pytest.mark.parametrize("dims", _plan.PREFILL_DIMS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_plan_can_be_printed_for_all_dims_and_devices(dtype: str, dims: tuple[int, int], device: str | None) -> None:
    q, k, v = (
        np.empty((2, 1000, heads, dim), DTYPES[dtype]) for heads, dim in ((24, dims[0]), (4, dims[0]), (4, dims[1]))
    )
    plan = cuattn.plan_prefill(q, k, v, device=device)
    is_tiled = device in (None, "sm_90a") and dtype != "float32" and dims != (512, 512)
    assert isinstance(plan, cuattn.TiledPrefillPlan if is_tiled else cuattn.PrefillPlan)
    known = DEVICES[device or "sm_90a"]
    assert plan.device == known
    assert plan.problem == _plan.PrefillProblem(
        _plan.Dtype(dtype), *(_plan.formats_of(_plan.Dtype(dtype))[0],) * 2, 2, 1000, 24, 4, *dims, max_kv_len=1000
    )
    text = str(plan)
    for word in (known.name, dtype, *map(str, dims), "1000 keys"):
        assert word in text


@of_all_layouts
@pytest.mark.parametrize("formats", [("raw16", "raw16"), ("tbq4", "raw16"), ("raw16", "tbq4"), ("tbq4", "tbq4")])
def test_a_plan_has_the_sizes_of_the_call_and_not_its_contents(q_layout: str, kv_layout: str, formats: tuple) -> None:
    """A captured CUDA graph stays right as lengths change."""
    problem = example(q_layout, kv_layout, k_format=formats[0], v_format=formats[1])
    (q, k, v), options = problem.arrays(), problem.options()
    options = {n: options[n] for n in ("cu_seqlens_q", "cu_seqlens_k", "kv_len", "page_table") if n in options}
    plan = cuattn.plan_prefill(q, k, v, **options)
    keys = {"dense": 9, "padded": 9 + 5, "ragged": 14, "paged": 4 * 5}[kv_layout]
    tokens, ragged = (3, False) if q_layout == "dense" else (11, True)
    kinds = map(_plan.KvFormat, formats)
    page_size = 4 if kv_layout == "paged" else 0
    assert plan.problem == _plan.PrefillProblem(
        _plan.Dtype.FP16, *kinds, 3, tokens, 6, 2, 64, 64, keys, ragged, page_size
    )
    other = {name: np.full_like(x, 2**31 - 1) for name, x in options.items()}
    assert cuattn.plan_prefill(np.full_like(q, np.nan), k, v, **other) == plan
    other = {name: np.full_like(x, -1).tolist() if x.ndim == 1 else x for name, x in options.items()}
    assert str(cuattn.plan_prefill(q, k, v, **other)) == str(plan)


def test_a_plan_for_a_device_of_ones_own() -> None:
    q = np.empty((1, 64, 8, 64), np.float16)
    small = replace(DEVICES["sm_90a"], name="half", num_sms=4)
    assert cuattn.plan_prefill(q, q, q, device=small).device == small


def parameters(
    problem: PrefillProblem, num_splits: int = 1, **more: Any
) -> tuple[_check.PrefillCall, Any, dict[str, Any]]:
    """Return a checked call, its parameters, and the arrays that they point to beside those of the call."""
    call = _check.prefill(*problem.arrays(), **problem.options(), **more)
    plan = _plan.prefill_plan(call.problem, DEVICES["sm_90a"], num_splits)
    kv_len = None if call.kv_len is None else np.repeat(call.kv_len, 2)[::2]
    arrays = {
        "out": np.zeros(call.out_shape, call.q.dtype) if call.out is None else call.out,
        "lse": np.zeros(call.out_shape[:-1], np.float32),
        "parts": np.zeros(plan.out_partial_shape, np.float32) if num_splits > 1 else None,
        "states": np.zeros((*plan.out_partial_shape[:-1], 2), np.float32) if num_splits > 1 else None,
        "kv_len": kv_len,
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_k,
        "sinks": None if call.sinks is None else call.sinks.astype(np.float32),
    }
    return call, _prefill_params.params_of(call, plan, **arrays)[0], arrays


def read(p: Any, name: str, dtype: Any, count: int, *steps: int) -> np.ndarray:
    """Return what lies in memory where the parameters say, some steps along the axes of an array."""
    strides = [p[field] for field in p.dtype.names if field.startswith(f"{name}_stride")]
    address = int(p[name]) + sum(int(stride) * int(step) for stride, step in zip(strides, steps, strict=True))
    return np.frombuffer(ctypes.string_at(address, count * np.dtype(dtype).itemsize), dtype)


@of_all_layouts
def test_the_parameters_lead_to_every_row(q_layout: str, kv_layout: str) -> None:
    """Addresses as a kernel computes them; where there is no stride between sequences, their number has no effect."""
    problem = example(q_layout, kv_layout, head_dim=192, value_dim=128, dtype="bfloat16")
    call, p, arrays = parameters(problem)
    ragged_keys = kv_layout == "ragged"
    assert (
        [bool(p[f"cu_seqlens_{x}"]) for x in "qk"] == [call.ragged, ragged_keys] == [q_layout == "ragged", ragged_keys]
    )
    assert (bool(p["kv_len"]), bool(p["page_table"])) == (kv_layout in {"padded", "paged"}, kv_layout == "paged")
    arrays["out"][...] = np.arange(arrays["out"].size).reshape(arrays["out"].shape)

    def begin(x: str, sequence: int) -> int:
        return int(np.frombuffer(ctypes.string_at(int(p[f"cu_seqlens_{x}"]) + 4 * sequence, 4), np.int32)[0])

    for b, (rows, sequence) in enumerate(zip(problem.rows(), problem.sequences(), strict=True)):
        q, k, v = sequence
        result = (arrays["out"][0] if call.ragged else arrays["out"])[rows]
        for i, head in np.ndindex(q.shape[:2]):
            token = i + begin("q", b) if call.ragged else i
            assert same_bits(read(p, "q", BFLOAT16, 192, b, token, head), q[i, head])
            assert same_bits(read(p, "out", BFLOAT16, 128, b, token, head), result[i, head])
        if p["kv_len"]:
            assert read(p, "kv_len", np.int32, 1, b)[0] == len(k)
        for j, head in np.ndindex(k.shape[:2]):
            page, slot = (b, j + begin("k", b)) if ragged_keys else (b, j)
            if p["page_table"]:
                page, slot = read(p, "page_table", np.int32, 1, b, j // p["page_size"])[0], j % p["page_size"]
            assert 0 <= slot < p["page_size"]
            assert same_bits(read(p, "k", BFLOAT16, 192, page, slot, head), k[j, head])
            assert same_bits(read(p, "v", BFLOAT16, 128, page, slot, head), v[j, head])
    for name in ("k_norms", "v_norms", "k_mean", "v_mean", "sinks"):
        assert p[name] == 0
    assert p["lse"] == arrays["lse"].ctypes.data


@of_all_layouts
def test_the_parameters_lead_to_codes_norms_and_means(q_layout: str, kv_layout: str) -> None:
    problem = example(q_layout, kv_layout, head_dim=256, k_format="tbq4", v_format="tbq4", means=True, sinks=True)
    call, p, arrays = parameters(problem)
    for name, cache in (("k", call.k), ("v", call.v)):
        assert cache.rows.ndim == cache.norms.ndim == 4
        for page, slot, head in np.ndindex(cache.rows.shape[:3]):
            assert same_bits(read(p, name, np.uint8, 128, page, slot, head), cache.rows[page, slot, head])
            norms = read(p, f"{name}_norms", np.float16, 2, page, slot, head)
            assert norms.tobytes() == cache.norms[page, slot, head].tobytes()
        mean = np.frombuffer(ctypes.string_at(int(p[f"{name}_mean"]), 4 * 2 * 256), np.float32)
        assert same_bits(mean.reshape(2, 256), cache.mean)
        assert [bool(p[f"{x}_stride_page"]) for x in (name, f"{name}_norms")] == [kv_layout != "ragged"] * 2
    assert p["sinks"] == arrays["sinks"].ctypes.data


@of_all_layouts
def test_the_parameters_have_the_numbers_of_call_and_plan(q_layout: str, kv_layout: str) -> None:
    problem = example(q_layout, kv_layout, causal=False, window=(7, None), softcap=5.0)
    call, p, _ = parameters(problem, softmax_scale=-0.25)
    plan = _plan.prefill_plan(call.problem, DEVICES["sm_90a"])
    keys = {"dense": (9, 9), "padded": (14, 14), "ragged": (14, 14), "paged": (4, 20)}[kv_layout]
    assert {name: p[name] for name in p.dtype.names if p.dtype[name] == np.int32} == {
        "batch": 3,
        "num_tokens": 3 if q_layout == "dense" else 11,
        "num_qo_heads": 6,
        "num_kv_heads": 2,
        "group": 3,
        "page_size": keys[0],
        "capacity": keys[1],
        "window_left": 7,
        "window_right": -1,
        "num_tiles": plan.num_tiles,
        "streams_at_once": plan.streams_at_once,
        "num_splits": 1,
        "reserved": 0,
    }
    assert p["out_partial"] == p["state_partial"] == 0
    log2_e = np.log2(np.e)
    wanted = {"softmax_scale_log2": -0.25 * log2_e, "softcap_log2": 5 * log2_e, "scale_over_softcap": -0.05}
    assert {name: p[name] for name in wanted} == {name: np.float32(x) for name, x in wanted.items()}
    assert p.dtype == _params.PREFILL


def test_the_parameters_of_splits_lead_to_their_parts() -> None:
    _, p, arrays = parameters(example("dense", "paged"), num_splits=3)
    assert p["num_splits"] == 3
    assert (p["out_partial"], p["state_partial"]) == tuple(arrays[name].ctypes.data for name in ("parts", "states"))


def test_causal_is_a_right_window_of_0_in_the_parameters_and_no_softcap_is_0() -> None:
    for window in (None, (4, 9)):
        _, p, _ = parameters(example("ragged", "ragged", window=window))
        assert (p["window_left"], p["window_right"]) == (-1 if window is None else 4, 0)
        assert (p["softcap_log2"], p["scale_over_softcap"]) == (0, 0)


def test_a_checked_call_has_views_of_the_arrays_and_copies_of_lengths_on_the_host() -> None:
    problem = example("ragged", "ragged", v_format="tbq4")
    (q, k, v), options = problem.arrays(), problem.options()
    out = np.zeros_like(q)
    call = _check.prefill(q, k, v, **options, out=out)
    assert (call.q.shape, call.out.shape) == ((1, *q.shape), (1, *q.shape))
    assert (call.k.shape, call.v.shape) == ((1, *k.shape), (1, *v.shape))
    for view, array in (
        (call.q, q),
        (call.out, out),
        (call.k.rows, k),
        (call.v.rows, v.codes),
        (call.v.norms, v.norms),
    ):
        assert view.ctypes.data == array.ctypes.data
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        assert not np.shares_memory(getattr(call, name), options[name])
    assert (call.ragged, call.batch, call.max_pages) == (True, 3, 1)
