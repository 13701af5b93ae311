"""Laws of attention, each a sentence, as properties of the reference."""

from functools import partial
from itertools import pairwise

import numpy as np
import strategies
from hypothesis import given
from hypothesis import strategies as st
from scipy import special
from strategies import Problem
from tolerance import score_magnitude

from cuattn import reference

# The laws do not depend on sizes, and small ones leave time for more examples.
SMALL = {
    "lengths": strategies.lengths(6),
    "head_dims": (4, 20),
    "value_dims": (None, 3),
    "groups": (1, 2, 3),
    "kv_heads": (1, 2),
    "page_sizes": (None,),
}
problems = partial(strategies.problems, **SMALL)
problems_without_masks = partial(problems, causal=(False,), windows=st.none())
cuts = st.lists(st.floats(0, 1), max_size=5)
seeds = st.integers(0, 2**32 - 1)


def dense(problem: Problem) -> tuple[tuple[np.ndarray, ...], dict]:
    """Return q with a dimension for tokens, k, v, and the options with kv_len, as `reference.attention` takes them."""
    q, k, v, kv_len = problem.arrays()
    return (q if q.ndim == 4 else q[:, None], k, v), {**problem.options(), "kv_len": kv_len}


def edges(cuts: list[float], stop: int) -> list[tuple[int, int]]:
    """Return ranges, empty ones among them, that together cover ``[0, stop)``."""
    inner = sorted(int(c * stop) for c in cuts)
    return list(zip([0, *inner], [*inner, stop], strict=True))


def assert_equal(got: tuple[np.ndarray, ...], want: tuple[np.ndarray, ...]) -> None:
    """Assert the same bits; NaN equals NaN."""
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


def assert_close(problem: Problem, got: tuple[np.ndarray, np.ndarray], want: tuple[np.ndarray, np.ndarray]) -> None:
    """Assert agreement to the roundings of float64.

    A score errs by no more than its number of terms times half an ulp of the sum of their magnitudes, a sum of weights
    by its number of terms; a weighted mean of values errs relative to the largest value. Twice all that, as both sides
    err.
    """
    magnitude = max(score_magnitude(q, k) for q, k, _ in problem.sequences())
    largest = max(np.abs(v.astype(float)).max(initial=1.0) for _, _, v in problem.sequences())
    bound = 2 * np.finfo(float).eps * (magnitude * (problem.head_dim + 2) + max(problem.kv_len) + 8)
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=2 * bound * largest)  # derived above
    np.testing.assert_allclose(got[1], want[1], rtol=0, atol=bound)  # derived above


def sees(problem: Problem, kv_len: int, query: int, key: int) -> bool:
    """Say whether a query sees a key: the words of the definition, one by one."""
    position = kv_len - problem.seqlen_q + query
    left, right = problem.window or (None, None)
    return (
        (not problem.causal or key <= position)
        and (left in {None, -1} or key >= position - left)
        and (right in {None, -1} or key <= position + right)
    )


@given(problem=problems())
def test_every_row_is_the_softmax_of_its_visible_scores_as_scipy_computes_it(problem: Problem) -> None:
    """An independent oracle, with masks key by key."""
    arrays, options = dense(problem)
    out, lse = reference.attention(*arrays, **options)
    want_out, want_lse = np.zeros_like(out), np.full_like(lse, -np.inf)
    for b, (q, k, v) in enumerate(problem.sequences()):
        for i, h in np.ndindex(lse.shape[1:]):
            keys = [j for j in range(len(k)) if sees(problem, len(k), i, j)]
            kv_head = h // problem.group
            scores = [float(np.dot(q[i, h].astype(float), k[j, kv_head].astype(float))) for j in keys]
            scores = np.array(scores) * problem.head_dim**-0.5
            if problem.softcap is not None:
                scores = problem.softcap * np.tanh(scores / problem.softcap)
            values = v[keys, kv_head].astype(float)
            if problem.sinks and np.isfinite(options["sinks"][h]):
                scores, values = (
                    np.append(scores, options["sinks"][h]),
                    np.append(values, np.zeros((1, v.shape[-1])), 0),
                )
            if len(scores):
                want_out[b, i, h] = special.softmax(scores) @ values
                want_lse[b, i, h] = special.logsumexp(scores)
    assert_close(problem, (out, lse), (want_out, want_lse))
    np.testing.assert_array_equal(out[np.isneginf(lse)], 0)


@given(problem=problems_without_masks(), cuts=cuts)
def test_merging_any_partition_of_the_keys_equals_attention_over_all_of_them(problem: Problem, cuts: list) -> None:
    """The law split-KV rests on; holds for empty parts and for sequences of length zero. A sink counts once."""
    (q, k, v), options = dense(problem)
    kv_len, sinks = options.pop("kv_len"), options.pop("sinks", None)
    parts = [
        reference.attention(
            q, k[:, a:b], v[:, a:b], kv_len=np.clip(kv_len - a, 0, b - a), sinks=None if part else sinks, **options
        )
        for part, (a, b) in enumerate(edges(cuts, k.shape[1]))
    ]
    merged = reference.merge(*(np.stack(x) for x in zip(*parts, strict=True)))
    assert_close(problem, merged, reference.attention(q, k, v, kv_len=kv_len, sinks=sinks, **options))


