"""What a plan needs to know of a GPU, and one GPU of each supported architecture."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """What a plan needs to know of a GPU.

    Attributes
    ----------
    name : str
        For messages.
    arch : str
        NVRTC architecture, such as ``"sm_90a"``.
    num_sms : int
        Multiprocessors.
    smem_per_block : int
        Bytes of dynamic shared memory that one block may ask for.
    smem_per_sm : int
        Bytes of shared memory of a multiprocessor; every block also takes 1024 bytes of it.
    bandwidth : float
        Bytes per second of device memory, 0 if unknown; for the roof that a plan prints.
    l2_bytes : int
        Bytes of the L2 cache, 0 if unknown.
    """

    name: str
    arch: str
    num_sms: int
    smem_per_block: int
    smem_per_sm: int
    bandwidth: float = 0.0
    l2_bytes: int = 0


KIB = 1024
_MIB = 1024 * KIB
# One GPU per supported architecture, for plans without a GPU at hand and for the compile tests. Shared memory: CUDA
# programming guide, technical specifications per compute capability; bandwidth and L2: NVIDIA data sheets.
DEVICES = {
    "sm_80": Device("NVIDIA A100", "sm_80", 108, 163 * KIB, 164 * KIB, 2.039e12, 40 * _MIB),
    "sm_86": Device("NVIDIA A40", "sm_86", 84, 99 * KIB, 100 * KIB, 0.696e12, 6 * _MIB),
    "sm_89": Device("NVIDIA L40S", "sm_89", 142, 99 * KIB, 100 * KIB, 0.864e12, 96 * _MIB),
    "sm_90a": Device("NVIDIA H200", "sm_90a", 132, 227 * KIB, 228 * KIB, 4.8e12, 50 * _MIB),
    "sm_100a": Device("NVIDIA B200", "sm_100a", 148, 227 * KIB, 228 * KIB, 8.0e12, 126 * _MIB),
    "sm_120a": Device("NVIDIA RTX PRO 6000", "sm_120a", 188, 99 * KIB, 100 * KIB, 1.792e12, 128 * _MIB),
}


_FIRST_SPECIFIC_ARCH = 9


def arch_of(major: int, minor: int) -> str:
    """NVRTC architecture of a compute capability; from 9.0 on the one with the chip's own instructions."""
    return f"sm_{major}{minor}{'a' if major >= _FIRST_SPECIFIC_ARCH else ''}"
