"""Splits of a given size: the bits of a sequence's result are the sequence's own."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simt import product
from strategies import Problem, lengths, only, problems
from tolerance import assert_decode

SIZES = st.sampled_from((64, 128, 320))
DRAWN = {"lengths": lengths(64) | lengths(128), "head_dims": (64,), "groups": (1, 3), "seqlens_q": (1, 2)}
DRAWN |= {"page_sizes": (None, 16), "batch_max": 3, "dtypes": ("float16",)}
KEPT = {"nums_sink": (0, 2), "nums_recent": (0, 5), "k_formats": ("tbq4",), "v_formats": ("tbq4",), "seqlens_q": (1,)}
SEQUENCES = Problem(kv_len=(700, 131, 0, 64), num_kv_heads=2, group=3, sinks=True)


def alone(problem: Problem, sequence: int, capacity: int, **choices: Any) -> tuple[np.ndarray, np.ndarray]:
    """Result of one sequence of a problem by itself."""
    arrays, options = only(problem, sequence, capacity)
    return product.decode_arrays(*arrays, **options, **choices)


@given(problem=problems(**DRAWN) | problems(**DRAWN | KEPT), split_size=SIZES, data=st.data())
@settings(deadline=None)
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(problem, split_size, data):
    got = product.decode_arrays(*problem.arrays(), **problem.options(), split_size=split_size)
    one_token = problem.seqlen_q == 1
    assert_decode(problem, *(x[:, 0] if one_token else x for x in got))
    sequence = data.draw(st.integers(0, len(problem.kv_len) - 1), "sequence")
    capacity = problem.kv_len[sequence] + data.draw(st.sampled_from((1, 77, 700)), "unused tokens")
    seed = data.draw(st.integers(0, 3), "seed")
    for a, b in zip(got, alone(problem, sequence, capacity, split_size=split_size, seed=seed), strict=True):
        assert a[sequence].tobytes() == b[0].tobytes()


def _same_bits(capacity: int, split_size: int = 128, sequences: Problem = SEQUENCES, **choices: Any) -> bool:
    """Of some problems, as a single one may round alike."""
    choices |= {"split_size": split_size}
    same = []
    for seed in range(6):
        problem = replace(sequences, seed=seed)
        got = product.decode_arrays(*problem.arrays(), **problem.options(), **choices)
        same += [
            a[0].tobytes() == b[0].tobytes() for a, b in zip(got, alone(problem, 0, capacity, **choices), strict=True)
        ]
    return all(same)


@pytest.mark.parametrize("capacity", [701, 769, 5000])
def test_the_number_of_parts_does_not_count(capacity):
    """6, 7 and 40 of them, few and many for merge.cu; and fewer and larger ones."""
    assert _same_bits(capacity)
    assert _same_bits(capacity, 192)


def test_a_fault_that_cuts_by_the_capacity_is_seen():
    fault = [("common/decode_work.cuh", "if (p.split_size > 0) {", "if (false) {")]
    # 256 is what short sequences have anyway.
    assert not _same_bits(5000, 512, replace(SEQUENCES, kv_len=(1500, 30)), patches=fault)


def test_a_merge_that_follows_the_number_of_parts_is_seen(monkeypatch):
    config_of = product._merge.config_of
    monkeypatch.setattr(product._merge, "config_of", lambda *arrays, fixed: config_of(*arrays, fixed=not fixed))
    assert not _same_bits(5000)


def test_one_part_is_merged_like_several():
    """Rows that a kernel divides itself have another rounding."""
    problem = replace(SEQUENCES, kv_len=(100, 30))
    short = product.decode_arrays(*problem.arrays(), **problem.options(), split_size=128)
    long = alone(problem, 0, 5000, split_size=128)
    for a, b in zip(short, long, strict=True):
        assert a[0].tobytes() == b[0].tobytes()
