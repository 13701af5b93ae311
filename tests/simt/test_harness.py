"""The harness itself: it computes what NumPy computes, and it reports what is wrong in a kernel."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from simt import cases, harness, numpy_cases

SEEDS = range(4)
MISUSE = {
    "divergent_barrier": r"__syncthreads: other threads .* wait at misuse.cu:(9|11) .*, misuse.cu:(9|11)\]",
    "early_return": r"deadlock: 1 of 64 threads finished; thread \d+ waits at misuse.cu:16, __syncthreads \(63/64\)",
    "barrier_sizes": r"bar.* barrier 3 is for (64|96) threads here, for (64|96) at misuse.cu",
    "divergent_shuffle": r"deadlock: 32 of 64 threads finished; .* misuse.cu:26, __shfl_sync \(16/32\)",
    "unnamed_lane": r"__shfl_sync: mask 7fffffff does not name lane 31, which calls",
    "unnamed_source": r"__shfl_sync: reads lane 20, which mask 0000ffff does not name",
    "poll_forever": r"deadlock: 0 of 64 threads finished; thread 0 waits at .*, polling",
    "copy_past_the_end": r"cp.async: shared memory \+1024..\+1040 is outside of its 1024 bytes",
    "copy_past_the_array": r"cp.async: the 16 bytes at .* are outside of the memory given to launch",
    "load_past_the_array": r"ld.global.v4: the 16 bytes at .* are outside of the memory given to launch",
    "crooked_copy": r"cp.async: the address is not a multiple of 16",
    "crooked_target": r"cp.async: the address is not a multiple of 8",
    "crooked_source": r"cp.async: the address is not a multiple of 8",
    "small_copy_past_the_array": r"cp.async: the 4 bytes at .* are outside of the memory given to launch",
    "crooked_ldmatrix": r"ldmatrix: the address is not a multiple of 16",
    "lone_copy": r"the block ended with 1 TMA or bulk copies in flight",
    "uninitialized_mbarrier": r"mbarrier at shared memory \+0: not initialized",
    "arrivals": r"mbarrier at shared memory \+0: more arrivals than its count",
    "half_a_warpgroup": r"wgmma: the warpgroup has fewer than 128 threads",
    "trap": r"__trap\(\) \[block \(0,0,0\), thread \d+, misuse.cu:\d+\]",
}
STORE = "store_past_the_end"  # AddressSanitizer ends the process before the harness can report


class Cpu:
    """The backend of the harness."""

    def __init__(self, module, seed=0):
        self.module = module
        self.seed = seed

    def upload(self, array):
        return array.copy()

    def address(self, array):
        return array.ctypes.data

    def tensor_map(self, array, box, swizzle):
        return self.module.tensor_map(array, box, swizzle)

    def launch(self, case, args):
        self.module.launch(case.kernel, case.grid, case.block, args, smem=case.smem, seed=self.seed)

    def download(self, array):
        return array


@cache
def module(source, patches=()):
    s = cases.SOURCES[source]
    return harness.build(s.path, kernels=s.kernels, prelude=s.prelude, patches=patches)


@cache
def cases_of(source):
    return [case for case in numpy_cases.all_cases() if case.source == source]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("source", cases.SOURCES)
def test_every_kernel_gives_what_numpy_gives(source, seed):
    for case in cases_of(source):
        cases.check(case, cases.run(case, Cpu(module(source), seed)))


# ---- reports -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def misuse():
    return harness.build(cases.KERNELS / "misuse.cu", kernels=[*MISUSE, STORE])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", MISUSE)
def test_a_misuse_is_reported_with_its_place(misuse, kernel, seed):
    with pytest.raises(harness.KernelError, match=f"^{kernel}: {MISUSE[kernel]}"):
        misuse.launch(kernel, 1, 64, (np.zeros(64, np.int32),), smem=1024, seed=seed, memory=[])


@pytest.mark.skipif(harness.SANITIZE, reason="AddressSanitizer ends the process at once")
def test_a_plain_store_past_the_end_of_shared_memory_is_found_when_the_block_ends(misuse):
    with pytest.raises(harness.KernelError, match="a store past the 1024 bytes of shared memory"):
        misuse.launch(STORE, 1, 64, (np.zeros(64, np.int32),), smem=1024)


def test_a_tensor_copy_must_begin_at_16_bytes_as_on_an_h200():
    case = next(c for c in numpy_cases.copy_cases() if c.kernel == "tma_2d")
    case.args[-1]["x"] = 4
    with pytest.raises(harness.KernelError, match="tma_load_2d: coordinate 4 is not a multiple of 16 bytes"):
        cases.run(case, Cpu(module("sm90_ops")))


def test_a_failed_launch_leaves_nothing_behind(misuse):
    x = np.zeros(64, np.int32)
    for _ in range(2):
        with pytest.raises(harness.KernelError, match="__trap"):
            misuse.launch("trap", 1, 64, (x,))
    case = numpy_cases.stream_case()
    cases.check(case, cases.run(case, Cpu(module("stream_mma"))))


# ---- planted faults ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Replacements in a kernel, and what comes of them: a report, or also a wrong result if none is named."""

    source: str
    replacements: tuple[tuple[str, str], ...]
    report: str | None = None

    @property
    def patches(self):
        return tuple((cases.SOURCES[self.source].file, *replacement) for replacement in self.replacements)


