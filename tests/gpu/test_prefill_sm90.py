"""prefill_sm90.cu on a Hopper GPU, against the reference, and what must not change its result."""

from dataclasses import replace
from itertools import product
from typing import Any

import cupy
import numpy as np
import pytest
import strategies
from gpu.helpers import VIEWS, assert_same_bits, call_prefill, nans, on_device, prefill, to_device, viewed
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import DTYPES, PrefillProblem
from tolerance import assert_prefill, assert_prefill_call

import cuattn
from cuattn import _arrays, _check, _jit, _plan, _prefill_params, _tiled

DEVICE = _arrays.device(0)
pytestmark = pytest.mark.skipif(DEVICE.arch != "sm_90a", reason="needs a Hopper GPU")
# Of head_dim 96 and 192, and of TBQ4, half in each dtype.
CONFIGS = [
    c
    for c in _plan.tiled_prefill_configs(DEVICE)
    if not c.uses_tbq4
    and (c.head_dim in {64, 128, 256} or (c.dtype is _plan.Dtype.FP16) == ((c.head_dim // 32 + c.paged) % 2 == 0))
]
TBQ4_CONFIGS = [
    c
    for c in _plan.tiled_prefill_configs(DEVICE)
    if c.uses_tbq4 and (c.dtype is _plan.Dtype.FP16) == (c.head_dim == 128)
]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.describe())
every_format = pytest.mark.parametrize("config", CONFIGS + TBQ4_CONFIGS, ids=lambda c: c.describe())
VALUES = ("normal", "late_max", "early_max", "rising", "falling", "huge", "equal")
ROWS = strategies.lengths(64) | st.sampled_from((127, 128, 129, 191, 192, 193, 383, 384, 385, 700))
KEYS = strategies.lengths(16) | strategies.lengths(80) | strategies.lengths(128)
_SIDES = st.sampled_from((None, None, 0, 5, 63, 200, 500))
WINDOWS = st.none() | st.tuples(_SIDES, _SIDES)
BASE = PrefillProblem(((300, 700),) * 2, 2, 3, q_layout="dense", kv_layout="dense", causal=True, seed=3)


def of(config: _plan.TiledPrefillConfig, **fields: Any) -> PrefillProblem:
    layout = {"kv_layout": "paged", "page_size": 128} if config.paged else {}
    choices = {
        "dtype": config.dtype.value, "head_dim": config.head_dim, "value_dim": config.value_dim,
        "softcap": 5.0 if config.softcap else None, "k_format": config.k_format.value,
        "v_format": config.v_format.value,
    }  # fmt: skip
    return replace(BASE, **choices | layout | fields)


def launch(
    arrays: tuple[Any, ...], options: dict[str, Any], *, num_ctas: int | None = None, **changes: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Run the kernel whatever the plan would choose, with changes of its config, on as many CTAs."""
    call = _check.prefill(*map(to_device, arrays), **on_device(options))
    assert call.beyond_tiles == ""
    config = replace(_plan.tiled_config_of(call.problem), **changes)
    device = DEVICE if num_ctas is None else replace(DEVICE, num_sms=num_ctas)
    plan = _plan.TiledPrefillPlan(call.problem, device, config)
    out, lse = nans(call.out_shape, call.q.dtype), nans(call.out_shape[:-1], np.float32)
    lengths = {name: to_device(getattr(call, name)) for name in ("kv_len", "cu_seqlens_q", "cu_seqlens_k")}
    claimed = cupy.zeros(1, cupy.int32) if plan.counts_items else None
    params = _prefill_params.tiled_params_of(
        call, plan, out=out, lse=lse, items_claimed=claimed, sinks=call.sinks, encode=_tiled.tensor_map, **lengths
    )
    _jit.kernel(config, 0, DEVICE.arch).launch(plan.grid, plan.block, params)
    out, lse = cupy.asnumpy(out), cupy.asnumpy(lse)
    return (out[0], lse[0]) if call.ragged else (out, lse)


def run(problem: PrefillProblem, **choices: Any) -> tuple[np.ndarray, np.ndarray]:
    return launch(problem.arrays(), problem.options(), **choices)


def with_value(problem: PrefillProblem, v: np.ndarray, key: int, value: float) -> np.ndarray:
    """A copy of v with another element 5 of KV head 1 at a key of the first sequence."""
    changed = v.copy()
    if problem.kv_layout == "paged":
        page = problem.options()["page_table"][0, key // problem.page_size]
        changed[page, key % problem.page_size, 1, 5] = value
    else:
        changed[0, key, 1, 5] = value
    return changed


@every_format
@settings(settings.get_profile("gpu"))
@given(data=st.data())
def test_any_problem_obeys_the_error_law(config: _plan.TiledPrefillConfig, data: st.DataObject) -> None:
    problem = data.draw(
        strategies.prefill_problems(
            rows=ROWS, lengths=KEYS, kv_layouts=("paged",) if config.paged else ("ragged", "dense", "padded"),
            page_sizes=(64, 128, 192), windows=WINDOWS,
            softcaps=(0.5, 5.0, 1e6) if config.softcap else (None,),
            choices=(
                (config.k_format.value, config.v_format.value, config.dtype.value, config.head_dim, config.value_dim),
            ),
        )
    )  # fmt: skip
    problem = replace(problem, means=False)
    tokens, keys = (sum(lengths) for lengths in zip(*problem.seqlens, strict=True))
    assume(tokens > 0 and (problem.kv_layout in {"padded", "paged"} or keys > 0))
    assert_prefill(problem, *run(problem, num_ctas=data.draw(st.sampled_from((None, 1, 3)))))


@every_format
@pytest.mark.parametrize("causal", [False, True])
def test_a_call_is_that_kernel(config: _plan.TiledPrefillConfig, *, causal: bool) -> None:
    problem = of(config, causal=causal)
    plan = cuattn.plan_prefill(*problem.arrays(), **problem.options(), device="sm_90a")
    assert isinstance(plan, cuattn.TiledPrefillPlan)
    assert plan.config == config
    got = prefill(problem)
    assert_prefill(problem, *got)
    assert_same_bits(got, run(problem))


@every_format
@pytest.mark.parametrize("choices", [{"take_turns": False}, {"num_stages": 1}], ids=str)
def test_choices_do_not_change_a_bit(config: _plan.TiledPrefillConfig, choices: dict[str, Any]) -> None:
    problem = of(config)
    assert_same_bits(run(problem, **choices), run(problem), choices)


@every_format
def test_the_same_call_gives_the_same_bits_on_any_number_of_ctas(config: _plan.TiledPrefillConfig) -> None:
    """Rounds wrap rings and phases at other places."""
    problem = of(config, seqlens=((2000, 3001),), group=6)
    expected = run(problem)
    assert_prefill(problem, *expected)
    for num_ctas in (1, 2, 7, 100, 10_000, *[None] * 20):
        assert_same_bits(run(problem, num_ctas=num_ctas), expected, num_ctas)


@pytest.mark.parametrize("view", VIEWS)
def test_any_strides_that_tma_has_give_the_same_bits(view: str) -> None:
    """And others, of axes that go backwards, are for the other kernel."""
    arrays = BASE.arrays()
    views = tuple(viewed(x, VIEWS[view][0](x.shape), VIEWS[view][1])[1] for x in arrays)
    call = _check.prefill(*views, **BASE.options())
    assert ("backwards" in view) == (call.beyond_tiles != "")
    if call.beyond_tiles:
        assert_prefill(BASE, *call_prefill(views, BASE.options()))
    else:
        assert_same_bits(launch(views, BASE.options()), run(BASE), view)


@every_format
@pytest.mark.parametrize("values", VALUES)
def test_unusual_scores_obey_the_error_law_whichever_way_weights_are_taken(
    config: _plan.TiledPrefillConfig, values: str
) -> None:
    for weigh_first in (False, True):
        problem = of(config, values=values)
        assert_prefill(problem, *run(problem, weigh_first=weigh_first))


@every_config
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_shows_in_the_rows_that_see_it(config: _plan.TiledPrefillConfig, bad: float) -> None:
    problem = of(config)
    q, k, v = problem.arrays()
    for key in (0, 399, 400, 510, 699):  # tokens stand at 400 to 699
        spoiled = with_value(problem, v, key, bad)
        out, lse = launch((q, k, spoiled), problem.options())
        assert_prefill_call((q, k, spoiled), problem.options(), (out, lse))
        sees = np.zeros(out.shape, bool)
        sees[0, max(0, key - 400) :, 3:, 5] = True
        np.testing.assert_array_equal(~np.isfinite(out.astype(np.float32)), sees)


@every_config
def test_keys_past_a_length_do_not_matter(config: _plan.TiledPrefillConfig) -> None:
    """They are NaN, or of another sequence; lengths are on and beside the edges of tiles of keys, of which a sequence
    may have none.
    """
    layouts = ("paged",) if config.paged else ("padded", "ragged")
    for causal, kv_layout in product((False, True), layouts):
        for lengths in ((500, 0, 1, 63, 64, 65), (17, 79, 80, 81, 95, 96, 97, 159, 161, 499)):
            problem = of(config, seqlens=tuple((300, n) for n in lengths), causal=causal, kv_layout=kv_layout)
            assert_prefill(problem, *run(problem))


@pytest.mark.parametrize("kv_layout", ["ragged", "dense", "padded", "paged"])
def test_a_sequence_gives_the_same_bits_wherever_it_lies(kv_layout: str) -> None:
    """Beside others whose queries are NaN, of which there are more than a warp looks at at once."""
    problem = replace(BASE, kv_layout="padded", seqlens=((297, 710),))
    expected = run(problem, tile_kv=64)
    tokens = [(n % 7, 710 if kv_layout == "dense" else n % 5) for n in range(100)]
    many = replace(problem, q_layout="ragged", kv_layout=kv_layout, page_size=64, seqlens=((297, 710), *tokens))
    q, k, v = many.arrays()
    spoiled = q.copy()
    spoiled[297:] = np.nan
    for arrays in ((q, k, v), (spoiled, k, v)):
        got = launch(arrays, many.options(), tile_kv=64)
        assert_same_bits(tuple(x[None, :297] for x in got), expected)


@pytest.mark.parametrize("kv_layout", ["ragged", "padded", "paged"])
def test_sequences_may_have_no_queries_or_no_keys(kv_layout: str) -> None:
    seqlens = ((0, 5), (333, 0), (0, 0), (129, 20), (0, 70), (5, 64), (400, 900), (0, 0))
    for num_ctas in (None, 1, 50):
        problem = replace(BASE, q_layout="ragged", kv_layout=kv_layout, seqlens=seqlens, page_size=64)
        assert_prefill(problem, *run(problem, num_ctas=num_ctas))


def test_ragged_lengths_on_the_device_are_held_to_what_there_is() -> None:
    seqlens = ((70, 100), (0, 50), (230, 64))
    problem = replace(BASE, q_layout="ragged", kv_layout="ragged", seqlens=seqlens)
    wild = {
        "cu_seqlens_q": np.array([-5, 70, 70, 2**31 - 1], np.int32),
        "cu_seqlens_k": np.array([-(2**31), 100, 150, 10**9], np.int32),
    }
    assert_same_bits(launch(problem.arrays(), problem.options() | wild), run(problem))


@pytest.mark.parametrize("kv_layout", ["padded", "paged"])
def test_lengths_on_the_device_are_held_to_what_there_is(kv_layout: str) -> None:
    problem = replace(BASE, kv_layout=kv_layout, page_size=64, seqlens=((300, 700), (300, 64)))
    q, k, v = (cupy.nan_to_num(to_device(x).astype(cupy.float32)).astype(cupy.float16) for x in problem.arrays())
    options = problem.options()
    if kv_layout == "paged":
        options["page_table"] = options["page_table"][:, :11].copy()
        options["page_table"][1] = options["page_table"][0]
    capacity = 11 * 64 if kv_layout == "paged" else k.shape[1]
    expected = launch((q, k, v), {**options, "kv_len": np.array([capacity, 0], np.int32)})
    got = launch((q, k, v), {**options, "kv_len": np.array([2**31 - 1, -(2**31)], np.int32)})
    assert_same_bits(got, expected)


@every_config
@pytest.mark.parametrize("window", [(0, 0), (100, 0), (100, None), (100, 150), (650, 30), (5000, None)], ids=str)
def test_windows_obey_the_error_law(config: _plan.TiledPrefillConfig, window: tuple[int, int | None]) -> None:
    problem = of(config, causal=False, window=window, sinks=True)
    assert_prefill(problem, *run(problem))


@every_config
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_and_before_a_window_is_not_seen(
    config: _plan.TiledPrefillConfig, bad: float
) -> None:
    """Tiles of its rows have it, and those of others."""
    problem = of(config, window=(130, None), sinks=True)
    q, k, v = problem.arrays()
    for key in (271, 300, 450):  # tokens stand at 400 to 699
        spoiled = with_value(problem, v, key, bad)
        out, lse = launch((q, k, spoiled), problem.options())
        assert_prefill_call((q, k, spoiled), problem.options(), (out, lse))
        sees = np.zeros(out.shape, bool)
        sees[0, max(0, key - 400) : key + 130 - 400 + 1, 3:, 5] = True
        np.testing.assert_array_equal(~np.isfinite(out.astype(np.float32)), sees)


@every_config
def test_a_sink_far_above_the_scores_takes_all_the_weight(config: _plan.TiledPrefillConfig) -> None:
    problem = of(config)
    arrays = problem.arrays()
    for sink in (-1e30, -200.0, 200.0, 1e30):
        options = {**problem.options(), "sinks": np.full(problem.num_qo_heads, sink, np.float32)}
        got = launch(arrays, options)
        assert_prefill_call(arrays, options, got)
        assert got[0].any() == (sink < 0)


def test_memory_outside_of_the_arrays_does_not_matter() -> None:
    """Tiles reach past the last token; beside the arrays there is NaN."""
    arrays = BASE.arrays()
    wide = tuple(viewed(x, (x.shape[0], x.shape[1] + 300, *x.shape[2:]), lambda a: a[:, :-300])[1] for x in arrays)
    assert_same_bits(launch(wide, BASE.options()), run(BASE))


def test_a_graph_counts_items_anew_each_time() -> None:
    """On two streams at once, too, as each graph has a counter of its own."""
    arrays = tuple(map(to_device, replace(BASE, seqlens=((2000, 2100),), group=12).arrays()))
    expected = cuattn.prefill(*arrays, causal=True)
    assert cuattn.plan_prefill(*arrays, causal=True).workspace_bytes > 0
    cupy.cuda.Device().synchronize()
    graphs = []
    for _ in range(2):
        stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
        out = nans(expected.shape, expected.dtype)
        with stream, cupy.cuda.using_allocator(pool.malloc):
            stream.begin_capture()
            cuattn.prefill(*arrays, causal=True, out=out)
            graphs.append((stream.end_capture(), stream, out, pool))
    for _ in range(5):
        for graph, stream, out, _ in graphs:
            with stream:
                out.fill(np.nan)
                graph.launch(stream)
        for _, stream, out, _ in graphs:
            stream.synchronize()
            np.testing.assert_array_equal(cupy.asnumpy(out), cupy.asnumpy(expected))


def test_the_error_of_an_exponential_beside_a_score_of_zero_obeys_the_law() -> None:
    """Nothing else is rounded there."""
    seqlens = ((1, 1), (0, 0), (0, 0))
    problem = PrefillProblem(
        seqlens, num_kv_heads=1, group=2, q_layout="ragged", kv_layout="ragged", causal=True, softcap=0.5, sinks=True,
        values="rising", seed=9385,
    )  # fmt: skip
    assert_prefill(problem, *run(problem))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_long_sequences_agree_with_the_other_kernel(dtype: str) -> None:
    """Where the reference would take too long: within two roundings of outputs."""
    rng = np.random.default_rng(0)
    shapes = ((1, 16384, heads, 128) for heads in (8, 2, 2))
    q, k, v = (to_device(rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])) for shape in shapes)
    out, lse = cuattn.prefill(q, k, v, causal=True, return_lse=True)
    call = _check.prefill(q, k, v, causal=True)
    plan = _plan.prefill_plan(call.problem, DEVICE, 1)
    other, other_lse = nans(call.out_shape, q.dtype), nans(call.out_shape[:-1], np.float32)
    lengths = dict.fromkeys(("kv_len", "cu_seqlens_q", "cu_seqlens_k", "sinks"))
    params = _prefill_params.params_of(call, plan, out=other, lse=other_lse, parts=None, states=None, **lengths)
    _jit.kernel(plan.config, 0, DEVICE.arch).launch(plan.grid, plan.block, params)
    ulp = 2.0**-10 if dtype == "float16" else 2.0**-7
    x, y = (cupy.asnumpy(a).astype(np.float32) for a in (out, other))
    # Weights are rounded to `ulp` / 2 in both, each time against another maximum, and so are results. Values are
    # normal, so the errors of a row's elements are to these as `ulp` is to 1, but for a factor of the largest of many.
    assert (np.abs(x - y).max(-1) <= 2 * ulp * np.abs(y).max(-1)).all()
    assert float(cupy.abs(lse - other_lse).max()) <= 1e-4
