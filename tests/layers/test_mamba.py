"""The Mamba-2 layer: against transformers' mixers, against its definition in fp64, and its own ways."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.zamba2.modeling_zamba2 import Zamba2MambaMixer

from fulmen.layers import LightningAttention, Mamba2, MambaCache, Sequences, StateCache
from fulmen.testing import assert_close, expected, results_of

close = torch.testing.assert_close
WIDTH, H, P, N, G = 32, 8, 8, 16, 2
MASK = torch.tensor([[0] * 5 + [1] * 16, [1] * 17 + [0] * 4, [0, 1, 1, 0] + [1] * 15 + [0] * 2], dtype=torch.bool)
BAMBA = {"mamba_n_heads": H, "mamba_d_head": P, "mamba_d_state": N, "mamba_n_groups": G, "mamba_chunk_size": 8}
FAMILIES = {
    "mamba2": (Mamba2Mixer, lambda: transformers.Mamba2Config(
        hidden_size=WIDTH, num_heads=H, head_dim=P, state_size=N, n_groups=G, num_hidden_layers=2, use_bias=True,
        chunk_size=8, expand=2)),
    "bamba": (BambaMixer, lambda: transformers.BambaConfig(hidden_size=WIDTH, num_hidden_layers=2, **BAMBA)),
    "granite": (GraniteMoeHybridMambaLayer, lambda: transformers.GraniteMoeHybridConfig(
        hidden_size=WIDTH, num_hidden_layers=2, layer_types=["mamba"] * 2, **BAMBA | {"mamba_n_groups": 1})),
    "nemotron": (NemotronHMamba2Mixer, lambda: transformers.NemotronHConfig(
        hidden_size=WIDTH, mamba_num_heads=H, mamba_head_dim=P, ssm_state_size=N, n_groups=G, chunk_size=8,
        layers_block_type=["mamba"] * 2)),
    "zamba2": (Zamba2MambaMixer, lambda: transformers.Zamba2Config(
        hidden_size=WIDTH, n_mamba_heads=H, mamba_d_state=N, mamba_ngroups=G, chunk_size=8, num_hidden_layers=2,
        layers_block_type=["mamba"] * 2)),
}  # fmt: skip


def theirs(family: str):
    torch.manual_seed(0)
    kind, config = FAMILIES[family]
    module = kind(config := config(), 0)
    for p in module.parameters():
        if p.ndim == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    return module, config


def made(**options) -> Mamba2:
    torch.manual_seed(0)
    layer = Mamba2(WIDTH, H, **{"head_dim": P, "state_size": N, "num_groups": G, **options})
    if layer.norm is not None:
        torch.nn.init.uniform_(layer.norm.weight, 0.5, 1.5)
    return layer


def tokens(B: int = 2, length: int = 21, seed: int = 1) -> torch.Tensor:
    return torch.randn(B, length, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_of_transformers(family):
    module, config = theirs(family)
    layer = Mamba2.from_hf(module, config)
    x, dy = tokens(), tokens(seed=2)
    ours_at, theirs_at = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, want = layer(ours_at), module(theirs_at)
    close(y, want, rtol=1e-4, atol=1e-4)
    y.backward(dy)
    want.backward(dy)
    close(ours_at.grad, theirs_at.grad, rtol=1e-3, atol=1e-3)
    grads = dict(module.named_parameters())
    assert {n for n, _ in layer.named_parameters()} == set(grads)
    for name, p in layer.named_parameters():
        size = float(grads[name].grad.abs().max())
        close(p.grad, grads[name].grad, rtol=1e-3, atol=1e-4 * size, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("family", ["mamba2", "granite", "nemotron"])
@torch.no_grad()
def test_cached_decoding_of_transformers(family):
    module, config = theirs(family)
    layer = Mamba2.from_hf(module.state_dict(), config.to_dict())
    ours, hf = MambaCache(), DynamicCache(config=config)
    for part in tokens().split([9, 1, 1, 3, 2, 5], dim=1):
        y = layer(part, cache=ours)
        if family != "nemotron" or part.shape[1] > 1:  # its step forgets the floor of step sizes
            close(y, module(part, cache_params=hf), rtol=1e-4, atol=1e-4)
        else:
            break
        close(ours.state.mT, hf.get_recurrent_state(0), rtol=1e-4, atol=1e-4)
        close(ours.conv.mT, hf.get_conv_state(0)[..., 1:], rtol=1e-4, atol=1e-4)


def test_from_hf_refuses():
    module, config = theirs("mamba2")
    wrong = module.state_dict() | {"conv1d.weight": torch.zeros(3, 1, 4)}
    with pytest.raises(ValueError, match=r"conv1d.weight has shape \(3, 1, 4\)"):
        Mamba2.from_hf(wrong, config)
    with pytest.raises(NotImplementedError, match="model_type='falcon_h1'"):
        Mamba2.from_hf(module, transformers.FalconH1Config(hidden_size=WIDTH))
    config.hidden_act = "gelu"
    with pytest.raises(NotImplementedError, match="hidden_act='gelu'"):
        Mamba2.from_hf(module, config)


def test_from_hf_refuses_a_module_as_it_does_its_state_dict():
    """Falcon-H1's mixer has an Identity for a norm."""
    small = {"mamba_n_heads": H, "mamba_d_head": P, "mamba_d_state": N, "mamba_d_ssm": H * P}
    config = transformers.FalconH1Config(hidden_size=WIDTH, num_hidden_layers=1, mamba_rms_norm=False, **small)
    module = FalconH1Mixer(config, 0)
    for source in (module, module.state_dict()):
        with pytest.raises(NotImplementedError, match=r"model_type='falcon_h1': from_hf knows mamba2, .* accelerate"):
            Mamba2.from_hf(source, config)
    module, config = theirs("mamba2")
    module.norm = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"not those of Mamba2.* missing norm.weight"):
        Mamba2.from_hf(module, config)


