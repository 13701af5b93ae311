"""Element types, cache formats and kinds of partial results: the enums that the prelude names."""

from __future__ import annotations

from enum import Enum


class Dtype(Enum):
    """Element type; the value is the name that NumPy and ml_dtypes use."""

    FP16 = "float16"
    BF16 = "bfloat16"
    FP32 = "float32"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is Dtype.FP32 else 2


class KvFormat(Enum):
    """Format of a KV cache, one policy each in ``cuda_src/kv``."""

    RAW16 = "raw16"
    RAW32 = "raw32"
    TBQ4 = "tbq4"
    FP8 = "fp8"


class Parts(Enum):
    """What comes with a partial result, see ``cuda_src/common/types.cuh``."""

    LSE = "lse"
    STATE = "state"


def formats_of(dtype: Dtype) -> tuple[KvFormat, ...]:
    """Return the formats that K and V may have, each by itself, beside queries of a dtype, in every kernel."""
    return (KvFormat.RAW32,) if dtype is Dtype.FP32 else (KvFormat.RAW16, KvFormat.TBQ4)


def decode_formats_of(dtype: Dtype) -> tuple[KvFormat, ...]:
    """Return the same of decode, which has one more."""
    return formats_of(dtype) if dtype is Dtype.FP32 else (*formats_of(dtype), KvFormat.FP8)
