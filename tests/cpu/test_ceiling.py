"""``python -m cuattn ceiling``: the note's figures, what was measured, and messages."""

import json
import re

import pytest

from cuattn import _ceiling, _info, _plan, _records
from cuattn.__main__ import main

HEADLINE = {"layers": 16, "q_heads": 24, "kv_heads": 4, "head_dim": 256, "context": 262144, "weights_gb": 17.0}
STEP = _ceiling.Step(**HEADLINE, bandwidth=4.8)
_records_of = _records.of_gpu
ENV = {"gpu": "NVIDIA A100", "date": "2026-01-02", "commit": "0123456789", "clean": True}


def options(**changed):
    chosen = {**HEADLINE, "bandwidth": 4.8, **changed}
    pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in chosen.items() if value is not None)
    return ["ceiling", *(text for pair in pairs for text in pair)]


def table(out):
    """Cells by their row and heading; columns are two spaces apart."""
    found = {}
    for block in out.split("\n\n"):
        lines = [re.split(r"  +", line.strip()) for line in block.splitlines() if "  " in line]
        found |= {(row[0], name): cell for row in lines[1:] for name, cell in zip(lines[0], row, strict=True)}
    return found


def row(us, **fields):
    return {
        "op": "decode", "impl": "cuattn", "dtype": "bf16", "kv": "bf16", "head_dim": 256, "q_heads": 24, "kv_heads": 4,
        "batch": 1, "seqlen_q": 1, "kv_len": 262144, "mask": "full", "us": us, "us_p5": us, "us_p95": us, "bytes": 0,
        "flops": 0, "roof_us": 0.0, "note": "", **fields,
    }  # fmt: skip


def save(folder, topic, *rows, date="2026-01-02", **env):
    path = folder / f"a100-{date}-{topic}.json"
    path.write_text(json.dumps({"env": {**ENV, **env}, "rows": rows}))
    return path


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(_info, "devices", lambda: ([], "none"))


def test_the_figures_of_the_headline(capsys):
    assert main(options()) == 0
    cells = table(capsys.readouterr().out)

    gigabytes = {name: float(cells[name, "moved GB"]) for name in ("fp16", "fp8", "TBQ4", "TBQ4, separate")}
    assert gigabytes == {"fp16": 17.18, "fp8": 8.59, "TBQ4": 4.43, "TBQ4, separate": 38.79}
    assert (cells["TBQ4", "attention"], cells["fp16", "attention"]) == ("20.7 %", "50.3 %")
    assert (cells["TBQ4", "bits a value"], cells["fp8", "bits a value"]) == ("4.125", "8.000")
    assert cells["TBQ4, separate", "cache GB"] == "4.43"


def test_the_command_of_readme_is_the_headline(capsys):
    text = (_records.FOLDER.parents[1] / "README.md").read_text()
    (command,) = re.findall(r"^python -m cuattn (ceiling .*)$", text, re.MULTILINE)
    assert main(command.split()) == main(options()) == 0
    once, again = capsys.readouterr().out.split("a step of ")[1:]
    assert once == again


def test_bytes_are_those_of_the_arrays():
    step = _ceiling.Step(
        layers=3, q_heads=8, kv_heads=2, head_dim=64, context=10, weights_gb=0.0, bandwidth=1.0, batch=5
    )
    values = 2 * 5 * 10 * 2 * 64

    moved = {line.name: line.moved for line in _ceiling.lines(step)}
    # A row of 64 values has 32 bytes of codes and a norm of 2.
    tbq4 = values // 64 * 34
    assert moved == {"fp16": 2 * values, "fp8": values, "TBQ4": tbq4, "TBQ4, separate": tbq4 + 4 * values}


def test_tokens_are_bandwidth_by_bytes():
    for line in _ceiling.lines(STEP):
        assert line.tokens(STEP) == pytest.approx(4.8e12 / line.total(STEP))
        assert line.tokens(STEP, line.seconds(STEP)) == pytest.approx(line.tokens(STEP))
        assert line.tokens(STEP, 2 * line.seconds(STEP)) < line.tokens(STEP)


def test_weights_are_read_once_for_a_batch():
    one, four = (_ceiling.Step(**HEADLINE, bandwidth=4.8, batch=batch) for batch in (1, 4))
    fp16 = [_ceiling.lines(step)[0] for step in (one, four)]

    assert fp16[1].moved == 4 * fp16[0].moved
    assert fp16[1].total(four) == pytest.approx(17e9 + 4 * 16 * fp16[0].moved)
    assert fp16[0].tokens(one) < fp16[1].tokens(four) < 4 * fp16[0].tokens(one)


def test_formats_that_a_head_dim_has_not_are_left_out(capsys):
    assert main(options(head_dim=96)) == 0
    out = capsys.readouterr().out
    assert "TBQ4 has head_dim 64, 128, 256, 512, not 96" in out
    assert ("fp8", "moved GB") in table(out)
    assert ("TBQ4", "moved GB") not in table(out)


