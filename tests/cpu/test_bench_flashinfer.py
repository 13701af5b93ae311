"""How FlashInfer is called, with its two wrappers in NumPy."""

from types import SimpleNamespace

import numpy as np
import pytest

from bench import flashinfer, peers, readme, rows
from cuattn import reference

WORKSPACE = 128 << 20


class Tensor(np.ndarray):
    """What is asked of a tensor."""

    def view(self, *shape):
        return super().view(*shape) if isinstance(shape[0], type | np.dtype) else self.reshape(shape)

    def flatten(self, first, last):
        return self.reshape(*self.shape[:first], -1, *self.shape[last + 1 :])


def tensor(x):
    return np.asarray(x).view(Tensor)


@pytest.fixture
def made(monkeypatch):
    """Wrappers that were made, each with what it was made and planned with."""
    found = []

    class Wrapper:
        def __init__(self, workspace, kv_layout, **options):
            assert (workspace.nbytes, kv_layout) == (WORKSPACE, "NHD")
            self.workspace, self.options, self.runs = workspace, options, 0
            found.append(self)

        def plan(self, **plan):
            self.planned = SimpleNamespace(**plan)

    class Decode(Wrapper):
        def plan(self, **plan):
            if not self.options["use_tensor_cores"] and plan["num_qo_heads"] == 6 * plan["num_kv_heads"]:
                raise RuntimeError("Unsupported group_size: 6")
            super().plan(**plan)

        def run(self, q, cache):
            self.runs += 1
            plan, out = self.planned, []
            assert cache[0].shape[1:] == (plan.page_size, plan.num_kv_heads, plan.head_dim)
            assert plan.q_data_type == plan.kv_data_type == q.dtype
            assert len(plan.last_page_len) == len(q)
            for i, row in enumerate(q):
                pages = plan.indices[plan.indptr[i] : plan.indptr[i + 1]]
                k, v = (x[pages].reshape(-1, *x.shape[2:]) for x in cache)
                keys = (len(pages) - 1) * plan.page_size + plan.last_page_len[i]
                out.append(reference.decode(row[None], k[None, :keys], v[None, :keys], np.array([keys], np.int32))[0])
            return tensor(np.stack(out))

    class Prefill(Wrapper):
        def run(self, q, k, v):
            self.runs += 1
            plan = self.planned
            assert (q.shape[1:], k.shape[1], v.shape[2]) == (
                (plan.num_qo_heads, plan.head_dim_qk), plan.num_kv_heads, plan.head_dim_vo
            )  # fmt: skip
            ends = {"cu_seqlens_q": plan.qo_indptr, "cu_seqlens_k": plan.kv_indptr}
            return tensor(reference.prefill(q, k, v, causal=plan.causal, **ends))

    modules = {
        "flashinfer": SimpleNamespace(
            BatchDecodeWithPagedKVCacheWrapper=Decode, BatchPrefillWithRaggedKVCacheWrapper=Prefill
        )
    }
    monkeypatch.setattr(flashinfer, "import_module", modules.__getitem__)
    return found


@pytest.fixture
def peer():
    def on_gpu(make):
        return lambda *args, dtype, device: tensor(make(*args, dtype)) if device == "cuda" else None

    return flashinfer.FlashInfer(
        SimpleNamespace(
            zeros=on_gpu(np.zeros), arange=on_gpu(lambda *a: np.arange(*a[:-1], dtype=a[-1])), full=on_gpu(np.full),
            int32=np.int32, uint8=np.uint8,
        )
    )  # fmt: skip


def arrays(*shapes, dtype=np.float16):
    rng = np.random.default_rng(3)
    return [tensor(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


@pytest.mark.parametrize(("tokens", "page_size"), [(48, 16), (40, 8), (37, 1)])
def test_decode_sees_dense_caches_as_pages(peer, made, tokens, page_size):
    q, k, v = arrays((3, 6, 64), (3, tokens, 2, 64), (3, tokens, 2, 64))
    forms = peer.decode(q, k, v)
    assert list(forms) == ["tensor cores", "CUDA cores"]
    want = reference.decode(q, k, v, np.full(3, tokens, np.int32))
    for call in forms.values():
        np.testing.assert_array_equal(call(), want)
    assert [wrapper.options for wrapper in made] == [{"use_tensor_cores": True}, {"use_tensor_cores": False}]
    assert [wrapper.planned.page_size for wrapper in made] == [page_size] * 2
    assert all(wrapper.planned.indptr.dtype == np.int32 for wrapper in made)


@pytest.mark.parametrize("causal", [False, True])
def test_prompts_are_a_ragged_batch(peer, made, causal):
    q, k, v = arrays((2, 20, 6, 64), (2, 20, 2, 64), (2, 20, 2, 32))
    found = peer.attention(q, k, v, causal=causal)()
    want = reference.prefill(q, k, v, causal=causal)
    np.testing.assert_array_equal(found.reshape(want.shape), want)
    assert made[0].options == {}


def test_calls_of_one_size_share_a_plan_and_all_share_the_workspace(peer, made):
    sets = [arrays((1, 4, 64), (1, 32, 4, 64), (1, 32, 4, 64)) for _ in range(3)]
    calls = [call for each in sets for call in peer.decode(*each).values()]
    other = peer.decode(*arrays((1, 8, 64), (1, 32, 4, 64), (1, 32, 4, 64)))
    assert made == []
    for call in (*calls, *other.values()):
        call()
    assert [wrapper.runs for wrapper in made] == [3, 3, 1, 1]
    assert len({id(wrapper.workspace) for wrapper in made}) == 1
    peer.free()
    calls[0]()
    assert len(made) == 5


def test_a_form_without_a_kernel_leaves_the_other(peer, made):
    forms = peer.decode(*arrays((1, 12, 64), (1, 32, 2, 64), (1, 32, 2, 64)))
    assert made == []
    with pytest.raises(RuntimeError, match="group_size"):
        forms["CUDA cores"]()
    assert forms["tensor cores"]().shape == (1, 12, 64)


def test_without_the_package_the_reason_is_told(peer, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(flashinfer, "import_module", missing)

    class Torch:
        def free(self):
            peer.free()

    def forms(_):
        return {form: [call] for form, call in peer.decode(*arrays((1, 4, 64), (1, 32, 4, 64), (1, 32, 4, 64))).items()}

    found, why = peers.timed(Torch(), forms, print, None)
    assert found == {}
    assert "flashinfer left out: ModuleNotFoundError: No module named 'flashinfer'" in why


def test_a_column_is_there_where_there_are_rows():
    without, with_it = [{"impl": "cuattn"}, {"impl": "cudnn"}], [{"impl": "cuattn"}, {"impl": "flashinfer"}]
    assert rows.peers_of(without) == ["fa3", "cudnn", "fa2"]
    assert rows.peers_of(with_it) == ["fa3", "cudnn", "fa2", "flashinfer"]
    head, rule = readme._with_peers(("| us |", "|---|"), rows.peers_of(with_it), " us")
    assert head == "| us | FA3 us | cuDNN us | FA2 us | FlashInfer us |"
    assert rule == "|---|---|---|---|---|"


def test_a_compiler_that_is_missing_leaves_a_peer_out(peer):
    def broken():
        message = "No such file or directory: 'ninja'"
        raise FileNotFoundError(message)

    class Torch:
        def free(self):
            peer.free()

    found, why = peers.timed(Torch(), lambda _: {"": [broken]}, print, None)
    assert found == {}
    assert [reason.split(" left out: ")[0] for reason in why] == list(peers.IMPLS)
    assert all("FileNotFoundError" in reason for reason in why)
