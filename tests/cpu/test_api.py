"""The public functions on NumPy arrays, their signatures, and what an import brings along."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, Problem, problems

import cuattn
from cuattn import reference
from cuattn._plan import DEVICES, HEAD_DIMS

ROOT = Path(__file__).parents[2]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PUBLIC = [cuattn.decode, cuattn.prefill, cuattn.merge]
PLANS = [cuattn.plan_decode, cuattn.plan_prefill]
# A program in a process of its own, which prints one literal.
BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
"""


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def run(code: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


@given(problem=problems(dtypes=("float16", "bfloat16", "float32")), num_splits=st.none() | st.integers(1, 512))
def test_decode_on_numpy_is_the_reference_rounded_to_the_dtype_of_q(problem: Problem, num_splits: int | None) -> None:
    arrays, options = problem.arrays(), problem.options()
    out, lse = cuattn.decode(*arrays, **options, num_splits=num_splits, return_lse=True)
    want_out, want_lse = reference.decode(*arrays, **options, return_lse=True)
    assert same_bits(out, want_out.astype(DTYPES[problem.dtype]))
    assert same_bits(lse, want_lse.astype(np.float32))


@given(problem=problems(), softmax_scale=st.floats(-2, 2).filter(lambda x: x == 0 or abs(x) > 1e-18))
def test_decode_on_numpy_passes_the_scale_on(problem: Problem, softmax_scale: float) -> None:
    arrays, options = problem.arrays(), {**problem.options(), "softmax_scale": softmax_scale}
    out = cuattn.decode(*arrays, **options)
    assert same_bits(out, reference.decode(*arrays, **options).astype(DTYPES[problem.dtype]))


@given(problem=problems(), num_parts=st.integers(1, 5))
def test_merge_on_numpy_is_the_reference_rounded_to_the_dtype_of_the_parts(problem: Problem, num_parts: int) -> None:
    """A third of the parts is empty, and holds NaN."""
    rng = np.random.default_rng(problem.seed)
    shape = (num_parts, len(problem.kv_len), problem.num_qo_heads)
    lse = np.where(rng.random(shape) < 1 / 3, -np.inf, rng.normal(0, 30, shape)).astype(np.float32)
    parts = rng.standard_normal((*shape, problem.head_dim)).astype(DTYPES[problem.dtype])
    parts[np.isneginf(lse)] = np.nan
    got_out, got_lse = cuattn.merge(parts, lse)
    want_out, want_lse = reference.merge(parts, lse)
    assert same_bits(got_out, want_out.astype(parts.dtype))
    assert same_bits(got_lse, want_lse.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("tokens", [(), (1,), (5,), (16,)], ids=str)
def test_results_of_decode_have_the_shape_and_dtype_of_q(tokens: tuple[int, ...], dtype: Any) -> None:
    q = np.ones((3, *tokens, 4, 64), dtype)
    k_cache, v_cache = np.ones((2, 3, 20, 2, 64), dtype)
    alone = cuattn.decode(q, k_cache, v_cache, [0, 3, 20])
    out, lse = cuattn.decode(q, k_cache, v_cache, [0, 3, 20], return_lse=True)
    assert type(alone) is type(out) is type(lse) is np.ndarray
    assert same_bits(alone, out)
    assert (out.shape, out.dtype) == (q.shape, np.dtype(dtype))
    assert (lse.shape, lse.dtype) == (q.shape[:-1], np.float32)
    # One token sees all 20 keys, and each has the score 64 / 8.
    np.testing.assert_array_equal(lse[2, ..., -1, :] if tokens else lse[2], np.full(4, 8 + np.log(20), np.float32))
    assert np.isneginf(lse[0]).all()
    assert not out[0].any()
    assert (out[2] == 1).all()


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32], ids=str)
def test_results_of_merge_have_the_shape_of_a_part(dtype: Any) -> None:
    for shape in ((4,), (3, 4), (3, 2, 4)):
        out, lse = cuattn.merge(np.ones((5, *shape, 64), dtype), np.zeros((5, *shape), np.float32))
        assert (out.shape, out.dtype) == ((*shape, 64), np.dtype(dtype))
        assert (lse.shape, lse.dtype) == (shape, np.float32)
        assert (out == 1).all()
        np.testing.assert_array_equal(lse, np.full(shape, np.log(5), np.float32))


