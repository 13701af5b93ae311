"""Shipped configs through NVRTC for every architecture: no spill, no stack, and the static_asserts hold."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from cuattn import _jit, _nvrtc, _plan
from cuattn._plan.codec import MIN_MEAN_BLOCKS

# NVRTC leaves the interpreter lock while it compiles.
WORKERS = 2
# What CI compiles of decode with fp8: a head_dim with conversions by an instruction, and one without.
FP8_IN_CI = {"sm_90a": 256, "sm_86": 128}
# The head_dim of which CI compiles K and V in different formats.
MIXED_IN_CI = 128
# The head_dims of CI where not all are compiled: the ends, and of the large tiles the most frequent.
ENDS = (_plan.HEAD_DIMS[0], _plan.HEAD_DIMS[-1])
DIMS_IN_CI = {"sm_80": (*ENDS, 128), "sm_86": ENDS, "sm_89": ENDS, "sm_100a": ENDS, "sm_120a": ENDS}
# Far from any limit of registers.
SHORT = {"append", "dequantize", "quantize"}


def is_tried(config, arch):
    """Whether a config is to be compiled in this run: a run by hand compiles all, CI some that stand for others."""
    if os.environ.get("HYPOTHESIS_PROFILE") != "ci":
        return True
    fp8 = _plan.KvFormat.FP8
    if config.kernel == "decode" and fp8 in (config.k_format, config.v_format):
        return (config.k_format, config.row_tiles, config.head_dim) == (fp8, 1, FP8_IN_CI.get(arch))
    mixed = hasattr(config, "k_format") and config.k_format is not config.v_format
    if config.kernel == "prefill_sm90":
        # Neither pages nor softcap, or both; of mixed formats those with pages.
        return config.paged if mixed else config.uses_tbq4 or config.paged is config.softcap
    if mixed and config.head_dim != MIXED_IN_CI:
        return False
    return config.head_dim in (ENDS if config.kernel in SHORT else DIMS_IN_CI.get(arch, _plan.HEAD_DIMS))


def unique(device):
    """For an H200 every config of the short kernels, and of the long ones those that differ in more than a conversion.

    For other GPUs those that differ in more than that, the length of a loop, or the size of a table. What is far from
    any limit of registers, merge, append and dequantize, is left to the oldest of them, and its head_dims to the ends.
    """
    configs = [c for c in dict.fromkeys(_plan.shipped_configs(device)) if is_tried(c, device.arch)]
    fp16, fp32 = _plan.Dtype.FP16, _plan.Dtype.FP32
    if device.arch == "sm_90a":
        # One of each kernel with float16 shows that its conversions compile.
        dims = (_plan.HEAD_DIMS[0], _plan.HEAD_DIMS[-1])
        long = {"decode", "prefill_mma", "prefill_sm90"}
        configs = [c for c in configs if c.kernel not in long or c.dtype is not fp16 or c.head_dim in dims]
        configs = [
            c for c in configs if c.kernel != "prefill_sm90" or c.dtype is not fp16 or not (c.paged or c.softcap)
        ]
        return [c for c in configs if c.kernel != "merge" or c.head_dim in dims]
    if device.arch != "sm_80":
        configs = [c for c in configs if c.kernel in {"decode", "prefill_mma", "quantize"}]
    # Tiles and registers are those of sm_86 and of sm_90a: kernels in 16 bits show it.
    if device.arch in {"sm_89", "sm_100a"}:
        configs = [c for c in configs if c.kernel != "quantize" and c.dtype is not fp32]
    # With a larger table of means fewer CTAs share the registers.
    alike = {
        "decode": lambda c: c.dtype is fp16 or c.k_format is not c.v_format,
        "merge": lambda c: (
            fp16 in (c.in_dtype, c.out_dtype) or c.head_dim not in (_plan.HEAD_DIMS[0], _plan.HEAD_DIMS[-1])
        ),
        "prefill_mma": lambda c: c.dtype is fp16 or c.k_format is not c.v_format,
        "append": lambda c: c.dtype is fp16 or c.k_format is not c.v_format,
        "quantize": lambda c: c.dtype is fp16 or c.mean_blocks > MIN_MEAN_BLOCKS,
        "dequantize": lambda c: c.dtype is fp16,
    }
    return [c for c in configs if not alike[c.kernel](c)]


@pytest.mark.parametrize("arch", list(_plan.DEVICES))
def test_every_config_compiles_without_spills_or_stack(arch):
    device = _plan.DEVICES[arch]

    def resources(config):
        text = _jit.source(config)
        return config, _nvrtc.compile_cubin(text, name=f"{config.kernel}.config.cu", arch=arch, include=_jit.CUDA_SRC)

    with ThreadPoolExecutor(WORKERS) as pool:
        results = list(pool.map(resources, unique(device)))
    for config, result in results:
        report = result.report
        assert report.registers > 0, result.log
        assert report.spill_bytes == 0, (config, report)
        assert report.stack_bytes == 0, (config, report)
        assert report.smem_bytes == 0, (config, report)
        # CTAs that the plan counts on fit an SM together; registers are allocated in units of 8 a thread.
        threads = config.num_warps * _plan.WARP
        assert _plan.align(report.registers, 8) * threads * config.ctas_per_sm <= _plan.REGISTERS_PER_SM, (
            config,
            report,
        )
        assert "warning" not in result.log, result.log
        assert "serialized" not in result.log, result.log  # wgmma, where registers in flight are touched


def test_a_wrong_shared_memory_sum_stops_the_compiler():
    config = _plan.MergeConfig(_plan.Dtype.FP32, _plan.Dtype.FP16, 64)
    text = _jit.source(config).replace(f"SMEM_BYTES = {config.smem_bytes}", f"SMEM_BYTES = {config.smem_bytes + 4}")
    with pytest.raises(_nvrtc.CompileError, match="disagree on shared memory") as caught:
        _nvrtc.compile_cubin(text, name="merge", arch="sm_90a", include=_jit.CUDA_SRC, config=repr(config))
    assert repr(config) in str(caught.value)
    assert caught.value.kernel == "merge"


def test_headers_of_the_chips_own_instructions_compile():
    text = '#include "common/ptx_sm90.cuh"\nextern "C" __global__ void empty() {}\n'
    result = _nvrtc.compile_cubin(text, name="empty", arch="sm_90a", include=_jit.CUDA_SRC)
    assert result.cubin[:4] == b"\x7fELF"
