"""What `accelerate` must leave as it is: hooks, adapters, copies, casts, and the model itself after `undo`.

One model for each kind of mixer: softmax (Llama), lightning (MiniMax) and Mamba-2 (Granite 4 H), with softmax layers.
"""

from __future__ import annotations

import copy
import io
import types

import pytest
import torch
import transformers
from torch import nn

from fulmen.integrations import transformers as ours
from fulmen.integrations.transformers import attention, lightning, mamba2
from tests.integrations.families import FAMILIES, TINY
from tests.integrations.test_models import N, assert_close, error, ids_of, in_parts, logits_of, own

KINDS = ("llama", "minimax", "granitemoehybrid")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj", "output_gate", "in_proj")
POSITIONS = torch.tensor([[*range(5), *range(7)]])  # two packed sequences


def accelerated(family, dtype=torch.float64, **options):
    model = copy.deepcopy(own(family, dtype))
    return model, ours.accelerate(model, verbose=False, **options)


def is_own(model, implementation="eager"):
    return model.config._attn_implementation == implementation and not any(
        "forward" in m.__dict__ or hasattr(m, "fulmen_accelerated") or m._forward_pre_hooks for m in model.modules()
    )


# -------------------------------------------------------------------------------- hooks and replaced parts


@pytest.mark.parametrize("family", KINDS)
def test_hooks_of_all_parts_run(family):
    model, result = accelerated(family)
    seen = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: seen.append(name))
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
    model(ids_of(), use_cache=False)
    with_fulmen = sorted(seen)
    result.undo()
    seen.clear()
    model(ids_of(), use_cache=False)
    assert with_fulmen == sorted(seen)


@pytest.mark.parametrize("part", ["norm", "act_fn"])
@pytest.mark.parametrize("hook", ["forward_pre", "forward", "full_backward", "replaced"])
def test_lightning_parts_with_hooks_are_called(part, hook, monkeypatch):
    """On a GPU fused kernels take the place of norm and activation, unless somebody listens there."""
    asked = []
    for name in ("kernels_for", "fused_call"):
        monkeypatch.setattr(lightning, name, lambda module, *rest: asked.append(rest[0]) or None)
    model, _ = accelerated("minimax", torch.float32)
    layer = model.model.layers[0].self_attn
    width = layer.num_attention_heads * layer.head_dim

    def fused():
        """Which of the fused kernels the layer asks for."""
        asked.clear()
        layer(torch.zeros(1, 5, 32))
        widths = [x.shape[-1] for x in asked if isinstance(x, torch.Tensor)]
        return {"act_fn": 3 * width in widths, "norm": width in widths}

    assert fused() == {"act_fn": True, "norm": True}
    module, calls = getattr(layer, part), []
    if hook == "replaced":
        before = module.forward
        module.forward = lambda x: calls.append(1) or before(x)
    else:
        getattr(module, f"register_{hook}_hook")(lambda *_: calls.append(1) and None)
    assert fused()[part] is False
    assert fused()["act_fn" if part == "norm" else "norm"] is True
    assert calls or hook == "full_backward"