@given(problem=problems())
def test_decode_fills_out_and_returns_it(problem: Problem) -> None:
    """And the array itself: not another view of its memory."""
    arrays, options = problem.arrays(), problem.options()
    want, want_lse = cuattn.decode(*arrays, **options, return_lse=True)
    out = np.full_like(arrays[0], np.nan)
    assert cuattn.decode(*arrays, **options, out=out) is out
    assert same_bits(out, want)
    out[...] = np.nan
    got, lse = cuattn.decode(*arrays, **options, out=out, return_lse=True)
    assert got is out
    assert same_bits(out, want)
    assert same_bits(lse, want_lse)


def test_decode_writes_through_strides_of_out_and_nothing_else() -> None:
    problem = Problem(kv_len=(0, 5, 17), group=4, seed=1)
    arrays = problem.arrays()
    base = np.full((7, 6, 3, 64), 77, np.float16)
    out = base[::-2, 1:5, 1][:3]
    assert cuattn.decode(*arrays, out=out) is out
    assert same_bits(out, cuattn.decode(*arrays))
    is_guard = np.ones(base.shape, bool)
    is_guard[::-2, 1:5, 1][:3] = False
    assert (base[is_guard] == 77).all()


@pytest.mark.parametrize(("dtype", "out_dtype"), [("float16",) * 2, ("float32", "float16"), ("float32", "bfloat16")])
def test_merge_fills_out_and_returns_it(dtype: str, out_dtype: str) -> None:
    rng = np.random.default_rng(0)
    parts = rng.standard_normal((3, 2, 4, 64)).astype(DTYPES[dtype])
    lse_partial = rng.standard_normal((3, 2, 4)).astype(np.float32)
    out = np.full((2, 4, 64), np.nan, DTYPES[out_dtype])
    got, lse = cuattn.merge(parts, lse_partial, out=out)
    want, want_lse = reference.merge(parts, lse_partial)
    assert got is out
    assert same_bits(out, want.astype(out.dtype))
    assert same_bits(lse, want_lse.astype(np.float32))


@pytest.mark.parametrize("tokens", [(), (2,)], ids=str)
def test_an_empty_batch_gives_an_empty_result(tokens: tuple[int, ...]) -> None:
    q = np.zeros((0, *tokens, 4, 64), np.float16)
    cache = np.zeros((0, 10, 2, 64), np.float16)
    pages = np.zeros((3, 10, 2, 64), np.float16)
    table = np.zeros((0, 2), np.int32)
    for kv_len in (np.zeros(0, np.int32), [], 0):
        for k_cache, options in ((cache, {}), (pages, {"page_table": table})):
            out, lse = cuattn.decode(q, k_cache, k_cache, kv_len, **options, return_lse=True)
            assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:-1], np.float32)


@pytest.mark.parametrize(
    "shape",
    [(2, 0, 2, 64), (0, 4, 2, 64), (3, 4, 2, 64), (3, 0, 2, 64)],
    ids=["dense", "no page", "no entry", "no token"],
)
def test_a_cache_without_capacity_gives_empty_rows(shape: tuple[int, ...]) -> None:
    q = np.ones((2, 4, 64), np.float16)
    cache = np.zeros(shape, np.float16)
    entries = 4 if shape == (3, 0, 2, 64) else 0
    options = {} if shape[0] == len(q) else {"page_table": np.zeros((2, entries), np.int32)}
    out, lse = cuattn.decode(q, cache, cache, 0, **options, return_lse=True)
    assert same_bits(out, np.zeros_like(q))
    assert np.isneginf(lse).all()
    assert lse.shape == (2, 4)