def stream(old, new, report=None):
    return Fault("stream_mma", ((old, new),), report)


def attention(old, new, report=None):
    return Fault("attention_f16", ((old, new),), report)


FREE, VISIBLE = (f"__syncthreads();  // {x}" for x in ("every warp is done", "the tile is visible"))
MMA = "ptx::mma_m16n8k16<Half>(acc, a_frag[kb],"
SECOND_BATCH = "\n#pragma unroll\n    for (int kb = 0; kb < cfg::TILE"
PROBS = "u32 probs[cfg::TILE_KV / 16][4];"
RELEASE = "if (lane == 0) ptx::mbarrier_arrive(&sm.empty[stage]);"
FULL = "ptx::mbarrier_wait(&sm.full[stage], phase"
FAULTS = {
    "no cp.async wait": stream("ptx::cp_async_wait<1>();", ""),
    "cp.async wait too weak": stream("ptx::cp_async_wait<1>();", "ptx::cp_async_wait<2>();"),
    "no barrier before a refill": stream(FREE, f"//{FREE}"),
    "no barrier before a read": stream(VISIBLE, f"//{VISIBLE}"),
    "divergent barrier": stream(VISIBLE, f"if (warp < 2) {VISIBLE}", "__syncthreads: other threads"),
    "divergent mma": stream(MMA, f"if (t == 0) {MMA}", r"deadlock: .* stream_mma.cu:\d+, mma \(8/32\)"),
    "no wgmma wait": attention("ptx::wgmma_wait<0>();\n#pragma", "\n#pragma"),
    "no wgmma fence": attention(f"ptx::wgmma_fence();{SECOND_BATCH}", SECOND_BATCH, "wgmma: a batch begins with"),
    "stage released before the wgmma": Fault("attention_f16", ((RELEASE, ""), (PROBS, f"{RELEASE}\n{PROBS}"))),
    "stage released before the wait": attention(
        f"ptx::wgmma_wait<0>();\n    {RELEASE}", f"{RELEASE}\n    ptx::wgmma_wait<0>();",
        "wgmma: an operand .* was overwritten before the wait",
    ),
    "every lane releases": attention("if (lane == 0) ptx::mbarrier_arrive", "ptx::mbarrier_arrive"),
    "wrong parity": attention(FULL, f"{FULL} ^ 1"),
    "too few bytes expected": attention("2 * TILE_BYTES", "TILE_BYTES", "too few bytes were expected"),
    "too many bytes expected": attention("2 * TILE_BYTES", "3 * TILE_BYTES", "deadlock: .*mbarrier, parity"),
    "wrong sbo": attention("sm.k[stage][c] + k, 16, GROUP_BYTES", "sm.k[stage][c] + k, 16, GROUP_BYTES / 2"),
    "wrong swizzle": attention("k_desc = ptx::smem_desc<128>", "k_desc = ptx::smem_desc<64>"),
}  # fmt: skip


def case_of(source):
    return numpy_cases.stream_case() if source == "stream_mma" else numpy_cases.attention_case(source, 1, 500)


