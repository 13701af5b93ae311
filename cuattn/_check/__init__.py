"""Argument checks and their messages; the only package that raises for bad arguments. Writes nothing."""

from cuattn._check.append import AppendCall, AppendSide, append
from cuattn._check.arguments import device, flag
from cuattn._check.cache import taken
from cuattn._check.decode import DecodeCall, decode, workspace_of
from cuattn._check.fp8 import fp8_parts, quantize_fp8
from cuattn._check.lengths import lengths_of
from cuattn._check.merge import merge
from cuattn._check.prefill import PrefillCall, prefill
from cuattn._check.tbq4 import channel_mean, planes, quantize, result_dtype

__all__ = [
    "AppendCall", "AppendSide", "DecodeCall", "PrefillCall", "append", "channel_mean", "decode", "device", "flag",
    "fp8_parts", "lengths_of", "merge", "planes", "prefill", "quantize", "quantize_fp8", "result_dtype", "taken",
    "workspace_of",
]  # fmt: skip
