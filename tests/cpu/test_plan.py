"""Plans: what they promise to the kernels, for every config and device, without a GPU."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn import _plan, _tbq4
from cuattn._cache import Cache
from cuattn._plan import DEVICES, DecodeProblem, Device, Dtype, KvFormat

BOTH_RAW = (KvFormat.RAW16, KvFormat.RAW16)
devices = st.sampled_from(list(DEVICES.values()))


@st.composite
def planned(draw):
    """Draw a problem of any formats, with a head_dim that they have, and a device."""
    dtype = draw(st.sampled_from(list(Dtype)))
    formats = draw(st.sampled_from(list(product(_plan.decode_formats_of(dtype), repeat=2))))
    num_kv_heads = draw(st.integers(1, 64))
    problem = DecodeProblem(
        dtype,
        *formats,
        batch=draw(st.integers(1, 300)),
        seqlen_q=draw(st.integers(1, _plan.MAX_SEQLEN_Q)),
        num_qo_heads=draw(st.integers(1, _plan.MAX_GROUP)) * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from(_tbq4.HEAD_DIMS if KvFormat.TBQ4 in formats else _plan.HEAD_DIMS)),
        max_kv_len=draw(st.integers(0, 2**20)),
        adjacent_heads=draw(st.sampled_from([n for n in (1, 2, 4) if num_kv_heads % n == 0])),
    )
    return problem, draw(devices)


@given(planned())
def test_a_plan_fits_its_device_and_covers_every_row(case):
    problem, device = case
    plan = _plan.decode_plan(problem, device)
    config = plan.config
    assert config.smem_bytes <= device.smem_per_block
    assert config.ctas_per_sm >= 1
    assert config.ctas_per_sm * (config.smem_bytes + 1024) <= device.smem_per_sm
    assert plan.row_blocks * config.head_rows >= problem.rows > (plan.row_blocks - 1) * config.head_rows
    assert 1 <= plan.num_splits <= _plan.MAX_SPLITS
    heads = plan.grid[0] * config.tile_heads
    assert (heads, *plan.grid[1:]) == (problem.num_kv_heads, plan.num_splits * plan.row_blocks, problem.batch)
    assert config.tile_heads == 1 or plan.row_blocks == config.row_tiles == 1
    assert config in _plan.shipped_configs(device)


@given(planned())
def test_tiles_of_codes_have_a_table_and_a_ring_that_norms_may_be_late_in(case):
    """What decode.cu asserts of them, for every device."""
    config = _plan.decode_config(*case)
    assert (config.table_stride in {128, 256}) == config.uses_tbq4
    if config.uses_tbq4:
        assert config.num_stages >= 4
    assert config.num_stages % 2 == 0 or config.k_format is config.v_format
    assert 0 <= config.warps_below < config.num_warps


@given(planned())
def test_no_split_is_planned_that_full_sequences_would_leave_empty(case):
    problem, device = case
    plan = _plan.decode_plan(problem, device)
    if plan.num_splits > 1:
        # One step of eight warps, or two of four, whose pipelines would not fill in one.
        steps = 1 if plan.config.uses_tbq4 or plan.config.num_warps > 4 else 2
        assert problem.max_kv_len // plan.num_splits >= steps * plan.config.min_split


@pytest.mark.parametrize("arch", DEVICES)
def test_the_codec_fits_every_device(arch):
    device = DEVICES[arch]
    codecs = [c for c in _plan.shipped_configs(device) if isinstance(c, _plan.QuantizeConfig)]
    assert len(codecs) == len(set(codecs)) == 3 * 4 * (2 * 2 + 2)  # with a mean three tables of the encoder
    for config in codecs:
        assert config.smem_bytes <= device.smem_per_block
        assert 1 <= config.ctas_per_sm <= device.smem_per_sm // (config.smem_bytes + 1024)
        assert config.grid(1, device) == (1, 1, 1)
        assert config.grid(2**31, device) == (config.ctas_per_sm * device.num_sms, 1, 1)


def test_one_sequence_fills_the_gpu_and_a_large_batch_is_not_cut():
    def splits(batch, num_kv_heads, max_kv_len):
        problem = DecodeProblem(Dtype.FP16, *BOTH_RAW, batch, 1, 4 * num_kv_heads, num_kv_heads, 128, max_kv_len)
        return _plan.decode_plan(problem, DEVICES["sm_90a"]).num_splits

    assert splits(1, 8, 131072) * 8 >= 0.95 * 132
    assert splits(64, 8, 131072) == 1
    assert splits(1, 8, 100) == 1


def test_the_number_of_splits_can_be_asked_for():
    problem = DecodeProblem(Dtype.FP16, *BOTH_RAW, 1, 1, 8, 8, 128, 4096)
    plan = _plan.decode_plan(problem, DEVICES["sm_80"], 7)
    assert plan.num_splits == 7
    assert plan.workspace_bytes == 7 * 8 * 130 * 4
    assert "asked for" in str(plan)


@pytest.mark.parametrize(
    ("major", "minor", "arch"), [(8, 0, "sm_80"), (8, 9, "sm_89"), (9, 0, "sm_90a"), (12, 0, "sm_120a")]
)
def test_architectures_are_named_as_nvrtc_wants_them(major, minor, arch):
    assert _plan.arch_of(major, minor) == arch


def test_a_gpu_with_too_little_shared_memory_is_refused():
    tiny = Device("tiny", "sm_87", 8, 48 * 1024, 64 * 1024)
    with pytest.raises(ValueError, match=r"device must give a block \d+ bytes .* tiny gives 49152"):
        _plan.decode_plan(DecodeProblem(Dtype.BF16, *BOTH_RAW, 1, 1, 8, 2, 128, 65536), tiny)


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "group", "adjacent", "together"),
    [
        (128, 8, 4, 4, 2), (128, 8, 1, 4, 2), (128, 8, 4, 1, 1), (128, 8, 5, 4, 1), (128, 3, 4, 1, 1),
        (64, 8, 2, 4, 4), (64, 8, 2, 2, 2), (64, 8, 3, 4, 2), (64, 8, 8, 4, 1), (256, 8, 2, 4, 1),
    ],
)  # fmt: skip
def test_kv_heads_share_a_tile_where_their_query_rows_fit(head_dim, num_kv_heads, group, adjacent, together):
    formats = (KvFormat.TBQ4, KvFormat.TBQ4)
    sizes = (1, 1, group * num_kv_heads, num_kv_heads, head_dim, 65536, adjacent)
    plan = _plan.decode_plan(DecodeProblem(Dtype.BF16, *formats, *sizes), DEVICES["sm_90a"])
    assert plan.config.tile_heads == together
    assert plan.grid[0] == num_kv_heads // together
    assert (f"{together} KV heads a tile" in str(plan)) == (together > 1)
    mixed = _plan.decode_plan(DecodeProblem(Dtype.BF16, formats[0], KvFormat.RAW16, *sizes), DEVICES["sm_90a"])
    small = _plan.decode_plan(DecodeProblem(Dtype.BF16, *formats, *sizes), DEVICES["sm_89"])
    assert mixed.config.tile_heads == small.config.tile_heads == 1


def aligned(shape, offset):
    """Zeros of float16 that begin so many bytes behind a multiple of 16."""
    memory = np.zeros(2 * int(np.prod(shape)) + 32, np.uint8)
    start = -memory.ctypes.data % 16 + offset
    return memory[start : start + 2 * int(np.prod(shape))].view(np.float16).reshape(shape)


@pytest.mark.parametrize(
    ("num_kv_heads", "offset", "change", "adjacent"),
    [
        (8, 0, lambda x: x, 4),
        (8, 8, lambda x: x, 4),
        (8, 4, lambda x: x, 2),
        (8, 2, lambda x: x, 1),
        (6, 0, lambda x: x, 2),
        (3, 0, lambda x: x, 1),
        (4, 0, lambda x: x[:, :, ::-1], 1),
        (4, 0, lambda x: x.swapaxes(1, 2), 1),
        (4, 0, lambda x: x[:, ::2], 4),
        (5, 0, lambda x: x[:, :, :4], 1),
        (6, 0, lambda x: x[:, :, :4], 2),
    ],
)
def test_heads_are_adjacent_if_their_rows_and_norms_are(num_kv_heads, offset, change, adjacent):
    norms = aligned((2, num_kv_heads, num_kv_heads, 1), offset)
    codes = np.zeros((*norms.shape[:-1], 64), np.uint8)
    assert Cache(change(codes), change(norms), kv_format=KvFormat.TBQ4).adjacent_heads == adjacent
    assert Cache(np.zeros((2, 4, 4, 64), np.float16)).adjacent_heads == 1


def test_more_splits_than_a_grid_has_blocks_are_refused():
    """1024 query rows of a KV head in blocks of eight."""
    problem = DecodeProblem(Dtype.FP16, *BOTH_RAW, 1, 16, 64, 1, 512, 2**20)
    assert _plan.decode_plan(problem, DEVICES["sm_90a"], 511).grid == (1, 511 * 128, 1)
    with pytest.raises(ValueError, match=r"num_splits must be at most 511 for 1024 query rows .* got 512"):
        _plan.decode_plan(problem, DEVICES["sm_90a"], 512)


def test_splits_too_small_for_a_sequence_are_refused():
    problem = DecodeProblem(Dtype.FP16, *BOTH_RAW, 1, 1, 8, 1, 64, 100_000)
    plan = _plan.decode_plan(problem, DEVICES["sm_90a"], split_size=256)
    assert (plan.num_splits, plan.grid) == (391, (1, 391, 1))
    with pytest.raises(ValueError, match=r"split_size must be at least 256 for 100000 tokens .* 512 splits, got 192"):
        _plan.decode_plan(problem, DEVICES["sm_90a"], split_size=192)


@pytest.mark.parametrize(("batch", "parts", "rounds"), [(2, 16, 1), (11, 33, 2), (16, 49, 3), (64, 198, 12)])
def test_balanced_parts_are_whole_rounds_and_three_a_sequence(batch, parts, rounds):
    """Eight KV heads and one CTA an SM: 16 parts of the batch run at once, and 33 in two rounds."""
    problem = DecodeProblem(Dtype.BF16, *BOTH_RAW, batch, 1, 32, 8, 128, 32768)
    plan = _plan.decode_plan(problem, DEVICES["sm_90a"], balance=True)
    assert (plan.num_splits, plan.grid) == (parts, (8, parts, 1))
    assert plan.out_partial_shape == (parts, 1, 32, 128)
    assert plan.workspace_bytes == parts * 32 * 130 * 4 + batch * 8
    assert f"in {rounds} rounds" in str(plan)


@pytest.mark.parametrize(
    ("formats", "keys", "options", "asks"),
    [
        (BOTH_RAW, 131072, {}, True), (BOTH_RAW, 131072, {"split_size": 2048}, True),
        ((KvFormat.FP8, KvFormat.FP8), 131072, {}, True),
        (BOTH_RAW, 8192, {}, False), ((KvFormat.TBQ4, KvFormat.TBQ4), 262144, {}, False),
        ((KvFormat.RAW16, KvFormat.TBQ4), 262144, {}, False), (BOTH_RAW, 131072, {"balance": True}, False),
    ],
)  # fmt: skip
def test_long_calls_without_norms_ask_for_keys_ahead(formats, keys, options, asks):
    problem = DecodeProblem(Dtype.BF16, *formats, 1 + len(options), 1, 32, 8, 128, keys)
    assert _plan.decode_plan(problem, DEVICES["sm_90a"], **options).asks_ahead is asks


def test_parts_are_balanced_only_where_there_are_several_sequences_with_keys_to_cut():
    for batch, keys in ((1, 32768), (4, 200)):
        problem = DecodeProblem(Dtype.BF16, *BOTH_RAW, batch, 1, 32, 8, 128, keys)
        assert _plan.decode_plan(problem, DEVICES["sm_90a"], balance=True) == _plan.decode_plan(
            problem, DEVICES["sm_90a"]
        )


def test_an_unknown_gpu_is_planned_by_its_numbers():
    small = Device("some GPU", "sm_87", 8, 163 * 1024, 164 * 1024)
    plan = _plan.decode_plan(DecodeProblem(Dtype.BF16, *BOTH_RAW, 1, 1, 8, 2, 128, 65536), small)
    assert plan.num_splits == 4
    assert "TB/s" not in str(plan)