def definition(layer: Mamba2, x: torch.Tensor) -> torch.Tensor:
    """Token by token."""
    inner, states = layer.num_heads * layer.head_dim, layer.num_groups * layer.state_size
    z, mixed, dt = layer.in_proj(x).split([inner, inner + 2 * states, layer.num_heads], 2)
    mixed = F.silu(layer.conv1d(mixed.mT)[..., : x.shape[1]].mT)
    v, k, q = mixed.split([inner, states, states], 2)
    v, k, q = v.unflatten(2, (H, P)), *(t.unflatten(2, (G, N)).repeat_interleave(H // G, 2) for t in (k, q))
    dt = F.softplus(dt + layer.dt_bias).clamp(*layer.steps[1:])
    state, out = 0.0, []
    for t in range(x.shape[1]):
        keep = torch.exp(-torch.exp(layer.A_log) * dt[:, t])[..., None, None]
        state = state * keep + (dt[:, t, :, None] * v[:, t])[..., None] * k[:, t, :, None]
        out.append((state * q[:, t, :, None]).sum(-1) + layer.D[:, None] * v[:, t])
    y = torch.stack(out, 1).flatten(2) * F.silu(z)
    if layer.norm is not None:
        y = layer.norm(y)
    return layer.out_proj(y)


KINDS = {
    "usual": {},
    "norm in groups": {"norm_groups": 4},
    "no norm": {"norm_groups": None, "bias": True},
    "no bias, three taps": {"conv_bias": False, "conv_size": 3},
    "limit": {"dt_limit": (0.01, 0.5)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_definition(kind):
    """Outputs and all gradients, by what the definition errs in fp32."""
    layer = made(**KINDS[kind])
    exact, parameters = copy.deepcopy(layer).double(), dict(layer.named_parameters())

    def by(function):
        def of(x, *given):
            module = exact if x.dtype == torch.float64 else layer
            named = {f"layer.{name}": p for name, p in zip(parameters, given, strict=True)}
            return [torch.func.functional_call(_Called(module, function), named, (x,))]

        return of

    leaves = [tokens().requires_grad_(), *(p.detach().requires_grad_() for p in parameters.values())]
    wanted = expected(by(definition), leaves, [tokens(seed=2)])
    for i, got in enumerate(results_of(by(lambda layer, x: layer(x)), leaves, [tokens(seed=2)])):
        assert_close(["y", "x", *parameters][i], got, *wanted[i])


class _Called(torch.nn.Module):
    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x):
        return self.function(self.layer, x)


# ------------------------------------------------------------------------------------------ rows and caches


@torch.no_grad()
def test_packed_sequences_are_those_alone():
    layer, x, ends = made(), tokens(1, 30), [0, 2, 13, 13, 30]
    y = layer(x, cu_seqlens=torch.tensor(ends, dtype=torch.int32))
    for begin, end in itertools.pairwise(ends):
        close(y[:, begin:end], layer(x[:, begin:end]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limit", [(0.0, math.inf), (0.02, math.inf)])
@torch.no_grad()
def test_padded_rows_are_those_alone(limit):
    """Also after the padding: state and convolution go on from a row's own tokens."""
    layer, x, cache = made(dt_limit=limit), tokens(3), MambaCache()
    later, again = tokens(3, 1, seed=5), tokens(3, 4, seed=6)
    mask = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    y = [layer(x, cache=cache, mask=MASK), layer(later, cache=cache), layer(again, cache=cache, mask=mask)]
    assert not y[0][~MASK].any()
    for b in range(3):
        alone = MambaCache()
        parts = x[b : b + 1, MASK[b]], later[b : b + 1], again[b : b + 1, mask[b]]
        for part, got, there in zip(parts, y, (MASK[b], slice(None), mask[b]), strict=True):
            close(got[b : b + 1, there], layer(part, cache=alone), rtol=1e-4, atol=1e-5)
        assert alone.length == int(cache.lengths[b])
        close(cache.state[b : b + 1], alone.state, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_steps_keep_the_memory_and_may_be_reordered():
    layer, x, cache = made(), tokens(3, 12), MambaCache()
    want = layer(x)
    layer(x[:, :8], cache=cache)
    held = cache.state.data_ptr(), cache.conv.data_ptr()
    for t in range(8, 11):
        close(layer(x[:, t : t + 1], cache=cache), want[:, t : t + 1], rtol=1e-4, atol=1e-5)
    assert (cache.state.data_ptr(), cache.conv.data_ptr()) == held
    assert cache.length == 11
    cache.reorder([2, 0])
    close(layer(x[[2, 0], 11:], cache=cache), want[[2, 0], 11:], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="another layer"):
        made()(x[:2, :1], cache=cache)
    cache.reset()
    assert cache.conv is None
    layer(x, cache=cache)
    with pytest.raises(NotImplementedError, match="crop"):
        cache.crop(3)


def test_gradients_through_a_cache():
    layer, x = made(), tokens()
    cache, leaf = MambaCache(), x.clone().requires_grad_()
    parts = [layer(part, cache=cache) for part in leaf.split([7, 1, 13], 1)]
    torch.cat(parts, 1).backward(tokens(seed=2))
    whole = x.clone().requires_grad_()
    layer(whole).backward(tokens(seed=2))
    close(leaf.grad, whole.grad, rtol=1e-4, atol=1e-5)


def test_compiled_whole():
    layer, x = made(), tokens()
    close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x), rtol=1e-4, atol=1e-5)


def test_bad_arguments():
    for options, message in (
        ({"num_groups": 3}, "num_groups=3 must divide num_heads=8"),
        ({"norm_groups": 5}, "norm_groups=5: so many groups must divide H \\* P = 64"),
        ({"dt_limit": (1.0, 0.0)}, "dt_limit="),
        ({"conv_size": 1}, "conv_size=1"),
    ):
        with pytest.raises(ValueError, match=message):
            made(**options)
    with pytest.raises(ValueError, match="cache is a StateCache, must be a MambaCache"):
        made()(tokens(), cache=StateCache())
    assert Mamba2(32, head_dim=16).num_heads == 4
    assert "num_groups=2" in repr(made())


def test_a_layer_on_the_meta_device_is_drawn_later():
    layer = Mamba2(WIDTH, H, head_dim=P, device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    dt = F.softplus(layer.dt_bias)
    assert ((dt > 0.0009) & (dt < 0.11)).all()
    assert layer(tokens()).isfinite().all()


def test_a_cache_of_other_rows_is_refused():
    layer, cache = made(), MambaCache()
    with torch.no_grad():
        layer(torch.randn(3, 5, layer.embed_dim), cache=cache)
        for rows, tokens in ((5, 1), (2, 1), (5, 4)):
            with pytest.raises(ValueError, match=r"cache holds states \(3, .* call reset\(\)"):
                layer(torch.randn(rows, tokens, layer.embed_dim), cache=cache)


@pytest.mark.parametrize("kind", [Mamba2, LightningAttention])
@torch.no_grad()
def test_a_cache_of_another_dtype_is_named(kind):
    layer = made() if kind is Mamba2 else LightningAttention(WIDTH, 4)
    cache = layer.cache_type()
    layer(tokens(), cache=cache)
    state = cache.state.clone()
    layer.double()
    said = "cache holds states in torch.float32 on cpu, and x, torch.float64 on cpu, needs torch.float64 there"
    for length in (1, 4):
        with pytest.raises(ValueError, match=rf"^{said}: call reset\(\)"):
            layer(tokens(length=length).double(), cache=cache)
    assert torch.equal(cache.state, state)
    assert cache.length == 21
    layer.bfloat16()  # whose state is fp32, too
    assert layer(tokens(length=1).bfloat16(), cache=cache).isfinite().all()


def test_a_step_after_inference_mode_and_with_gradients():
    layer, cache = made(), MambaCache()
    x = torch.randn(2, 6, layer.embed_dim)
    with torch.inference_mode():
        layer(x[:, :4], cache=cache)
    with torch.no_grad():
        layer(x[:, 4:5], cache=cache)
    for name, p in layer.named_parameters():
        p.requires_grad_(name == "dt_bias")
    layer(x[:, 5:], cache=cache).sum().backward()
    assert layer.dt_bias.grad is not None
    assert layer.dt_bias.grad.any()


# ---------------------------------------------------------------------------------- who looks on, and what fails


@torch.no_grad()
def test_fp64_is_exact_to_its_last_digits():
    """Whole and in steps: nothing on the way is rounded to fp32."""
    layer, x, cache = made(dt_limit=(0.001, 0.5)).double(), tokens().double(), MambaCache()
    want = definition(layer, x)
    exact = {"rtol": 1e-12, "atol": 1e-13}
    close(layer(x), want, **exact)
    parts = [layer(part, cache=cache) for part in x.split([9, 1, 1, 10], 1)]
    close(torch.cat(parts, 1), want, **exact)
    assert cache.state.dtype == torch.float64


@pytest.mark.parametrize("kind", ["hook", "pre-hook", "forward"])
@torch.no_grad()
def test_a_norm_that_somebody_watches_is_called(kind):
    layer, x = made(), tokens()
    want, seen = layer(x), []
    if kind == "hook":
        layer.norm.register_forward_hook(lambda *args: seen.append(1))
    elif kind == "pre-hook":
        layer.norm.register_forward_pre_hook(lambda *args: seen.append(1))
    else:
        forward = layer.norm.forward
        layer.norm.forward = lambda x: (seen.append(1), forward(x))[1]
    cache = MambaCache()
    parts = [layer(x[:, :20], cache=cache), layer(x[:, 20:], cache=cache)]
    assert len(seen) == 2
    close(torch.cat(parts, 1), want, rtol=1e-4, atol=1e-5)


def test_a_convolution_that_must_be_called_is_refused():
    for change in (
        lambda conv: conv.register_forward_hook(lambda module, given, y: 2 * y),
        lambda conv: torch.nn.utils.weight_norm(conv),  # a hook computes the weight
        lambda conv: setattr(conv, "__class__", type("Adapted", (torch.nn.Conv1d,), {})),
    ):
        layer = made()
        with pytest.warns(FutureWarning) if change.__code__.co_names[:1] == ("torch",) else contextlib.nullcontext():
            change(layer.conv1d)
        with pytest.raises(NotImplementedError, match=r"conv1d is a .* reads its weights and does not call it"):
            layer(tokens())


@torch.no_grad()
def test_a_parametrised_convolution_counts():
    layer, x = made(), tokens()
    exact = copy.deepcopy(layer)
    exact.conv1d.weight.mul_(2)
    torch.nn.utils.parametrize.register_parametrization(layer.conv1d, "weight", _Doubled())
    close(layer(x), exact(x))


class _Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@torch.no_grad()
def test_a_call_that_fails_leaves_the_cache():
    layer, x, cache = made(), tokens(), MambaCache()
    layer(x[:, :9], cache=cache)
    held = cache.state, cache.conv, cache.length
    handle = layer.out_proj.register_forward_hook(_failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        layer(x[:, 9:13], cache=cache)
    assert (cache.state, cache.conv, cache.length) == held
    handle.remove()
    close(layer(x[:, 9:], cache=cache), layer(x)[:, 9:], rtol=1e-4, atol=1e-5)


def _failing(*args):
    raise RuntimeError("out of memory")


@torch.no_grad()
def test_a_norm_in_fp32_of_a_layer_in_bf16():
    layer, x, cache = made().bfloat16(), tokens().bfloat16(), MambaCache()
    layer.norm.float()
    want = layer(x)
    parts = [layer(part, cache=cache) for part in x.split([20, 1], 1)]
    assert {y.dtype for y in parts} == {torch.bfloat16}
    close(torch.cat(parts, 1), want, rtol=3e-2, atol=3e-2)


@torch.no_grad()
def test_offsets_that_are_a_view():
    layer, x = made(), tokens(1, 30)
    ends = torch.tensor([[0, 7], [4, 7], [30, 7]], dtype=torch.int32)[:, 0]
    assert not ends.is_contiguous()
    close(layer(x, cu_seqlens=ends), layer(x, cu_seqlens=ends.contiguous()), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_steps_by_kernels(kind, interpreted):
    """All of a step in five launches, as torch's operations have it."""
    layer, x = made(**KINDS[kind]), tokens(3, 6)
    torch.nn.init.uniform_(layer.D, 0.5, 1.5)
    caches, ys = [MambaCache(), MambaCache()], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fulmen.layers.fused.on_gpu", lambda x: False)
        patch.setattr("fulmen.layers.fused.projections.on_gpu", lambda x: False)
        patch.setattr("fulmen.layers.scan.kernels_for", lambda *given: None)
        for cache in caches:
            layer(x[:, :3], cache=cache)
        ys.append([layer(x[:, t : t + 1], cache=caches[0]) for t in (3, 4, 5)])
    interpreted.clear()
    ys.append([layer(x[:, t : t + 1], cache=caches[1]) for t in (3, 4, 5)])
    normed = [] if layer.norm is None else ["outputs_kernel"]
    products = ["linear_rows_kernel"]
    assert interpreted == 3 * [*products, "conv_step_kernel", "state_update_kernel", *normed, *products]
    for plain, fast in zip(*ys, strict=True):
        close(fast, plain, rtol=1e-4, atol=1e-5)
    close(caches[1].state, caches[0].state, rtol=1e-4, atol=1e-5)
    close(caches[1].conv, caches[0].conv, rtol=1e-4, atol=1e-5)  # rows of another product, whose sums round otherwise
    assert caches[1].length == 6


@torch.no_grad()
def test_compiled_steps():
    layer, x, caches = made(), tokens(2, 8), [MambaCache(), MambaCache()]
    for cache in caches:
        layer(x[:, :5], cache=cache)
    step = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for t in (5, 6, 7):
        one = x[:, t : t + 1]
        close(step(one, cache=caches[0]), layer(one, cache=caches[1]), rtol=1e-4, atol=1e-5)
    close(caches[0].state, caches[1].state, rtol=1e-4, atol=1e-5)
    close(caches[0].conv, caches[1].conv, rtol=0, atol=0)
    assert caches[0].length == 8


@torch.no_grad()
def test_a_mixer_inside_a_model():
    """The groups of its norm are the module's own, which older versions of transformers did not know."""
    module, config = theirs("mamba2")
    model, x = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.ModuleDict({"mixer": module})])}), tokens()
    prefix = "layers.0.mixer."
    layer = Mamba2.from_hf(model, config, prefix=prefix)
    close(layer(x), module(x), rtol=1e-4, atol=1e-4)
    close(Mamba2.from_hf(model.state_dict(), config, prefix=prefix)(x), layer(x))
    assert layer.norm.groups == G
    del module.norm.group_size
    assert Mamba2.from_hf(model, config, prefix=prefix).norm.groups == 1
    with pytest.raises(ValueError, match="these weights are not those of Mamba2"):
        Mamba2.from_hf(model, config, prefix="layers.0.")


def test_there_is_no_pool():
    with pytest.raises(NotImplementedError, match=r"^Mamba2 has no pool of many sequences: .* a MambaCache\(\)"):
        Mamba2(32).new_pool(Sequences(8, 2))
