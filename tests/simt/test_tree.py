"""Decode of drafted tokens that are branches of a tree."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simt import product
from simt.faults import selected
from strategies import Problem, lengths, problems
from tolerance import LSE_OF_TWO_ORDERS, assert_call, assert_decode

DRAWN = {"head_dims": (64,), "groups": (1, 3), "seqlens_q": (1, 2, 5), "page_sizes": (None, 16), "trees": (True,)}
DRAWN |= {"lengths": lengths(32) | st.integers(0, 40), "batch_max": 2, "dtypes": ("float16",)}
TBQ4 = {"k_formats": ("raw16",), "v_formats": ("tbq4",), "nums_recent": (0, 5)}
SINGLE = {"dtypes": ("float32",), "k_formats": ("raw32",), "v_formats": ("raw32",)}
BASE = Problem(kv_len=(70, 131), seqlen_q=6, num_kv_heads=2, group=3, tree=True)


@given(
    problem=st.one_of(problems(**DRAWN | more) for more in ({}, TBQ4, SINGLE)),
    num_splits=st.integers(1, 3),
    seed=st.integers(0, 3),
)
@settings(deadline=None)
def test_any_tree_obeys_the_error_law(problem: Problem, num_splits: int, seed: int) -> None:
    assert_decode(problem, *product.decode(problem, num_splits=num_splits, seed=seed))


def test_a_tree_that_is_a_chain_gives_the_bits_of_causal_tokens() -> None:
    problem = replace(BASE, tree=False)
    mask = np.tril(np.ones((6, 6), np.uint8)) * np.uint8(3)  # anything but 0 is seen
    want = product.decode(problem)
    got = product.decode_arrays(*problem.arrays(), tree_mask=np.stack((mask, mask)), **problem.options())
    for a, b in zip(got, want, strict=True):
        assert a.tobytes() == b.tobytes()


def test_a_branch_gives_what_its_tokens_give_without_the_others() -> None:
    """Token by token: the last one of a branch of three among six, against a cache with these three alone."""
    problem = replace(BASE, kv_len=(70,), tree=False)
    q, k, v, kv_len = problem.arrays()
    branch = [0, 2, 5]
    mask = np.eye(6, dtype=bool)[None]
    for i, token in enumerate(branch):
        mask[0, token, branch[: i + 1]] = True
    out, lse = product.decode_arrays(q, k, v, kv_len, tree_mask=mask)
    rows = [*range(64), *(64 + token for token in branch)]
    of_branch = (q[:, [5]], k[:, rows], v[:, rows], np.array([len(rows)], np.int32))
    assert_call(of_branch, {}, (out[:, [5]], lse[:, [5]]))
    assert_call((q, k, v, kv_len), {"tree_mask": mask}, (out, lse))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_value_that_is_not_finite_shows_in_the_branch_that_sees_it_alone(bad: float, dtype: str) -> None:
    q, k, v, kv_len = replace(BASE, kv_len=(70,), dtype=dtype, tree=False).arrays()
    v[0, 66, :, 5] = bad  # token 2
    mask = np.tril(np.ones((1, 6, 6), bool))
    mask[0, [3, 5], 2] = False
    out, lse = product.decode_arrays(q, k, v, kv_len, tree_mask=mask)
    assert_call((q, k, v, kv_len), {"tree_mask": mask}, (out, lse))
    finite = np.isfinite(out.astype(float)).all(axis=(0, 2, 3))
    assert finite.tolist() == [True, True, False, True, False, True]


def test_a_single_token_that_does_not_see_itself_leaves_its_own_key_out() -> None:
    q, k, v, kv_len = replace(BASE, seqlen_q=1, tree=False).arrays()
    v[np.arange(2), kv_len - 1] = np.nan
    out, lse = product.decode_arrays(q, k, v, kv_len, tree_mask=np.zeros((2, 1, 1), bool))
    want = product.decode_arrays(q, k, v, kv_len - 1)
    assert np.isfinite(out.astype(float)).all()
    np.testing.assert_allclose(lse, want[1], rtol=LSE_OF_TWO_ORDERS)


def test_a_token_that_sees_nothing_is_zero() -> None:
    q, k, v, _ = BASE.arrays()
    kv_len = np.array([6, 3], np.int32)
    out, lse = product.decode_arrays(q, k, v, kv_len, tree_mask=np.zeros((2, 6, 6), bool))
    assert not out.any()
    assert np.isneginf(lse).all()


FAULTS = {
    "the tree of the first sequence": ("p.tree_mask + batch * ", "p.tree_mask + 0 * "),
    "the tree of another token": ("of_row * p.tree", "of_row / 2 * p.tree"),
    "the tree's key after": ("tree[row] >> place & 1", "tree[row] >> (place + 1) & 1"),
    "tiles of the tree's keys need no mask": ("? kv_len : kv_len - p.seqlen_q;", "? kv_len : kv_len;"),
    "the tree of the next row": ("w.read_tree(p, threadIdx.x)", "w.read_tree(p, threadIdx.x + 1)"),
}


@pytest.mark.parametrize("fault", selected(FAULTS))
def test_a_planted_fault_is_caught(fault: str) -> None:
    # The last tile of the second sequence is full, so that nothing but the tree hides its keys from the last token.
    problem = replace(BASE, kv_len=(70, 128), causal=False)
    where = "decode.cu" if "read_tree" in FAULTS[fault][0] else "common/decode_work.cuh"
    with pytest.raises(AssertionError):
        assert_decode(problem, *product.decode(problem, patches=[(where, *FAULTS[fault])]))