@pytest.fixture(scope="module")
def faulty():
    """Every faulty build, by name; they compile beside each other."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(FAULTS, pool.map(lambda f: module(f.source, f.patches), FAULTS.values()), strict=True))


def test_launches_leave_no_mapping_behind(tmp_path):
    """A process has room for some 65,000, of which guard pages of stacks take two a thread."""
    source = tmp_path / "threads.cu"
    source.write_text('extern "C" __global__ void threads(int* out) { out[threadIdx.x] = threadIdx.x; }\n')
    built, out = harness.build(source, kernels=["threads"]), np.zeros(512, np.int32)
    maps = Path("/proc/self/maps")
    before = len(maps.read_text().splitlines())
    built.launch("threads", 1, 512, (out,))
    assert len(maps.read_text().splitlines()) < before + 512
    assert np.array_equal(out, np.arange(512))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen_under_every_seed(faulty, fault, seed):
    case, report = case_of(FAULTS[fault].source), FAULTS[fault].report
    with pytest.raises(harness.KernelError if report else (harness.KernelError, AssertionError), match=report):
        cases.check(case, cases.run(case, Cpu(faulty[fault], seed)))


@pytest.mark.parametrize("source", ["stream_mma", "attention_f16"])
def test_too_little_shared_memory_is_reported(source):
    case = case_of(source)
    with pytest.raises(harness.KernelError, match=r"shared memory \+\d+..\+\d+ is outside of its \d+ bytes"):
        cases.run(replace(case, smem=case.smem - 32), Cpu(module(source)))


# ---- the Python side ---------------------------------------------------------------------------------------------


def test_arguments_must_fit_the_kernel(misuse):
    with pytest.raises(harness.KernelError, match="takes 1 arguments, got 2"):
        misuse.launch("trap", 1, 64, (np.zeros(1), np.int32(1)))
    with pytest.raises(harness.KernelError, match="argument 0 has 8 bytes in the kernel, got 4"):
        misuse.launch("trap", 1, 64, (np.int32(1),))
    with pytest.raises(harness.KernelError, match="no such kernel"):
        misuse.launch("trapp", 1, 64, ())
    with pytest.raises(TypeError, match="got int"):
        misuse.launch("trap", 1, 64, (1,))


@pytest.mark.parametrize(("old", "count"), [("no such text", 0), ("const", 2)])
def test_a_patch_must_match_once(old, count):
    with pytest.raises(ValueError, match="once, found") as caught:
        module("stream_mma", (("stream_mma.cu", old, "x"),))
    assert int(str(caught.value).rsplit(maxsplit=1)[1]) >= count
    with pytest.raises(ValueError, match=r"merge\.cu is not part of stream_mma\.cu"):
        module("stream_mma", (("merge.cu", "a", "b"),))


def test_what_the_compiler_says_is_in_the_error(tmp_path):
    source = tmp_path / "broken.cu"
    source.write_text('extern "C" __global__ void broken() { int unused; }\n')
    with pytest.raises(harness.KernelError, match=r"broken\.cu:1:.*unused"):
        harness.build(source, kernels=["broken"])


def test_blocks_run_in_the_order_of_the_seed(tmp_path):
    source = tmp_path / "order.cu"
    source.write_text(
        '#include "common/types.cuh"\n'
        'extern "C" __global__ void order(int* next, int* out) {\n'
        "  out[atomicAdd(next, 1)] = blockIdx.y * gridDim.x + blockIdx.x;\n}\n"
    )
    built = harness.build(source, kernels=["order"])
    orders = []
    for seed in SEEDS:
        out = np.full(12, -1, np.int32)
        built.launch("order", (4, 3), 1, (np.zeros(1, np.int32), out), seed=seed)
        orders.append(out.tolist())
    assert orders[0] == list(range(12))
    assert orders[1] == orders[0][::-1]
    assert sorted(orders[2]) == sorted(orders[3]) == orders[0]
    assert orders[2] not in (orders[0], orders[1], orders[3])


@pytest.mark.parametrize("name", ["ptx", "ptx_sm90"])
def test_the_cpu_offers_the_functions_of_the_device(name):
    """Definitions of namespace ptx: a name before a parenthesis, at the start of a line but for specifiers."""

    def functions(path):
        text = path.read_text().split("namespace ptx {")[1]
        text = re.sub(r"//.*|\bPlace at.*?(?=\) \{)", "", text)
        head = r"^(?:__device__ |__forceinline__ |inline )*(?:void|bool|u8\*|u32|u64|float|uint2|uint4) (\w+)"
        return set(re.findall(head, text, re.MULTILINE))

    device = functions(harness.CUDA_SRC / f"common/{name}.cuh")
    assert device == functions(harness.HERE / f"{name}.h")
    assert {"ptx": "prmt", "ptx_sm90": "wgmma_rs"}[name] in device


# ---- sanitizers --------------------------------------------------------------------------------------------------


def has_libasan():
    find = [harness.CXX, "-print-file-name=libasan.so"]  # the bare name if there is none
    return Path(subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip()).is_absolute()


needs_libasan = pytest.mark.skipif(not has_libasan(), reason="the compiler has no libasan")


@needs_libasan
@pytest.mark.skipif(harness.SANITIZE, reason="it is this run")
def test_the_kernels_are_clean_under_the_sanitizers():
    selection = "every_kernel and (warp_ops or stream or attention_f16)"
    run = harness.run_with_sanitizers(["-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", selection])
    assert run.returncode == 0, run.stdout + run.stderr
    assert "12 passed" in run.stdout


@needs_libasan
@pytest.mark.parametrize(("rows", "report"), [(56, ""), (55, "heap-buffer-overflow.*READ of size 16.*stream_mma.cu")])
def test_a_read_past_an_array_is_found_by_address_sanitizer(rows, report):
    script = f"""
import numpy as np
from simt import cases, harness
a, b, c = np.zeros((64, 64), np.float16), np.zeros(({rows}, 64), np.float16), np.zeros((64, 56), np.float32)
s = cases.SOURCES["stream_mma"]
harness.build(s.path, kernels=s.kernels).launch("stream_mma", 1, 128, (a, b, c, np.int32(7)), smem=2048)
"""
    path = f"import sys; sys.path[:0] = {[str(harness.HERE.parent), *sys.path]!r}"
    run = harness.run_with_sanitizers(["-c", path + script])
    assert bool(run.returncode) == bool(report), run.stderr
    assert re.search(report, run.stderr, re.DOTALL)
