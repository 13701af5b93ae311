"""The NumPy definition of every function of cuattn: same names, same arguments, float64 unless told otherwise.

Slow and obvious on purpose. What a kernel computes is right when it agrees with this package within the error law.
"""

from cuattn.reference.append import append
from cuattn.reference.attention import attention, decode, prefill, visible_keys
from cuattn.reference.fp8 import QuantizedFp8, dequantize_fp8, quantize_fp8
from cuattn.reference.merge import SoftmaxState, finish, merge, online_softmax, update
from cuattn.reference.products import tensor_core
from cuattn.reference.same_precision import attention_same_precision, decode_same_precision
from cuattn.reference.tbq4 import Quantized, dequantize, quantize, rotate, unrotate

__all__ = [
    "Quantized",
    "QuantizedFp8",
    "SoftmaxState",
    "append",
    "attention",
    "attention_same_precision",
    "decode",
    "decode_same_precision",
    "dequantize",
    "dequantize_fp8",
    "finish",
    "merge",
    "online_softmax",
    "prefill",
    "quantize",
    "quantize_fp8",
    "rotate",
    "tensor_core",
    "unrotate",
    "update",
    "visible_keys",
]
