"""What is made of recorded rows: README's tables, comparisons and pictures."""

import json
import re
import sys

import pytest

from bench import __main__ as command
from bench import compare, kv_error, plot, plot_data, readme, rivals, rows, timing
from cuattn import _records

README = timing.ROOT / "README.md"
ENV = {
    "gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "cupy": "14.2.0", "nvrtc": "13.0", "commit": "0123456789",
    "clean": True, "date": "2026-01-02T03:04:05+00:00", "clocks_before": {"sm_mhz": 1980.0}, "clocks_after": None,
}  # fmt: skip


def row(us=100.0, low=None, high=None, **fields):
    """A row of the headline in 16 bits whose percentiles are half a percent off the median unless given."""
    return {
        "op": "decode", "impl": "cuattn", "dtype": "bf16", "kv": "bf16", "head_dim": 256, "q_heads": 24, "kv_heads": 4,
        "batch": 1, "seqlen_q": 1, "kv_len": 8192, "mask": "full", "us": us, "us_p5": low or 0.995 * us,
        "us_p95": high or 1.005 * us, "bytes": 1000, "flops": 4000, "roof_us": 50.0, "note": "", **fields,
    }  # fmt: skip


def prompt(us, impl="cuattn", **fields):
    return row(us, op="prefill", impl=impl, **{"seqlen_q": 8192, **fields})


def save(folder, topic, lines, **env):
    path = folder / f"h200-2026-01-02-{topic}.json"
    path.write_text(json.dumps({"env": {**ENV, **env}, "rows": lines}))
    return path


def record(*lines, left_out=0, **env):
    return _records.Record(timing.ROOT / "some.json", {**ENV, **env}, list(lines), left_out)


# Records


def test_the_newest_record_of_the_topic_is_found(tmp_path):
    for name in (
        "h200-2026-01-02-tbq4.json", "h200-2026-01-02-tbq4-2.json", "h200-2026-01-02-tbq4-10.json",
        "h200-2026-01-03-tiles-tbq4.json", "h200-2026-01-04-tbq4-fp16.json", "h200-2026-01-05-decode.json", "tbq4.json",
    ):  # fmt: skip
        (tmp_path / name).touch()

    assert _records.newest(tmp_path, "tbq4").name == "h200-2026-01-02-tbq4-10.json"
    (tmp_path / "h200-2026-01-03-tbq4.json").touch()
    assert _records.newest(tmp_path, "tbq4").name == "h200-2026-01-03-tbq4.json"
    assert _records.newest(tmp_path, "prefill") is None
    assert _records.topic_of(tmp_path / "h200-2026-01-04-tbq4-fp16-3.json") == "tbq4-fp16"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "must be JSON"),
        ("[]", "must be a record"),
        ('{"env": {}}', "must be a record"),
        ('{"env": {"gpu": "H200", "date": 3}, "rows": []}', "must name date in env as str, got 3"),
    ],
)
def test_a_file_that_is_no_record_is_named_with_what_is_wrong(content, message, tmp_path, capsys):
    good, bad = save(tmp_path, "tbq4", []), tmp_path / "bad.json"
    if content is not None:
        bad.write_text(content)

    assert command.main(["compare", str(good), str(bad)]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"{bad} ")
    assert message in printed.err
    assert not printed.out


@pytest.mark.parametrize("files", [[], ["a.json"], ["a.json", "b.json", "c.json"]])
def test_compare_takes_two_files(files, capsys):
    with pytest.raises(SystemExit):
        command.parse(["compare", *files])
    assert f"compare takes 2 files, got {len(files)}" in capsys.readouterr().err


def test_rows_whose_columns_say_less_than_the_call_are_not_plain():
    for note in ("", "splits 4; tile 1x2", "page 16", "noisy", "fa3 left out: X: unbalance"):
        assert _records.is_plain(row(note=note))
    for note in (
        "splits 4; warm, K and V in L2",
        "page 64; splits 4; lengths 3 to 9, 12 in all", "split_size 64; tile 1x2", "splits 9; balance",
        "4 first and 8 newest tokens kept in 16 bits; noisy",
    ):  # fmt: skip
        assert not _records.is_plain(row(note=note))


