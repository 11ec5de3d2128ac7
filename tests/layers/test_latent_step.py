"""Decoding steps of latent attention with a preallocated cache: positions and lengths come from the device alone."""

from __future__ import annotations

import pytest
import torch

from fulmen.layers import LatentCache, MultiHeadLatentAttention, Sequences

close = torch.testing.assert_close
SIZES = {"kv_rank": 32, "nope_dim": 16, "rope_dim": 8, "value_dim": 12}


def made(**options) -> MultiHeadLatentAttention:
    torch.manual_seed(0)
    return MultiHeadLatentAttention(48, 4, **{"q_rank": 24, "absorb": True, **SIZES, **options}).requires_grad_(False)


def tokens(B: int = 3, N: int = 21, seed: int = 1) -> torch.Tensor:
    return torch.randn(B, N, 48, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["torch", "kernels"])
def way(request, monkeypatch):
    """By PyTorch's operations, or by the kernel, interpreted."""
    if request.param == "kernels":
        request.getfixturevalue("interpreted")
    taken = []
    step, chained = MultiHeadLatentAttention._step, MultiHeadLatentAttention._chained

    def counted(*args):
        taken.append(1)
        return step(*args)

    def counted_chain(*args):
        y = chained(*args)
        taken.extend([] if y is None else [1])
        return y

    monkeypatch.setattr(MultiHeadLatentAttention, "_step", counted)
    monkeypatch.setattr(MultiHeadLatentAttention, "_chained", counted_chain)
    return taken


def replayed(layer, x, cache, mask=None) -> torch.Tensor:
    """A step after which the host knows no more than before, as after a graph's replay."""
    length = cache.length
    y = layer(x, cache=cache, mask=mask)
    cache.length = length
    return y


@pytest.mark.parametrize("options", [{}, {"q_rank": None}, {"rope": {"interleaved": False}}], ids=str)
@torch.no_grad()
def test_steps_are_the_full_forward(options, way):
    layer, x, cache = made(**options), tokens(), LatentCache(max_length=24)
    y = [layer(x[:, :9], cache=cache)]
    y += [replayed(layer, part, cache) for part in x[:, 9:].split([1, 1, 3, 1, 6], 1)]
    close(torch.cat(y, 1), layer(x))
    assert len(way) == 5
    assert cache.ends.tolist() == [21] * 3


@torch.no_grad()
def test_rows_of_different_lengths(way):
    layer, x, cache = made(), tokens(N=12), LatentCache(max_length=30)
    mask = torch.tensor([[0] * 5 + [1] * 7, [1] * 12, [1] * 3 + [0] * 9], dtype=torch.bool)
    some = torch.tensor([[1, 1], [1, 0], [0, 0]], dtype=torch.bool)
    y = layer(x, cache=cache, mask=mask)
    later = tokens(N=4, seed=2)
    steps = [
        replayed(layer, later[:, :1], cache),
        replayed(layer, later[:, 1:3], cache, some),
        replayed(layer, later[:, 3:], cache),
    ]
    assert len(way) == 3
    assert cache.ends.tolist() == [11, 15, 5]
    assert cache.lengths.tolist() == [11, 15, 5]
    y = torch.cat([y, *steps], 1)
    ones = torch.ones(3, 1, dtype=torch.bool)
    seen, everything = torch.cat([mask, ones, some, ones], 1), torch.cat([x, later], 1)
    assert not y[~seen].any()
    for row in range(3):
        close(y[row][seen[row]], layer(everything[row][seen[row]][None])[0])


@torch.no_grad()
def test_ends_never_move(way):
    """Crop, reorder and reset change them in place; another batch has others."""
    layer, x, cache = made(), tokens(), LatentCache(max_length=24)
    layer(x[:, :9], cache=cache)
    ends, memory = cache.ends, cache._held[0]
    cache.crop(5)
    assert ends.tolist() == [5] * 3
    close(layer(x[:, 5:6], cache=cache), layer(x)[:, 5:6])
    cache.reorder([1, 1, 0])
    close(layer(x[[1, 1, 0], 6:7], cache=cache), layer(x[[1, 1, 0]])[:, 6:7])
    cache.reset()
    assert ends.tolist() == [0] * 3
    layer(x[:, :4], cache=cache)
    close(layer(x[:, 4:5], cache=cache), layer(x)[:, 4:5])
    assert cache.ends is ends
    assert cache._held[0] is memory
    cache.reset()
    layer(x[:2, :4], cache=cache)
    assert cache.ends.tolist() == [4] * 2
    assert len(way) == 3