def test_what_was_measured_is_beside_the_limit(tmp_path, capsys):
    # 223.7 and 57.7 us of one layer at 4.8 TB/s.
    first = save(
        tmp_path, "tbq4", row(100, kv="tbq4", note="4 first and 8 newest tokens kept in 16 bits"),
        row(100, kv="tbq4", batch=2), row(100, kv="tbq4", kv_len=8192), row(100, kv="tbq4", impl="read"),
        row(100, kv="tbq4", head_dim=128), row(115.34, kv="tbq4", note="splits 3"),
        row(1010.2, kv="tbq4", impl="separate"),
    )  # fmt: skip
    second = save(tmp_path, "decode", row(447.4), row(1, kv="tbq4"))

    assert main([*options(), "--results", str(first), str(second)]) == 0
    out = capsys.readouterr().out
    cells = table(out)

    shares = {name: cells[name, "share of limit"] for name in ("fp16", "TBQ4", "TBQ4, separate")}
    assert shares == {"fp16": "50 %", "TBQ4": "50 %", "TBQ4, separate": "50 %"}
    assert cells["TBQ4", "measured us"] == "115.3"
    assert cells["fp16", "tokens/s with it"] == f"{1 / (17 / 4800 + 16 * 447.4e-6):.0f}"
    assert ("fp8", "measured us") not in cells
    for name in ("tbq4", "decode"):
        assert f"measured: NVIDIA A100, 2026-01-02, commit 0123456, a100-2026-01-02-{name}.json" in out


def test_records_of_the_gpu_are_found(tmp_path, monkeypatch, capsys):
    save(tmp_path, "tbq4", row(100, kv="tbq4"))
    save(tmp_path, "tbq4", row(50, kv="tbq4"), date="2026-01-01")
    save(tmp_path, "tbq4", row(10, kv="tbq4"), date="2026-01-03", gpu="NVIDIA H200")
    save(tmp_path, "prefill", row(1, kv="tbq4"))
    save(tmp_path, "decode", row(200))
    monkeypatch.setattr(_ceiling._records, "of_gpu", lambda gpu: _records_of(gpu, tmp_path))

    for gpu, us in (("a100", "100.0"), ("NVIDIA H200", "10.0")):
        assert main(options(gpu=gpu, bandwidth=None)) == 0
        out = capsys.readouterr().out
        assert table(out)["TBQ4", "measured us"] == us
        assert f"{_ceiling._device(gpu)[1]:g} TB/s" in out
    monkeypatch.setattr(_info, "devices", lambda: ([(0, _plan.DEVICES["sm_80"])], ""))
    assert main(options(bandwidth=None)) == 0
    assert table(capsys.readouterr().out)["fp16", "measured us"] == "200.0"
    assert main(options(gpu="B200")) == 0
    assert "measured: no record of NVIDIA B200 here" in capsys.readouterr().out


def test_the_headline_on_the_gpu_of_the_committed_records(capsys):
    (gpu,) = {_records.load(path).env["gpu"] for path in _records.FOLDER.glob("*-tbq4.json")}

    assert main(options(gpu=gpu)) == 0
    cells = table(capsys.readouterr().out)
    # Shares of a limit are parts of it, and codes are not read as slowly as the separate pass moves its bytes.
    assert 0 < float(cells["TBQ4, separate", "share of limit"][:-2]) < float(cells["TBQ4", "share of limit"][:-2]) < 100


def test_sizes_that_nothing_was_measured_of_are_told(tmp_path, capsys):
    path = save(tmp_path, "tbq4", row(100, kv="tbq4"))

    assert main([*options(context=1000), "--results", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"no row of decode with 24/4 heads of 256, batch 1, 1,000 keys, in {path.name}" in out
    assert main(options()) == 0
    assert "measured: no GPU here: --gpu NAME or --results FILE adds them" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": 0}, "argument --layers: must be a whole number from 1 on, got '0'"),
        ({"context": "many"}, "argument --context: must be a whole number from 1 on, got 'many'"),
        ({"weights_gb": -1}, "argument --weights-gb: must be a number from 0 on, got '-1'"),
        ({"bandwidth": 0}, "argument --bandwidth: must be a number above 0, got '0'"),
        ({"bandwidth": "nan"}, "argument --bandwidth: must be a number above 0, got 'nan'"),
        ({"head_dim": 80}, "--head-dim must be one of 64, 96, 128, 192, 256, 512, got 80"),
        ({"q_heads": 23}, "--q-heads must be 1 to 64 times --kv-heads 4, got 23"),
        ({"q_heads": 260}, "--q-heads must be 1 to 64 times --kv-heads 4, got 260"),
        ({"context": 2**30 + 1}, "--context must be at most 1,073,741,824 keys, got 1,073,741,825"),
        ({"bandwidth": None}, "--bandwidth must be given in TB/s, as there is no GPU here and no --gpu"),
        ({"bandwidth": None, "gpu": "GTX"}, "as --gpu GTX is none of NVIDIA A100,"),
        ({"results": "missing.json"}, "missing.json cannot be read: No such file"),
    ],
)
def test_what_does_not_fit_is_named_with_what_would(changed, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(options(**changed))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