class LoRA(nn.Module):
    """As peft wraps a projection."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.randn(linear.in_features, 2, dtype=linear.weight.dtype) * 0.2)
        self.b = nn.Parameter(torch.randn(2, linear.out_features, dtype=linear.weight.dtype) * 0.2)

    weight, bias = property(lambda self: self.linear.weight), property(lambda self: self.linear.bias)

    def forward(self, x):
        return self.linear(x) + x @ self.a @ self.b


def adapt(model):
    torch.manual_seed(0)
    found = [(m, name, getattr(m, name)) for m in model.modules() for name in PROJECTIONS if hasattr(m, name)]
    for parent, name, linear in found:
        setattr(parent, name, LoRA(linear))
    return len(found)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("family", KINDS)
def test_adapters_are_seen_whenever_they_come(family, when):
    model = copy.deepcopy(own(family))
    if when == "before":
        adapt(model)
    result = ours.accelerate(model, verbose=False)
    if when == "after":
        adapt(model)
    cache = result.new_cache()
    steps = in_parts(model, ids_of(), None, None, cache, (9, 10, 11, 12))
    logits = model.train()(ids_of(), use_cache=False).logits
    grads = torch.autograd.grad(logits.square().sum(), [p for p in model.parameters() if p.shape[-1:] == (2,)])
    result.undo()
    want = model(ids_of(), use_cache=False).logits
    assert_close(logits, want, family)
    assert_close(steps, want.detach(), family)
    assert error(want, logits_of(family)) > 0.01
    wanted = torch.autograd.grad(want.square().sum(), [p for p in model.parameters() if p.shape[-1:] == (2,)])
    for got, exact in zip(grads, wanted, strict=True):
        assert error(got, exact) < 1e-4


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("family", KINDS)
def test_parametrised_weights(family):
    model = copy.deepcopy(own(family))
    for module in list(model.modules()):
        if isinstance(module, nn.Linear) or "Norm" in type(module).__name__:
            nn.utils.parametrize.register_parametrization(module, "weight", Twice())
    want = model(ids_of(), use_cache=False).logits
    ours.accelerate(model, verbose=False)
    assert_close(model(ids_of(), use_cache=False).logits, want, family)


def test_slopes_loaded_later_are_read():
    """`slope_rate` is a buffer of MiniMax's checkpoints."""
    model, result = accelerated("minimax")
    layer = model.model.layers[0].self_attn
    weights = model.state_dict()
    slopes = weights["model.layers.0.self_attn.slope_rate"] * 3
    names = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    for name, x in zip(names, (slopes, *layer.decay_factors(slopes)), strict=True):
        weights[f"model.layers.0.self_attn.{name}"] = x
    with torch.no_grad():
        before = model(ids_of(), use_cache=False).logits
        model.load_state_dict(weights)
        loaded = model(ids_of(), use_cache=False).logits
        result.undo()
        want = model(ids_of(), use_cache=False).logits
    assert error(before, want) > 1e-4
    assert_close(loaded, want, "minimax")
    layer.slope_rate = layer.slope_rate.to(torch.bfloat16)
    assert lightning._slopes(layer).dtype == torch.float32


def test_a_model_moved_in_inference_mode_still_trains():
    model, _ = accelerated("minimax", torch.float32)
    with torch.inference_mode():
        model.double()(ids_of())  # reads the slopes again
    model.load_state_dict(own("minimax").state_dict(), assign=True)
    logits = model.requires_grad_().train()(ids_of(), use_cache=False).logits
    logits.sum().backward()
    assert_close(logits, logits_of("minimax"), "minimax")


# -------------------------------------------------------------------------------------------------- casts


@pytest.mark.parametrize("family", KINDS)
def test_autocast(family):
    """fp32 weights, products in bf16, in training and in steps."""
    model, result = accelerated(family, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        rough = own(family, torch.float32)(ids_of(), use_cache=False).logits
        steps = in_parts(model, ids_of(), None, None, result.new_cache(), (9, 10, 12))
        logits = model.train()(ids_of(), use_cache=False).logits
    logits.float().square().sum().backward()
    for got in (logits, steps):
        assert error(got, logits_of(family)) <= 2 * error(rough, logits_of(family))
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("family", KINDS)
def test_a_cast_after_accelerate(family):
    """Also between a prompt and its first step: the cache goes on in the new dtype."""
    model, result = accelerated(family)
    name, ids = FAMILIES[family].cache, ids_of()
    for dtype in (torch.float16, torch.bfloat16):
        model.load_state_dict(own(family).state_dict())
        cache = result.new_cache()
        with torch.no_grad():
            model.to(dtype)(ids[:, :9], **{name: cache})
            alone = model(ids, use_cache=False).logits
            steps = in_parts(model.float(), ids[:, 9:], None, None, cache, (1, 2, 3))
            roughly = copy.deepcopy(own(family)).to(dtype)(ids, use_cache=False).logits
        limit = 2 * error(roughly, logits_of(family))
        assert error(alone, logits_of(family)) <= limit
        assert error(steps, logits_of(family)[:, 9:]) <= limit


# -------------------------------------------------------------------------- copies, files, undo, twice


@pytest.mark.parametrize("family", KINDS)
def test_files_of_an_accelerated_model(family, tmp_path):
    model, result = accelerated(family)
    assert list(model.state_dict()) == list(own(family).state_dict())
    with pytest.raises(TypeError, match=r"cannot be pickled as a whole.*undo\(\)"):
        torch.save(model, io.BytesIO())
    model.save_pretrained(tmp_path)
    assert "fulmen" not in (tmp_path / "config.json").read_text()
    result.undo()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(ids_of(), use_cache=False).logits, logits_of(family))


