"""Peers in the same run: FlashAttention-2 and cuDNN as PyTorch has them, FlashAttention-3, and products by cuBLAS."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import packages_distributions, version
from typing import TYPE_CHECKING, Any

import numpy as np

from cuattn import _arrays

if TYPE_CHECKING:
    from collections.abc import Callable

    from cuattn._arrays import Array

    from .timing import Capture

# Names in records, and those of PyTorch's ``SDPBackend``.
BACKENDS = {"fa2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
# FlashAttention-3 is a package of its own; any wheel of it has this module.
FA3 = "flash_attn_interface"
IMPLS = ("fa3", *BACKENDS)
# What a reader of their times must know: called for inference, cuDNN writes no lse, and FlashAttention always does.
NOTES = {"fa3": (), "fa2": (), "cudnn": ("without lse",)}


@dataclass(frozen=True, slots=True)
class Queued:
    """In place of a graph, for calls that cannot be captured: makes them anew, so that Python must be ahead."""

    work: Callable[[], object]

    @classmethod
    def of(cls, _stream: object, work: Callable[[], object]) -> Queued:
        """Take work as `timing.graph_of` does."""
        return cls(work)

    def launch(self, _stream: object) -> None:
        """Make the calls on the current stream."""
        self.work()


class Torch:
    """PyTorch on the current device and on CuPy's current stream; arrays are those of CuPy.

    Parameters
    ----------
    torch : module
    """

    def __init__(self, torch: Any) -> None:  # noqa: ANN401  the module
        self._torch = torch
        torch.cuda.set_device(_arrays.import_cupy().cuda.Device().id)

    def __str__(self) -> str:
        cudnn = self._torch.backends.cudnn.version() or 0
        # 9.19.0 is 91900.
        found = f"PyTorch {self._torch.__version__}, cuDNN {cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
        return ", ".join((found, *(f"{name} {version(name)}" for name in packages_distributions().get(FA3, ()))))

    def _stream(self, pointer: int) -> Any:  # noqa: ANN401
        # To `ExternalStream` a null pointer is no stream, and gives a new one.
        return self._torch.cuda.ExternalStream(pointer) if pointer else self._torch.cuda.default_stream()

    def _on_current_stream(self) -> Any:  # noqa: ANN401
        return self._torch.cuda.stream(self._stream(_arrays.import_cupy().cuda.get_current_stream().ptr))

    def tensor(self, x: Array) -> Any:  # noqa: ANN401
        """View a 16-bit CuPy array as a tensor."""
        # As integers, which every version exchanges.
        with self._on_current_stream():
            return self._torch.from_dlpack(x.view(np.int16)).view(getattr(self._torch, x.dtype.name))

    def attention(self, impl: str, q: Array, k: Array, v: Array, *, causal: bool) -> Callable[[], Any]:
        """Return a call of a peer; its result is a tensor of shape (batch, heads, tokens, value_dim).

        Parameters
        ----------
        impl : {"fa3", "fa2", "cudnn"}
        q, k, v : cupy.ndarray, shape (batch, tokens, heads, dim)
            As many tokens in each.
        causal : bool
        """
        if impl == "fa3":
            return self._attention3(q, k, v, causal=causal)
        attention = import_module("torch.nn.attention")
        # In the order (batch, tokens, heads), which is what a projection produces, seen as (batch, heads, tokens).
        arguments = [self.tensor(x).transpose(1, 2) for x in (q, k, v)]
        attend = partial(
            self._torch.nn.functional.scaled_dot_product_attention,
            *arguments, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2],
        )  # fmt: skip
        backend = getattr(attention.SDPBackend, BACKENDS[impl])

        def call() -> Any:  # noqa: ANN401
            with self._torch.inference_mode(), self._on_current_stream(), attention.sdpa_kernel(backend):
                return attend()

        return call

    def _attention3(self, q: Array, k: Array, v: Array, *, causal: bool) -> Callable[[], Any]:
        attend = partial(import_module(FA3).flash_attn_func, *map(self.tensor, (q, k, v)), causal=causal)

        def call() -> Any:  # noqa: ANN401
            with self._torch.inference_mode(), self._on_current_stream():
                found = attend()
                return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

        return call

    def result(self, tensor: Any, dtype: np.dtype[Any]) -> Array:  # noqa: ANN401
        """Return what a call of `attention` gave as a CuPy array (batch, tokens, heads, value_dim)."""
        with self._on_current_stream():
            integers = tensor.transpose(1, 2).contiguous().view(self._torch.int16)
            return _arrays.import_cupy().from_dlpack(integers).view(dtype)

    def product(self, a: Array, b: Array, out: Array) -> Callable[[], Any]:
        """Return a call that multiplies matrices."""
        a, b, out = map(self.tensor, (a, b, out))

        def call() -> None:
            with self._torch.inference_mode(), self._on_current_stream():
                self._torch.matmul(a, b, out=out)

        return call

    def graph_of(self, stream: Any, work: Callable[[], object]) -> Any:  # noqa: ANN401
        """Capture what work launches on a stream, with PyTorch's own pool of memory; see `timing.Capture`."""
        graph = self._torch.cuda.CUDAGraph()
        try:
            # Relaxed, as CuPy captures: the pool may grow.
            with self._torch.cuda.graph(graph, stream=self._stream(stream.ptr), capture_error_mode="relaxed"):
                work()
        except BaseException:
            # A capture that cannot be ended leaves its stream current, which is about to go.
            self._torch.cuda.set_stream(self._torch.cuda.default_stream())
            raise
        return _TorchGraph(self, graph)

    def free(self) -> None:
        """Give memory back that PyTorch holds and does not use."""
        self._torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class _TorchGraph:
    torch: Torch
    graph: Any

    def launch(self, stream: Any) -> None:  # noqa: ANN401
        with self.torch._torch.cuda.stream(self.torch._stream(stream.ptr)):  # noqa: SLF001  a part of it
            self.graph.replay()


def find() -> tuple[Torch | None, str]:
    """Return PyTorch if it is there and has CUDA; and its version, or why it is left out."""
    try:
        torch = import_module("torch")
        if not torch.cuda.is_available():
            return None, "left out: PyTorch sees no GPU"
        found = Torch(torch)
    except (ImportError, OSError, RuntimeError) as error:
        return None, f"left out: {type(error).__name__}: {error}"
    return found, str(found)


def product(torch: Torch | None, a: Array, b: Array, out: Array) -> tuple[Callable[[], Any], Capture]:
    """Return a product of matrices by cuBLAS, and how it is captured."""
    if torch is not None:
        return torch.product(a, b, out), torch.graph_of
    # CuPy does not let cuBLAS be captured.
    return partial(_arrays.import_cupy().matmul, a, b, out=out), Queued.of
