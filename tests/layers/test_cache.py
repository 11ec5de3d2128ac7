"""Caches: prefill and token by token are the full forward, for every row of any batch."""

from __future__ import annotations

import copy
import itertools
import pickle
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fulmen.layers import (
    GroupedQueryAttention,
    KVCache,
    LatentCache,
    LightningAttention,
    Mamba2,
    MambaCache,
    MultiHeadLatentAttention,
    StateCache,
)
from fulmen.layers import cache as caching

EXACT = {"atol": 1e-10, "rtol": 0}
OPTIONS = {
    "plain": {},
    "rope": {"rope": {}, "qk_norm": "before"},
    "window": {"rope": {"dim": 4}, "window": (3, None)},
    "sinks": {"sinks": True, "softcap": 5.0, "rope": {"interleaved": True}, "qk_norm": "after"},
    "norm of all heads": {"rope": {}, "qk_norm": "all"},
}
KINDS = {"growing": None, "preallocated": 20}


def layer(**options) -> GroupedQueryAttention:
    torch.manual_seed(0)
    made = GroupedQueryAttention(24, 6, 2, head_dim=8, causal=True, dtype=torch.float64, **options)
    if made.sinks is not None:
        torch.nn.init.normal_(made.sinks)
    return made


def tokens(B: int, N: int) -> torch.Tensor:
    return torch.randn(B, N, 24, dtype=torch.float64)


