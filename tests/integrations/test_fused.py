"""Projections and RoPE around attention: fused kernels where they serve, else the module's own parts.

Kernels run in Triton's interpreter, in fp32. Results are compared with the model's own eager code in fp64.
"""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fulmen.integrations import transformers as ours
from fulmen.integrations.transformers import attention, fused, lightning
from fulmen.integrations.transformers.fused import Projections, Style
from tests.integrations.families import FAMILIES, HYBRID, TINY
from tests.integrations.test_accelerate import LoRA, Twice
from tests.integrations.test_models import N, assert_close, error, ids_of, in_parts, logits_of, own, trained

LLAMA = Style(False, True, True)
ROTARY = "turn_both_kernel"
PRODUCTS = {"linear_row_kernel", "linear_rows_kernel"}
# families whose softmax modules have projections of the hidden state; those of the second set turn q and k, too
PROJECTED = (
    "llama",
    "qwen3",
    "gemma3",
    "gpt_oss",
    "phi3",
    "olmo2",
    "minimax",
    "granitemoehybrid",
    "falcon_h1",
    "zamba2",
)
TURNED = set(PROJECTED) - {"granitemoehybrid"}


def rotary_of(model):
    return importlib.import_module(f"transformers.models.{model}.modeling_{model}").apply_rotary_pos_emb


@pytest.mark.parametrize(("model", "style"), [
    ("llama", LLAMA), ("minimax", LLAMA), ("qwen3", LLAMA), ("gemma3", LLAMA), ("granitemoehybrid", LLAMA),
    ("olmo2", LLAMA._replace(keeps_dtype=True)), ("phi3", LLAMA._replace(partial=True)),
    ("bamba", LLAMA._replace(partial=True)), ("cohere", Style(True, True, True, keeps_dtype=True)),
    ("glm", Style(True, False, True, partial=True)), ("gpt_oss", Style(False, False, False)),
])  # fmt: skip
def test_how_models_turn(model, style):
    assert fused.style_of(rotary_of(model)) == style


def test_other_ways_to_turn_are_not_known():
    llama = rotary_of("llama")
    for other in (
        lambda q, k, cos, sin: llama(q, k, cos, -sin),
        lambda q, k, cos, sin: llama(q, q, cos, sin),
        lambda q, k, cos, sin: (*llama(q, k, cos, sin), None),
        lambda q, k, cos, sin, positions: llama(q, k, cos, sin),
        lambda q, k, cos, sin: 1 / 0,
    ):
        assert fused.style_of(other) is None
    before = torch.get_rng_state()
    fused.style_of.cache_clear()
    assert fused.style_of(llama) == LLAMA
    assert torch.equal(torch.get_rng_state(), before)


def attention_of(model):
    return next(m for m in model.modules() if attention.matches(m))


@pytest.mark.parametrize("family", FAMILIES)
def test_projections_of_the_families(family):
    mixers = [m for m in own(family).modules() if attention.matches(m)]
    found = {fused.projections_of(type(m)) for m in mixers}
    if family == "mamba2":
        assert not mixers
    elif family == "phi3":
        assert found == {Projections(("qkv_proj",), ("o_proj",))}
    elif family in (*PROJECTED, "mistral", "gemma2", "bamba", "nemotron_h"):
        (one,) = found
        assert one.together == ("q_proj", "k_proj", "v_proj")
        assert "o_proj" in one.after


class Branches(nn.Module):
    def forward(self, x, more=None):
        y = self.e(more) + self.a(x)
        if more is None:
            y = y + self.b(x)
        return self.c(y) + self.d(x) @ self.d.weight


class Changed(nn.Module):
    def forward(self, x):
        x = x + 1
        return self.a(x)


class Sets(nn.Module):
    def forward(self, x):
        self.seen = x
        return self.a(x)


class Calls(nn.Module):
    def help(self, x):
        self.seen = x

    def forward(self, x):
        self.help(x)
        return self.a(x)


def test_what_is_computed_ahead():
    """Only what every call computes, and only if the module stays as it is."""
    assert fused.projections_of(Branches) == Projections(("a",), ("b", "c"))
    assert [fused.projections_of(kind) for kind in (Changed, Sets, Calls)] == [None] * 3


# ------------------------------------------------------------------------------------------- the fused path


def accelerated(family, dtype=torch.float32):
    model = copy.deepcopy(own(family, dtype))
    return model, ours.accelerate(model, verbose=False)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", PROJECTED)