# Comparison


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (row(100), row(101), "same"),
        (row(100), row(99), "same"),
        (row(100, 99.9, 100.1), row(101, 100.9, 101.1), "same"),  # apart, but by less than medians are known
        (row(100), row(110), "slower"),
        (row(100), row(90), "faster"),
        (row(100, 99, 106), row(105, 104, 106), "unclear"),
        (row(100, 95, 101), row(96, 94, 98), "unclear"),
        (row(100), row(101, note="splits 3; noisy"), "unclear"),
        (row(100, note="noisy"), row(100), "unclear"),
        (row(100, note="noisy"), row(110), "slower"),
        (row(100), row(90, us_p5=None, us_p95=None), "unclear"),
    ],
)
def test_verdicts_follow_the_rule(a, b, verdict):
    assert compare.verdict(a, b) == verdict


def test_verdicts_are_the_other_way_round_when_records_are():
    opposite = {"faster": "slower", "slower": "faster"}
    for us in (90.0, 98.0, 99.0, 101.0, 103.0, 120.0):
        for width in (0.1, 3.0, 20.0):
            a, b = row(100.0), row(us, us - width, us + width)
            assert compare.verdict(b, a) == opposite.get(compare.verdict(a, b), compare.verdict(a, b))


def test_rows_match_by_their_case_and_not_by_what_was_found(tmp_path, capsys):
    pages, kept = {"note": "splits 4; page 16"}, {"note": "4 first and 128 newest tokens kept in 16 bits; splits 2"}
    before = [
        row(10), row(20, **pages), row(30, **kept), row(40, kv="tbq4"), row(50, impl="read"), row(60, head_dim=64),
        prompt(70, note="value_dim 128; tile 1x2"),
    ]  # fmt: skip
    after = [
        row(30, note="4 first and 128 newest tokens kept in 16 bits; splits 9; noisy"), row(10, note="splits 7"),
        row(80, kv="tbq4"), row(25, impl="read"), row(20, note="page 64"), prompt(70, note="value_dim 128; tile 2x2"),
    ]  # fmt: skip

    assert command.main(["compare", str(save(tmp_path, "a", before)), str(save(tmp_path, "b", after))]) == 0
    out = capsys.readouterr().out
    assert "B beside A: 2 same, 1 faster, 1 slower, 1 unclear; 2 only in A, 1 only in B" in out
    assert "splits 2 | splits 9; noisy" in out
    only = out.split("only in A:")[1].split("only in B:")
    assert [len(text.strip().splitlines()) for text in (only[0], only[1].split("\n\n")[0])] == [3, 2]
    assert "page 16" in only[0]
    assert "page 64" in only[1]
    assert "warning" not in out


def test_a_sweep_is_compared_by_splits_and_tile():
    a = [row(10, note="splits 4; tile 1x2"), row(20, note="splits 8; tile 1x2"), row(5, note="splits 4; tile 1x2")]
    b = [row(21, note="splits 8; tile 1x2; noisy"), row(11, note="splits 4; tile 1x2"), row(9, note="splits 2")]

    first, second = rows.cases(a, b)

    assert len(first) == len(second) == 3
    assert [(x["us"], second[case]["us"]) for case, x in first.items() if case in second] == [(10, 11), (20, 21)]


def test_what_differs_of_the_machines_is_warned_of():
    a = record(row(), gpu="NVIDIA H100", clean=False)
    clocks = {"sm_mhz": 1700.0, "mem_mhz": 3201.0}
    b = record(row(), driver="590.2", clocks_before=clocks, left_out=3)

    assert list(compare.warnings(a, b)) == [
        "gpu differs: A NVIDIA H100, B NVIDIA H200", "driver differs: A 580.1, B 590.2",
        "clocks_before sm_mhz differs: A 1980, B 1700", "clocks_before mem_mhz is unknown of A",
        "A was measured on a tree with changes",
        "3 rows of B are of another kind, or without a time, and left out",
    ]  # fmt: skip
    changed = [f"{letter} was measured on a tree with changes" for letter in "AB"]
    assert list(compare.warnings(a, a)) == changed


def test_every_committed_record_compares_with_itself():
    for path in sorted(_records.FOLDER.glob("*.json")):
        mine = _records.load(path)
        last = compare.report(mine, mine).splitlines()[-1]
        assert re.fullmatch(r"B beside A: \d+ same, 0 faster, 0 slower, \d+ unclear; 0 only in A, 0 only in B", last)


# README


@pytest.mark.parametrize("topic", readme.TOPICS)
def test_readme_shows_the_newest_record(topic):
    text = README.read_text()

    assert text == readme.updated(text, _records.newest(_records.FOLDER, topic)), "run python -m bench readme"


def test_the_page_of_the_bench_says_where_rivals_win_in_the_newest_record():
    text = (timing.ROOT / "bench" / "README.md").read_text()

    assert text == rivals.updated(text, _records.FOLDER), "run python -m bench readme"