@pytest.mark.parametrize("max_length", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("steps", [(12,), (5, 1, 1, 1, 1, 1, 1, 1), (1,) * 12, (4, 4, 4), (0, 7, 5)])
@torch.no_grad()
def test_prefill_and_decoding_are_the_full_forward(steps, options, max_length):
    f, x, cache = layer(**options), tokens(2, 12), KVCache(max_length)
    y = torch.cat([f(part, cache=cache) for part in x.split(steps, 1)], 1)
    torch.testing.assert_close(y, f(x), **EXACT)
    assert cache.length == 12
    assert cache.lengths is None


@pytest.mark.parametrize("max_length", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("side", ["left", "right", "between"])
@torch.no_grad()
def test_rows_of_different_lengths_are_as_each_alone(side, options, max_length):
    """A padded prompt, single tokens, a padded chunk, tokens again."""
    f, cache = layer(**options), KVCache(max_length)
    first, second = [6, 2, 0, 4], [1, 3, 2, 0]
    rows = [tokens(1, n + 2 + m + 1) for n, m in zip(first, second, strict=True)]
    alone = [f(row) for row in rows]
    done, got = [0] * 4, [[] for _ in rows]
    for counts in (first, [1] * 4, [1] * 4, second, [1] * 4):
        mask = make_mask(counts, side)
        x = torch.full((4, mask.shape[1], 24), torch.nan, dtype=torch.float64)
        for b, n in enumerate(counts):
            x[b, mask[b]] = rows[b][0, done[b] : done[b] + n]
            done[b] += n
        y = f(x, cache=cache, mask=None if mask.all() else mask)
        assert not y[~mask].any()
        for b in range(4):
            got[b].append(y[b, mask[b]])
    for parts, want in zip(got, alone, strict=True):
        torch.testing.assert_close(torch.cat(parts), want[0], **EXACT)
    assert cache.lengths is not None
    assert cache.lengths.tolist() == done


def make_mask(counts: list[int], side: str) -> torch.Tensor:
    N = max(counts)
    mask = torch.zeros(len(counts), N, dtype=torch.bool)
    for b, n in enumerate(counts):
        columns = {"left": range(N - n, N), "right": range(n), "between": [*range(n // 2), *range(N - n + n // 2, N)]}
        mask[b, list(columns[side])] = True
    return mask


@pytest.mark.parametrize("max_length", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("indices", [[1, 0, 0], [2, 2, 1, 0, 1], [1]], ids=str)
@torch.no_grad()
def test_reorder_takes_rows(indices, padded, max_length):
    f, x, z = layer(rope={}), tokens(3, 6), tokens(len(indices), 3)
    mask = make_mask([3, 6, 1], "left") if padded else None
    cache, index = KVCache(max_length), torch.tensor(indices)
    f(x, cache=cache, mask=mask)
    cache.reorder(indices if padded else index)
    got = torch.cat([f(part, cache=cache) for part in z.split(1, 1)], 1)
    other = KVCache()
    f(x[index], cache=other, mask=None if mask is None else mask[index])
    torch.testing.assert_close(got, f(z, cache=other), **EXACT)


@pytest.mark.parametrize("max_length", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("padded", [False, True])
def test_copies_made_in_inference_mode_are_reordered_and_written(padded, max_length):
    f, x, z = layer(rope={}), tokens(3, 4), tokens(3, 2)
    mask = make_mask([3, 4, 1], "left") if padded else None
    cache, index = KVCache(max_length), torch.tensor([2, 0, 0])
    with torch.inference_mode():
        f(x, cache=cache, mask=mask)
        inside = copy.deepcopy(cache)
        outside = copy.deepcopy(inside)
        inside.reorder(index)
        got = f(z, cache=inside)
    other = KVCache()
    with torch.no_grad():
        f(x[index], cache=other, mask=None if mask is None else mask[index])
        want = f(z, cache=other)
        outside.reorder(index)
        torch.testing.assert_close(f(z, cache=outside), want, **EXACT)
    torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("max_length", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("crop", "left"), [(4, 4), (-2, 4), (6, 6), (0, 0), (-6, 0)])
@torch.no_grad()
def test_crop_forgets_the_last_tokens(crop, left, max_length):
    f, x, z, cache = layer(rope={}), tokens(2, 6), tokens(2, 3), KVCache(max_length)
    f(x, cache=cache)
    cache.crop(crop)
    assert cache.length == left
    torch.testing.assert_close(f(z, cache=cache), f(torch.cat([x[:, :left], z], 1))[:, left:], **EXACT)


@torch.no_grad()
def test_crop_of_rows_of_different_lengths():
    f, x, z = layer(rope={}), tokens(3, 6), tokens(3, 2)
    mask, counts = make_mask([3, 6, 1], "left"), [3, 6, 1]
    for crop, kept in ((2, [2, 2, 1]), (-2, [1, 4, 0])):
        cache = KVCache()
        f(x, cache=cache, mask=mask)
        cache.crop(crop)
        y = f(z, cache=cache)
        assert cache.lengths is not None
        assert cache.lengths.tolist() == [n + 2 for n in kept]
        for b, (n, k) in enumerate(zip(counts, kept, strict=True)):
            row = torch.cat([x[b, mask[b]][:k], z[b]])[None]
            torch.testing.assert_close(y[b], f(row)[0, k:], **EXACT, msg=f"row {b} of {n}, cropped by {crop}")


@pytest.mark.parametrize("kind", ["grouped, preallocated", "latent, preallocated"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("then", ["crop(-1)", "crop(9)", "reorder", "prompt", "step"])
@torch.no_grad()
def test_what_replays_appended_is_counted(then, padded, kind, monkeypatch):
    """A captured step runs on the device alone; whatever comes next takes the count from there."""
    make, new = CACHED[kind]
    f, x, mask = make(), tokens(2, 30), make_mask([3, 6], "right") if padded else None
    cache, other = new(), new()
    for each in (cache, other):
        f(x[:, :6], cache=each, mask=mask)
    with monkeypatch.context() as patch:
        patch.setattr(caching, "is_capturing", lambda device: True)
        for i in range(6, 11):
            f(x[:, i : i + 1], cache=cache)
    assert cache.length == 6
    for i in range(6, 11):
        f(x[:, i : i + 1], cache=other)
    for each in (cache, other):
        if "crop" in then:
            each.crop(int(then[5:-1]))
        elif then == "reorder":
            each.reorder([1, 0])
    N = 8 if then == "prompt" else 1
    torch.testing.assert_close(f(x[:, 11 : 11 + N], cache=cache), f(x[:, 11 : 11 + N], cache=other), **EXACT)
    assert cache.ends.tolist() == other.ends.tolist()
    assert cache.length == other.ends.max()


@torch.no_grad()
def test_sync_after_more_replays_than_there_is_room_for(monkeypatch):
    f, x, cache = layer(rope={}), tokens(1, 24), KVCache(20)
    f(x[:, :18], cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr(caching, "is_capturing", lambda device: True)
        for i in range(18, 24):
            f(x[:, i : i + 1], cache=cache)
    cache.sync()
    assert (cache.length, cache.lengths, cache.ends.tolist()) == (20, None, [20])
    with pytest.raises(ValueError, match="too small"):
        f(x[:, :1], cache=cache)


@torch.no_grad()
def test_a_state_is_not_captured(monkeypatch):
    f, cache = CACHED["lightning"][0](), StateCache()
    f(tokens(1, 6), cache=cache)
    monkeypatch.setattr(caching, "is_capturing", lambda device: True)
    with pytest.raises(NotImplementedError, match=r"a StateCache in a CUDA graph.* use a pool"):
        f(tokens(1, 1), cache=cache)


@torch.no_grad()
def test_only_single_tokens_of_mamba_are_captured(monkeypatch):
    f, cache = Mamba2(24, 6, head_dim=8, state_size=16, dtype=torch.float64), MambaCache()
    f(tokens(1, 6), cache=cache)
    monkeypatch.setattr(caching, "is_capturing", lambda device: True)
    f(tokens(1, 1), cache=cache)
    with pytest.raises(NotImplementedError, match=r"a MambaCache in a CUDA graph.* capture steps of one token"):
        f(tokens(1, 2), cache=cache)


@torch.no_grad()
def test_a_context_mask_without_a_context():
    f, cache = layer(rope={}), KVCache(20)
    f(tokens(1, 6), cache=cache)
    with pytest.raises(ValueError, match="no context"):
        f(tokens(1, 1), cache=cache, context_mask=torch.ones(1, 1, dtype=torch.bool))
    assert cache.length == 6


def latent() -> MultiHeadLatentAttention:
    sizes = {"kv_rank": 8, "nope_dim": 6, "rope_dim": 4, "value_dim": 10}
    return MultiHeadLatentAttention(24, 4, dtype=torch.float64, **sizes)


CACHED = {
    "grouped, growing": (lambda: layer(rope={}), KVCache),
    "grouped, preallocated": (lambda: layer(rope={}), lambda: KVCache(20)),
    "latent, growing": (latent, LatentCache),
    "latent, preallocated": (latent, lambda: LatentCache(20)),
    "lightning": (lambda: LightningAttention(24, 4, preset="ring", head_dim=8, dtype=torch.float64), StateCache),
}
EMPTIED = {"reset": lambda cache: cache.reset(), "crop(0)": lambda cache: cache.crop(0)}


@pytest.mark.parametrize("empty", EMPTIED)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", CACHED)
@torch.no_grad()
def test_an_emptied_cache_takes_another_batch(kind, padded, empty):
    make, new = CACHED[kind]
    if kind == "lightning" and empty != "reset":
        pytest.skip("a state cannot be cropped")
    f, cache = make(), new()
    mask = make_mask([3, 6], "left") if padded else None
    for B, dtype in ((2, torch.float64), (1, torch.float64), (3, torch.float64), (3, torch.float32)):
        f(tokens(2, 6), cache=cache, mask=mask)
        EMPTIED[empty](cache)
        assert (cache.length, cache.lengths) == (0, None)
        x, other = tokens(B, 4).to(dtype), copy.deepcopy(f).to(dtype)
        y = torch.cat([other(part, cache=cache) for part in x.split([3, 1], 1)], 1)
        torch.testing.assert_close(y, other(x), atol=1e-10 if dtype == torch.float64 else 1e-5, rtol=0)
        assert cache.length == 4
        EMPTIED[empty](cache)


def fail(*arguments) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("tokens_before", [0, 10])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", CACHED)
def test_a_call_that_fails_at_its_end_leaves_the_cache_as_it_was(kind, padded, tokens_before, grad):
    if grad and "preallocated" in kind:
        pytest.skip("refuses gradients")
    make, new = CACHED[kind]
    f, cache, other = make(), new(), new()
    last = f.out_proj if kind == "lightning" else f.o_proj
    mask, prompt = make_mask([5, 10], "left") if padded else None, tokens(2, 10)
    with torch.set_grad_enabled(grad):
        for each in (cache, other) if tokens_before else ():
            f(prompt, cache=each, mask=mask)
        hook = last.register_forward_pre_hook(fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of memory"):
                f(tokens(2, 1), cache=cache)
        hook.remove()
        assert facts(cache) == facts(other)
        x = tokens(2 if tokens_before else 3, 2)
        torch.testing.assert_close(f(x, cache=cache), f(x, cache=other), **EXACT)


def facts(cache) -> tuple:
    rows = None if cache.lengths is None else cache.lengths.tolist()
    state = getattr(cache, "state", None)
    return cache.length, rows, getattr(cache, "capacity", None), None if state is None else state.tolist()


ANOTHER = "cache holds 6 tokens of another layer: give each layer a cache of its own, or call reset()"


LAYERS = {
    KVCache: lambda: GroupedQueryAttention(24, 6, 2, head_dim=8, causal=True),
    LatentCache: lambda: MultiHeadLatentAttention(
        24, 2, q_rank=None, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=8, causal=True
    ),
    StateCache: lambda: LightningAttention(24, 6),
    MambaCache: lambda: Mamba2(24, 6, head_dim=8, state_size=16),
}


@pytest.mark.parametrize(("own", "foreign"), list(itertools.permutations(LAYERS, 2)))
def test_a_cache_of_another_kind_is_refused(own, foreign):
    f, cache = LAYERS[own](), foreign()
    with pytest.raises(ValueError, match=rf"^cache is a {foreign.__name__}, must be a {own.__name__}"):
        f(tokens(2, 6).float(), cache=cache)
    assert not cache.length


@pytest.mark.parametrize("kind", CACHED)
@torch.no_grad()
def test_a_cache_is_of_one_layer(kind):
    make, new = CACHED[kind]
    first, second, cache, x = make(), make(), new(), tokens(2, 6)
    first(x, cache=cache)
    before = facts(cache)
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(ANOTHER)):
            second(x, cache=cache)
        assert facts(cache) == before
    cache.reorder([1, 0])
    if kind != "lightning":
        cache.crop(6)
    with pytest.raises(ValueError, match=re.escape(ANOTHER)):
        second(x, cache=cache)
    z = tokens(2, 1)
    torch.testing.assert_close(first(z, cache=cache), first(torch.cat([x[[1, 0]], z], 1))[:, 6:], **EXACT)


@pytest.mark.parametrize("empty", EMPTIED)
@pytest.mark.parametrize("kind", CACHED)
@torch.no_grad()
def test_a_cache_without_tokens_is_any_layers(kind, empty):
    """Emptied, or given to calls that failed or had no token."""
    if kind == "lightning" and empty != "reset":
        pytest.skip("a state cannot be cropped")
    make, new = CACHED[kind]
    first, second, cache, x = make(), make(), new(), tokens(2, 6)
    for f in (first, second, second, first):
        f(x, cache=cache)
        EMPTIED[empty](cache)
    with pytest.raises(ValueError, match="x has shape"):
        first(x[..., 1:], cache=cache)
    first(x[:, :0], cache=cache)
    torch.testing.assert_close(second(x, cache=cache), second(x), **EXACT)


@pytest.mark.parametrize("kind", CACHED)
@torch.no_grad()
def test_copies_of_layers_and_of_caches_go_on(kind):
    make, new = CACHED[kind]
    f, cache, x = make(), new(), tokens(2, 8)
    want = f(x)[:, 6:]
    f(x[:, :6], cache=cache)
    again, other = pickle.loads(pickle.dumps(f)), make()
    other.load_state_dict(f.state_dict())
    pairs = [
        (copy.deepcopy(f), copy.deepcopy(cache)),
        copy.deepcopy((f, cache)),
        pickle.loads(pickle.dumps((f, cache))),
    ]
    pairs += [(f, pickle.loads(pickle.dumps(cache))), (other, copy.deepcopy(cache)), (again, copy.deepcopy(cache))]
    for g, c in (*pairs, (copy.deepcopy(f), cache)):
        torch.testing.assert_close(torch.cat([g(part, cache=c) for part in x[:, 6:].split(1, 1)], 1), want, **EXACT)
        with pytest.raises(ValueError, match="cache holds 8 tokens of another layer"):
            make()(x, cache=c)


@pytest.mark.parametrize("kind", ["grouped, growing", "latent, growing", "lightning"])
def test_one_layer_at_two_depths_has_two_caches(kind):
    make, new = CACHED[kind]
    f, x = make(), tokens(2, 6).requires_grad_()

    def deep(x: torch.Tensor) -> torch.Tensor:
        caches = new(), new()
        return torch.cat([f(f(part, cache=caches[0]), cache=caches[1]) for part in x.split([4, 1, 1], 1)], 1)

    for y in (deep(x), checkpoint(deep, x, use_reentrant=False)):
        for got, want in zip(*(grads(z.square().sum(), x, f) for z in (y, f(f(x)))), strict=True):
            torch.testing.assert_close(got, want, **EXACT)


@torch.no_grad()
def test_memory_grows_by_doubling_and_a_preallocated_cache_never_moves():
    k = torch.randn(2, 3, 1, 4)
    growing, fixed = KVCache(), KVCache(64)
    moves, places = 0, set()
    for i in range(64):
        before = growing.capacity
        k_all, v_all = growing.append(k + i, k - i)
        moves += growing.capacity != before
        places.add(fixed.append(k, k)[0].data_ptr())
    assert moves <= 8
    assert len(places) == 1
    assert k_all.shape == (2, 3, 64, 4)
    assert torch.equal(k_all, k + torch.arange(64.0)[:, None])
    assert torch.equal(v_all, k - torch.arange(64.0)[:, None])
    fixed.reset()
    assert places == {fixed.append(k, k)[0].data_ptr()}


@pytest.mark.parametrize("padded", [False, True])
def test_gradients_pass_through_a_growing_cache(padded):
    f, x = layer(rope={}), tokens(2, 7).requires_grad_()
    mask = make_mask([5, 3], "right") if padded else None
    cache, rest = KVCache(), x[:, 5:]
    y = torch.cat([f(x[:, :5], cache=cache, mask=mask), *(f(part, cache=cache) for part in rest.split(1, 1))], 1)
    whole = None if mask is None else torch.cat([mask, torch.ones(2, 2, dtype=torch.bool)], 1)
    weight = tokens(2, 7)
    for got, want in zip(*(grads((z * weight).sum(), x, f) for z in (y, f(x, mask=whole))), strict=True):
        torch.testing.assert_close(got, want, **EXACT)


def grads(loss: torch.Tensor, x: torch.Tensor, f: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, [x, *f.parameters()])


def test_inference_mode_and_ordinary_mode_share_a_cache():
    f, x = layer(rope={}), tokens(2, 6)
    for max_length in KINDS.values():
        cache = KVCache(max_length)
        with torch.inference_mode():
            f(x[:, :3], cache=cache)
            cache.reorder(torch.tensor([0, 1]))
        with torch.no_grad():
            y = f(x[:, 3:], cache=cache)
            torch.testing.assert_close(y, f(x)[:, 3:], **EXACT)


def test_latent_cache():
    latent, k_rope = torch.randn(2, 7, 6), torch.randn(2, 7, 4)
    for max_length in KINDS.values():
        cache = LatentCache(max_length)
        for a, b in itertools.pairwise((0, 3, 4, 7)):
            whole = cache.append(latent[:, a:b], k_rope[:, a:b])
        assert torch.equal(whole[0], latent)
        assert torch.equal(whole[1], k_rope)
        cache.crop(5)
        cache.reorder(torch.tensor([1, 0]))
        whole = cache.append(latent[:, 5:], k_rope[:, 5:], torch.tensor([1, 2]))
        assert cache.lengths is not None
        assert cache.lengths.tolist() == [6, 7]
        assert torch.equal(whole[0][0, :6], torch.cat([latent[1, :5], latent[0, 5:6]]))
        assert torch.equal(whole[1][1, :7], torch.cat([k_rope[0, :5], k_rope[1, 5:]]))


def test_state_cache():
    cache = StateCache()
    state = torch.randn(2, 3, 4, 4)
    cache.update(state, 5)
    cache.update(state + 1, 3, torch.tensor([3, 1]))
    assert cache.length == 8
    assert cache.lengths is not None
    assert cache.lengths.tolist() == [8, 6]
    cache.reorder(torch.tensor([1, 1, 0]))
    assert torch.equal(cache.state, (state + 1)[[1, 1, 0]])
    assert cache.lengths.tolist() == [6, 6, 8]
    cache.crop(8)
    with pytest.raises(NotImplementedError, match=r"crop\(3\): a state is a decayed sum over all 8 tokens"):
        cache.crop(3)
    cache.reset()
    assert (cache.state, cache.length, cache.lengths) == (None, 0, None)


@pytest.mark.parametrize("reserved", [None, 16])
@torch.no_grad()
def test_a_reorder_that_fails_leaves_the_cache(reserved, monkeypatch):
    """Also halfway: out of memory where more rows need more room."""
    cache = KVCache(reserved)
    k = torch.randn(3, 2, 5, 4)
    cache.append(k, k, torch.tensor([5, 2, 4]))
    held, lengths = cache._held, cache.lengths
    room, index_select, calls = caching._room, torch.Tensor.index_select, []

    def failing(*args):
        calls.append(1)
        if len(calls) == 2 + (reserved is None):
            raise torch.OutOfMemoryError
        return room(*args) if reserved else index_select(*args)

    monkeypatch.setattr(*((caching, "_room") if reserved else (torch.Tensor, "index_select")), failing)
    with pytest.raises(torch.OutOfMemoryError):
        cache.reorder([0, 0, 1, 2])
    monkeypatch.undo()
    assert cache._held is held
    assert cache.lengths is lengths
    assert cache.lengths.tolist() == [5, 2, 4]
    cache.reorder([0, 0, 1, 2])
    assert cache.lengths.tolist() == [5, 5, 2, 4]


@torch.no_grad()
def test_a_reorder_of_states_that_fails_leaves_the_cache(monkeypatch):
    cache = MambaCache()
    cache.update(torch.randn(3, 2, 4, 4), 5, torch.tensor([5, 2, 4]), conv=torch.randn(3, 3, 8))
    held, index_select, calls = (cache.state, cache.conv, cache.lengths), torch.Tensor.index_select, []

    def failing(*args):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError
        return index_select(*args)

    monkeypatch.setattr(torch.Tensor, "index_select", failing)
    with pytest.raises(torch.OutOfMemoryError):
        cache.reorder([0, 0, 1, 2])
    assert all(a is b for a, b in zip((cache.state, cache.conv, cache.lengths), held, strict=True))


@pytest.mark.parametrize("tokens", [0, 3])
@torch.no_grad()
def test_steps_of_no_rows(tokens):
    layer, cache = GroupedQueryAttention(16, 4, 2, causal=True, rope={}), KVCache(16)
    for N in (tokens, 1, 1):
        assert layer(torch.randn(0, N, 16), cache=cache).shape == (0, N, 16)
    assert cache.length == tokens + 2