@given(problem=problems(), cuts=cuts, seed=seeds)
def test_the_size_and_the_order_of_tiles_do_not_matter(problem: Problem, cuts: list, seed: int) -> None:
    """The rule that the kernels follow equals the definition under every mask."""
    arrays, options = dense(problem)
    tiles = edges(cuts, arrays[1].shape[1])
    np.random.default_rng(seed).shuffle(tiles)
    assert_close(problem, reference.online_softmax(*arrays, tiles, **options), reference.attention(*arrays, **options))


@given(problem=problems_without_masks(), seed=seeds)
def test_permuting_keys_and_values_together_changes_nothing(problem: Problem, seed: int) -> None:
    """Attention is to a set of keys."""
    (q, k, v), options = dense(problem)
    rng = np.random.default_rng(seed)
    order = np.tile(np.arange(k.shape[1]), (len(k), 1))
    for row, length in zip(order, problem.kv_len, strict=True):
        rng.shuffle(row[:length])
    moved = (np.take_along_axis(x, order[:, :, None, None], axis=1) for x in (k, v))
    assert_close(problem, reference.attention(q, *moved, **options), reference.attention(q, k, v, **options))


@given(problem=problems(page_sizes=(None, 1, 4)), seed=seeds)
def test_permuting_the_batch_permutes_the_result(problem: Problem, seed: int) -> None:
    """Sequences do not see each other."""
    q, k, v, kv_len = problem.arrays()
    options = problem.options()
    order = np.random.default_rng(seed).permutation(len(kv_len))
    out, lse = reference.decode(q, k, v, kv_len, **options, return_lse=True)
    if problem.page_size is None:
        k, v = k[order], v[order]
    else:
        options["page_table"] = options["page_table"][order]
    moved = reference.decode(q[order], k, v, kv_len[order], **options, return_lse=True)
    assert_equal(moved, (out[order], lse[order]))


@given(problem=problems(page_sizes=(None, 1, 4)), filler=st.sampled_from((0.0, np.inf, -60000.0)))
def test_whatever_stands_past_a_length_or_in_an_unused_page_does_not_matter(problem: Problem, filler: float) -> None:
    """Unused rows of a problem hold NaN; anything else gives the same bits, for page-table entries too."""
    q, k, v, kv_len = problem.arrays()
    options = problem.options()
    got = reference.decode(q, k, v, kv_len, **options, return_lse=True)
    same = reference.decode_same_precision(q, k, v, kv_len, **options, return_lse=True)
    assert not any(np.isnan(x).any() for x in (*got, *same))
    k, v = (np.where(np.isnan(x), np.asarray(filler, x.dtype), x) for x in (k, v))
    if "page_table" in options:
        table = options["page_table"]
        options["page_table"] = np.where((table < 0) | (table >= len(k)), 0, table)
    assert_equal(got, reference.decode(q, k, v, kv_len, **options, return_lse=True))
    assert_equal(same, reference.decode_same_precision(q, k, v, kv_len, **options, return_lse=True))


@given(problem=problems(), exponent=st.integers(-3, 3))
def test_scaling_v_scales_out_and_lse_does_not_see_v(problem: Problem, exponent: int) -> None:
    """Exact for powers of two."""
    (q, k, v), options = dense(problem)
    out, lse = reference.attention(q, k, v, **options)
    assert_equal(reference.attention(q, k, v.astype(float) * 2.0**exponent, **options), (out * 2.0**exponent, lse))


@given(problem=problems_without_masks(sinks=(False,)))
def test_softmax_scale_zero_gives_the_mean_of_v_and_the_logarithm_of_kv_len(problem: Problem) -> None:
    """Also with a softcap, which leaves zero alone."""
    (q, k, v), options = dense(problem)
    out, lse = reference.attention(q, k, v, softmax_scale=0.0, **options)
    for b, (_, _, values) in enumerate(problem.sequences()):
        mean = values.astype(float).mean(axis=0) if len(values) else np.zeros(values.shape[1:])
        want = np.broadcast_to(np.repeat(mean, problem.group, axis=0), out[b].shape)
        np.testing.assert_allclose(out[b], want, rtol=0, atol=1e-14)  # sums of some hundred values below 5, two orders
        want_lse = np.log(len(values)) if len(values) else -np.inf
        np.testing.assert_allclose(lse[b], want_lse, rtol=1e-15)  # the logarithm of the same exact integer