def test_rivals_that_win_are_those_with_lower_medians():
    lines = [
        prompt(100), prompt(90, "fa3"), prompt(99, "cudnn"), prompt(110, "fa2"),
        prompt(50, mask="causal"), prompt(60, "fa3", mask="causal"), prompt(10, "fa3", head_dim=64),
        prompt(10, "read"),
    ]  # fmt: skip
    told = rivals.block(record(*lines, peers="PyTorch 1"))

    assert "Of 4 pairs of a case of prefill and a rival, the rival's median is the lower one in 2:" in told
    assert "| FlashAttention-3 | 90 | 100 | faster |" in told
    assert "| cuDNN | 99 | 100 | same |" in told
    assert "peers: PyTorch 1" in told


def test_readme_has_decode_with_what_the_host_takes(tmp_path):
    lines = [
        row(7e5, op="compile"), row(9e5, op="compile"), row(31e3, op="load"), row(120, op="launch", note="splits 1; x"),
        row(180, op="launch", note="splits 2; x"), row(200.0, bytes=10**9), row(5, impl="read"),
    ]  # fmt: skip
    text, path = tmp_path / "README.md", save(tmp_path, "decode", lines)
    text.write_text("<!-- bench:decode -->\n<!-- /bench -->\n")

    assert readme.write(text, tmp_path) == [path]
    written = text.read_text()
    assert "| 24/4 | 256 | 1 | 8,192 | 200.0 | 5.00 | 25% | - | - | - |" in written
    assert "compiles a decode kernel in 0.7 to 0.9 s, or loads it from the cache in 31 ms." in written
    assert "A call takes 120 us of Python, 180 with a merge" in written


# Pictures


@pytest.fixture(scope="module")
def pictures():
    return {picture.name: picture for picture in plot_data.pictures(_records.FOLDER)}


@pytest.mark.parametrize("name", ["decode", "prefill", "roofline", "error"])
def test_committed_pictures_show_the_newest_records(name, pictures):
    """Both files carry the digest of what they show; nothing is drawn here."""
    for suffix in ("svg", "png"):
        content = (plot.FIGURES / f"{name}.{suffix}").read_bytes()
        assert pictures[name].digest.encode() in content, "run python -m bench plot"
        assert len(content) < 150_000


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_readme_shows_two_of_the_pictures_with_their_source(name, pictures):
    text = README.read_text()
    _, after = text.split(f"](docs/figures/{name}.png)\n")

    assert after.strip().splitlines()[0].endswith("The picture names its records.")
    shown = (plot.FIGURES / f"{name}.svg").read_text()
    assert all(f"{source.source}, {source.path.name}" in shown for source in pictures[name].records)


def test_a_digest_changes_with_what_is_shown_and_with_its_source():
    picture = plot_data.Picture("decode", {"series": {"16 bits": [[8192, 10.0]]}})
    other = plot_data.Picture("decode", {"series": {"16 bits": [[8192, 10.1]]}})
    sourced = plot_data.Picture("decode", picture.data, [record()])

    assert len({picture.digest, other.digest, sourced.digest}) == 3


def test_decode_has_one_curve_a_format_and_names_what_is_missing(tmp_path):
    def line(us, kv_len, **fields):
        return row(us, kv_len=kv_len, bytes=1000 * kv_len, **fields)

    kept = {"kv": "tbq4", "note": "4 first and 8 newest tokens kept in 16 bits"}
    save(tmp_path, "tbq4", [
        line(30, 2048), line(20, 1024), line(6, 1024, kv="tbq4"), line(8, 1024, **kept), line(7, 1024, batch=2),
        line(5, 1024, head_dim=128), line(1, 1024, dtype="fp16", kv="tbq4"), line(2, 1024, impl="read"),
        line(90, 2048, impl="separate", kv="tbq4"),
    ])  # fmt: skip
    save(tmp_path, "decode", [line(99, 1024)])
    save(tmp_path, "prefill", [])

    found, prefill, roofline, _ = plot_data.pictures(tmp_path)

    assert {name: line["points"] for name, line in found.data["series"].items()} == {
        "separate": [[2048, 90.0]], "16 bits": [[1024, 20.0], [2048, 30.0]], "tbq4": [[1024, 6.0]]
    }  # fmt: skip
    assert found.missing == ["fp8"]
    assert found.data["read_tb_s"] == 1000 * 1024 / 2 / 1e6
    assert found.source == "NVIDIA H200, 2026-01-02, commit 0123456, h200-2026-01-02-tbq4.json"
    assert prefill.is_empty
    assert "cuattn, head_dim 64, causal" in prefill.missing
    assert roofline.missing == ["decode fp8", "prefill 16 bits", "prefill fp8", "prefill tbq4", "cublas"]

    save(tmp_path, "fp8", [line(4, 1024, kv="fp8")], gpu="NVIDIA H200")
    found, _, roofline, _ = plot_data.pictures(tmp_path)
    assert found.data["series"]["fp8"]["points"] == [[1024, 4.0]]
    assert found.missing == []
    assert len(found.records) == 2
    assert "decode fp8" not in roofline.missing

    save(tmp_path, "fp8", [line(4, 1024, kv="fp8")], gpu="NVIDIA A100")
    assert plot_data.pictures(tmp_path)[0].missing == ["fp8"]


