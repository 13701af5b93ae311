"""Every level of every code, bit for bit: as decode.cu finds it in its table, and as byte permutations pick it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from simt import cases, harness, product
from tbq4_codes import TOKENS, codes_of_all_bytes, codes_of_all_pairs, levels_of, powers, rotated_one_hots

from cuattn import Tbq4Array, _jit, _plan, _tbq4, reference

NEWEST = {"window": (0, 0), "num_splits": 2, "merge": False}  # each query token sees its own key; parts in float32
DEVICES = {arch: _plan.DEVICES[arch] for arch in ("sm_90a", "sm_86")}  # two strides of the table
on_both_tables = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)


def check_scores(head_dim: int, step: int = 1, **more: Any) -> None:
    """Compare the scores of every step-th one-hot query with levels: a level, times a float16, times a power of two."""
    codes = codes_of_all_bytes(head_dim)
    block = _tbq4.block_of(head_dim)
    norms = powers(*codes.shape[:3], head_dim // block)
    k = Tbq4Array(codes, norms)
    v = Tbq4Array(np.zeros_like(codes), np.ones_like(norms))
    # float16 of sqrt(block), which is what float32 makes of a rotated +-1 row.
    hot = np.float64(np.float16(np.float32(block) * np.float32(block**-0.5)))
    want = levels_of(codes)[:, :, 0].astype(np.float64) * hot * norms[:, :, 0].repeat(block, axis=-1)
    for first in range(0, head_dim, 64 * step):
        dims = slice(first, first + 64 * step, step)
        q = np.tile(rotated_one_hots(head_dim)[dims], (len(codes), TOKENS, 1, 1))
        # In base-2 units, so that the maximum of the softmax is the score.
        _, states = product.decode_arrays(q, k, v, TOKENS, **NEWEST, softmax_scale=float(np.log(2)), **more)
        np.testing.assert_array_equal(states[0, ..., 1], 1)
        np.testing.assert_array_equal(states[0, ..., 0], want[..., dims].astype(np.float32))


@pytest.mark.parametrize("head_dim", [64, 128])
@on_both_tables
def test_scores_of_one_hot_queries_are_the_levels_of_all_bytes(head_dim: int, device: _plan.Device) -> None:
    check_scores(head_dim, device=device)


@pytest.mark.parametrize("head_dim", [256, 512])
def test_scores_of_some_one_hot_queries_are_the_levels_of_several_blocks(head_dim: int) -> None:
    check_scores(head_dim, step=head_dim // 64)


def decoded(codes: np.ndarray, norms: np.ndarray, **more: Any) -> np.ndarray:
    """Return what out is when each of TOKENS query tokens sees one value: float32 ``[sequences, TOKENS, head_dim]``."""
    head_dim = 2 * codes.shape[-1]
    q = np.ones((len(codes), TOKENS, 1, head_dim), np.float16)
    k = Tbq4Array(np.zeros_like(codes), np.ones_like(norms))
    parts, states = product.decode_arrays(q, k, Tbq4Array(codes, norms), TOKENS, **NEWEST, **more)
    np.testing.assert_array_equal(states[0, ..., 1], 1)
    return parts[0, :, :, 0]


def check_values(head_dim: int, **more: Any) -> None:
    """Rotate out again in float64 and divide by the norm: the level in float16, and no other number, is nearest."""
    codes = codes_of_all_pairs(head_dim)
    block = _tbq4.block_of(head_dim)
    norms = powers(*codes.shape[:3], head_dim // block)
    got = reference.rotate(decoded(codes, norms, **more))
    got /= norms[:, :, 0].repeat(block, axis=-1)
    want = levels_of(codes)[:, :, 0]
    assert got.astype(np.float16).tobytes() == want.tobytes()
    # Some roundings of float32, of values below the length of a block: at most 2.
    assert np.abs(got - want.astype(np.float64)).max() < 10 * 2.0**-24 * 2


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@on_both_tables
def test_values_of_one_hot_weights_are_the_levels_of_all_pairs_of_bytes(head_dim: int, device: _plan.Device) -> None:
    check_values(head_dim, device=device)


@pytest.mark.parametrize("check", [check_scores, check_values])
def test_one_wrong_level_for_one_lane_is_seen(check: Callable[..., None]) -> None:
    level = "cfg::LEVELS_HALF[upper] << 16;"
    wrong = "cfg::LEVELS_HALF[upper ^ (upper == 10 && lower == 7 && lane == 31)] << 16;"
    with pytest.raises(AssertionError):
        check(64, patches=[("kv/tbq4.cuh", level, wrong)])


# ---- byte permutations -------------------------------------------------------------------------------------------


def picked(head_dim: int, kernel: str, given: np.ndarray, width: int) -> np.ndarray:
    """Run a kernel of tbq4_levels.cu on `given` ``[n]``: float16 ``[n, width]``."""
    tbq4 = _plan.KvFormat.TBQ4
    config = _plan.tiled_prefill_config(_plan.Dtype.FP16, (head_dim, head_dim), tbq4, tbq4)
    source = cases.KERNELS / "tbq4_levels.cu"
    module = harness.build(source, prelude=_jit.prelude(config), kernels=["levels", "products"])
    values = np.full((len(given), width), np.nan, np.float16)
    module.launch(kernel, 2, 64, (given, values, np.int32(len(given))))
    return values


def book(head_dim: int) -> np.ndarray:
    return _tbq4.codebook(_tbq4.block_of(head_dim)).astype(np.float16)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_permutations_pick_the_levels_of_all_halves_of_words(head_dim: int) -> None:
    half = np.arange(1 << 16, dtype=np.uint32)
    words = half | (half * 40503 & 0xFFFF) << 16  # an odd factor: the upper half takes all values, too
    codes = words[:, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15

    got = picked(head_dim, "levels", words, 8)

    assert got.tobytes() == book(head_dim)[codes].tobytes()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_products_with_all_norms_are_rounded_once(head_dim: int) -> None:
    """Subnormals, zeros of both signs and infinities among them; what is NaN may be any."""
    norms = np.arange(1 << 16, dtype=np.uint16)

    got = picked(head_dim, "products", norms, 16)

    with np.errstate(over="ignore", invalid="ignore"):
        want = norms.view(np.float16)[:, None] * book(head_dim)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), ~numbers)
    assert got[numbers].tobytes() == want[numbers].tobytes()
