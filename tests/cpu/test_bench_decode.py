"""The topic decode, with NumPy in CuPy's place: `cuattn` runs the reference then, and times are made up."""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import cuattn
from bench import __main__ as command
from bench import cases, checks, decode, decode_cases, inputs, kernels, peers, readme, rivals, rows, run, timing
from bench.cases import DecodeCase
from bench.progress import Progress
from bench.run import Variant
from bench.sampling import FULL, QUICK, Timing
from cuattn import _arrays, _plan, _records

H200 = _plan.DEVICES["sm_90a"]
DRAWN = Timing(10.0, 9.0, 11.0, 30, noisy=False)
ENV = {
    "gpu": "NVIDIA H200", "date": "2026-01-02T03:04:05+00:00", "commit": "0123456789abcdef", "clean": True,
    "l2_bytes": 2**10,
}  # fmt: skip
EQUAL = DecodeCase(2, 40, 4, 2, 64)
UNEQUAL = DecodeCase(3, 70, 4, 2, 64, page_size=16, lengths=(3, 70, 33))
SMALL = [EQUAL, replace(EQUAL, batch=1), replace(EQUAL, seqlen_q=4), UNEQUAL]


def numbers(elements, dtype, seed=0, out=None):
    found = np.random.default_rng(seed).standard_normal(elements).astype(dtype)
    if out is None:
        return found
    out[...] = found
    return out


@pytest.fixture
def numpy_for_cupy(monkeypatch):
    """Put NumPy in CuPy's place, with what else the bench asks CuPy for."""
    device = SimpleNamespace(id=0, mem_info=(2**40, 2**40), synchronize=lambda: None)
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    fake = SimpleNamespace(
        empty=np.empty, zeros=np.zeros, asarray=np.asarray, asnumpy=np.asarray, exp=np.exp, log=np.log,
        from_dlpack=np.asarray, get_default_memory_pool=lambda: pool, cuda=SimpleNamespace(Device=lambda: device),
    )  # fmt: skip
    monkeypatch.setattr(_arrays, "import_cupy", lambda: fake)
    monkeypatch.setattr(inputs, "normal", numbers)
    return fake


class DryRun(run.Run):
    """A run without a GPU: every call is made once, and takes 10 us."""

    def __init__(self, cupy, folder, *options):
        self.options = command.parse(["decode", *options])
        self.progress = Progress(terminal=False)
        self.sampling, self.cupy, self.env = QUICK, cupy, dict(ENV)
        self.rows, self.failures, self._small_checks, self._roofs = [], [], set(), {}
        self.path = folder / "h200-2026-01-02-decode.json"
        self.read = []
        self.reader = SimpleNamespace(roof=self.roof)

    def roof(self, arrays, _):
        self.read.append(arrays[0].nbytes)
        return replace(DRAWN, us=5.0), "shape"

    def launch(self):
        pass


class FakeTorch:
    """PyTorch's place: the reference, or something else."""

    def __init__(self, wrong=(), broken=()):
        self.wrong, self.broken, self.freed = wrong, broken, 0

    def decode(self, impl, q, k, v, kv_len):
        if impl in self.broken:
            raise ModuleNotFoundError(f"No module named {impl!r}; install it")
        forms = {"fa3": ("pack_gqa=True", "pack_gqa=None"), "cudnn": ("packed", "enable_gqa"), "fa2": ("packed",)}
        forms["flashinfer"] = ("tensor cores", "CUDA cores")
        scale = {name: 2.0 if f"{impl} {name}" in self.wrong else None for name in forms[impl]}
        return {
            name: lambda name=name: cuattn.decode(q, k, v, kv_len, softmax_scale=scale[name]) for name in forms[impl]
        }

    def result(self, tensor, shape, dtype):
        return tensor.reshape(shape).astype(dtype)

    def graph_of(self, stream, work):
        raise NotImplementedError

    def free(self):
        self.freed += 1