def test_an_empty_batch_merges_to_an_empty_result() -> None:
    out, lse = cuattn.merge(np.zeros((3, 0, 4, 64), np.float16), np.zeros((3, 0, 4), np.float32))
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((0, 4, 64), np.float16, (0, 4), np.float32)


@pytest.mark.parametrize(
    "kv_len", [7, np.int64(7), [7, 7], (7, 7), np.array([7, 7]), np.array([7, 7], np.uint8)], ids=repr
)
def test_lengths_come_as_a_number_a_sequence_or_an_array(kv_len: Any) -> None:
    q, k_cache, v_cache, lengths = Problem(kv_len=(7, 7), seed=3).arrays()
    assert same_bits(cuattn.decode(q, k_cache, v_cache, kv_len), cuattn.decode(q, k_cache, v_cache, lengths))


def test_an_array_of_the_host_that_speaks_dlpack_runs_there() -> None:
    class Dlpack:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

    problem = Problem(kv_len=(7, 0, 40), num_kv_heads=2, page_size=16, sinks=True, seed=3)
    options = {name: Dlpack(x) if isinstance(x, np.ndarray) else x for name, x in problem.options().items()}
    got = cuattn.decode(*map(Dlpack, problem.arrays()), **options, return_lse=True)
    want = cuattn.decode(*problem.arrays(), **problem.options(), return_lse=True)
    assert all(type(x) is np.ndarray for x in got)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def test_sinks_may_have_the_dtype_of_q() -> None:
    problem = Problem(kv_len=(7, 0), group=4, seed=3)
    sinks = np.array([0.5, -1.25, -np.inf, 3], np.float32)
    want = cuattn.decode(*problem.arrays(), sinks=sinks, return_lse=True)
    got = cuattn.decode(*problem.arrays(), sinks=sinks.astype(np.float16), return_lse=True)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@given(problem=problems())
def test_decode_and_merge_change_none_of_their_arguments(problem: Problem) -> None:
    arrays, options = problem.arrays(), problem.options()
    arguments = (*arrays, *(x for x in options.values() if isinstance(x, np.ndarray)))
    before = [x.copy() for x in arguments]
    out, lse = cuattn.decode(*arrays, **options, return_lse=True)
    assert all(same_bits(a, b) for a, b in zip(arguments, before, strict=True))
    parts = np.stack([out, out]), np.stack([lse, lse])
    before = [x.copy() for x in parts]
    cuattn.merge(*parts)
    assert all(same_bits(a, b) for a, b in zip(parts, before, strict=True))


@pytest.mark.parametrize(
    ("function", "positional", "keywords"),
    [
        (
            cuattn.decode,
            ["q", "k_cache", "v_cache", "kv_len"],
            {
                "page_table": None,
                "causal": True,
                "window": None,
                "tree_mask": None,
                "softcap": None,
                "sinks": None,
                "softmax_scale": None,
                "num_splits": None,
                "split_size": None,
                "balance": False,
                "k_sink": None,
                "v_sink": None,
                "k_recent": None,
                "v_recent": None,
                "return_lse": False,
                "out": None,
                "workspace": None,
            },
        ),
        (
            cuattn.prefill,
            ["q", "k", "v"],
            {
                "causal": False,
                "window": None,
                "softcap": None,
                "sinks": None,
                "softmax_scale": None,
                "cu_seqlens_q": None,
                "cu_seqlens_k": None,
                "kv_len": None,
                "page_table": None,
                "return_lse": False,
                "out": None,
            },
        ),
        (cuattn.merge, ["out_partial", "lse_partial"], {"out": None}),
        (
            cuattn.append,
            ["k_new", "v_new", "k_cache", "v_cache", "kv_len"],
            dict.fromkeys(("page_table", "k_sink", "v_sink", "k_recent", "v_recent")),
        ),
        (
            cuattn.plan_decode,
            ["q", "k_cache", "v_cache", "kv_len"],
            {"page_table": None, "num_splits": None, "split_size": None, "balance": False, "device": None},
        ),
        (
            cuattn.plan_prefill,
            ["q", "k", "v"],
            {"causal": False}
            | dict.fromkeys(("window", "softcap", "sinks", "softmax_scale"))
            | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "kv_len", "page_table", "device")),
        ),
        (cuattn.channel_mean, ["x"], {"skip": 0}),
    ],
    ids=["decode", "prefill", "merge", "append", "plan_decode", "plan_prefill", "channel_mean"],
)
def test_arrays_are_positional_and_everything_else_is_a_keyword(
    function: Callable[..., Any], positional: list[str], keywords: dict[str, Any]
) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == keywords
    assert [p.name for p in parameters] == [*positional, *keywords]


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.__name__)
def test_the_reference_has_the_same_arguments_and_then_a_dtype(function: Callable[..., Any]) -> None:
    public = inspect.signature(function).parameters
    defined = inspect.signature(getattr(reference, function.__name__)).parameters
    assert list(defined) == [*public, "dtype"]
    for name, parameter in public.items():
        assert (parameter.kind, parameter.default) == (defined[name].kind, defined[name].default), name


