"""The bench of caches in fp8: its cases, and the tiles that sweeps try; what it measures with is tested for TBQ4."""

from dataclasses import asdict, replace

import pytest

from bench import __main__ as command
from bench import cases, roofline
from cuattn import _plan

H200 = _plan.DEVICES["sm_90a"]
MB = 10**6


def test_every_fp8_case_has_its_equal_in_16_bits_and_names_are_unique():
    found = cases.fp8_cases()

    assert len({case.name for case in found}) == len(found) == 2 * 2 * 6 + 4
    assert {replace(c, formats="raw16") for c in found if c.formats == "fp8"} == {
        c for c in found if c.formats == "raw16"
    }
    assert {c.kv for c in found} == {"fp8", "bf16", "fp8/bf16", "bf16/fp8", "fp8/tbq4", "tbq4/fp8"}


@pytest.mark.parametrize("case", cases.fp8_cases(), ids=lambda case: case.name)
def test_planes_add_up_to_the_bytes_that_are_read(case):
    assert case.cache_bytes == sum(case.planes) == roofline.decode_traffic(case.problem)[0]
    assert not any(size % 16 for size in case.planes)


def test_there_are_caches_of_more_than_250_megabytes_in_one_sequence_and_in_several():
    sizes = {(c.batch, c.cache_bytes // MB) for c in cases.fp8_cases() if c.formats == "fp8" and c.kv_len > 8192}

    assert sizes == {(1, 67), (1, 268), (1, 536), (4, 536), (16, 536)}


@pytest.mark.parametrize("kv", ["fp8", "raw16/fp8"])
def test_sweeps_take_formats_and_default_tiles_fit_an_h200(kv):
    options = command.parse(["tiles", "--kv", kv])
    found = command.sweep_cases(options)

    assert command.topic(options) == f"tiles-{kv.replace('/', '-')}"
    assert {case.formats for case in found} == {kv}
    assert len(found) == 12
    for case in found if kv == "fp8" else ():
        config = _plan.decode_plan(case.problem, H200).config
        for tile in options.tiles[case.head_dim]:
            assert replace(config, **asdict(tile)).smem_bytes <= H200.smem_per_block, (case.head_dim, str(tile))
