"""The bench of prefill, with NumPy in CuPy's place: `cuattn` runs the reference then, and times are made up."""

import json
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

import cuattn
from bench import __main__ as command
from bench import (
    cases,
    checks,
    inputs,
    peers,
    prefill,
    prefill_cases,
    prefill_inputs,
    prefill_record,
    readme,
    run,
    timing,
)
from bench.prefill_cases import PrefillCase, visible_pairs
from bench.progress import Progress
from bench.sampling import QUICK, Timing
from cuattn import _arrays, _plan, reference

H200 = _plan.DEVICES["sm_90a"]
DRAWN = Timing(10.0, 9.0, 11.0, 10, noisy=False)
ENV = {
    "gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "cupy": "14.2.0", "nvrtc": "13.0", "cuattn": "0.1.0",
    "commit": "0123456789abcdef", "clean": True, "date": "2026-01-02T03:04:05+00:00", "num_sms": 132,
    "l2_bytes": 2**10, "copy_tb_s": 4.25, "clocks_before": {"sm_mhz": 1980.0}, "clocks_after": None,
}  # fmt: skip
ROW_KEYS = [
    "op", "impl", "dtype", "kv", "head_dim", "q_heads", "kv_heads", "batch", "seqlen_q", "kv_len", "mask", "us",
    "us_p5", "us_p95", "bytes", "flops", "roof_us", "note",
]  # fmt: skip
README = "before\n<!-- bench:prefill -->\nold\n<!-- /bench -->\nafter\n"
PROMPT = PrefillCase(2, 40, 40, 4, 2, 64, 64, has_peers=True)
CHUNK = PrefillCase(1, 24, 96, 4, 2, 128, 128, page_size=16)
SMALL = (
    PROMPT,
    replace(PROMPT, causal=False, dtype="float16"),
    replace(PROMPT, head_dim=192, value_dim=128, has_peers=False),
    replace(PROMPT, window=(8, None), has_peers=False),
    *(replace(CHUNK, formats=formats, page_size=size) for formats in ("raw16", "tbq4") for size in (16, None)),
)


def numbers(elements, dtype, seed=0, out=None):
    assert out is None
    return np.random.default_rng(seed).standard_normal(elements).astype(dtype)


@pytest.fixture
def numpy_for_cupy(monkeypatch):
    """Put NumPy in CuPy's place, with what else the bench asks CuPy for."""
    device = SimpleNamespace(id=0, mem_info=(2**40, 2**40), synchronize=lambda: None)
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    fake = SimpleNamespace(
        empty=np.empty, asarray=np.asarray, asnumpy=np.asarray, exp=np.exp, log=np.log, sqrt=np.sqrt,
        matmul=np.matmul, get_default_memory_pool=lambda: pool, cuda=SimpleNamespace(Device=lambda: device),
    )  # fmt: skip
    monkeypatch.setattr(_arrays, "import_cupy", lambda: fake)
    for module in (inputs, prefill_inputs, prefill):
        monkeypatch.setattr(module, "normal", numbers)
    return fake


class DryRun(run.Run):
    """A run without a GPU: every call is made once, and takes 10 us."""

    def __init__(self, cupy, folder, *options):
        self.start, self.options = 0.0, command.parse(["prefill", *options])
        self.progress = Progress(terminal=False)
        self.sampling, self.cupy, self.env = QUICK, cupy, dict(ENV)
        self.rows, self.failures = [], []
        self.path = folder / "h200-2026-01-02-prefill.json"

    def read_clocks(self, key):
        self.env[key] = {"sm_mhz": 1980.0}


class FakeTorch:
    """PyTorch's place: the reference, or something else."""

    def __init__(self, wrong=(), broken=()):
        self.wrong, self.broken = wrong, broken
        self.captured = 0

    def attention(self, impl, q, k, v, *, causal):
        if impl in self.broken:
            message = "No available kernel. Aborting execution."
            raise RuntimeError(message)
        return lambda: cuattn.prefill(q, k, v, causal=causal != (impl in self.wrong))

    def result(self, tensor, shape, dtype):
        return tensor.reshape(shape).astype(dtype)

    def product(self, a, b, out):
        return lambda: out.fill((a[0] * b[:, 0]).sum())

    def graph_of(self, stream, work):
        raise NotImplementedError

    def free(self):
        pass


