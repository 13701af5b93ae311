"""Into how many splits `prefill` cuts keys, and what a plan says of them."""

import heapq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuattn
from cuattn import _check, _plan
from cuattn._plan import DEVICES, Dtype, KvFormat, PrefillProblem, prefill_sm90

H200 = DEVICES["sm_90a"]
FORMATS = {Dtype.FP32: KvFormat.RAW32, Dtype.FP16: KvFormat.RAW16}


def problem(num_tokens: int = 512, keys: int = 32768, dtype: Dtype = Dtype.FP16, **fields: Any) -> PrefillProblem:
    """A chunk of one sequence with 32 heads on 8 KV heads against a cache."""
    kv_format = fields.pop("kv_format", FORMATS[dtype])
    sizes = {"batch": 1, "num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "value_dim": 128, **fields}
    return PrefillProblem(dtype, kv_format, kv_format, num_tokens=num_tokens, max_kv_len=keys, **sizes)


def splits(*sizes: int, **fields: Any) -> int:
    return _plan.prefill_plan(problem(*sizes, **fields), H200).num_splits


def test_a_chunk_against_a_long_cache_is_cut_to_fill_the_gpu() -> None:
    """128 tiles of 128 rows on 132 SMs, each with room for two."""
    plan = _plan.prefill_plan(problem(), H200)
    assert plan.num_splits == 2
    assert plan.grid == (128, 2, 1)
    assert splits(1) == splits(40) == 15


@pytest.mark.parametrize("keys", [0, 1, 1024, 2047])
def test_short_keys_are_not_cut(keys: int) -> None:
    assert splits(1, keys) == 1


def test_splits_are_no_shorter_than_1024_keys() -> None:
    assert [splits(1, keys) for keys in (2048, 3072, 5000, 8192, 10**6)] == [2, 3, 4, 8, 15]


def test_what_fills_the_gpu_is_not_cut() -> None:
    """With a round of CTAs of a prompt, of which many end early, or with four of a chunk."""
    assert splits(4096, 4096) == splits(1100, 2199) == 1
    assert splits(1100, 2200) == 2
    assert splits(4352) == splits(512, batch=9) == 1


def test_ragged_sequences_are_not_cut() -> None:
    """However few their tokens are: rows past the last have no result to be merged."""
    assert splits(ragged=True) == splits(1, ragged=True) == 1


def test_no_query_token_is_not_cut() -> None:
    assert splits(0) == splits(batch=0) == 1


@pytest.mark.parametrize("num_splits", [1, 2, 7, 64])
def test_the_number_of_splits_can_be_asked_for(num_splits: int) -> None:
    plan = _plan.prefill_plan(problem(keys=100), H200, num_splits)
    assert (plan.num_splits, plan.grid[1]) == (num_splits, num_splits)


@given(
    num_tokens=st.integers(0, 3000),
    keys=st.integers(0, 100_000),
    batch=st.integers(0, 9),
    heads=st.sampled_from(((1, 1), (8, 1), (32, 8), (24, 24))),
    head_dim=st.sampled_from((64, 128, 256)),
    dtype=st.sampled_from((Dtype.FP16, Dtype.FP32)),
    device=st.sampled_from(tuple(DEVICES.values())),
)
def test_splits_are_the_fewest_that_are_nearly_as_fast_as_any(
    num_tokens: int, keys: int, batch: int, heads: tuple[int, int], head_dim: int, dtype: Dtype, device: _plan.Device
) -> None:
    """By rounds of the GPU, of which each takes the time of a split."""
    sizes = {"num_qo_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "value_dim": head_dim}
    p = problem(num_tokens, keys, dtype, batch=batch, **sizes)
    plan = _plan.prefill_plan(p, device)
    at_once = plan.config.ctas_per_sm * device.num_sms
    ctas = plan.grid[0]

    def time(num_splits: int) -> float:
        return -(-ctas * num_splits // at_once) / num_splits

    allowed = [n for n in range(1, 17) if n == 1 or n * 1024 <= keys]
    if ctas >= at_once * (4 if keys >= 2 * num_tokens else 1):
        allowed = [1]
    best = min(map(time, allowed))
    assert plan.num_splits == min(n for n in allowed if time(n) <= 1.1 * best)
    assert plan.grid == (ctas, plan.num_splits, 1)
    assert f"splits     {plan.num_splits}, {plan.workspace_bytes} bytes of workspace" in str(plan)


@pytest.mark.parametrize("num_splits", [1, 2, 3])
@pytest.mark.parametrize("kv_format", [KvFormat.RAW16, KvFormat.TBQ4], ids=lambda f: f.value)
def test_the_workspace_is_that_of_parts_and_their_states(kv_format: KvFormat, num_splits: int) -> None:
    p = problem(5, 100, batch=2, kv_format=kv_format, value_dim=128)
    plan = _plan.prefill_plan(p, H200, num_splits)
    assert plan.out_partial_shape == (num_splits, 2, 5, 32, 128)
    parts = np.empty(plan.out_partial_shape, np.float32)
    states = np.empty((*plan.out_partial_shape[:-1], 2), np.float32)
    assert plan.workspace_bytes == (parts.nbytes + states.nbytes if num_splits > 1 else 0)


def test_the_parts_of_values_have_their_dim() -> None:
    p = problem(5, 100, head_dim=192, value_dim=128)
    plan = _plan.prefill_plan(p, H200, 2)
    assert plan.out_partial_shape == (2, 1, 5, 32, 128)
    assert plan.workspace_bytes == 2 * 5 * 32 * 130 * 4


def test_plan_prefill_says_into_how_many_splits_keys_are_cut() -> None:
    q, k = np.empty((1, 512, 32, 128), np.float16), np.empty((1, 32768, 8, 128), np.float16)
    plan = cuattn.plan_prefill(q[:, :, :16], k, k, kv_len=32768)
    assert plan.num_splits == 4
    assert f"splits     4, {4 * 512 * 16 * 130 * 4} bytes of workspace" in str(plan)
    ragged = cuattn.plan_prefill(q[0], k, k, cu_seqlens_q=[0, 512], device="sm_80")
    assert (ragged.num_splits, ragged.workspace_bytes) == (1, 0)
    assert "splits     1, 0 bytes of workspace" in str(ragged)


# ---- prefill_sm90.cu ---------------------------------------------------------------------------------------------


def arrays(tokens: int = 4096, keys: int = 4096, dim: int = 128, dtype: Any = np.float16) -> tuple[np.ndarray, ...]:
    """Dense arrays of 32 heads on 8 KV heads, without contents."""
    kv = np.empty((2, keys, 8, dim), dtype)
    return np.empty((2, tokens, 32, dim), dtype), kv, kv


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (None, 5)},
        {"softmax_scale": 3.0},
        {"kv_len": 5},
        {"window": (5, None)},
        {"softcap": 2.0},
        {"sinks": np.zeros(32, np.float32)},
        {"kv_len": 5, "page_table": np.zeros((2, 3), np.int32)},
    ],
    ids=str,
)
def test_a_hopper_gpu_has_a_kernel_of_its_own_for_calls_in_16_bits(dim: int, options: dict[str, Any]) -> None:
    plan = cuattn.plan_prefill(*arrays(dim=dim), **options)
    assert isinstance(plan, cuattn.TiledPrefillPlan)
    assert (plan.config.paged, plan.config.softcap) == ("page_table" in options, "softcap" in options)
    rows = plan.config.tile_q
    assert plan.num_items == 2 * 32 * -(-4096 // rows)
    assert f"{plan.num_items} items, 4 bytes of workspace" in str(plan)
    assert plan.grid == (132, 1, 1)
    assert plan.block == (2 * rows + 128, 1, 1)
    assert plan.config.smem_bytes <= H200.smem_per_block
    assert f"prefill_sm90: {rows} query tokens" in str(plan)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softmax_scale": 0.0}, "softmax_scale is not positive"),
        ({"device": "sm_100a"}, "sm_100a has no wgmma of sm_90a"),
    ],
    ids=str,
)
def test_a_plan_says_why_it_is_not_that_kernel(options: dict[str, Any], reason: str) -> None:
    plan = cuattn.plan_prefill(*arrays(), **options)
    assert isinstance(plan, cuattn.PrefillPlan)
    assert plan.reason == reason
    assert f"not sm90   {reason}" in str(plan)


