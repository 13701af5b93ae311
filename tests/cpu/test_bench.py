"""Measurements need a GPU; what they are made of does not."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from bench import __main__ as command
from bench import cases, checks, record, roofline, tiles, timing
from bench.clock import SmClock
from bench.sampling import Sampling, Timing, median_error, sample
from cuattn import _decode, _dispatch, _plan, reference

H200 = _plan.DEVICES["sm_90a"]
L2_BYTES = 60 << 20
GB = 10**9
ENV = {
    "gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "cupy": "14.2.0", "nvrtc": "13.0", "cuattn": "0.1.0",
    "commit": "0123456789abcdef", "clean": True, "date": "2026-01-02T03:04:05+00:00", "num_sms": 132,
    "l2_bytes": L2_BYTES, "copy_tb_s": 4.25, "clocks_before": {"sm_mhz": 1980.0}, "clocks_after": None,
}  # fmt: skip
# The keys of a row in a record, in order; every program that reads records relies on them.
ROW_KEYS = [
    "op", "impl", "dtype", "kv", "head_dim", "q_heads", "kv_heads", "batch", "seqlen_q", "kv_len", "mask", "us",
    "us_p5", "us_p95", "bytes", "flops", "roof_us", "note",
]  # fmt: skip


def find(name, **options):
    return next(case for case in cases.sweep_cases(**options) if case.name == name)


def fake_timer(*microseconds):
    """Return a measurement that gives these in turn, forever."""
    state = {"calls": 0}

    def measure():
        state["calls"] += 1
        return microseconds[(state["calls"] - 1) % len(microseconds)]

    return measure


def test_bench_imports_without_cupy():
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        "from bench import __main__ as command\n"
        "command.parse(['tiles', '--tiles', '128:32x3x4'])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_sweeps_have_two_shapes_times_two_batches_times_three_contexts():
    names = [case.name for case in cases.sweep_cases()]

    assert len(names) == len(set(names)) == 12
    assert "d128-b16-kv131072" in names


@pytest.mark.parametrize(
    ("name", "megabytes", "gigaflop"),
    [("d128-b1-kv8192", 33.554432, 0.134217728), ("d128-b16-kv131072", 8589.934592, 34.359738368),
     ("d256-b1-kv131072", 536.870912, 3.221225472)],
)  # fmt: skip
def test_traffic_is_that_of_k_and_v(name, megabytes, gigaflop):
    assert find(name).traffic == (megabytes * 1e6, gigaflop * 1e9)


def test_pages_round_the_cache_up_and_not_the_traffic():
    case = find("d128-b16-kv8192", page_size=48)

    assert case.cache_shape == (16 * 171, 48, 8, 128)
    assert case.cache_bytes > case.traffic[0] == find("d128-b16-kv8192").traffic[0]


@pytest.mark.parametrize("case", cases.sweep_cases(), ids=lambda case: case.name)
def test_sets_exceed_three_times_l2_and_no_more_than_needed(case):
    sets = timing.num_sets(case.cache_bytes, L2_BYTES, 100 * GB)

    assert sets * case.cache_bytes > 3 * L2_BYTES
    assert (sets - 1) * case.cache_bytes <= 3 * L2_BYTES


def test_memory_bounds_the_sets():
    assert timing.num_sets(10, 100, 55) == 5
    assert timing.num_sets(10, 100, 9) == 0


def test_sampling_stops_at_the_least_number_when_samples_agree():
    found = sample(fake_timer(10.0), Sampling())

    assert found == Timing(10.0, 10.0, 10.0, 30, noisy=False)


def test_sampling_goes_on_while_samples_disagree_and_then_says_so():
    found = sample(fake_timer(8.0, 12.0), Sampling())

    assert found.samples == 200
    assert found.noisy
    assert (found.us_p5, found.us_p95) == (8.0, 12.0)


def test_one_outlier_is_not_noise():
    found = sample(fake_timer(*[10.0] * 29, 1000.0), Sampling())

    assert not found.noisy
    assert found.us == 10.0


def clocked(*mhz):
    """A clock, a timer that is slower at lower clocks and takes these in turn, the last from then on; and pauses."""
    clock, rest, pauses = SmClock.__new__(SmClock), list(mhz), []
    clock.mhz, clock.top_mhz = None, 0.0

    def measure():
        clock.update(rest.pop(0) if len(rest) > 1 else rest[0])
        return 2e4 / clock.mhz if clock.mhz else 10.0

    return clock, measure, pauses


def test_samples_at_a_fallen_clock_are_left_out():
    clock, measure, pauses = clocked(2000, 1700, 1600, 1800, 1500, 2000)
    found = sample(measure, Sampling(), clock, pauses.append)
    assert (found.us, found.samples, found.left_out, found.fallen_mhz) == (10.0, 30, 3, None)
    assert pauses == [0.02, 0.04, 0.02]
    # At 1700, 1600 and 1500 MHz.
    assert found.us_left_out == 12.5
    assert found.notes == ("3 samples at lower clocks left out, 12.5 us",)


def test_a_clock_that_stays_low_is_told():
    clock, measure, pauses = clocked(2000, 1600)
    found = sample(measure, Sampling(), clock, pauses.append)
    assert (found.us, found.us_left_out, found.fallen_mhz) == (12.5, 12.5, 1600)
    assert pauses[:4] == [0.02, 0.04, 0.08, 0.16]
    assert set(pauses[4:-1]) == {0.16}
    # Pauses end when there were three seconds of them, and samples go on.
    assert sum(pauses) == pytest.approx(3.0)
    assert (found.samples, found.left_out) == (30, len(pauses))
    assert found.notes[-1] == "SMs at 1600 MHz"


def test_without_patience_no_sample_is_left_out():
    clock, measure, pauses = clocked(2000, 1600)
    found = sample(measure, Sampling(patience_s=0.0), clock, pauses.append)
    assert (found.samples, found.left_out, pauses) == (30, 0, [])


def test_a_clock_that_cannot_be_is_not_believed():
    clock, measure, pauses = clocked(2000, -5, 0, 9000)
    found = sample(measure, Sampling(), clock, pauses.append)
    assert (found.left_out, found.fallen_mhz, pauses) == (0, None, [])


def test_median_error_is_the_standard_error_of_the_median():
    samples = np.random.default_rng(0).standard_normal((2000, 99))

    error = np.mean([median_error(row) for row in samples])

    # Order statistics of 99 samples are 1 % of the ranks apart.
    assert error == pytest.approx(np.median(samples, axis=1).std(), rel=0.1)


def test_rows_have_the_keys_of_the_record(tmp_path):
    case = replace(find("d256-b1-kv8192", dtype="float16"), page_size=16)
    noisy = Timing(20.123456, 19.0, 21.0, 200, noisy=True)
    rows = [
        record.row(case, noisy, roof_us=10.0, splits=33, notes=("why",)),
        record.row(cases.tiny_cases()[0], replace(noisy, noisy=False), op="launch", splits=1),
    ]

    record.write(tmp_path / "new" / "record.json", ENV, rows)

    written = json.loads((tmp_path / "new" / "record.json").read_text())
    assert list(written) == ["env", "rows"]
    assert written["env"] == ENV
    assert [list(row) for row in written["rows"]] == [ROW_KEYS, ROW_KEYS]
    decode, launch = written["rows"]
    assert decode == {
        "op": "decode", "impl": "cuattn", "dtype": "fp16", "kv": "fp16", "head_dim": 256, "q_heads": 24, "kv_heads": 4,
        "batch": 1, "seqlen_q": 1, "kv_len": 8192, "mask": "full", "us": 20.1235, "us_p5": 19.0, "us_p95": 21.0,
        "bytes": 2 * 8192 * 4 * 256 * 2, "flops": 4 * 24 * 256 * 8192, "roof_us": 10.0,
        "note": "splits 33; page 16; why; noisy",
    }  # fmt: skip
    assert (launch["bytes"], launch["flops"], launch["note"]) == (0, 0, "splits 1")


def test_table_shows_time_bandwidth_roof_and_splits():
    found = Timing(15.2, 15.0, 15.5, 30, noisy=False)

    heading, line = record.table([record.row(find("d128-b1-kv8192"), found, roof_us=11.4, splits=16)]).splitlines()

    assert "TB/s" in heading
    # 33.55 MB in 15.2 us.
    assert line.split() == [
        "decode", "cuattn", "32/8", "128", "1", "1", "8192", "15.2", "[15.0", "15.5]", "33.6", "2.21", "75.0", "16",
        "bf16",
    ]  # fmt: skip


def test_heading_names_commit_gpu_and_versions():
    text = record.heading(ENV)

    for part in ("0123456789ab, clean", "NVIDIA H200, 132 SMs, 1980 MHz", "4.25 TB/s", "NVRTC 13.0", "CuPy 14.2.0"):
        assert part in text


def test_records_are_never_overwritten(tmp_path):
    first = record.path_for(ENV, "decode", tmp_path)
    first.touch()

    assert first.name == "h200-2026-01-02-decode.json"
    assert record.path_for(ENV, "decode", tmp_path).name == "h200-2026-01-02-decode-2.json"


@pytest.mark.parametrize(
    ("arguments", "topic"),
    [([], "decode"), (["--dtype", "float16"], "decode-fp16"), (["splits", "--page-size", "16"], "splits-page16")],
)
def test_topic_names_command_and_options(arguments, topic):
    assert command.topic(command.parse(arguments)) == topic


def test_a_given_commit_is_clean_unless_it_says_dirty():
    assert record.commit("abc") == ("abc", True)
    assert record.commit("abc-dirty") == ("abc-dirty", False)


def test_without_git_the_commit_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "ROOT", tmp_path)

    assert record.commit() == ("unknown", False)


def test_clocks_are_read_from_the_line_of_nvidia_smi():
    driver, clocks = record.parse_clocks("580.159, 1980, 1980, 3201, 345.67, 700.00, [N/A]\n")

    assert driver == "580.159"
    assert clocks == {
        "sm_mhz": 1980, "sm_max_mhz": 1980, "mem_mhz": 3201, "power_w": 345.67, "power_limit_w": 700
    }  # fmt: skip
    assert record.parse_clocks("") == (None, None)


def test_a_lower_clock_has_fallen_and_an_unknown_one_has_not():
    assert record.clocks_fell({"sm_mhz": 1980}, {"sm_mhz": 1700})
    assert not record.clocks_fell({"sm_mhz": 1980}, {"sm_mhz": 1965})
    assert not record.clocks_fell({"sm_mhz": 1980}, None)
    assert not record.clocks_fell({"sm_mhz": 1980}, {"mem_mhz": 3201})


@pytest.mark.parametrize("case", [c for c in cases.sweep_cases() if c.name.endswith("b1-kv8192")], ids=str)
def test_a_substituted_tile_is_planned_and_then_gone(case):
    before = _plan.decode_plan(case.problem, H200)
    tile = tiles.Tile(before.config.tile_kv, before.config.num_stages + 1, before.config.num_warps)

    with tiles.substituted_tile(before.config, tile, H200):
        inside = _plan.decode_plan(case.problem, H200).config

    assert inside == replace(before.config, num_stages=tile.num_stages, ctas_per_sm=inside.ctas_per_sm)
    assert _plan.decode_plan(case.problem, H200) == before


def test_calls_that_were_planned_before_a_tile_was_substituted_are_planned_anew(monkeypatch):
    forms = _dispatch.Forms()
    monkeypatch.setattr(_decode, "_FORMS", forms)
    case = cases.sweep_cases()[0]
    config = _plan.decode_plan(case.problem, H200).config

    def planned():
        _, _, made = forms.look_up((), [], ("a call",))
        return made is not None

    def plan():
        _, form, _ = forms.look_up((), [], ("a call",))
        forms.put(form, "launches")

    plan()
    assert planned()
    with tiles.substituted_tile(config, tiles.Tile.of(config), H200):
        assert not planned()
        plan()
    assert not planned()


def test_default_tiles_fit_an_h200():
    for case in cases.sweep_cases():
        config = _plan.decode_plan(case.problem, H200).config
        for tile in tiles.DEFAULT_TILES["raw16"][case.head_dim]:
            assert replace(config, **asdict(tile)).smem_bytes <= H200.smem_per_block, (case.head_dim, str(tile))


def test_splits_and_tiles_are_read_from_the_command_line():
    options = command.parse(["splits", "--splits", "auto,8,132", "--tiles", "128:32x3x4,128:16x6x4,256:16x3x4"])

    assert options.splits == (None, 8, 132)
    assert options.tiles == {128: (tiles.Tile(32, 3, 4), tiles.Tile(16, 6, 4)), 256: (tiles.Tile(16, 3, 4),)}


@pytest.mark.parametrize("arguments", [["--splits", "0"], ["--splits", "x"], ["--tiles", "128:32x3"], ["compare"]])
def test_nonsense_on_the_command_line_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        command.parse(arguments)
    assert "error" in capsys.readouterr().err


def expected_of(q, k, v):
    """Return what the check of one sequence and all heads compares with."""
    same = reference.decode_same_precision(q, k, v, k.shape[1])
    ref = reference.decode(q, k, v, k.shape[1])
    return checks.ByReference([((0, slice(0, q.shape[1])), same[0], ref[0])], q.dtype)


def test_the_check_accepts_the_rounded_result_and_refuses_wrong_ones():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in ((1, 4, 64), (1, 99, 1, 64), (1, 99, 1, 64)))
    expected, right = expected_of(q, k, v), reference.decode_same_precision(q, k, v, 99)

    expected.check(right)

    one_key_less = reference.decode_same_precision(q, k, v, 98)
    not_a_number = right.copy()
    not_a_number[0, 3, 63] = np.nan
    for wrong in (one_key_less, not_a_number):
        with pytest.raises(checks.WrongResultError, match="sequence 0, query heads 0 to 3"):
            expected.check(wrong)


def test_a_first_call_that_ran_nvrtc_has_compiled():
    assert timing.FirstCall(1.0, 1.0, 1.0, 1.0, {"NVRTC start": 1.0, "compile": 900.0}).compiled
    assert not timing.FirstCall(1.0, 1.0, 1.0, 1.0, {"NVRTC start": 1.0, "module load": 2.0}).compiled


@pytest.mark.parametrize("name", ["read", "copy"])
@pytest.mark.parametrize("arch", list(_plan.DEVICES))
def test_the_kernels_of_roofs_leave_room_for_every_thread_of_an_sm(arch, name):
    pytest.importorskip("cuda.bindings.nvrtc")

    report = roofline.compile_roof(name, arch).report

    # Copies keep more addresses; GPUs with 1024 or 1536 threads an SM have room for half or two thirds of 2048.
    fewer = name == "copy" and arch in ("sm_86", "sm_89", "sm_120a")
    assert report.registers <= _plan.REGISTERS_PER_SM // (1024 if fewer else 2048)
    assert (report.spill_bytes, report.stack_bytes) == (0, 0)