@pytest.fixture
def dry_run(numpy_for_cupy, monkeypatch, tmp_path):
    """Make runs of small cases without a GPU."""
    monkeypatch.setattr(timing, "replayed", lambda calls, *_: [call() for call in calls] and DRAWN)
    monkeypatch.setattr(prefill, "prefill_cases", lambda *_: list(SMALL))
    monkeypatch.setattr(prefill, "build_kernels", lambda _: None)
    monkeypatch.setattr(prefill_record, "PRODUCT_SIZE", 8)

    def make(*options, torch=None, peers_are="left out: PyTorch sees no GPU"):
        monkeypatch.setattr(peers, "find", lambda: (torch, peers_are))
        return DryRun(numpy_for_cupy, tmp_path, *options)

    return make


WINDOWS = [None, (None, None), (0, None), (3, None), (None, 0), (None, 2), (2, 5), (100, 100)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_pairs_are_those_of_brute_force(window, *, causal):
    for seqlen_q, kv_len in product((0, 1, 2, 7, 16), (0, 1, 6, 7, 20)):
        count = 0
        for i, key in product(range(seqlen_q), range(kv_len)):
            position = kv_len - seqlen_q + i
            left, right = window or (None, None)
            count += (
                (not causal or key <= position)
                and (left is None or key >= position - left)
                and (right is None or key <= position + right)
            )
        by_definition = (
            reference.visible_keys(i, seqlen_q, kv_len, causal=causal, window=window) for i in range(seqlen_q)
        )
        assert visible_pairs(seqlen_q, kv_len, causal=causal, window=window) == count
        assert count == sum(stop - start for start, stop in by_definition)


def test_flops_are_those_of_both_products():
    case = PrefillCase(3, 10, 25, 6, 2, 192, 128, causal=False)

    assert case.flops == 2 * 3 * 10 * 25 * 6 * (192 + 128) == case.problem.flops
    assert replace(case, causal=True).flops == case.flops - 2 * 3 * 45 * 6 * (192 + 128)


def test_bytes_are_those_of_every_array_once():
    rows, keys = 3 * 10 * 6, 3 * 25 * 2
    case = PrefillCase(3, 10, 25, 6, 2, 192, 128)

    assert case.bytes == rows * (192 * 2 + 128 * 2 + 4) + keys * (192 + 128) * 2
    tbq4 = replace(case, head_dim=256, value_dim=256, formats="tbq4", page_size=16)
    assert tbq4.bytes == rows * (256 * 4 + 4) + keys * 2 * (128 + 4)


def test_no_case_is_measured_twice():
    for options in ({}, {"dtype": "float16"}, {"page_size": 16}):
        found = prefill_cases.prefill_cases(**options)
        assert len(found) == len(set(found)) == len({case.name for case in found}) == 32 + 2 + 8 + 8 + 2 + 36


def test_cases_cover_what_the_topic_promises():
    found = prefill_cases.prefill_cases()

    assert {case.batch * case.seqlen_q for case in found if case.seqlen_q == case.kv_len} == {16384, 32768}
    assert {(c.head_dim, c.value_dim) for c in found} == set(_plan.PREFILL_DIMS)
    assert {case.dtype for case in found} == {"bfloat16", "float16", "float32"}
    names = {case.name for case in found}
    for name in (
        "d64-h32x32-b8-q2048-kv2048-causal", "d256-h16x16-b1-q16384-kv16384-full",
        "d128-h32x8-b2-q8192-kv8192-causal-fp16", "d192v128-h16x16-b2-q8192-kv8192-full",
        "d512-h16x4-b4-q4096-kv4096-causal", "d128-h32x8-b1-q32768-kv32768-window1024",
        "d256-h24x4-b1-q512-kv131072-causal-tbq4-page64", "d128-h32x8-b1-q4096-kv32768-causal",
    ):  # fmt: skip
        assert name in names
    # Of every 16-bit chunk there is the same in TBQ4.
    chunks = {case for case in found if case.seqlen_q < case.kv_len}
    assert {replace(case, formats="tbq4") for case in chunks} == {case for case in chunks if case.formats == "tbq4"}


@pytest.mark.parametrize("case", prefill_cases.prefill_cases(), ids=lambda case: case.name)
def test_a_case_can_be_planned_and_compared(case):
    assert _plan.prefill_plan(case.problem, H200).config.smem_bytes <= H200.smem_per_block
    # PyTorch aligns causal masks to the first key, and has one mask.
    assert not case.has_peers or (case.seqlen_q == case.kv_len and case.window is None and case.formats == "raw16")
    assert case.kv_len % (case.page_size or 1) == 0


def test_the_window_costs_what_it_leaves():
    long, window = (case for case in prefill_cases.prefill_cases() if case.kv_len == case.seqlen_q == 32768)

    assert (long.mask, window.mask) == ("causal", "window:1024,0")
    assert window.flops / long.flops == pytest.approx(2 * 1025 / 32768, rel=0.02)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.usefixtures("numpy_for_cupy")
def test_the_check_accepts_the_right_result(case):
    arrays = prefill_inputs.PrefillInputs(case, 2)
    arrays.poison()
    first, second = arrays.calls()
    out, lse = first()
    second()

    arrays.check(arrays.expected(), out, lse)
    assert arrays.is_out(out)
    assert arrays.plan().config.value_dim == case.value_dim


@pytest.mark.parametrize("case", [PROMPT, CHUNK, replace(CHUNK, formats="tbq4")], ids=lambda case: case.name)
@pytest.mark.usefixtures("numpy_for_cupy")
def test_the_check_refuses_wrong_results(case):
    arrays = prefill_inputs.PrefillInputs(case, 1)
    expected, (out, lse) = arrays.expected(), arrays.calls()[0]()
    not_a_number, late = out.copy(), lse.copy()
    not_a_number[-1, -1, -1, -1] = np.nan
    late[0, 0, 0] += 0.5
    arrays._options["causal"] = False
    unmasked = arrays.calls()[0]()[0]

    for wrong in ((not_a_number, lse), (out, late), (unmasked, None)):
        with pytest.raises(checks.WrongResultError, match=r"(out|lse) of sequence \d"):
            arrays.check(expected, *wrong)


@pytest.mark.parametrize("formats", ["raw16", "tbq4"])
@pytest.mark.parametrize("dtype", list(cases.DTYPES))
@pytest.mark.parametrize(("head_dim", "kv_len"), [(128, 2048), (256, 1024)])
@pytest.mark.usefixtures("numpy_for_cupy")
def test_the_bounds_hold_for_results_with_the_roundings_of_kernels(formats, dtype, head_dim, kv_len):
    case = PrefillCase(1, 96, kv_len, 4, 1, head_dim, head_dim, dtype=dtype, formats=formats)
    arrays = prefill_inputs.PrefillInputs(case, 1)
    expected = arrays.expected()
    out, lse = reference.attention_same_precision(*arrays.rows[0], causal=True)

    arrays.check(expected, out, lse)
    # They are not lax either: a fifth is used, and a result for the token before is refused.
    used = [np.abs(out[0, x.token, x.heads].astype(float) - x.out).max() / x.allowed for x in expected]
    assert max(used) > 1 / 5
    with pytest.raises(checks.WrongResultError):
        arrays.check(expected, np.roll(out, 1, axis=1))


def test_the_topic_has_a_complete_row_of_everything(dry_run):
    torch = FakeTorch()
    dry = dry_run(torch=torch, peers_are="PyTorch 2.11.0, cuDNN 9.19.0")

    prefill.measure(dry)

    assert dry.failures == []
    written = json.loads(dry.path.read_text())
    assert written["env"]["peers"] == "PyTorch 2.11.0, cuDNN 9.19.0"
    rows = written["rows"]
    assert all(list(row) == ROW_KEYS for row in rows)
    assert [(row["impl"], row["dtype"]) for row in rows] == [
        ("cublas", "bf16"), ("cuattn", "bf16"), ("fa3", "bf16"), ("fa2", "bf16"), ("cudnn", "bf16"),
        ("flashinfer", "bf16"),
        ("cublas", "fp16"), ("cuattn", "fp16"), ("fa3", "fp16"), ("fa2", "fp16"), ("cudnn", "fp16"),
        ("flashinfer", "fp16"),
        *[("cuattn", "bf16")] * 6,
    ]  # fmt: skip
    # 1024 FLOPs take 10 us.
    assert all(row["roof_us"] == pytest.approx(10 * row["flops"] / 1024) for row in rows)
    assert all(row["op"] == "prefill" and row["bytes"] > 0 and row["us"] == 10.0 for row in rows)
    assert [row["mask"] for row in rows[-6:]] == ["causal", "window:8,0", *["causal"] * 4]
    assert [row["kv"] for row in rows[-4:]] == ["bf16", "bf16", "tbq4", "tbq4"]
    assert "value_dim 128" in rows[-6]["note"]
    assert "page 16; tile " in rows[-4]["note"]
    assert rows[4]["note"] == "without lse"


def test_without_pytorch_there_are_no_peers_and_a_roof_by_cupy(dry_run):
    dry = dry_run("--cases", "q40-kv40-causal")

    prefill.measure(dry)

    assert [(row.impl, row.head_dim) for row in dry.rows] == [("cublas", 0), ("cuattn", 64), ("cuattn", 192)]
    assert dry.env["peers"] == "left out: PyTorch sees no GPU"


def test_without_cublas_there_is_no_roof(dry_run, numpy_for_cupy, capsys):
    def missing(*_, **__):
        raise ImportError("libcublas.so.13: cannot open shared object file")

    numpy_for_cupy.matmul = missing
    dry = dry_run("--cases", "kv96")

    prefill.measure(dry)

    assert [(row.impl, row.roof_us) for row in dry.rows] == [("cuattn", 0.0)] * 4
    assert capsys.readouterr().err.count("no roof in bfloat16: ImportError: libcublas") == 1


def test_a_peer_that_is_wrong_or_fails_is_left_out_with_a_note(dry_run):
    dry = dry_run("--cases", "q40-kv40-causal", torch=FakeTorch(wrong=("fa2",), broken=("cudnn",)))

    prefill.measure(dry)

    assert dry.failures == []
    assert [row.impl for row in dry.rows] == ["cublas", "cuattn", "fa3", "flashinfer", "cuattn"]
    wrong, broken = dry.rows[1].notes[-2:]
    assert wrong.startswith("fa2 left out: WrongResultError: out of sequence 0")
    assert broken == "cudnn left out: RuntimeError: No available kernel. Aborting execution."


def test_a_case_that_fails_leaves_the_others(dry_run, monkeypatch):
    dry, right = dry_run(), cuattn.prefill

    def broken(q, k, v, **options):
        if isinstance(k, cuattn.Tbq4Array):
            raise cuattn.CompileError("prefill_mma.cu", "", "no such instruction")
        return right(q, k, v, **options)

    monkeypatch.setattr(cuattn, "prefill", broken)

    prefill.measure(dry)

    assert len(dry.failures) == 2
    assert "no such instruction" in dry.failures[0]
    assert {row.kv for row in dry.rows} == {"bf16", "fp16"}
    assert dry.finish() == 1


def test_the_table_shows_flops_and_the_roof(dry_run, capsys):
    dry = dry_run("--cases", "q24-kv96-causal-tbq4-page16", torch=FakeTorch(), peers_are="PyTorch 2.11.0")
    prefill.measure(dry)
    dry.rows = [replace(line, us=20.0, flops=10**9, roof_us=15.0) for line in dry.rows]

    assert dry.finish() == 0
    assert dry.env["seconds"] > 0
    heading, *lines = capsys.readouterr().out.splitlines()[2:]

    assert heading == "peers: PyTorch 2.11.0"
    assert "roof: the FLOPs that the mask leaves" in lines[0]
    assert lines[1].split() == [
        "impl", "heads", "dim", "mask", "batch", "new", "keys", "us", "[p5", "p95]", "TFLOP/s", "%", "roof", "note"
    ]  # fmt: skip
    assert lines[2].split()[:6] == ["cublas", "20.0", "[9.0", "11.0]", "50", "75.0"]
    assert lines[3].split()[:12] == [
        "cuattn", "4/2", "128", "causal", "1", "24", "96", "20.0", "[9.0", "11.0]", "50", "75.0"
    ]  # fmt: skip
    assert "bf16; kv tbq4; page 16; tile " in lines[3]


def test_the_topic_is_named_by_command_and_options():
    assert command.topic(command.parse(["prefill"])) == "prefill"
    assert command.topic(command.parse(["prefill", "--dtype", "float16", "--page-size", "16"])) == "prefill-fp16-page16"


def row(case, us, impl="cuattn", **fields):
    line = prefill_record.row(case, replace(DRAWN, us=us), impl=impl, roof_us=us / 2)
    return {**line.as_dict(), "flops": 10**9, **fields}


def test_readme_has_prompts_beside_peers_and_formats_side_by_side(tmp_path):
    wide = [row(replace(CHUNK, page_size=size), us) for size, us in ((64, 30.0), (None, 25.0))]
    tbq4 = [row(replace(CHUNK, page_size=size, formats="tbq4"), us) for size, us in ((64, 40.0), (None, 50.0))]
    rows = [
        prefill_record.product_row("bfloat16", DRAWN).as_dict(),
        row(PROMPT, 20.0), row(PROMPT, 40.0, "fa2"), row(PROMPT, 10.0, "cudnn"), row(PROMPT, 80.0, "fa3"),
        row(replace(PROMPT, head_dim=192, value_dim=128), 20.0),
        *wide, *tbq4, row(replace(CHUNK, seqlen_q=8), 12.0),
    ]  # fmt: skip
    text, path = tmp_path / "README.md", tmp_path / "h200-2026-01-02-prefill.json"
    text.write_text(README)
    path.write_text(json.dumps({"env": {**ENV, "peers": "PyTorch 2.11.0, cuDNN 9.19.0"}, "rows": rows}))

    assert readme.write(text, tmp_path) == [path]
    once = text.read_text()
    readme.write(text, tmp_path)

    assert text.read_text() == once
    assert once.startswith("before\n<!-- bench:prefill -->\n### Prefill\n")
    assert once.endswith("\n<!-- /bench -->\nafter\n")
    lines = once.splitlines()
    for line in (
        "cuBLAS, product of 8192 x 8192 matrices, bf16: 109951 TFLOP/s.",
        "| 4/2 | 64 | bf16 | causal | 2 x 40 | 20 | 50 | 50% | 12 | 100 | 25 |",
        "| 4/2 | 192/128 | bf16 | causal | 2 x 40 | 20 | 50 | 50% | - | - | - |",
        "| 4/2 | 128 | 24 | 96 | 30 | 33 | 25 | 40 | 25 | 50 | 0.75 |",
        "| 4/2 | 128 | 8 | 96 | 12 | 83 |  |  |  |  |  |",
    ):
        assert line in lines
    source = f"NVIDIA H200, 2026-01-02, commit 0123456, `bench/results/{path.name}`"
    assert f"{source}; peers: PyTorch 2.11.0, cuDNN 9.19.0; written by `python -m bench readme`." in lines
    tables = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in tables} == {12}