@given(problem=problems(values=("equal",), softcaps=(None,), sinks=(False,)))
def test_equal_scores_give_the_mean_of_the_visible_values(problem: Problem) -> None:
    """And lse is the score plus the logarithm of the number of visible keys."""
    arrays, options = dense(problem)
    out, lse = reference.attention(*arrays, **options)
    for b, (q, k, v) in enumerate(problem.sequences()):
        for i, h in np.ndindex(lse.shape[1:]):
            keys = [j for j in range(len(k)) if sees(problem, len(k), i, j)]
            if keys:
                score = q[i, h].astype(float) @ k[0, h // problem.group].astype(float) * problem.head_dim**-0.5
                mean = v[keys, h // problem.group].astype(float).mean(axis=0)
                np.testing.assert_allclose(out[b, i, h], mean, rtol=0, atol=1e-14)  # as for a scale of zero
                want_lse = score + np.log(len(keys))
                np.testing.assert_allclose(lse[b, i, h], want_lse, rtol=0, atol=1e-13)  # ulp(100) = 1.4e-14


@given(problem=problems(causal=(True,)))
def test_the_last_row_of_causal_prefill_equals_decode_with_the_same_cache(problem: Problem) -> None:
    """A row does not depend on the rows before it."""
    (q, k, v), options = dense(problem)
    kv_len = options.pop("kv_len")
    out, lse = reference.prefill(q, k, v, kv_len=kv_len, **options, return_lse=True)
    assert_close(
        problem, reference.decode(q[:, -1], k, v, kv_len, **options, return_lse=True), (out[:, -1], lse[:, -1])
    )


@given(problem=problems(causal=(True,), page_sizes=(None, 4), seqlens_q=(2, 5, 16)))
def test_decoding_several_tokens_equals_decoding_them_one_by_one(problem: Problem) -> None:
    """Each token sees the cache as it was when the token was the newest."""
    q, k, v, kv_len = problem.arrays()
    out, lse = reference.decode(q, k, v, kv_len, **problem.options(), return_lse=True)
    for i in range(problem.seqlen_q):
        length = np.maximum(kv_len - problem.seqlen_q + 1 + i, 0)
        got = reference.decode(q[:, i], k, v, length, **problem.options(), return_lse=True)
        assert_close(problem, got, (out[:, i], lse[:, i]))


@given(problem=problems(page_sizes=(1, 4)), same_precision=st.booleans())
def test_dense_padded_ragged_and_paged_storage_give_the_same_bits(problem: Problem, *, same_precision: bool) -> None:
    """Storage is no part of the definition; queries are ragged or dense independently of keys."""
    sequences = list(problem.sequences())
    q, k_pages, v_pages, kv_len = problem.arrays()
    q = q if q.ndim == 4 else q[:, None]
    options = problem.options()
    paged = {"page_table": options.pop("page_table"), "kv_len": kv_len}
    attend = reference.attention_same_precision if same_precision else partial(reference.prefill, return_lse=True)

    padded = Problem(**{name: getattr(problem, name) for name in Problem.__dataclass_fields__} | {"page_size": None})
    _, k, v, _ = padded.arrays()
    want = attend(q, k, v, kv_len=kv_len, **options)
    assert_equal(attend(q, k_pages, v_pages, **paged, **options), want)

    k, v = (np.concatenate([rows[x] for rows in sequences]) for x in (1, 2))
    cu_seqlens_k = np.cumsum([0, *kv_len])
    assert_equal(attend(q, k, v, cu_seqlens_k=cu_seqlens_k, **options), want)

    # A row past the last sequence belongs to none and is empty.
    tokens = np.concatenate([q.reshape(-1, *q.shape[2:]), q[0, :1]])
    cu_seqlens_q = np.arange(len(kv_len) + 1) * problem.seqlen_q
    for keys in ({"k": k, "v": v, "cu_seqlens_k": cu_seqlens_k}, {"k": k_pages, "v": v_pages, **paged}):
        out, lse = attend(tokens, **keys, cu_seqlens_q=cu_seqlens_q, **options)
        assert_equal((out[:-1].reshape(want[0].shape), lse[:-1].reshape(want[1].shape)), want)
        assert not out[-1].any()
        assert np.isneginf(lse[-1]).all()

    for b, (q_rows, k_rows, v_rows) in enumerate(sequences):
        got = attend(q_rows[None], k_rows[None], v_rows[None], **options)
        assert_equal((got[0][0], got[1][0]), (want[0][b], want[1][b]))


@given(lens=st.lists(st.integers(0, 9), min_size=1, max_size=4), seed=seeds)
def test_ragged_sequences_of_any_lengths_equal_attention_sequence_by_sequence(lens: list[int], seed: int) -> None:
    """Keys default to the lengths of the queries, as in self-attention."""
    q, k, v = np.random.default_rng(seed).standard_normal((3, sum(lens), 2, 4))
    cu_seqlens = np.cumsum([0, *lens])
    out, lse = reference.prefill(q, k, v, cu_seqlens_q=cu_seqlens, causal=True, return_lse=True)
    for a, b in pairwise(cu_seqlens):
        got = reference.attention(*(x[None, a:b] for x in (q, k, v)), causal=True)
        assert_equal((got[0][0], got[1][0]), (out[a:b], lse[a:b]))


@given(problem=problems())
def test_grouped_heads_equal_repeated_heads(problem: Problem) -> None:
    """Query head h reads KV head h // group."""
    (q, k, v), options = dense(problem)
    k_repeated, v_repeated = (np.repeat(x, problem.group, axis=2) for x in (k, v))
    got = reference.attention(q, k_repeated, v_repeated, **options)
    assert_close(problem, got, reference.attention(q, k, v, **options))