@torch.no_grad()
def test_a_full_cache_is_refused_and_stays(way):
    layer, x, cache = made(), tokens(), LatentCache(max_length=9)
    layer(x[:, :9], cache=cache)
    with pytest.raises(ValueError, match="too small"):
        layer(x[:, 9:10], cache=cache)
    assert cache.ends.tolist() == [9] * 3
    cache.length = 8  # as after replays: what comes beyond the end is not written
    held = cache._held[0].clone()
    layer(x[:, 9:10], cache=cache)
    assert torch.equal(cache._held[0], held)


@torch.no_grad()
def test_a_page_out_of_range_is_not_written(way):
    layer, x = made(), tokens(B=2, N=4)
    served = Sequences(rows=2, max_length=32, pages=2, page_size=16)
    pool = layer.new_pool(served)
    served.step([served.new(), served.new()], 4)
    served.table[0], served.table[1] = -1, 2
    layer(x, cache=pool)
    assert len(way) == 1
    assert not pool.memory[0].any()


@torch.no_grad()
def test_compiled():
    layer, x = made(), tokens()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    caches = LatentCache(max_length=24), LatentCache(max_length=24)
    for part in x.split([9, 1, 3, 1, 7], 1):
        close(compiled(part, cache=caches[0]), layer(part, cache=caches[1]))
    close(caches[0]._held[0], caches[1]._held[0])