def test_readme_shows_the_newest_record_of_each_topic(tmp_path):
    text = tmp_path / "README.md"
    text.write_text(README + README.replace("prefill", "tbq4"))
    for name in ("h200-2026-01-02-tbq4.json", "h200-2026-01-03-prefill.json", "h200-2026-01-04-prefill-fp16.json"):
        (tmp_path / name).write_text(json.dumps({"env": ENV, "rows": []}))

    assert [path.name for path in readme.write(text, tmp_path)] == [
        "h200-2026-01-02-tbq4.json", "h200-2026-01-03-prefill.json"
    ]  # fmt: skip
    assert "### Decode on a 4-bit cache" in text.read_text()
    assert "### Prefill" in text.read_text()


def test_readme_without_a_place_for_a_record_is_left_alone(tmp_path):
    text = tmp_path / "README.md"
    text.write_text("nothing")
    (tmp_path / "h200-2026-01-03-prefill.json").write_text(json.dumps({"env": ENV, "rows": []}))

    with pytest.raises(ValueError, match=r"must have one block that matches .*bench:prefill"):
        readme.write(text, tmp_path)
    assert text.read_text() == "nothing"


def test_a_capture_that_fails_is_ended():
    ends = []
    stream = SimpleNamespace(begin_capture=lambda: ends.append("begin"), end_capture=lambda: ends.append("end") or 7)

    assert timing.graph_of(stream, lambda: ends.append("work")) == 7
    with pytest.raises(ZeroDivisionError):
        timing.graph_of(stream, lambda: 1 / 0)
    assert ends == ["begin", "work", "end", "begin", "end"]