@pytest.mark.parametrize("tokens", [300, 2048, 8192, 65536])
@pytest.mark.parametrize("kv_heads", [1, 7, 12, 16])
@pytest.mark.parametrize("group", [1, 4])
def test_as_many_heads_at_once_as_fit_half_of_l2_and_give_each_sm_a_tile(
    tokens: int, kv_heads: int, group: int
) -> None:
    q, k = (np.empty((2, tokens, n, 128), np.float16) for n in (kv_heads * group, kv_heads))
    plan = _plan.TiledPrefillPlan(
        _check.prefill(q, k, k).problem, H200, _plan.tiled_prefill_config(Dtype.FP16, (128, 128))
    )
    streams, per_stream = 2 * kv_heads, group * plan.num_tiles
    least = min(streams, max(H200.l2_bytes // 2 // (tokens * 2 * 128 * 2), -(-H200.num_sms // per_stream)))
    assert least <= plan.streams_at_once <= min(streams, 2 * least)

    def missing(at_once: int) -> int:
        return -(-streams // at_once) * at_once - streams

    assert missing(plan.streams_at_once) == min(map(missing, range(least, min(streams, 2 * least) + 1)))
    anywhere = replace(plan, device=replace(H200, l2_bytes=0))
    assert anywhere.streams_at_once == streams


def test_a_call_of_no_more_items_than_sms_counts_none() -> None:
    plan = cuattn.plan_prefill(*(x[:, :, :heads] for x, heads in zip(arrays(), (3, 1, 1), strict=True)))
    assert isinstance(plan, cuattn.TiledPrefillPlan)
    assert plan.num_items == plan.grid[0] == 132
    assert plan.workspace_bytes == 0


def test_dims_dtypes_and_layouts_without_that_kernel_have_the_other() -> None:
    q, k, v = arrays()
    table = np.zeros((2, 1), np.int32)
    for call, options, reason in (
        (arrays(dim=512), {}, "head_dim is none of 64, 96, 128, 192 with value_dim 128, 192, 256"),
        (arrays(dtype=np.float32), {}, "q is not in 16 bits"),
        ((q[0], k[0], v[0]), {"cu_seqlens_q": range(0, 4097, 64)}, "fewer query tokens than half of a tile of 192"),
        (
            (q, k[:, :96], v[:, :96]),
            {"page_table": table, "kv_len": 7},
            "pages of 96 tokens are no whole tiles of 64 keys",
        ),
        ((q, k[:0], v[:0]), {"page_table": table, "kv_len": 0}, "k is empty"),
        ((q, k[:, :0], v[:, :0]), {}, "there are no keys, or no queries"),
        ((q[:, :0], k, v), {}, "there are no keys, or no queries"),
        ((q[:, :63], k, v), {}, "fewer query tokens than half of a tile of 192"),
        ((q[:, ::-1], k, v), {}, f"q has a stride of {-32 * 128 * 2} bytes"),
        ((q, k, np.broadcast_to(v[:1], v.shape)), {}, "v has a stride of 0 bytes"),
    ):
        assert cuattn.plan_prefill(*call, **options).reason == reason


def test_ragged_sequences_have_as_many_tiles_as_they_can_have() -> None:
    q, k, v = arrays()
    for options, keys in (
        ({"cu_seqlens_k": [0, 2000, 3000, 4096]}, k[0]),
        ({"kv_len": 7}, np.resize(k, (3, *k.shape[1:]))),
    ):
        plan = cuattn.plan_prefill(q[0], keys, keys, cu_seqlens_q=[0, 1000, 1001, 4096], **options)
        assert isinstance(plan, cuattn.TiledPrefillPlan)
        assert plan.num_tiles == 4096 // 192 + 3
        assert plan.num_items == 32 * plan.num_tiles
        assert plan.num_streams == 8
        assert "batch 3, 4096 query tokens in all" in str(plan)
    plan = cuattn.plan_prefill(q, k[0], v[0], cu_seqlens_k=[0, 2000, 4096])
    assert isinstance(plan, cuattn.TiledPrefillPlan)


def test_few_tiles_for_many_keys_are_cut_into_splits() -> None:
    q, k, v = arrays(128, 32768)
    assert cuattn.plan_prefill(q[:1, :, :16], k[:1, :, :4], v[:1, :, :4]).num_splits > 1
    assert isinstance(cuattn.plan_prefill(*arrays(256, 9000)), cuattn.TiledPrefillPlan)


@pytest.mark.parametrize(
    ("options", "num_splits"),
    [
        ({}, 4),
        ({"window": (1023, 0)}, 1),
        ({"window": (4095, None), "causal": True}, 4),
        ({"window": (2100, 0)}, 2),
        ({"window": (100, None)}, 4),
        ({"window": (None, 100)}, 4),
    ],
)
def test_a_window_bounds_what_there_is_to_cut(options: dict[str, Any], num_splits: int) -> None:
    """On both sides, one of which may be a causal mask."""
    q, k = np.empty((1, 256, 32, 128), np.float16), np.empty((1, 131072, 8, 128), np.float16)
    assert cuattn.plan_prefill(q, k, k, **options).num_splits == num_splits


def work_of_ctas(plan: cuattn.TiledPrefillPlan) -> list[tuple[int, list[tuple[int, int]]]]:
    """When each CTA is done, and its (head of all sequences, tile), as common/prefill_items.cuh has them claim these.

    Time is counted in keys: a tile of a causal mask takes its own, and about those of two tiles more.
    """
    group, config = plan.problem.group, plan.config
    per_turn = plan.streams_at_once * group * plan.num_tiles

    def item(index: int) -> tuple[int, int]:
        turn, in_turn = divmod(index, per_turn)
        heads = min(plan.streams_at_once, plan.num_streams - turn * plan.streams_at_once) * group
        return turn * plan.streams_at_once * group + in_turn % heads, plan.num_tiles - 1 - in_turn // heads

    ctas: list[tuple[int, list[tuple[int, int]]]] = [(0, []) for _ in range(plan.grid[0])]
    for index in range(plan.num_items):
        time, items = heapq.heappop(ctas)
        head, tile = item(index)
        heapq.heappush(ctas, (time + (tile + 1) * config.tile_q + 2 * config.tile_kv, [*items, (head, tile)]))
    return ctas


@pytest.mark.parametrize("config", _plan.tiled_prefill_configs(H200), ids=lambda c: c.describe())
def test_warpgroups_share_the_registers_of_a_launch(config: _plan.TiledPrefillConfig) -> None:
    """One that asked for more would wait for them forever."""
    assert config.launch_registers * config.num_warps * 32 <= 65536
    for registers in (config.producer_registers, config.consumer_registers, config.launch_registers):
        assert registers % 8 == 0
        assert 24 <= registers <= 240
    asked = config.consumers * config.consumer_registers + config.producer_registers
    assert asked <= config.launch_registers * (config.consumers + 1)


@pytest.mark.parametrize(
    "config", [c for c in _plan.tiled_prefill_configs(H200) if c.paged], ids=lambda c: c.describe()
)
def test_pages_have_whole_tiles(config: _plan.TiledPrefillConfig) -> None:
    """The least pages that this kernel takes; others are multiples of these."""
    assert prefill_sm90.PAGED_TILE_KV % config.tile_kv == 0


@pytest.mark.parametrize("tokens", [2048, 4096, 8192, 16384, 32768])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 8, 64), (32, 32, 64), (32, 8, 128), (24, 4, 256), (16, 16, 128), (16, 16, 256)]
)
def test_ctas_have_as_much_to_do_under_a_causal_mask(heads: int, kv_heads: int, dim: int, tokens: int) -> None:
    """Within 3 %: items that are claimed last are short. And each tile is done once."""
    batch = max(1, 16384 // tokens)
    q, k = (np.empty((batch, tokens, n, dim), np.float16) for n in (heads, kv_heads))
    plan = cuattn.plan_prefill(q, k, k, causal=True)
    assert isinstance(plan, cuattn.TiledPrefillPlan)
    work = work_of_ctas(plan)
    everything = [(h, t) for h in range(batch * heads) for t in range(plan.num_tiles)]
    assert sorted(x for _, items in work for x in items) == everything
    times = [time for time, _ in work]
    assert max(times) <= 1.03 * sum(times) / len(times)