def test_prefill_has_whole_prompts_of_one_dtype_beside_peers(tmp_path):
    shape = {"head_dim": 128, "q_heads": 32, "kv_heads": 8, "mask": "causal", "flops": 10**9}
    save(tmp_path, "prefill", [
        prompt(100, **shape, roof_us=80.0), prompt(50, "fa3", **shape), prompt(10, **{**shape, "kv": "tbq4"}),
        prompt(10, **shape, note="page 64"), prompt(10, **{**shape, "seqlen_q": 512}),
        prompt(10, **shape, note="value_dim 64"), prompt(1000, "cublas", flops=7 * 10**11),
    ])  # fmt: skip

    _, found, roofline, _ = plot_data.pictures(tmp_path)

    panel = next(p for p in found.data["panels"] if (p["head_dim"], p["mask"]) == (128, "causal"))
    assert panel["series"] == {"cuattn": [[8192, 10.0]], "fa3": [[8192, 20.0]]}
    assert panel["roof"] == 12.5
    assert roofline.data["product_tflops"] == 700.0
    assert len(roofline.data["series"]["prefill 16 bits"]) == 4


def test_without_records_only_the_error_is_drawn(tmp_path):
    assert [(x.name, x.is_empty) for x in plot_data.pictures(tmp_path)] == [
        ("decode", True), ("prefill", True), ("roofline", True), ("error", False)
    ]  # fmt: skip


def test_formats_with_more_bits_err_less_and_those_of_tbq4_as_its_page_says():
    errors = kv_error.errors()

    text = (timing.ROOT / "docs" / "tbq4.md").read_text()
    for name, heading in (
        ("tbq4", "as they are"), ("tbq4, mean", "mean of K removed"),
        ("tbq4, mean, sink", "mean of K removed, token 0 in `k_sink`, `v_sink`"),
    ):  # fmt: skip
        cells = re.search(rf"^\| {re.escape(heading)} \|(.*)\|$", text, re.MULTILINE)[1].split("|")
        told = [float(cell.removesuffix(" % ")) for cell in cells]
        assert [100 * error for _, _, error in errors[name]] == pytest.approx(told, abs=0.06)  # one decimal was written
    for index in range(len(kv_error.LAYERS)):
        fp16, bf16, fp8, tbq4 = (errors[name][index] for name in ("fp16", "bf16", "fp8", "tbq4"))
        assert 0 == fp16[2] < bf16[2] < fp8[2] < tbq4[2]
        assert [round(x[1], 1) for x in (fp16, bf16, fp8)] == [16, 16, 8]
        assert tbq4[1] == 4.25  # head_dim 64 has a norm for each 64 values


def test_plot_without_matplotlib_says_how_to_get_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    assert command.main(["plot", "--out", str(tmp_path)]) == 1
    assert "pip install 'cuattn[bench]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_plot_draws_what_there_is_and_twice_the_same(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra bench)")
    save(tmp_path, "tbq4", [row(8), row(4, kv="tbq4"), row(2, impl="read")])
    save(tmp_path, "prefill", [prompt(100, head_dim=128, q_heads=32, kv_heads=8)])

    written = []
    for name in ("one", "two"):
        assert command.main(["plot", "--results", str(tmp_path), "--out", str(tmp_path / name)]) == 0
        written.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})

    assert sorted(written[0]) == [
        f"{name}.{suffix}" for name in ("decode", "error", "prefill", "roofline") for suffix in ("png", "svg")
    ]
    assert written[0] == written[1]
    out = capsys.readouterr().out
    assert "decode: no record has separate, left out" in out
    assert "prefill: no record has fa3, head_dim 128, full, left out" in out
    assert command.main(["plot", "--results", str(tmp_path / "one"), "--out", str(tmp_path)]) == 0
    assert "prefill: nothing to draw" in capsys.readouterr().out