class Streams:
    """A part of ``torch.cuda``: what is the current stream, and what was called on it."""

    def __init__(self):
        self.current, self.log = [0], []

    def set_device(self, device):
        self.log.append(device)

    def set_stream(self, stream):
        self.log.append(("set", stream))

    def ExternalStream(self, pointer):  # noqa: N802  PyTorch's name
        assert pointer
        return pointer

    def default_stream(self):
        return 0

    def stream(self, stream):
        return Entered(self.current, stream)

    def graph(self, graph, *, stream, capture_error_mode):
        assert (graph, capture_error_mode) == (self.graphs[-1], "relaxed")
        return Entered(self.current, stream)

    def CUDAGraph(self):  # noqa: N802
        self.graphs = [SimpleNamespace(replay=lambda: self.log.append(("replay", self.current[-1])))]
        return self.graphs[-1]


class Entered:
    def __init__(self, stack, item):
        self.stack, self.item = stack, item

    def __enter__(self):
        self.stack.append(self.item)

    def __exit__(self, *_):
        self.stack.pop()


def test_pytorch_works_on_the_current_stream_of_cupy(numpy_for_cupy):
    cuda, pointer = Streams(), [0]
    numpy_for_cupy.cuda.get_current_stream = lambda: SimpleNamespace(ptr=pointer[0])
    module = SimpleNamespace(
        cuda=cuda, __version__="2.11.0", backends=SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 91900)),
        inference_mode=lambda: Entered([], None), from_dlpack=lambda x: x, float16=np.float16,
        matmul=lambda *_, out: out is not None and cuda.log.append(("matmul", cuda.current[-1])),
    )  # fmt: skip
    torch = peers.Torch(module)
    call, capture = peers.product(torch, *np.ones((3, 4, 4), np.float16))

    for pointer[0] in (0, 5):
        call()
    graph = capture(SimpleNamespace(ptr=5), call)
    graph.launch(SimpleNamespace(ptr=6))
    with pytest.raises(ZeroDivisionError):
        capture(SimpleNamespace(ptr=7), lambda: 1 / 0)

    assert str(torch) == "PyTorch 2.11.0, cuDNN 9.19.0"
    assert cuda.log == [0, ("matmul", 0), ("matmul", 5), ("matmul", 5), ("replay", 6), ("set", 0)]
    assert cuda.current == [0]


@pytest.mark.usefixtures("numpy_for_cupy")
def test_pytorch_that_is_missing_or_without_a_gpu_is_left_out(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(peers, "import_module", missing)
    assert peers.find() == (None, "left out: ModuleNotFoundError: No module named 'torch'")
    without_gpu = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setattr(peers, "import_module", lambda _: without_gpu)
    assert peers.find() == (None, "left out: PyTorch sees no GPU")