@pytest.mark.parametrize("family", KINDS)
def test_accelerate_on_a_part_or_a_copy_of_what_is_accelerated(family):
    model, result = accelerated(family)
    other = copy.deepcopy(model)
    for again in (model, model.base_model, other):
        with pytest.raises(ValueError, match=r"accelerated already.*undo\(\)"):
            ours.accelerate(again)
    result.undo()
    assert is_own(model)
    with torch.no_grad():  # the copy goes on
        assert_close(other(ids_of(), use_cache=False).logits, logits_of(family), family)
    inner = ours.accelerate(model.base_model, verbose=False)
    with pytest.raises(ValueError, match="accelerated already, as a whole or in part"):
        ours.accelerate(model)
    inner.undo()
    ours.accelerate(model, verbose=False).undo()
    assert is_own(model)


@pytest.mark.parametrize("family", ["minimax", "granitemoehybrid"])
def test_nothing_is_left_if_accelerate_fails(family, monkeypatch):
    model = copy.deepcopy(own(family))

    def fails(*args, **kwargs):
        assert not is_own(model), "the mixers before it are replaced"
        raise KeyboardInterrupt

    monkeypatch.setattr(attention, "register", fails)
    with pytest.raises(KeyboardInterrupt):
        ours.accelerate(model)
    assert is_own(model)


def test_code_over_a_forward_is_not_lost():
    model, result = accelerated("granitemoehybrid")
    mixer = model.model.layers[0].mamba
    served = mixer.forward
    mixer.forward = lambda *args, **kwargs: served(*args, **kwargs)
    with pytest.raises(RuntimeError, match="forward of GraniteMoeHybridMambaLayer was replaced after accelerate"):
        result.undo()
    assert model.config._attn_implementation == "eager"
    mixer.forward = served
    result.undo()
    assert is_own(model)
    calls = []
    mixer.forward = lambda *args, **kwargs: (
        calls.append(1) or types.MethodType(type(mixer).forward, mixer)(*args, **kwargs)
    )
    result = ours.accelerate(model, verbose=False)
    assert "its forward was replaced by other code" in result.mixers[0].verdict
    model(ids_of(), use_cache=False)
    assert calls


@pytest.mark.parametrize("family", ["minimax", "granitemoehybrid"])
def test_hooks_of_device_maps_may_come_and_go(family):
    """accelerate's hooks put the forward they found under another name."""
    model = copy.deepcopy(own(family))
    mixer = next(m for m in model.modules() if lightning.matches(m) or mamba2.matches(m))
    calls = []

    def hook():
        mixer._hf_hook, mixer._old_forward = object(), mixer.forward
        mixer.forward = lambda *args, **kwargs: calls.append(1) or mixer._old_forward(*args, **kwargs)

    def unhook():
        mixer.forward = mixer._old_forward
        del mixer._hf_hook, mixer._old_forward

    for before in (False, True):
        for after in (False, True):
            calls.clear()
            if before:
                hook()
            result = ours.accelerate(model, verbose=False)
            assert result.mixers[0].reason is None
            if before and not after:
                unhook()
            elif after and not before:
                hook()
            with torch.no_grad():
                assert_close(model(ids_of(), use_cache=False).logits, logits_of(family), family)
            assert bool(calls) == after
            result.undo()
            with torch.no_grad():
                assert torch.equal(model(ids_of(), use_cache=False).logits, logits_of(family))
            if after:
                unhook()
            mixer.__dict__.pop("forward", None)


