"""The bench of caches in TBQ4, with NumPy in CuPy's place: `cuattn` runs the reference then, and times are made up."""

import json
import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

import cuattn
from bench import __main__ as command
from bench import cases, checks, codec, decode, inputs, readme, roofline, run, tbq4, tiles, timing
from bench.progress import Progress
from bench.sampling import QUICK, Timing
from cuattn import _arrays, _plan, reference

H200 = _plan.DEVICES["sm_90a"]
MB = 10**6
DRAWN = Timing(10.0, 9.0, 11.0, 30, noisy=False)
ENV = {
    "gpu": "NVIDIA H200", "date": "2026-01-02T03:04:05+00:00", "commit": "0123456789abcdef", "clean": True,
    "l2_bytes": 2**10,
}  # fmt: skip


def numbers(elements, dtype, seed=0, out=None):
    found = np.random.default_rng(seed).standard_normal(elements).astype(dtype)
    if out is None:
        return found
    out[...] = found
    return out


@pytest.fixture
def numpy_for_cupy(monkeypatch):
    """Put NumPy in CuPy's place, with what else the bench asks CuPy for."""
    device = SimpleNamespace(mem_info=(2**40, 2**40), synchronize=lambda: None)
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    fake = SimpleNamespace(
        empty=np.empty, zeros=np.zeros, asarray=np.asarray, asnumpy=np.asarray,
        get_default_memory_pool=lambda: pool, cuda=SimpleNamespace(Device=lambda: device),
    )  # fmt: skip
    monkeypatch.setattr(_arrays, "import_cupy", lambda: fake)
    for module in (inputs, codec):
        monkeypatch.setattr(module, "normal", numbers)
    return fake


class DryRun(run.Run):
    """A run without a GPU: every call is made once, and takes 10 us."""

    def __init__(self, cupy, folder, cases=""):
        self.start, self.options = 0.0, command.parse(["tbq4", "--cases", cases])
        self.progress = Progress(terminal=False)
        self.sampling, self.cupy, self.env = QUICK, cupy, ENV
        self.rows, self.failures, self._small_checks, self._roofs = [], [], set(), {}
        self.path = folder / "h200-2026-01-02-tbq4.json"
        self.reader = SimpleNamespace(roof=lambda arrays, _: (replace(DRAWN, us=5.0 * bool(arrays)), "shape"))


class FakeCopier:
    def roof(self, sources, targets, _):
        assert [x.nbytes for x in sources] == [x.nbytes for x in targets]
        return replace(DRAWN, us=8.0), "shape"


def decode_case(formats="tbq4", **options):
    return cases.DecodeCase(2, 40, 4, 2, 128, formats=formats, **options)


def test_every_tbq4_case_has_its_equal_in_16_bits_and_names_are_unique():
    found = cases.tbq4_cases()

    assert len({(case.name, case.dtype) for case in found}) == len(found) == 2 * 2 * 11 + 4
    assert {replace(c, formats="raw16") for c in found if c.formats == "tbq4" and not c.has_kept} == {
        *(c for c in found if c.formats == "raw16"), replace(found[1], dtype="float16", kv_len=262144)
    }  # fmt: skip


def test_the_variants_of_the_headline_are_of_its_size():
    variants = cases.tbq4_cases()[-4:]

    assert [case.name for case in variants] == [
        "d256-b1-kv262144-raw16-tbq4", "d256-b1-kv262144-tbq4-raw16", "d256-b1-kv262144-tbq4",
        "d256-b1-kv262144-tbq4-sink4-recent128",
    ]  # fmt: skip
    assert [(case.dtype, case.kv) for case in variants] == [
        ("bfloat16", "bf16/tbq4"), ("bfloat16", "tbq4/bf16"), ("float16", "tbq4"), ("bfloat16", "tbq4")
    ]  # fmt: skip


