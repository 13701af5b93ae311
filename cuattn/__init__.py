"""Exact attention for NVIDIA GPUs without a deep-learning framework."""

from . import reference
from ._append import append
from ._decode import decode, plan_decode
from ._fp8 import Fp8Array, quantize_fp8
from ._merge import merge
from ._nvrtc import CompileError
from ._plan import DecodePlan, Device, PrefillPlan, TiledPrefillPlan
from ._prefill import plan_prefill, prefill
from ._quantize import Tbq4Array, channel_mean, dequantize, quantize
from ._version import __version__

__all__ = [
    "CompileError",
    "DecodePlan",
    "Device",
    "Fp8Array",
    "PrefillPlan",
    "Tbq4Array",
    "TiledPrefillPlan",
    "__version__",
    "append",
    "channel_mean",
    "decode",
    "dequantize",
    "merge",
    "plan_decode",
    "plan_prefill",
    "prefill",
    "quantize",
    "quantize_fp8",
    "reference",
]
