"""Exact attention for NVIDIA GPUs without a deep-learning framework."""

from . import reference
from ._decode import decode, plan_decode
from ._merge import merge
from ._nvrtc import CompileError
from ._plan import DecodePlan, Device
from ._version import __version__

__all__ = ["CompileError", "DecodePlan", "Device", "__version__", "decode", "merge", "plan_decode", "reference"]
