"""Peers in the same run: FlashAttention-2 and cuDNN of PyTorch, FlashAttention-3, FlashInfer; products by cuBLAS."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import packages_distributions, version
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from cuattn import _arrays

from . import flashinfer, timing
from .run import FAILURES
from .sampling import QUICK

if TYPE_CHECKING:
    from cuattn._arrays import Array

    from .sampling import Sampling, Timing
    from .timing import Capture

# Names in records, and those of PyTorch's ``SDPBackend``.
BACKENDS = {"fa2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
# FlashAttention-3 is a package of its own; any wheel of it has this module.
FA3 = "flash_attn_interface"
IMPLS = ("fa3", *BACKENDS, "flashinfer")
# What a reader of their times must know: called for inference, cuDNN and FlashInfer write no lse, and FlashAttention
# always does.
NOTES = {"fa3": (), "fa2": (), "cudnn": ("without lse",), "flashinfer": ("without lse",)}
# For which a peer is left out: also those of a package that is missing, or has another version's functions.
# FlashInfer's compiler may be missing, or have no folder to write to.
_LEFT_OUT = (*FAILURES, AssertionError, AttributeError, ImportError, OSError, TypeError)
# Calls without arguments, one for each set of inputs, by the form in which a peer takes them.
Forms: TypeAlias = Mapping[str, Sequence[Callable[[], Any]]]


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
        self._flashinfer = flashinfer.FlashInfer(torch)
        torch.cuda.set_device(_arrays.import_cupy().cuda.Device().id)

    def __str__(self) -> str:
        cudnn = self._torch.backends.cudnn.version() or 0
        # 9.19.0 is 91900.
        found = f"PyTorch {self._torch.__version__}, cuDNN {cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
        packages = packages_distributions()
        names = dict.fromkeys((*packages.get(FA3, ()), *packages.get(flashinfer.MODULE, ())))
        return ", ".join((found, *(f"{name} {version(name)}" for name in names)))

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
        """Return a call of a peer; its result is a tensor of shape (batch, tokens, heads, value_dim).

        Parameters
        ----------
        impl : {"fa3", "fa2", "cudnn", "flashinfer"}
        q, k, v : cupy.ndarray, shape (batch, tokens, heads, dim)
            As many tokens in each.
        causal : bool
        """
        q, k, v = map(self.tensor, (q, k, v))
        if impl == "fa3":
            return self._fa3("flash_attn_func", q, k, v, causal=causal)
        if impl == "flashinfer":
            with self._on_current_stream():
                return self._inference(self._flashinfer.attention(q, k, v, causal=causal))
        # In the order (batch, tokens, heads), which is what a projection produces, seen as (batch, heads, tokens).
        arguments = (x.transpose(1, 2) for x in (q, k, v))
        attend = self._sdpa(impl, *arguments, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2])
        return lambda: attend().transpose(1, 2)

    def decode(self, impl: str, q: Array, k: Array, v: Array, kv_len: Array) -> dict[str, Callable[[], Any]]:
        """Return calls of a peer by the form in which it takes one query token of each sequence.

        The result of each is a tensor whose elements are those of (batch, heads, head_dim), in this order.

        Parameters
        ----------
        impl : {"fa3", "fa2", "cudnn", "flashinfer"}
        q : cupy.ndarray, shape (batch, heads, head_dim)
        k, v : cupy.ndarray, shape (batch, tokens, kv_heads, head_dim)
        kv_len : cupy.ndarray, shape (batch,), int32
            As many as there are tokens.
        """
        batch, _, kv_heads, head_dim = k.shape
        q, k, v = map(self.tensor, (q, k, v))
        if impl == "fa3":
            with self._on_current_stream():
                lengths = self._torch.from_dlpack(kv_len)
            options = {"cache_seqlens": lengths, "causal": True, "num_splits": 0}
            return {
                f"pack_gqa={pack}": self._fa3(
                    "flash_attn_with_kvcache", q.unsqueeze(1), k, v, **options, pack_gqa=pack
                )
                for pack in (True, None)
            }  # fmt: skip
        if impl == "flashinfer":
            with self._on_current_stream():
                forms = self._flashinfer.decode(q, k, v)
            return {form: self._inference(call) for form, call in forms.items()}
        k, v = (x.transpose(1, 2) for x in (k, v))
        # The query heads of a KV head are the tokens of one, so that keys are read once for all of them.
        forms = {"packed": self._sdpa(impl, q.view(batch, kv_heads, -1, head_dim), k, v)}
        if impl == "cudnn":
            forms["enable_gqa"] = self._sdpa(impl, q.unsqueeze(2), k, v, enable_gqa=True)
        return forms

    def _sdpa(self, impl: str, *arguments: Any, **options: Any) -> Callable[[], Any]:  # noqa: ANN401
        attention = import_module("torch.nn.attention")
        attend = partial(self._torch.nn.functional.scaled_dot_product_attention, *arguments, **options)
        backend = getattr(attention.SDPBackend, BACKENDS[impl])

        def call() -> Any:  # noqa: ANN401
            with self._torch.inference_mode(), self._on_current_stream(), attention.sdpa_kernel(backend):
                return attend()

        return call

    def _fa3(self, name: str, *arguments: Any, **options: Any) -> Callable[[], Any]:  # noqa: ANN401
        return self._inference(partial(getattr(import_module(FA3), name), *arguments, **options))

    def _inference(self, attend: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:  # noqa: ANN401
            with self._torch.inference_mode(), self._on_current_stream():
                found = attend()
                return found[0] if isinstance(found, tuple) else found

        return call

    def result(self, tensor: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:  # noqa: ANN401
        """Return what a call gave as a CuPy array of a shape."""
        with self._on_current_stream():
            integers = tensor.reshape(shape).contiguous().view(self._torch.int16)
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
        """Give memory back that PyTorch and FlashInfer hold and do not use."""
        self._flashinfer.free()
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


@dataclass(frozen=True, slots=True)
class Found:
    """Time of a peer, and what a reader of it must know."""

    timing: Timing
    notes: tuple[str, ...]


def timed(
    torch: Torch | None, forms_of: Callable[[str], Forms], check: Callable[[Any], object], sampling: Sampling
) -> tuple[dict[str, Found], tuple[str, ...]]:
    """Time the peers that are there and right, each in the form that is fastest.

    Parameters
    ----------
    torch : Torch, optional
        Without it there are none.
    forms_of : callable
        Returns the calls of a peer by form; the empty one needs no name.
    check : callable
        Raises if what a call returned is wrong.
    sampling : Sampling

    Returns
    -------
    found : dict of Found
        By implementation.
    missing : tuple of str
        Why each of the others is left out.
    """
    found: dict[str, Found] = {}
    missing: list[str] = []
    if torch is None:
        return found, ()
    for impl in IMPLS:
        try:
            form, calls, left_out = _fastest(torch, forms_of(impl), check)
            notes = (*NOTES[impl], *filter(None, (form,)), *left_out)
            found[impl] = Found(timing.replayed(calls, sampling, torch.graph_of), notes)
        except _LEFT_OUT as error:
            missing.append(_left_out(impl, error))
    torch.free()
    return found, tuple(missing)


def _left_out(what: str, error: BaseException) -> str:
    # Parts of a note end at semicolons.
    text = f"{what} left out: {type(error).__name__}: {error}".replace(";", ",")
    return textwrap.shorten(text, 160)


def _fastest(
    torch: Torch, forms: Forms, check: Callable[[Any], object]
) -> tuple[str, Sequence[Callable[[], Any]], tuple[str, ...]]:
    """Return the fastest of the forms that are right, its calls, and why others are left out."""
    us: dict[str, float] = {}
    errors: dict[str, BaseException] = {}
    for form, calls in forms.items():
        try:
            check(calls[0]())
            us[form] = timing.replayed(calls, QUICK, torch.graph_of).us if len(forms) > 1 else 0.0
        except _LEFT_OUT as error:
            errors[form] = error
    if not us:
        raise next(iter(errors.values()))
    fastest = min(us, key=lambda form: us[form])
    return fastest, forms[fastest], tuple(_left_out(form, error) for form, error in errors.items())


def product(torch: Torch | None, a: Array, b: Array, out: Array) -> tuple[Callable[[], Any], Capture]:
    """Return a product of matrices by cuBLAS, and how it is captured."""
    if torch is not None:
        return torch.product(a, b, out), torch.graph_of
    # CuPy does not let cuBLAS be captured.
    return partial(_arrays.import_cupy().matmul, a, b, out=out), Queued.of