@pytest.mark.parametrize("case", cases.tbq4_cases(), ids=lambda case: f"{case.dtype}-{case.name}")
def test_planes_add_up_to_the_bytes_that_are_read(case):
    assert case.cache_bytes == sum(case.planes) == roofline.decode_traffic(case.problem)[0]
    # Rows and norms start at multiples of 16 bytes, and the read roof reads whole words.
    assert not any(size % 16 for size in case.planes)


def test_large_batches_have_277_and_554_megabytes():
    sizes = {case.cache_bytes // MB for case in cases.tbq4_cases() if case.formats == "tbq4" and case.batch > 1}

    assert sizes == {276, 553}


def test_bytes_of_mixed_formats_and_of_kept_tokens():
    # A token of K or V and KV head: 512 bytes in 16 bits, 128 and two norms in TBQ4.
    headline, tokens = cases.DecodeCase(*cases.HEADLINE, formats="tbq4"), 4 * 262144
    wide, mixed = replace(headline, formats="raw16"), replace(headline, formats="raw16/tbq4")
    kept = replace(headline, num_sink=4, num_recent=128)

    assert headline.traffic[0] == tokens * 264
    assert wide.traffic[0] == tokens * 1024
    assert mixed.traffic[0] == replace(headline, formats="tbq4/raw16").traffic[0] == tokens * 644
    assert kept.traffic == (headline.traffic[0] + 4 * 132 * (1024 - 264), headline.traffic[1])
    assert [case.token_bytes for case in (headline, wide, mixed)] == [264, 1024, 644]


def test_separate_reads_codes_writes_and_reads_16_bits():
    copied, read = cases.separate_traffic(cases.DecodeCase(*cases.HEADLINE, formats="tbq4"))

    assert (copied, read) == (4 * 262144 * (264 + 1024), 4 * 262144 * 1024)


def test_codec_cases_have_rows_of_1_gib():
    found = cases.codec_cases()

    assert {case.row_bytes for case in found} == {2**30}
    # 16-bit rows shrink to 4.125 bits a value, float32 rows likewise.
    assert {round(case.bytes / 2**30, 4) for case in found} == {1.2578, 1.1289}
    assert len({(case.op, case.name) for case in found}) == len(found) == 11


def test_append_cases_read_new_rows_and_write_the_cache():
    assert [(case.name, case.bytes) for case in cases.append_cases()] == [
        ("d128-b64-new1-tbq4", 2 * 64 * 8 * (256 + 66)), ("d128-b64-new1-raw16", 2 * 64 * 8 * 512),
        ("d128-b1-new8192-tbq4", 2 * 8192 * 8 * (256 + 66)), ("d128-b1-new8192-raw16", 2 * 8192 * 8 * 512),
    ]  # fmt: skip


@pytest.mark.parametrize("formats", cases.FORMATS)
@pytest.mark.parametrize("options", [{}, {"page_size": 16}, {"num_sink": 4, "num_recent": 8}, {"dtype": "float16"}])
@pytest.mark.usefixtures("numpy_for_cupy")
def test_checks_accept_the_right_result(formats, options):
    arrays = inputs.DecodeInputs(decode_case(formats, **options), 2)

    for expected in (arrays.by_reference(), arrays.by_raw16(), arrays.expected()):
        assert len(arrays.check(expected)) == 2 * 4 * 128 * 2
    assert len(arrays.calls()) == len(arrays.caches) == 2
    assert {x.nbytes for x in arrays.caches} == {arrays.case.cache_bytes}


@pytest.mark.parametrize("by", ["by_reference", "by_raw16"])
@pytest.mark.parametrize("kept", [{}, {"num_sink": 4, "num_recent": 8}])
@pytest.mark.usefixtures("numpy_for_cupy")
def test_checks_refuse_other_norms_and_nan(by, kept):
    arrays = inputs.DecodeInputs(decode_case(**kept), 1)
    expected = getattr(arrays, by)()
    norms = arrays._caches(0)[1].norms

    for factor in (np.float16(1.1), np.float16(np.nan)):
        norms[-1] *= factor
        with pytest.raises(checks.WrongResultError, match="sequence 1"):
            arrays.check(expected)


@pytest.mark.parametrize("dtype", list(cases.DTYPES))
@pytest.mark.parametrize("head_dim", [128, 256])
def test_the_bound_against_16_bits_holds_for_results_with_the_roundings_of_kernels(dtype, head_dim):
    kv_len, rng = 4096, np.random.default_rng(0)
    q = rng.standard_normal((1, 16, head_dim)).astype(cases.DTYPES[dtype])
    rows = rng.standard_normal((2, 1, kv_len, 1, head_dim)).astype(np.float16)
    k, v = (cuattn.quantize(x) for x in rows)
    wide = [cuattn.dequantize(x, dtype=np.float16) for x in (k, v)]

    def rounded(q, k, v):
        return reference.decode_same_precision(q, k, v, kv_len).astype(np.float64)

    expected = checks.ByRaw16(rounded(inputs.as_float16(q), *wide), dtype)
    found, allowed = rounded(q, k, v), expected.relative * np.abs(expected.ref).max()

    expected.check(found)
    # It is not lax either: a fifth of it is used, and 16 keys less are too few.
    assert np.abs(found - expected.ref).max() > allowed / 5
    with pytest.raises(checks.WrongResultError):
        expected.check(reference.decode_same_precision(q, *wide, kv_len - 16).astype(np.float64))


@pytest.mark.usefixtures("numpy_for_cupy")
def test_separate_calls_give_what_decode_gives():
    arrays = inputs.DecodeInputs(decode_case(), 2)

    arrays.check(arrays.expected(), call=arrays.separate_calls()[0])


@pytest.mark.parametrize("op", ["quantize", "dequantize"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("has_mean", [False, True])
@pytest.mark.usefixtures("numpy_for_cupy")
def test_codec_checks_accept_the_right_result(op, dtype, has_mean):
    codec.CodecInputs(cases.CodecCase(op, 64, 2, 256, dtype, has_mean=has_mean)).check()


def test_blocks_far_from_the_reference_are_refused():
    x = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    right = reference.quantize(x)
    off = right.codes.copy()
    off[0, 0] ^= 8
    many = right.codes.copy()
    many[:8, 0] ^= 1

    codec.check_blocks(x, right.codes, right.norms)
    for codes, norms in ((off, right.norms), (many, right.norms), (right.codes, right.norms * np.float16(1.01))):
        with pytest.raises(checks.WrongResultError):
            codec.check_blocks(x, codes, norms)


def test_rows_far_from_the_reference_are_refused():
    t = reference.quantize(np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32))
    rows = reference.dequantize(t.codes, t.norms).astype(np.float32)

    codec.check_rows(t.codes, t.norms, rows)
    rows[3, 7] += 1e-4
    with pytest.raises(checks.WrongResultError):
        codec.check_rows(t.codes, t.norms, rows)


@pytest.mark.parametrize("formats", ["tbq4", "raw16"])
@pytest.mark.parametrize("seqlen_new", [1, 24])
@pytest.mark.usefixtures("numpy_for_cupy")
def test_appended_rows_are_checked(formats, seqlen_new, monkeypatch):
    arrays = codec.AppendInputs(cases.AppendCase(3, seqlen_new, 2, 128, formats), 4)
    arrays.check()

    assert arrays.capacity == 4 * seqlen_new
    monkeypatch.setattr(cuattn, "append", lambda *_: None)
    arrays = codec.AppendInputs(arrays.case, 4)
    with pytest.raises(checks.WrongResultError):
        arrays.check()


@pytest.fixture
def dry_run(numpy_for_cupy, monkeypatch, tmp_path):
    """Make runs of small cases without a GPU."""
    monkeypatch.setattr(timing, "replayed", lambda calls, _: [call() for call in calls] and DRAWN)
    monkeypatch.setattr(roofline, "Copier", FakeCopier)
    monkeypatch.setattr(decode, "build_kernels", lambda _: None)
    monkeypatch.setattr(cases, "HEADLINE", (1, 128, 4, 2, 128))
    monkeypatch.setattr(cases, "SHAPES", ((4, 2, 128), (6, 2, 256)))
    monkeypatch.setattr(cases, "TBQ4_SIZES", ((1, 64), (2, 32), (1, 128)))
    monkeypatch.setattr(cases, "KEPT", (4, 16))
    monkeypatch.setattr(cases, "CODEC_BYTES", 2**16)
    monkeypatch.setattr(cases, "append_cases", lambda _: [cases.AppendCase(2, 3, 2, 128, f) for f in ("tbq4", "raw16")])
    return lambda text="": DryRun(numpy_for_cupy, tmp_path, text)


def test_the_topic_has_a_row_of_everything(dry_run):
    dry = dry_run()

    tbq4.measure(dry)

    assert dry.failures == []
    written = json.loads(dry.path.read_text())["rows"]
    found = {(row["op"], row["impl"], row["kv"]) for row in written}
    assert found == {
        *(("decode", "cuattn", kv) for kv in ("tbq4", "bf16", "bf16/tbq4", "tbq4/bf16")),
        *(("decode", "read", kv) for kv in ("tbq4", "bf16", "bf16/tbq4")),
        ("decode", "separate", "tbq4"),
        *((op, impl, "tbq4") for op in ("quantize", "dequantize", "append") for impl in ("copy", "cuattn")),
        *(("append", impl, "bf16") for impl in ("copy", "cuattn")),
    }
    assert all(row["roof_us"] > 0 and row["bytes"] > 0 for row in written)
    # As many bytes are read once.
    sizes = [row["bytes"] for row in written if row["impl"] == "read"]
    assert len(sizes) == len(set(sizes)) < len([row for row in written if row["op"] == "decode"]) - len(sizes)
    notes = [row["note"] for row in written if row["op"] == "decode" and row["impl"] == "cuattn"]
    assert all("tile " in note and "splits " in note for note in notes)
    assert sum("table stride" in note and "132 bytes a token" in note for note in notes) == 5
    assert sum("4 first and 16 newest tokens kept in 16 bits" in note for note in notes) == 1


def test_a_case_that_fails_leaves_the_others(dry_run, monkeypatch):
    dry, decode = dry_run(), cuattn.decode

    def broken(q, k_cache, *args, **options):
        if isinstance(k_cache, cuattn.Tbq4Array):
            raise cuattn.CompileError("decode.cu", "", "no such instruction")
        return decode(q, k_cache, *args, **options)

    monkeypatch.setattr(cuattn, "decode", broken)

    tbq4.measure(dry)

    # Six sizes, one mixed case, float16 and kept tokens.
    assert len(dry.failures) == 6 + 3
    assert "no such instruction" in dry.failures[0]
    timed = [row for row in dry.rows if row.impl in ("cuattn", "separate")]
    assert {row.op for row in timed} == {"decode", "quantize", "dequantize", "append"}
    assert {row.kv for row in timed if row.op == "decode"} == {"bf16", "bf16/tbq4", "tbq4"}
    assert [row.impl for row in timed if row.op == "decode" and row.kv == "tbq4"] == ["separate"]


def test_cases_are_selected_by_name(dry_run):
    dry = dry_run("append-d128-b2-new3-tbq4")

    tbq4.measure(dry)

    assert [(row.op, row.impl) for row in dry.rows] == [("append", "copy"), ("append", "cuattn")]


def test_sweeps_take_formats_and_default_tiles_fit_an_h200():
    options = command.parse(["tiles", "--kv", "tbq4"])
    found = command.sweep_cases(options)

    assert command.topic(options) == "tiles-tbq4"
    assert {case.formats for case in found} == {"tbq4"}
    assert len(found) == len({case.name for case in found}) == 22
    assert "d256-b1-kv262144-tbq4" in {case.name for case in found}
    for case in found:
        config = _plan.decode_plan(case.problem, H200).config
        for tile in options.tiles[case.head_dim]:
            assert replace(config, **asdict(tile)).smem_bytes <= H200.smem_per_block, (case.head_dim, str(tile))


@pytest.mark.parametrize("heads", [(24, 4, 256), (32, 8, 128), (16, 8, 64)])
@pytest.mark.parametrize("formats", cases.FORMATS)
def test_a_substituted_tile_keeps_the_stride_of_the_table_of_levels(formats, heads):
    problem = cases.DecodeCase(1, 32768, *heads, formats=formats).problem
    before = _plan.decode_plan(problem, H200).config
    tile = tiles.Tile(before.tile_kv, 2, before.num_warps)

    with tiles.substituted_tile(before, tile, H200):
        inside = _plan.decode_plan(problem, H200).config

    assert tiles.Tile.of(inside) == tile
    assert inside.table_stride == before.table_stride
    assert _plan.decode_plan(problem, H200).config == before


def test_kv_is_for_sweeps(capsys):
    with pytest.raises(SystemExit):
        command.parse(["tbq4", "--kv", "tbq4"])
    assert "--kv is for splits and tiles" in capsys.readouterr().err


def test_readme_is_written_between_its_marks(dry_run, tmp_path):
    dry, text = dry_run(), tmp_path / "README.md"
    text.write_text("before\n<!-- bench:tbq4 -->\nold\n<!-- /bench -->\nafter\n")
    tbq4.measure(dry)

    assert readme.write(text, tmp_path) == [dry.path]
    once = text.read_text()
    readme.write(text, tmp_path)

    assert text.read_text() == once
    assert once.startswith("before\n<!-- bench:tbq4 -->\n### Decode on a 4-bit cache\n")
    assert once.endswith("\n<!-- /bench -->\nafter\n")
    assert "old" not in once
    # 132 bytes a token and KV head, half of the roof, 16 bits as fast.
    assert "| 4/2 | 128 | 1 | 128 | 132 | 10.0 | 50% | 10.0 | 1.00 |" in once
    for part in (
        "- K and V tbq4, q fp16: 10.0", "- K/V bf16/tbq4, q bf16: 10.0", "- K and V bf16: 10.0",
        "- K and V tbq4, q bf16, 4 first and 16 newest tokens kept in 16 bits: 10.0",
        "then `decode` of these: 10.0", "| quantize, with mean | bf16 | tbq4 | 128 |",
        "NVIDIA H200, 2026-01-02, commit 0123456, `bench/results/h200-2026-01-02-tbq4.json`", "13.9 %",
    ):  # fmt: skip
        assert part in once


def test_the_errors_that_readme_quotes_are_those_of_the_format():
    text = (timing.ROOT / "docs" / "tbq4.md").read_text()
    table = [line for line in text.splitlines() if line.startswith(("| as they are", "| mean of K removed, token 0"))]

    assert len(table) == 2
    assert [x for line in table for x in re.findall(r"[0-9.]+ %", line)] == re.findall(r"[0-9.]+ %", readme._ERROR)


def test_readme_has_one_place_for_the_table(dry_run):
    dry = dry_run("d256-b1-kv64")
    tbq4.measure(dry)

    text = readme.updated((timing.ROOT / "README.md").read_text(), dry.path)

    assert "| 6/2 | 256 | 1 | 64 | 264 |" in text
    with pytest.raises(ValueError, match="must have one block"):
        readme.updated("", dry.path)


def test_readme_without_a_record_says_what_to_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="python -m bench tbq4"):
        readme.write(timing.ROOT / "README.md", tmp_path)