@pytest.mark.parametrize("options", [{"window": (5, None)}, {"softcap": 2.0}, {"sinks": True}], ids=str)
@torch.no_grad()
def test_other_options_take_the_general_way(options, way):
    layer, x, cache = made(**options), tokens(), LatentCache(max_length=21)
    close(torch.cat([layer(part, cache=cache) for part in x.split([9, 1, 11], 1)], 1), layer(x))
    assert not way


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 5])
@torch.inference_mode()
def test_a_step_in_a_graph(B):
    """DeepSeek's head dims: prompts come and go, the graph stays."""
    torch.manual_seed(0)
    layer = MultiHeadLatentAttention(256, 16, q_rank=128, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(B, 80, 256, device="cuda", dtype=torch.bfloat16)
    cache = LatentCache(max_length=200)
    layer(x[:, :30], cache=cache)
    token = x[:, 30:31].clone()
    for _ in range(3):  # compiles, and prepares launches
        layer(token, cache=cache)
    cache.crop(30)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(token, cache=cache)
    for length in (30, 7, 60):
        cache.reset()
        layer(x[:, :length], cache=cache)
        for i in range(length, length + 15):
            token.copy_(x[:, i : i + 1])
            graph.replay()
            want = layer(x[:, : i + 1])[:, i:]
            assert (y - want).float().norm() < 0.02 * want.float().norm()
        assert cache.ends.tolist() == [length + 15] * B


@torch.no_grad()
def test_tables_are_made_before_the_first_launch(interpreted, monkeypatch):
    """A kernel of the step may read them before the launches ahead of it have ended."""
    from fulmen.layers.rotary import Rotary

    layer, x, cache = made(), tokens(N=6), LatentCache(max_length=24)
    layer(x[:, :5], cache=cache)
    forward = Rotary.forward
    monkeypatch.setattr(Rotary, "forward", lambda *args: (interpreted.append("tables"), forward(*args))[1])
    layer.rope._tables.clear()
    interpreted.clear()
    layer(x[:, 5:], cache=cache)
    assert interpreted[0] == "tables"
    assert "latent_step_kernel" in interpreted
    assert interpreted.count("tables") == 1


def adapter(module):
    module.forward = lambda x, forward=module.forward: 2 * forward(x)


@pytest.mark.parametrize(
    "change",
    [adapter, lambda m: m.register_forward_hook(lambda m, given, y: 2 * y),
     lambda m: m.register_forward_pre_hook(lambda m, given: (2 * given[0],))],
    ids=["wrapper", "hook", "pre-hook"],
)  # fmt: skip
@torch.no_grad()
def test_an_up_projection_that_must_be_called_is(change, way):
    """The absorbed way reads kv_b_proj's weight alone, so it is not taken."""
    layer, x, cache = made(absorb="auto"), tokens(N=9), LatentCache(max_length=24)
    change(layer.kv_b_proj)
    double = made(absorb="auto")
    double.kv_b_proj.weight.mul_(2)
    want = double(x)
    y = [layer(x[:, :5], cache=cache), *(layer(part, cache=cache) for part in x[:, 5:].split(1, 1))]
    close(torch.cat(y, 1), want, rtol=1e-4, atol=1e-5)
    assert not way
    layer.absorb, reserved = True, LatentCache(max_length=24)
    with pytest.raises(NotImplementedError, match="absorb=True: it reads kv_b_proj's weight"):
        layer(x, cache=reserved)
    assert reserved.length == 0
    served = Sequences(3, 32, pages=6, page_size=16)
    pool = layer.new_pool(served)
    served.step([served.new() for _ in range(3)], 1)
    with pytest.raises(NotImplementedError, match="cache is a pool, which is read the absorbed way"):
        layer(x[:, :1], cache=pool)


@torch.no_grad()
def test_a_parametrised_up_projection_is_read(way):
    layer, x, cache = made(), tokens(N=9), LatentCache(max_length=24)
    want = made()
    want.kv_b_proj.weight.mul_(2)
    torch.nn.utils.parametrize.register_parametrization(layer.kv_b_proj, "weight", Doubled())
    y = [layer(x[:, :5], cache=cache), *(layer(part, cache=cache) for part in x[:, 5:].split(1, 1))]
    close(torch.cat(y, 1), want(x), rtol=1e-4, atol=1e-5)
    assert len(way) == 4


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@torch.no_grad()
def test_a_parametrised_weight_is_computed_before_the_first_launch(interpreted):
    """As RoPE's tables: latent_step_kernel reads it before it waits."""
    layer, x, cache = made(), tokens(N=6), LatentCache(max_length=24)
    layer(x[:, :5], cache=cache)
    noted = Doubled()
    noted.register_forward_hook(lambda *args: interpreted.append("weight"))
    torch.nn.utils.parametrize.register_parametrization(layer.kv_b_proj, "weight", noted)
    interpreted.clear()
    layer(x[:, 5:], cache=cache)
    launched = [name for name in interpreted if name != "weight"]
    assert "latent_step_kernel" in launched
    assert interpreted == ["weight"] * interpreted.count("weight") + launched


def sliced(t):
    """The same numbers, with others between them, as of a tensor that was loaded by assignment."""
    return torch.nn.Parameter(torch.stack([t.detach(), t.detach() + 1], -1)[..., 0])


def widened(t):
    return torch.nn.Parameter(torch.cat([t.detach(), t.detach() + 1], 1)[:, : t.shape[1]])


@pytest.mark.parametrize(
    ("name", "change"),
    [("kv_b_proj", widened), ("kv_b_proj", sliced), ("kv_a_layernorm", sliced), ("q_a_layernorm", sliced)],
)
@pytest.mark.parametrize("B", [1, 3, 17])
@torch.no_grad()
def test_weights_that_are_views(name, change, B, interpreted):
    layer, x = made(), tokens(B, 6)
    for norm in (layer.q_a_layernorm, layer.kv_a_layernorm):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    want, cache = layer(x), LatentCache(max_length=24)
    module = layer.get_submodule(name)
    module.weight = change(module.weight)
    assert not module.weight.is_contiguous()
    y = [layer(x[:, :4], cache=cache), *(layer(part, cache=cache) for part in x[:, 4:].split(1, 1))]
    close(torch.cat(y, 1), want, rtol=1e-4, atol=1e-5)