class Wrapped(nn.Module):
    """As DistributedDataParallel: a module around the model, which is no model of transformers."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("family", KINDS)
def test_a_module_around_the_model(family):
    model = Wrapped(copy.deepcopy(own(family)))
    result = ours.accelerate(model, verbose=False)
    cache = result.new_cache(16)
    with torch.no_grad():
        assert_close(model(ids_of(), past_key_values=cache).logits, logits_of(family), family)
    result.undo()
    assert is_own(model.module)


def test_names_that_users_register_stay_theirs():
    attention.register("fulmen", backend="reference")
    tables = attention._interfaces()
    before = tables[0]["fulmen"]
    model, result = accelerated("llama")
    assert tables[0]["fulmen"] is before
    attention.unregister("fulmen")
    model(ids_of())
    result.undo()


# ------------------------------------------------------------------------------------------ what calls ask for


@pytest.mark.parametrize("family", KINDS)
def test_weights_of_attention_are_refused(family):
    model, _ = accelerated(family)
    with pytest.raises(NotImplementedError, match=r"output_attentions=True.*undo\(\)"):
        model(ids_of(), output_attentions=True)
    model.config.get_text_config()._output_attentions = True
    with pytest.raises(NotImplementedError, match="output_attentions=True"):
        model(ids_of())
    model(ids_of(), output_attentions=False)


@pytest.mark.parametrize("family", KINDS)
def test_dropout_of_attention_is_refused_in_training_alone(family):
    model, _ = accelerated(family)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    with torch.no_grad():
        assert_close(model(ids_of(), use_cache=False).logits, logits_of(family), family)
        with pytest.raises(NotImplementedError, match=r"dropout=0\.3.*attention_dropout = 0"):
            model.train()(ids_of(), use_cache=False)


@pytest.mark.parametrize("family", ["minimax", "granitemoehybrid"])
def test_arguments_by_place(family):
    """Packed sequences and caches are seen there, too."""
    model, _ = accelerated(family)
    with torch.no_grad():
        want = model.base_model(input_ids=ids_of(1), position_ids=POSITIONS.clone(), use_cache=False)[0]
        got = model.base_model(ids_of(1), None, POSITIONS.clone(), use_cache=False)[0]
        assert torch.equal(got, want)
        cached = model.base_model(ids_of(1), None, None, None, use_cache=True)
        assert cached.past_key_values.get_seq_length() == N


@pytest.mark.parametrize("family", KINDS)
def test_packed_sequences_in_training_make_no_cache(family):
    """config.use_cache is true, and with a cache transformers takes nothing for packed."""
    model, _ = accelerated(family)
    want = model.train()(ids_of(1), position_ids=POSITIONS.clone(), use_cache=False).logits
    got = model(ids_of(1), position_ids=POSITIONS.clone())
    assert got.past_key_values is None
    assert torch.equal(got.logits, want)
    told = model(ids_of(1), position_ids=POSITIONS.clone(), use_cache=True)
    assert told.past_key_values.get_seq_length() == N
    assert error(told.logits, want) > 0.01
    assert model(ids_of(1), position_ids=torch.arange(N)[None]).past_key_values is not None, "not packed"


def test_packed_sequences_reach_a_model_that_is_not_given_positions():
    """Mamba2ForCausalLM keeps position_ids to itself. In training it makes no cache."""
    model, _ = accelerated("mamba2")
    ids = ids_of(1)
    with torch.no_grad():
        whole, alone = model(ids, use_cache=False).logits, model(ids[:, 5:], use_cache=False).logits
        got = model.train()(ids, position_ids=POSITIONS.clone()).logits
        torch.testing.assert_close(got[:, 5:], alone)
        offsets = torch.tensor([0, 5, N], dtype=torch.int32)
        torch.testing.assert_close(model(ids, cu_seq_lens_q=offsets).logits, got)
        model(ids, position_ids=POSITIONS.clone())  # the same tokens next, not packed
        torch.testing.assert_close(model(ids).logits, whole)
        model(ids, position_ids=POSITIONS.clone())
        torch.testing.assert_close(model.lm_head(model.backbone(ids).last_hidden_state).float(), whole)


@pytest.mark.parametrize("family", ["mamba2", "granitemoehybrid"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_mamba2(reentrant, family):
    model, _ = accelerated(family)
    model.train().enable_input_require_grads()

    def grads():
        model.zero_grad()
        logits = model(ids_of(1), position_ids=POSITIONS.clone(), use_cache=False).logits
        logits.square().sum().backward()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    want = grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.testing.assert_close(grads(), want)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_assisted_decoding_crops_the_cache(family):
    model, _ = accelerated(family)
    ids = ids_of(1)[:, [0, 1, 2, 3] * 3]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    want = own(family).generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), want)


class TextCrossAttention(nn.Module):
    """As MllamaTextCrossAttention: nothing says whether it is causal."""


def test_cross_attention_sees_all_keys_of_the_other_sequence():
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64) for _ in range(3))
    positions = POSITIONS[:, :9].clone()
    positions.fulmen_offsets = torch.tensor([0, 5, 9], dtype=torch.int32)
    got = attention.attend(TextCrossAttention(), q, k, v, None, position_ids=positions)[0].transpose(1, 2)
    torch.testing.assert_close(got, nn.functional.scaled_dot_product_attention(q, k, v))


# ----------------------------------------------------------------------------------------- other models


def test_encoder_and_decoder():
    config = transformers.BartConfig(
        vocab_size=61, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_attention_heads=2, decoder_ffn_dim=32, max_position_embeddings=64, dropout=0.0, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration._from_config(config, attn_implementation="eager").eval().double()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(std=0.3)
    ids, mask = ids_of(2), torch.ones(2, N, dtype=torch.long)
    mask[0, 7:] = 0

    def run():
        logits = [model(ids, attention_mask=m, decoder_input_ids=ids_of(2)).logits for m in (None, mask)]
        return *logits, model.generate(ids, attention_mask=mask, num_beams=2, max_new_tokens=5)

    want = run()
    ours.accelerate(model, verbose=False)
    torch.testing.assert_close(run(), want, rtol=1e-6, atol=1e-6)


def test_attention_that_is_switched_together_is_refused_together():
    windows = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    windows["vocab_size_per_layer_input"] = 61
    model = transformers.AutoModelForCausalLM.from_config(transformers.Gemma4TextConfig(**TINY, **windows))
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn cannot be: its head dim 512 is above 256"):
        ours.accelerate(model)
    assert is_own(model, "sdpa")
    sizes = {"vocab_size": 61, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ValueError, match="T5Attention: it adds biases of positions"):
        ours.accelerate(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)))


# ---------------------------------------------------------------------------------------- wrong arguments


def test_models_with_one_config_are_undone_one_by_one():
    models = [copy.deepcopy(own("llama")) for _ in range(2)]
    for module in models[1].modules():
        if hasattr(module, "config"):
            module.config = models[0].config
    results = [ours.accelerate(model, verbose=False) for model in models]
    third = copy.deepcopy(own("llama"))
    third.model.layers[0].self_attn.config = models[0].config
    with pytest.raises(ValueError, match=r"backend='eager'.*shares its config"):
        ours.accelerate(third, "eager", verbose=False)
    assert is_own(third)
    for result in results:
        assert models[0].config._attn_implementation == "fulmen_accelerate_auto"
        assert_close(models[1](ids_of()).logits, logits_of("llama"), "llama")
        result.undo()
    assert all(map(is_own, models))


@pytest.mark.parametrize("family", KINDS)
def test_masks_of_wrong_shapes_are_refused(family):
    model, _ = accelerated(family)
    ids = ids_of()
    B = ids.shape[0]
    wrong = [(B, N - 3), (1, N), (B + 1, N)]
    wrong += [] if family == "llama" else [(B, N + 4)]  # whose columns are counted from the first
    for shape in wrong:
        for padded in (False, True):
            mask = torch.ones(shape, dtype=torch.long)
            mask[0, :2] = not padded
            with pytest.raises(ValueError, match=rf"attention_mask has shape \({shape[0]}, {shape[1]}\)"):
                model(ids, attention_mask=mask)
    with torch.no_grad():
        past = model(ids, attention_mask=torch.ones_like(ids), use_cache=True).past_key_values
        for columns in (1, N):  # a column for the new token is missing
            with pytest.raises(ValueError, match=r"attention_mask has shape .*, those in the cache included"):
                model(ids[:, :1], attention_mask=ids.new_ones(B, columns), past_key_values=past)


def test_a_mask_of_mamba_is_checked_without_attention_layers():
    model, _ = accelerated("mamba2")
    for shape in ((3, N - 3), (1, N), (N,), (3, 1, N, N)):
        with pytest.raises(ValueError, match="attention_mask has shape"):
            model(ids_of(), attention_mask=torch.ones(shape))


@pytest.mark.parametrize("family", [*KINDS, "mamba2"])
@pytest.mark.parametrize(
    ("offsets", "said"),
    [([0, 7], "end at N"), ([2, 7, N], "start at 0"), ([0, 8, 7, N], "not decrease"), (None, "must be a tensor")],
)
def test_offsets_that_do_not_fit_are_refused(family, offsets, said):
    model, _ = accelerated(family)
    given = [0, N] if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    lengths = {"cu_seq_lens_q": given, "cu_seq_lens_k": given, "max_length_q": N, "max_length_k": N}
    with pytest.raises(ValueError, match=rf"cu_seq_lens_q.*{said}"):
        model(ids_of()[:1], use_cache=False, **lengths)


def test_a_static_cache_that_is_too_small_says_so():
    model, result = accelerated("llama")
    with pytest.raises(ValueError, match=rf"room for 5 tokens, and this call brings tokens 0 to {N - 1}"):
        model(ids_of(), past_key_values=result.new_cache(5))
    for length in (0, -1, 2.5, "a"):
        with pytest.raises(ValueError, match="max_length="):
            result.new_cache(length)


def test_dropout_can_be_taken_out_as_the_error_says():
    model, _ = accelerated("llama")
    model.train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    with pytest.raises(NotImplementedError, match=r"module.attention_dropout = 0.0"):
        model(ids_of())
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    assert_close(model(ids_of()).logits, logits_of("llama"), "llama")


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="model is a str"):
        ours.accelerate("meta-llama/x")