def test_append_of_the_reference_has_the_same_arguments():
    public, defined = (inspect.signature(module.append).parameters.values() for module in (cuattn, reference))
    assert [(p.name, p.kind, p.default) for p in public] == [(p.name, p.kind, p.default) for p in defined]


@pytest.mark.parametrize("function", [*PUBLIC, *PLANS, cuattn.append, cuattn.channel_mean], ids=lambda f: f.__name__)
def test_every_argument_is_documented(function: Callable[..., Any]) -> None:
    document = re.split(r"\n(?=\w+\n---)", inspect.getdoc(function).partition("Parameters\n")[2])[0]
    lines = [line.partition(" : ")[0] for line in document.splitlines() if line[:1].isalpha()]
    assert [name for line in lines for name in line.split(", ")] == list(inspect.signature(function).parameters)


def test_the_public_names_are_those_documented() -> None:
    assert set(cuattn.__all__) == {
        "CompileError",
        "DecodePlan",
        "Device",
        "Fp8Array",
        "PrefillPlan",
        "Tbq4Array",
        "TiledPrefillPlan",
        "__version__",
        "append",
        "channel_mean",
        "decode",
        "dequantize",
        "merge",
        "plan_decode",
        "plan_prefill",
        "prefill",
        "quantize",
        "quantize_fp8",
        "reference",
    }
    assert all(hasattr(cuattn, name) for name in cuattn.__all__)


def test_the_package_works_without_cupy_and_cuda_bindings() -> None:
    code = f"""BLOCKED = {{"cupy", "cuda"}}{BLOCK}
import numpy, cuattn
q, kv = numpy.ones((1, 2, 64), numpy.float16), numpy.ones((1, 3, 1, 64), numpy.float16)
out, lse = cuattn.decode(q, kv, kv, 3, return_lse=True)
out, lse = cuattn.merge(out[None], lse[None])
prompt, lse = cuattn.prefill(q[:, None], kv, kv, return_lse=True)
plan = cuattn.plan_prefill(q[:, None], kv, kv)
print((float(out[0, 0, 0]), cuattn.plan_decode(q, kv, kv).num_splits, float(prompt[0, 0, 0, 0]), plan.workspace_bytes))
"""
    assert run(code) == (1.0, 1, 1.0, 0)


def test_the_blocker_of_the_last_test_blocks() -> None:
    code = f"""BLOCKED = {{"numpy"}}{BLOCK}
try:
    import cuattn
except ImportError as error:
    print(repr(str(error)))
"""
    assert run(code) == "numpy is blocked"


def test_importing_the_package_imports_nothing_heavy() -> None:
    """Half a second is allowed in all; no other package may take a part of it."""
    packages, scipy_parts = run("""
import sys, cuattn
packages = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"__mp_main__"}
print((sorted(packages), sorted({name.split(".")[1] for name in sys.modules if name.startswith("scipy.")})))
""")
    # Names with an underscore are those of the interpreter and of an editable installation.
    assert {name for name in packages if not name.startswith("_")} <= {"cuattn", "ml_dtypes", "numpy", "scipy"}
    heavy = {"fft", "integrate", "interpolate", "ndimage", "optimize", "signal", "sparse", "spatial", "stats"}
    assert not heavy & set(scipy_parts)


