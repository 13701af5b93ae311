"""FlashInfer as a peer: decode on dense caches seen as pages, and prompts as a ragged batch."""

from __future__ import annotations

import math
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MODULE = "flashinfer"
# What its documentation asks for; calls that follow each other share it.
_WORKSPACE_BYTES = 128 << 20
# Tokens of a page, where sequences are whole pages of so many. Dense caches are such pages, one after the other.
_PAGE_SIZE = 16


class FlashInfer:
    """Calls of FlashInfer on tensors of the current device.

    A call is planned on the host when it is first made, and then runs many times: sizes and lengths make a plan, and
    tensors do not. So what FlashInfer has no kernel for raises when it is called.

    Parameters
    ----------
    torch : module
    """

    def __init__(self, torch: Any) -> None:  # noqa: ANN401  the module
        self._torch = torch
        self._workspace: Any = None
        self._plans: dict[tuple[object, ...], Any] = {}

    def free(self) -> None:
        """Give up plans and workspace."""
        self._plans.clear()
        self._workspace = None

    def _run(
        self, inputs: tuple[Any, ...], key: tuple[object, ...], kind: str, options: dict[str, Any], plan: dict[str, Any]
    ) -> Any:  # noqa: ANN401
        if key not in self._plans:
            if self._workspace is None:
                self._workspace = self._torch.zeros(_WORKSPACE_BYTES, dtype=self._torch.uint8, device="cuda")
            wrapper = getattr(import_module(MODULE), kind)(self._workspace, "NHD", **options)
            wrapper.plan(**plan)
            self._plans[key] = wrapper
        return self._plans[key].run(*inputs)

    def _ends(self, count: int, each: int) -> Any:  # noqa: ANN401
        return self._torch.arange(0, (count + 1) * each, each, dtype=self._torch.int32, device="cuda")

    def decode(self, q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:  # noqa: ANN401
        """Return calls for one query token of each sequence, on CUDA cores and on tensor cores.

        Parameters
        ----------
        q : tensor, shape (batch, heads, head_dim)
        k, v : tensor, shape (batch, tokens, kv_heads, head_dim)
            Contiguous.
        """
        batch, tokens, kv_heads, head_dim = k.shape
        page_size = math.gcd(tokens, _PAGE_SIZE)
        pages = batch * tokens // page_size
        cache = tuple(x.view(pages, page_size, kv_heads, head_dim) for x in (k, v))
        plan = {
            "indptr": self._ends(batch, tokens // page_size), "indices": self._ends(pages - 1, 1),
            "last_page_len": self._torch.full((batch,), page_size, dtype=self._torch.int32, device="cuda"),
            "num_qo_heads": q.shape[1], "num_kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size,
            "q_data_type": q.dtype, "kv_data_type": q.dtype,
        }  # fmt: skip
        return {
            form: partial(
                self._run, (q, cache), ("decode", form, tuple(q.shape), tuple(k.shape), q.dtype),
                "BatchDecodeWithPagedKVCacheWrapper", {"use_tensor_cores": on_tensor_cores}, plan,
            )
            for form, on_tensor_cores in (("tensor cores", True), ("CUDA cores", False))
        }  # fmt: skip

    def attention(self, q: Any, k: Any, v: Any, *, causal: bool) -> Callable[[], Any]:  # noqa: ANN401
        """Return a call for prompts; its result has q's tokens of all prompts along one axis.

        Parameters
        ----------
        q, k, v : tensor, shape (batch, tokens, heads, dim)
            As many tokens in each.
        causal : bool
        """
        batch, tokens, heads, dim = q.shape
        ends = self._ends(batch, tokens)
        plan = {
            "qo_indptr": ends, "kv_indptr": ends, "num_qo_heads": heads, "num_kv_heads": k.shape[2], "head_dim_qk": dim,
            "head_dim_vo": v.shape[3], "causal": causal, "q_data_type": q.dtype,
        }  # fmt: skip
        key = ("attention", causal, tuple(q.shape), tuple(k.shape), tuple(v.shape), q.dtype)
        rows = tuple(x.flatten(0, 1) for x in (q, k, v))
        return partial(self._run, rows, key, "BatchPrefillWithRaggedKVCacheWrapper", {}, plan)