@pytest.fixture
def dry_run(numpy_for_cupy, monkeypatch, tmp_path):
    """Make runs of small cases without a GPU."""
    monkeypatch.setattr(timing, "replayed", lambda calls, *_: [call() for call in calls] and DRAWN)
    monkeypatch.setattr(decode_cases, "decode_cases", lambda *_, **__: list(SMALL))
    monkeypatch.setattr(decode_cases, "INVARIANT_SIZES", ((1, 40),))
    monkeypatch.setattr(decode_cases, "SPLIT_SIZES", (64,))
    monkeypatch.setattr(decode, "build_kernels", lambda _: None)

    def make(*options, torch=None, peers_are="left out: PyTorch sees no GPU"):
        monkeypatch.setattr(peers, "find", lambda: (torch, peers_are))
        return DryRun(numpy_for_cupy, tmp_path, *options)

    return make


# Cases


def test_cases_are_those_of_the_topic_and_named_apart():
    for options in ({}, {"dtype": "float16"}, {"page_size": 16}):
        found = decode_cases.decode_cases(**options)
        assert len(found) == len({case.name for case in found}) == 2 * 13 + 9 + 8 + 2 + 8
    names = {case.name for case in decode_cases.decode_cases()}
    for name in (
        "d128-b1-kv8192", "d128-b4-kv262144", "d256-b16-kv131072", "d256-b64-kv32768", "d256-b1-kv1024",
        "d128-h32x4-b1-kv4096", "d128-b4-kv32768-q16", "d128-b16-kv131072-unequal290229",
        "d128-b16-kv131072-unequal146432", "d128-b1-kv4096-warm", "d256-b1-kv8192-tbq4-warm",
    ):  # fmt: skip
        assert name in names
    assert names.isdisjoint({"d128-b16-kv262144", "d128-b64-kv131072"})
    assert {"d128-b16-kv262144", "d256-b64-kv262144"} < {
        case.name for case in decode_cases.decode_cases(include_large=True)
    }


@pytest.mark.parametrize("case", decode_cases.decode_cases(include_large=True), ids=lambda case: case.name)
def test_a_case_can_be_planned_in_each_of_its_variants(case):
    for variant in decode.variants_of(case):
        options = variant.options
        num_splits, split_size = options["num_splits"], options["split_size"]
        plan = _plan.decode_plan(case.problem, H200, num_splits, split_size, balance=options["balance"])
        assert plan.balanced == variant.balance
        assert plan.split_size == (variant.split_size or 0)
    # Peers take dense caches and one token, and others' lengths are those of the caches.
    assert case.has_peers == (case.seqlen_q == 1 and not case.lengths and case.formats == "raw16")


def test_without_all_no_cache_is_larger_than_nine_gigabytes():
    assert max(case.cache_bytes for case in decode_cases.decode_cases()) < 9e9
    assert max(case.cache_bytes for case in decode_cases.decode_cases(include_large=True)) < 70e9
    assert command.parse(["--all"]).all


@pytest.mark.parametrize("name", ["tbq4", "prefill", "splits"])
def test_all_is_for_decode(name, capsys):
    with pytest.raises(SystemExit):
        command.parse([name, "--all"])
    assert f"--all is for decode, not for {name}" in capsys.readouterr().err


def test_long_calls_have_fewer_samples():
    by_name = {case.name: decode.sampling_of(case, quick=False) for case in decode_cases.decode_cases()}

    assert by_name["d128-b1-kv131072"] == decode.SAMPLING
    assert by_name["d128-b1-kv262144"] == by_name["d128-b64-kv32768"] == decode.LONG_SAMPLING
    assert decode.sampling_of(EQUAL, quick=True) == QUICK


def test_unequal_lengths_read_what_there_is_and_have_no_more_pages():
    assert UNEQUAL.pages == (1, 5, 3)
    assert UNEQUAL.cache_shape == (9, 16, 2, 64)
    assert UNEQUAL.traffic == (2 * 2 * 64 * 2 * 106, 4 * 4 * 64 * 106)
    assert min(decode_cases.GEOMETRIC) == 16
    assert max(decode_cases.GEOMETRIC) == 131072


@pytest.mark.usefixtures("numpy_for_cupy")
def test_kernels_that_are_built_ahead_are_those_of_the_calls(monkeypatch):
    built = []
    monkeypatch.setattr(_arrays, "device", lambda _: H200)
    monkeypatch.setattr(kernels, "build_missing", lambda configs, arch: built.extend([*configs, arch]))

    decode.build_kernels(SMALL)

    plans = [inputs.DecodeInputs(case, 1).plan(**v.options) for case in SMALL for v in decode.variants_of(case)]
    assert set(built) == {*(plan.config for plan in plans), "sm_90a"}
    built.clear()
    decode.build_kernels(decode_cases.decode_cases())
    assert len(built) < 14