def test_steps(family, static, interpreted):
    model, result = accelerated(family)
    cache = result.new_cache(16 if static else None)
    got = in_parts(model, ids_of(), None, None, cache, (9, 10, 11, 12))
    assert_close(got, logits_of(family), family)
    assert PRODUCTS & set(interpreted)
    assert (ROTARY in interpreted) == (family in TURNED)


def test_launches_of_a_step(interpreted):
    """One for q, k and v, one for RoPE, one for the output."""
    model, result = accelerated("llama")
    cache = result.new_cache(16)
    in_parts(model, ids_of(1), None, None, cache, (11,))
    interpreted.clear()
    in_parts(model, ids_of(1)[:, 11:], None, None, cache, (1,))
    assert interpreted == ["linear_row_kernel", ROTARY, "linear_row_kernel"] * model.config.num_hidden_layers


class Operations(TorchDispatchMode):
    """Names of those that write memory."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view:
            self.names.append(function._overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_a_token_in_minimax_s_static_cache():
    """Keys, values and the length: three operations."""
    _, result = accelerated("minimax")
    cache, other = result.new_cache(8), result.new_cache(8)
    parts = [torch.randn(2, 2, n, 16) for n in (3, 1, 1)]
    for part in parts[:2]:
        cache.update(part, -part, 1)
    negative = -parts[2]
    with Operations() as seen:
        keys, values = cache.update(parts[2], negative, 1)
    assert seen.names == ["index_copy_", "index_copy_", "add_"]
    other.update(torch.cat(parts, 2), -torch.cat(parts, 2), 1)
    assert torch.equal(keys, other.layers[1].keys)
    assert torch.equal(values, -keys)
    assert cache.get_seq_length() == other.get_seq_length() == 5


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_oss", "olmo2", "minimax"])
def test_training(family, interpreted):
    """Errors of logits and of the gradients of all parameters together, by those of the model's own fp32."""
    model, result = accelerated(family)
    weights = torch.randn(3, N, 61, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    exact, got, rough = (trained(one, weights) for one in (own(family), model, own(family, torch.float32)))
    assert error(got[0], exact[0]) <= 2 * error(rough[0], exact[0])
    flat = [torch.cat([g.double().flatten() for g in grads if g is not None]) for _, grads in (exact, got, rough)]
    assert error(flat[1], flat[0]) <= 3 * error(flat[2], flat[0])
    layers = sum(mixer.kind.op == "flash" for mixer in result.mixers)
    assert interpreted.count(ROTARY) == 2 * layers, "forward and backward"


@pytest.mark.parametrize("kind", ["glm", "cohere", "stablelm"])
def test_other_styles(kind, interpreted):
    """Interleaved, interleaved with angles of elements, and partial outside of the function."""
    make = {"glm": transformers.GlmConfig, "cohere": transformers.CohereConfig, "stablelm": transformers.StableLmConfig}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        make[kind](**HYBRID if kind == "stablelm" else TINY), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(ids_of()).logits
        rough = model(ids_of()).logits
        ours.accelerate(model, verbose=False)
        got = model(ids_of()).logits
    assert ROTARY in interpreted
    assert (got - exact).norm() <= 2 * (rough - exact).norm()


# ----------------------------------------------------------------------------------------- the module's own parts


def hooked(model):
    calls = []
    attention_of(model).k_proj.register_forward_hook(lambda *_: calls.append(1))
    return calls


def adapted(model):
    layer = attention_of(model)
    layer.k_proj, calls = LoRA(layer.k_proj), []
    layer.k_proj.register_forward_hook(lambda *_: calls.append(1))
    return calls


def parametrised(model):
    calls = []

    class Noted(Twice):
        def forward(self, x):
            calls.append(1)
            return x

    nn.utils.parametrize.register_parametrization(attention_of(model).k_proj, "weight", Noted())
    calls.clear()
    return calls


def replaced(model):
    linear, calls = attention_of(model).k_proj, []
    before = linear.forward
    linear.forward = lambda x: calls.append(1) or before(x)
    return calls


@pytest.mark.parametrize("change", [hooked, adapted, parametrised, replaced])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_projection_that_is_not_plain_is_called(change, when, interpreted):
    model = copy.deepcopy(own("llama", torch.float32))
    calls = change(model) if when == "before" else None
    result = ours.accelerate(model, verbose=False)
    calls = change(model) if calls is None else calls
    with torch.no_grad():
        got = in_parts(model, ids_of(), None, None, result.new_cache(), (11, 12))
    assert len(calls) == 2
    assert PRODUCTS & set(interpreted), "the others"
    result.undo()
    with torch.no_grad():
        torch.testing.assert_close(got, model(ids_of(), use_cache=False).logits)


@pytest.mark.parametrize("change", ["fp64", "autocast", "grad", "hooks of all modules"])
def test_calls_that_kernels_do_not_serve(change, interpreted):
    dtype = torch.float64 if change == "fp64" else torch.float32
    model, result = accelerated("llama", dtype)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None) if "hooks" in change else None
    try:
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"),
            torch.set_grad_enabled(change == "grad"),
        ):
            logits = model(ids_of(1)[:, :1], past_key_values=result.new_cache()).logits
    finally:
        if handle is not None:
            handle.remove()
    assert not PRODUCTS & set(interpreted)
    assert (ROTARY in interpreted) == (change in ("grad", "hooks of all modules"))
    if change != "autocast":
        with torch.no_grad():
            torch.testing.assert_close(logits, own("llama", dtype)(ids_of(1)[:, :1]).logits)