@pytest.mark.parametrize("device", [None, *DEVICES])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_plan_can_be_printed_for_every_head_dim_and_device(dtype: str, head_dim: int, device: str | None) -> None:
    q = np.empty((2, 24, head_dim), DTYPES[dtype])
    cache = np.empty((2, 4096, 4, head_dim), DTYPES[dtype])
    plan = cuattn.plan_decode(q, cache, cache, device=device)
    text = str(plan)
    known = DEVICES[device or "sm_90a"]
    assert plan.device == known
    assert known.name in text
    assert dtype in text
    assert str(head_dim) in text
    assert f"{plan.num_splits}" in text
    assert plan.reason in text
    assert 1 <= plan.num_splits <= 512


@pytest.mark.parametrize("num_splits", [1, 2, 512])
def test_a_plan_takes_the_number_of_splits_that_is_asked_for(num_splits: int) -> None:
    problem = Problem(kv_len=(5, 300), num_kv_heads=2, group=3)
    arrays = problem.arrays()
    plan = cuattn.plan_decode(*arrays, num_splits=num_splits)
    assert plan.num_splits == num_splits
    # A float32 output and its softmax state, two numbers, for every part.
    rows = 2 * problem.num_qo_heads
    assert plan.workspace_bytes == (0 if num_splits == 1 else 4 * num_splits * rows * (problem.head_dim + 2))


@pytest.mark.parametrize(("split_size", "num_splits"), [(64, 5), (320, 1), (4096, 1)])
def test_a_plan_takes_the_size_of_splits_that_is_asked_for(split_size: int, num_splits: int) -> None:
    """One split is merged, too: the rounding of merge is part of what does not depend on the capacity."""
    problem = Problem(kv_len=(5, 300), num_kv_heads=2, group=3)  # with 305 tokens of capacity
    plan = cuattn.plan_decode(*problem.arrays(), split_size=split_size)
    assert (plan.num_splits, plan.split_size) == (num_splits, split_size)
    assert plan.workspace_bytes == 4 * num_splits * 2 * problem.num_qo_heads * (problem.head_dim + 2)
    assert f"of {split_size} tokens" in str(plan)
    assert "no merge" not in str(plan)


def test_numpy_arrays_are_not_split() -> None:
    problem = Problem(kv_len=(5, 300), num_kv_heads=2, group=3)
    want = cuattn.decode(*problem.arrays())
    assert np.array_equal(cuattn.decode(*problem.arrays(), split_size=64), want)


def test_a_plan_does_not_depend_on_what_the_arrays_hold() -> None:
    """A captured CUDA graph stays right as sequences grow; and only sizes need to be known."""
    q, cache = np.zeros((2, 6, 64), np.float16), np.zeros((9, 16, 2, 64), np.float16)
    table = np.zeros((2, 200), np.int32)
    plan = cuattn.plan_decode(q, cache, cache, page_table=table)
    for kv_len, entry in ((np.array([5, 3200], np.int32), 8), ([-1, 2**31 - 1], 0), (1, 2**31 - 1), (3200, -1)):
        other = cuattn.plan_decode(np.full_like(q, np.nan), cache, cache, kv_len, page_table=np.full_like(table, entry))
        assert other == plan
        assert str(other) == str(plan)
    assert cuattn.plan_decode(q, cache, cache, page_table=np.zeros((2, 2), np.int32)) != plan


def test_a_plan_for_a_device_of_ones_own_uses_its_multiprocessors() -> None:
    arrays = Problem(kv_len=(3000,)).arrays()
    small = replace(DEVICES["sm_90a"], name="half", num_sms=4)
    plan = cuattn.plan_decode(*arrays, device=small)
    assert plan.device == small
    assert plan.num_splits < cuattn.plan_decode(*arrays).num_splits
