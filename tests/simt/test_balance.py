"""Parts that a GPU gives to the sequences of a batch by their lengths."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simt import product
from simt.faults import selected
from strategies import Problem, lengths, problems
from tolerance import assert_decode

from cuattn import _check, _plan

# Room for few parts, so that long sequences cannot have all they want.
SMALL = replace(product.H200, num_sms=3)
STEP = 256  # keys of all warps of the configs drawn here
UNEQUAL = Problem(kv_len=(1500, 3, 0, 700, 131, 128), num_kv_heads=2, group=3, sinks=True)
DRAWN = {"head_dims": (64,), "groups": (1, 3), "seqlens_q": (1, 2), "page_sizes": (None, 16), "batch_max": 6}
DRAWN |= {"lengths": lengths(STEP) | st.integers(0, 1500), "dtypes": ("float16",)}
# Several row blocks of a KV head; heads that share a tile.
MORE = {"groups": (8,), "seqlens_q": (16,), "kv_heads": (1,)}
TBQ4 = {"kv_heads": (4,), "k_formats": ("tbq4",), "v_formats": ("tbq4",), "seqlens_q": (1,)}


def decoded(problem: Problem, **choices: Any) -> None:
    out, lse = product.decode_arrays(*problem.arrays(), **problem.options(), balance=True, **choices)
    one_token = problem.seqlen_q == 1
    assert_decode(problem, *(x[:, 0] if one_token else x for x in (out, lse)))


@given(
    problem=st.one_of(problems(**DRAWN | more) for more in ({}, MORE, TBQ4)),
    device=st.sampled_from((SMALL, product.H200)),
    seed=st.integers(0, 3),
)
@settings(deadline=None)
def test_any_lengths_obey_the_error_law(problem: Problem, device: _plan.Device, seed: int) -> None:
    decoded(problem, device=device, seed=seed)


@pytest.mark.parametrize("batch", [2, 32, 33, 70])
def test_batches_beside_the_number_of_lanes_obey_the_error_law(batch: int) -> None:
    rng = np.random.default_rng(batch)
    problem = Problem(kv_len=tuple(rng.integers(0, 300, batch).tolist()), page_size=16)
    decoded(problem)
    decoded(replace(problem, kv_len=(*problem.kv_len[:-1], 2000)))


def least_steps(steps: list[int], parts: int) -> int:
    """Return the fewest steps of a part with which the parts suffice, each sequence having one at least."""
    most = 1
    while sum(max(1, -(-n // most)) for n in steps) > parts:
        most += 1
    return most


def keys_of_parts(kv_len: tuple[int, ...], device: _plan.Device, **choices: Any) -> tuple[np.ndarray, int]:
    """Return how many keys each part has, -1 for none, and how many parts there are for the sequences."""
    q, cache = np.ones((len(kv_len), 1, 64), np.float16), np.zeros((len(kv_len), max(kv_len), 1, 64), np.float16)
    arrays = (q, cache, cache, np.array(kv_len, np.int32))
    plan = _plan.decode_plan(_check.decode(*arrays).problem, device, balance=True)
    assert plan.balanced
    # With a scale of 0 each key weighs 1. Parts that no sequence needs are not written.
    _, states = product.decode_arrays(
        *arrays, softmax_scale=0.0, balance=True, merge=False, device=device, **choices
    )  # fmt: skip
    return np.nan_to_num(states[:, 0, 0, 1], nan=-1).astype(int), plan.num_splits


def assert_shares(kv_len: tuple[int, ...], device: _plan.Device, **choices: Any) -> None:
    """No part has more steps than it must, and together they have all keys."""
    keys, parts = keys_of_parts(kv_len, device, **choices)
    steps = [-(-n // STEP) for n in kv_len]
    assert keys[keys > 0].sum() == sum(kv_len)
    assert keys.max() <= least_steps(steps, parts) * STEP, (keys, parts)
    # Each sequence has its parts side by side, one at least.
    used = keys[keys >= 0]
    assert len(used) <= parts
    assert (keys[len(used) :] < 0).all()


@given(kv_len=st.lists(st.integers(0, 2000), min_size=2, max_size=40), num_sms=st.sampled_from((1, 3, 20, 132)))
@settings(deadline=None)
def test_no_part_is_longer_than_it_must_be(kv_len: list[int], num_sms: int) -> None:
    assert_shares((*kv_len, 800), replace(product.H200, num_sms=num_sms))


FAULTS = {
    "the next part": ("first + end > wanted", "first + end >= wanted"),
    "sequences of other lanes": ("w.batch = b0 + owner", "w.batch = owner"),
    "parts counted from the first sequence": ("w.split = wanted - begin", "w.split = wanted - first"),
    "as many parts as before": ("w.num_splits = __shfl_sync(FULL_MASK, parts, owner);", ""),
    "parts of the first 32 sequences are not counted": ("first += __shfl_sync", "first = __shfl_sync"),
    "too few parts": ("<= p.num_splits", "<= p.num_splits / 2"),
    "too many parts": ("<= p.num_splits", "<= p.num_splits * 2"),
}


@pytest.mark.parametrize("fault", selected(FAULTS))
def test_a_planted_fault_is_caught(fault: str) -> None:
    patches = [("common/decode_work.cuh", *FAULTS[fault])]
    kv_len = (*UNEQUAL.kv_len, *range(70, 130), 900)

    def both() -> None:
        decoded(replace(UNEQUAL, kv_len=kv_len), patches=patches)
        assert_shares((3000, 3, 0, 700), SMALL, patches=patches)  # more steps than parts

    with pytest.raises((AssertionError, product.harness.KernelError)):
        both()


@pytest.mark.parametrize("number", ["2 * i0", "2 * i0 + 1"])
def test_a_merge_of_the_parts_of_another_sequence_is_seen(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    build, fault = product.build, ("merge.cu", f"p.shares[{number}]", f"p.shares[{number.replace('i0', '0')}]")
    monkeypatch.setattr(product, "build", lambda c, patches=(): build(c, [fault] if c.kernel == "merge" else patches))
    with pytest.raises(AssertionError):
        decoded(UNEQUAL)