# Arrays and checks


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", list(cases.DTYPES))
@pytest.mark.parametrize("by", ["by_reference", "by_exact"])
@pytest.mark.usefixtures("numpy_for_cupy")
def test_checks_accept_the_right_result_and_no_other(case, dtype, by):
    arrays = inputs.DecodeInputs(replace(case, dtype=dtype), 2)
    expected = getattr(arrays, by)()

    for options in ({}, {"num_splits": 2}, {"split_size": 64}, {"balance": True}):
        arrays.check(expected, **options)
    arrays._caches(0)[1][...] *= np.float32(1.5)
    with pytest.raises(checks.WrongResultError, match="sequence 0"):
        arrays.check(expected)


@pytest.mark.parametrize("dtype", list(cases.DTYPES))
@pytest.mark.usefixtures("numpy_for_cupy")
def test_the_bound_of_float64_holds_for_results_with_the_roundings_of_kernels(dtype):
    arrays = inputs.DecodeInputs(DecodeCase(1, 4096, 8, 2, 128, dtype), 1)
    reference, exact = arrays.by_reference(), arrays.by_exact()
    out = np.full(arrays.case.q_shape, np.nan, cases.DTYPES[dtype])
    for (sequence, heads), same, _ in reference.parts:
        out[sequence, heads] = same

    exact.check(out)
    # It is not lax either: a fifth is used.
    used = [
        np.abs(out[sequence, heads].astype(float) - ref).max()
        / (checks.ByRaw16(ref, dtype).relative * np.abs(ref).max())
        for (sequence, _, heads), ref in exact.parts
    ]
    assert max(used) > 1 / 5
    out[0, 0, 0] = np.nan
    with pytest.raises(checks.WrongResultError, match="sequence 0, token 0, query heads 0 to 3"):
        exact.check(out)


@pytest.mark.usefixtures("numpy_for_cupy")
def test_long_cases_are_compared_with_float64(monkeypatch):
    arrays = inputs.DecodeInputs(EQUAL, 1)

    assert isinstance(arrays.expected(), checks.ByReference)
    monkeypatch.setattr(inputs, "_REFERENCE_SIZE", 1000)
    assert isinstance(arrays.expected(), checks.ByExact)


# Runs