def test_what_other_attention_is_given(interpreted):
    """A user's own attention function sees a module with its parts, parameters and attributes."""
    model, result = accelerated("llama")
    seen = []

    def attend(module, *args, **kwargs):
        seen.append((type(module), list(module.named_modules()), list(module.parameters()), module.layer_idx))
        return attention.attend(module, *args, **kwargs)

    attention_functions, _ = attention._interfaces()
    attention_functions.register("noted", attend)
    try:
        model.config._attn_implementation_internal = "noted"
        in_parts(model, ids_of(1)[:, :1], None, None, result.new_cache(), (1,))
    finally:
        del type(attention_functions)._global_mapping["noted"]
    assert PRODUCTS & set(interpreted)
    for (kind, modules, parameters, index), layer in zip(seen, model.model.layers, strict=True):
        own_parts = dict(layer.self_attn.named_modules())
        assert kind is type(layer.self_attn)
        assert all(part is own_parts[name] for name, part in modules if name)
        assert [id(p) for p in parameters] == [id(p) for p in layer.self_attn.parameters()]
        assert index == layer.self_attn.layer_idx


def test_compiled_mixers_are_one_graph(interpreted):
    model, _ = accelerated("llama")
    want = model(ids_of(), use_cache=False).logits
    interpreted.clear()
    for layer in model.model.layers:
        layer.self_attn.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(model(ids_of(), use_cache=False).logits, want)
    assert not interpreted


def test_copies_and_undo(interpreted):
    model, result = accelerated("llama")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
        want = other(ids_of(1)[:, :1], use_cache=False).logits
        assert PRODUCTS & set(interpreted)
        assert attention_of(other).forward.__self__ is attention_of(other)
    result.undo()
    assert not any("forward" in module.__dict__ for module in model.modules())
    interpreted.clear()
    with torch.no_grad():
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(model(ids_of(1)[:, :1], use_cache=False).logits, want)
    assert not interpreted


def test_code_over_a_forward_stays():
    """A module whose forward was replaced before is served through the attention interface alone."""
    model, calls = copy.deepcopy(own("llama")), []
    layer = attention_of(model)
    before = layer.forward
    layer.forward = lambda *args, **kwargs: calls.append(1) or before(*args, **kwargs)
    over = layer.forward
    result = ours.accelerate(model, verbose=False)
    assert layer.forward is over
    with torch.no_grad():
        assert_close(model(ids_of(), use_cache=False).logits, logits_of("llama"), "llama")
    assert calls
    result.undo()
    assert layer.forward is over


def test_a_step_starts_early_unless_its_slopes_or_state_were_just_made(monkeypatch):
    model = copy.deepcopy(own("minimax"))
    result = ours.accelerate(model, verbose=False)
    said, stepped = [], lightning.stepped

    def seen(*args, early, **kwargs):
        said.append(early)
        return stepped(*args, early=early, **kwargs)

    monkeypatch.setattr(lightning, "stepped", seen)
    cache = result.new_cache()
    with torch.no_grad():
        model(ids_of(2), past_key_values=cache)
        for _ in range(2):
            model(ids_of(2)[:, :1], past_key_values=cache)
        assert said == [True] * 4  # layers 0 and 2
        model.model.layers[0].self_attn.slope_rate.mul_(2)
        cache.linear_cache[2] = cache.linear_cache[2].bfloat16()
        model(ids_of(2)[:, :1], past_key_values=cache)
    assert said[4:] == [False, False]
