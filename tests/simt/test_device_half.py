"""The kernels of the harness for the device: NVRTC takes them. Whether a GPU agrees is for tests/gpu."""

import pytest
from simt import cases, harness

from cuattn import _nvrtc

BUILDS = [(name, arch) for name, s in cases.SOURCES.items() for arch in dict.fromkeys((s.arch, "sm_90a"))]


@pytest.mark.parametrize(("source", "arch"), BUILDS)
def test_the_kernels_compile_for_the_device_without_a_warning_or_a_spill(source, arch):
    s = cases.SOURCES[source]

    compiled = _nvrtc.compile_cubin(s.text, name=s.file, arch=arch, include=harness.CUDA_SRC)

    assert "warning" not in compiled.log.lower(), compiled.log
    assert "wgmma" not in compiled.log.replace("wgmma_", ""), "ptxas serialized wgmma: " + compiled.log
    assert compiled.report.spill_bytes == 0, compiled.log