def test_the_topic_has_a_complete_row_of_everything(dry_run):
    torch = FakeTorch()
    dry = dry_run(torch=torch, peers_are="PyTorch 2.11.0, cuDNN 9.19.0")

    decode.measure(dry)

    assert dry.failures == []
    written = json.loads(dry.path.read_text())
    assert written["env"]["peers"] == "PyTorch 2.11.0, cuDNN 9.19.0"
    found = written["rows"]
    peers_of = ["fa3", "fa2", "cudnn", "flashinfer"]
    assert [row["impl"] for row in found] == [
        "read", "cuattn", *peers_of, "read", "cuattn", *peers_of, "cuattn", "cuattn", "read", "cuattn", "cuattn"
    ]  # fmt: skip
    assert all(row["op"] == "decode" and row["roof_us"] == 5.0 and row["bytes"] > 0 for row in found)
    assert [row["note"] for row in found[2:6]] == [
        "pack_gqa=True", "packed", "without lse; packed", "without lse; tensor cores"
    ]  # fmt: skip
    special = [row for row in found if row["impl"] == "cuattn" and not _records.is_plain(row)]
    assert ["split_size 64" in row["note"] for row in special] == [True, False, False]
    assert ["balance" in row["note"] for row in special] == [False, False, True]
    assert all("lengths 3 to 70, 106 in all" in row["note"] for row in special[1:])
    assert [row["seqlen_q"] for row in found if row["mask"] == "causal"] == [4]
    # Of paged caches the roof reads what tokens have, too.
    assert dry.read == [EQUAL.cache_bytes, EQUAL.cache_bytes // 2, UNEQUAL.traffic[0]]
    assert torch.freed == 2


def test_without_pytorch_there_are_no_peers(dry_run):
    dry = dry_run("--cases", "b2-kv40")

    decode.measure(dry)

    assert [line.impl for line in dry.rows] == ["read", "cuattn", "cuattn"]
    assert dry.env["peers"] == "left out: PyTorch sees no GPU"


def test_warm_cases_read_the_same_caches_and_have_rows_and_a_roof_of_their_own(dry_run, monkeypatch, tmp_path):
    warm = replace(EQUAL, batch=1, warm=True)
    monkeypatch.setattr(decode_cases, "decode_cases", lambda *_, **__: [replace(warm, warm=False), warm])
    monkeypatch.setattr(decode_cases, "INVARIANT_SIZES", ())
    sets = []
    monkeypatch.setattr(DryRun, "roof", lambda _, arrays, __: sets.append(len(arrays)) or (DRAWN, "shape"))
    dry = dry_run(torch=FakeTorch())
    dry.env["l2_bytes"] = 2**17

    decode.measure(dry)

    assert sets[0] > 3 * dry.env["l2_bytes"] // warm.cache_bytes
    assert sets[1:] == [1]
    found = [line.as_dict() for line in dry.rows]
    assert [rows.is_warm(row) for row in found] == [False] * 6 + [True] * 6
    assert [row["impl"] for row in found[6:]] == ["read", "cuattn", "fa3", "fa2", "cudnn", "flashinfer"]
    assert not any(map(_records.is_plain, found[6:]))
    assert len(rows.cases(found)[0]) == 12
    text = readme.block(_records.load(save(tmp_path, dry.rows)))
    assert text.count("| 4/2 |") == 1
    assert "- 4/2 heads of 64, one sequence, K and V in L2: 40 keys 10.0 us." in text.splitlines()
    lines = rivals.rivals([row | {"us": 9.0} if row["impl"] == "fa3" else row for row in found])
    assert [("1 x 40 | FlashAttention-3" in line, "1 x 40 in L2 | FlashAttention-3" in line) for line in lines] == [
        (True, False), (False, True),
    ]  # fmt: skip


def test_warm_caches_leave_room_in_l2():
    sizes = [case.cache_bytes for case in decode_cases.decode_cases() if case.warm]
    assert len(sizes) == 8
    # Half of an H200's, as each half of the SMs has one of its own.
    assert max(sizes) < (60 << 20) / 2


def test_without_a_case_that_has_peers_none_are_looked_for(dry_run):
    dry = dry_run("--cases", "unequal106")

    decode.measure(dry)

    assert [line.impl for line in dry.rows] == ["read", "cuattn", "cuattn"]
    assert "peers" not in dry.env


def test_a_peer_that_is_wrong_or_missing_is_left_out_with_a_note(dry_run):
    wrong = ("fa2 packed", "cudnn enable_gqa")
    dry = dry_run("--cases", "b1-kv40", torch=FakeTorch(wrong=wrong, broken=("fa3",)))

    decode.measure(dry)

    assert dry.failures == []
    assert [line.impl for line in dry.rows] == ["read", "cuattn", "cudnn", "flashinfer", "cuattn"]
    assert dry.rows[1].notes[-2] == "fa3 left out: ModuleNotFoundError: No module named 'fa3', install it"
    assert dry.rows[1].notes[-1].startswith("fa2 left out: WrongResultError: sequence 0, query heads 0 to 1: error")
    assert dry.rows[2].notes[:2] == ("without lse", "packed")
    assert dry.rows[2].notes[2].startswith("enable_gqa left out: WrongResultError")


def test_the_faster_form_of_a_peer_is_kept(monkeypatch):
    us = {"slow": 20.0, "fast": 10.0}
    monkeypatch.setattr(timing, "replayed", lambda calls, *_: replace(DRAWN, us=us[calls[0]()]))
    forms = {name: [lambda name=name: name] for name in us}

    found, missing = peers.timed(FakeTorch(), lambda _: forms, lambda _: None, FULL)

    assert missing == ()
    assert {impl: (other.timing.us, other.notes) for impl, other in found.items()} == {
        "fa3": (10.0, ("fast",)), "fa2": (10.0, ("fast",)), "cudnn": (10.0, ("without lse", "fast")),
        "flashinfer": (10.0, ("without lse", "fast")),
    }  # fmt: skip


# PyTorch


class Tensor(np.ndarray):
    """What the bench asks of a tensor."""

    def view(self, *shape):
        return super().view(*shape) if isinstance(shape[0], type | np.dtype) else self.reshape(shape)

    def unsqueeze(self, axis):
        return np.expand_dims(self, axis)

    def transpose(self, a, b):
        return np.swapaxes(self, a, b)

    def contiguous(self):
        return np.ascontiguousarray(self).view(Tensor)


def naive(q, k, v):
    """Attend from (heads, rows, dim) to (kv_heads, keys, dim)."""
    k, v = (np.repeat(x.astype(np.float64), len(q) // len(k), axis=0) for x in (k, v))
    scores = q.astype(np.float64) @ np.swapaxes(k, 1, 2) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights @ v / weights.sum(axis=-1, keepdims=True)


@pytest.fixture
def torch(numpy_for_cupy, monkeypatch):
    """PyTorch with attention in NumPy, and what it was called with."""
    backends = []

    def sdpa(q, k, v, *, enable_gqa=False):
        assert enable_gqa == (q.shape[1] != k.shape[1])
        return np.stack([naive(*x) for x in zip(q, k, v, strict=True)]).astype(q.dtype).view(Tensor)

    def kvcache(q, k, v, *, cache_seqlens, causal, num_splits, pack_gqa):
        assert cache_seqlens.tolist() == [k.shape[1]] * len(k)
        assert (causal, num_splits, q.shape[1]) == (True, 0, 1)
        backends.append(pack_gqa)
        out = sdpa(*(np.swapaxes(x, 1, 2) for x in (q, k, v)), enable_gqa=True)
        return np.swapaxes(out, 1, 2), None

    modules = {
        "torch.nn.attention": SimpleNamespace(
            SDPBackend=SimpleNamespace(FLASH_ATTENTION="flash", CUDNN_ATTENTION="cudnn"),
            sdpa_kernel=lambda backend: backends.append(backend) or nullcontext(),
        ),
        "flash_attn_interface": SimpleNamespace(flash_attn_with_kvcache=kvcache),
    }
    monkeypatch.setattr(peers, "import_module", modules.__getitem__)
    numpy_for_cupy.cuda.get_current_stream = lambda: SimpleNamespace(ptr=0)
    cuda = SimpleNamespace(
        set_device=lambda _: None, default_stream=lambda: 0, stream=lambda _: nullcontext(), empty_cache=lambda: None
    )
    module = SimpleNamespace(
        cuda=cuda, inference_mode=nullcontext, from_dlpack=lambda x: x.view(Tensor), float16=np.float16,
        bfloat16=np.dtype(ml_dtypes.bfloat16), int16=np.int16,
        nn=SimpleNamespace(functional=SimpleNamespace(scaled_dot_product_attention=sdpa)),
    )  # fmt: skip
    return SimpleNamespace(peer=peers.Torch(module), backends=backends)


@pytest.mark.parametrize("dtype", list(cases.DTYPES))
def test_each_form_of_each_peer_gives_what_decode_gives(torch, dtype):
    arrays = inputs.DecodeInputs(DecodeCase(2, 40, 6, 2, 64, dtype), 2)
    expected = arrays.expected()
    q, k, v, kv_len = arrays.arguments()[0]

    # FlashInfer has tests of its own.
    forms = {impl: torch.peer.decode(impl, q, k, v, kv_len) for impl in ("fa3", *peers.BACKENDS)}
    for calls in forms.values():
        for call in calls.values():
            expected.check(torch.peer.result(call(), arrays.case.q_shape, cases.DTYPES[dtype]))

    assert {impl: list(calls) for impl, calls in forms.items()} == {
        "fa3": ["pack_gqa=True", "pack_gqa=None"], "fa2": ["packed"], "cudnn": ["packed", "enable_gqa"]
    }  # fmt: skip
    assert torch.backends == [True, None, "flash", "cudnn", "cudnn"]


# Graphs


class FakeEvent:
    def record(self, stream):
        self.at = stream.now

    def synchronize(self):
        pass


@pytest.mark.parametrize(("gpu_us", "host_us", "graphs"), [(6.0, 120.0, [9, 167]), (50.0, 10.0, [20])])
def test_a_graph_is_made_anew_where_python_was_slower_than_the_calls(monkeypatch, gpu_us, host_us, graphs):
    stream = type("Stream", (nullcontext,), {})()
    stream.now, stream.synchronize, made, capturing = 0.0, lambda: None, [], []

    def call():
        if capturing:
            made[-1] += 1
        else:
            stream.now += max(gpu_us, host_us)

    def capture(_, work):
        made.append(0)
        capturing.append(True)
        work()
        capturing.clear()

        def launch(on, calls=made[-1]):
            on.now += gpu_us * calls

        return SimpleNamespace(launch=launch)

    cuda = SimpleNamespace(
        Stream=lambda **_: stream, MemoryPool=lambda: SimpleNamespace(malloc=None, free_all_blocks=lambda: None),
        Event=FakeEvent, Device=lambda: SimpleNamespace(id=0, synchronize=lambda: None),
        using_allocator=lambda _: nullcontext(), get_elapsed_time=lambda start, stop: (stop.at - start.at) / 1e3,
    )  # fmt: skip
    monkeypatch.setattr(_arrays, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
    clock = SimpleNamespace(mark=lambda _: None, read=lambda _: None)
    monkeypatch.setattr(timing.sm_clock, "of_device", lambda _: clock)

    replay = timing.Replay([call], 1000.0, capture)

    assert made == graphs
    assert replay.num_calls == graphs[-1]
    assert replay.measure() == pytest.approx(gpu_us)


# What is written of rows


def save(folder, lines, **env):
    path = folder / "h200-2026-01-02-decode.json"
    path.write_text(json.dumps({"env": {**ENV, **env}, "rows": [line.as_dict() for line in lines]}))
    return path


def test_readme_and_rivals_are_written_from_a_run(dry_run, tmp_path):
    dry = dry_run(torch=FakeTorch(broken=("fa2", "flashinfer")), peers_are="PyTorch 2.11.0")
    decode.measure(dry)
    us = {"cuattn": 20.0, "fa3": 18.04, "cudnn": 30.0}
    lines = [replace(line, us=us.get(line.impl, line.us)) for line in dry.rows]
    lines = [replace(line, us=21.0) if "balance" in line.notes or line.seqlen_q > 1 else line for line in lines]
    text, page = tmp_path / "README.md", tmp_path / "page.md"
    text.write_text("<!-- bench:decode -->\n<!-- /bench -->\n")
    page.write_text("<!-- bench:rivals -->\nold\n<!-- /bench -->\n")
    save(tmp_path, lines, peers="PyTorch 2.11.0")

    readme.write(text, tmp_path)
    rivals.write(page, tmp_path)

    written = text.read_text()
    for line in (
        "| 4/2 | 64 | 2 | 40 | 20.0 | 0.00 | 25% | 18.0 | 30.0 | - |",
        "- 4/2 heads of 64, 2 x 40 keys: 4 query tokens take 1.05 times as long as one.",
        "- 4/2 heads of 64, 1 x 40 keys: 20.0 us, `split_size=64` 20.0.",
        "- 4/2 heads of 64, 3 x 70 keys, lengths 3 to 70, 106 in all: 20.0 us, `balance=True` 21.0, the read roof 5.0.",
    ):
        assert line in written.splitlines()
    assert "FlashAttention-3, and cuDNN (without lse)" in written
    assert written.count("| 4/2 |") == 2
    told = page.read_text()
    assert "Of 4 pairs of a case of decode and a rival, the rival's median is the lower one in 2:" in told
    assert "| decode | 4/2 | 64 | bf16 | full | 2 x 40 | FlashAttention-3 | 18.0 | 20.0 |" in told
    assert "old" not in told


def test_rows_of_special_calls_are_cases_of_their_own(dry_run):
    dry = dry_run(torch=FakeTorch())
    decode.measure(dry)

    (found,) = rows.cases([line.as_dict() for line in dry.rows])

    assert len(found) == len(dry.rows)
    assert not any(part.startswith("tile") for case in found for part in case if isinstance(part, str))


def test_variants_say_what_they_are():
    assert str(Variant()) == "default"
    assert str(Variant(num_splits=3, tile=None)) == "3 splits"
    assert str(Variant(split_size=64)) == "split_size 64"
    assert Variant(balance=True).notes == ("balance",)


def test_full_measures_every_topic_of_the_readme(monkeypatch, capsys):
    seen = []

    def measured(options):
        seen.append((options.command, options.quick))
        return int(options.command == "fp8")

    monkeypatch.setattr(command, "measured", measured)
    assert command.main(["full", "--quick"]) == 1
    assert seen == [("decode", True), ("tbq4", True), ("fp8", True), ("prefill", True)]
    assert "everything took" in capsys.readouterr().out
