"""`accelerate` on tiny random models of every family, against the model's own eager code in fp64.

In fp64 an accelerated model may differ by twice what the model's own fp32 differs by: transformers computes norms and
softmax in fp32 whatever the dtype. In bf16 its error is at most twice that of the model's own bf16, three times for
gradients. Padded and packed rows are compared with the same rows alone.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers
from transformers import masking_utils

from fulmen.integrations import transformers as ours
from fulmen.integrations.transformers import simple_gla
from tests.integrations.families import CHECKS, FAMILIES

N = 12
# of the accelerated model, and of the model's own code whose error is doubled
DTYPES = ((torch.float64, torch.float32), (torch.bfloat16, torch.bfloat16))


def passing(check):
    assert check in CHECKS
    return [name for name, family in FAMILIES.items() if check not in family.limits]


@functools.lru_cache
def own(family, dtype=torch.float64):
    """The model as it is, its weights numbers of bf16."""
    if dtype != torch.float64:
        return copy.deepcopy(own(family)).to(dtype)
    torch.manual_seed(1)
    config = FAMILIES[family].config()
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1 or "sinks" in name:
                p.normal_(std=1.0 if "sinks" in name else 0.2)
            p.copy_(p.to(torch.bfloat16))
    return model.double().eval()


@functools.lru_cache
def served(family, dtype=torch.float64):
    """A copy of it and what accelerate made of it."""
    model = copy.deepcopy(own(family, dtype))
    return model, ours.accelerate(model, verbose=False)


def ids_of(rows=3, length=N):
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(2))


@functools.lru_cache
def logits_of(family, dtype=torch.float64):
    with torch.no_grad():
        return own(family, dtype)(ids_of(), use_cache=False).logits.double()


def error(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def assert_close(got, want, family, rough=torch.float32):
    """`rough`: the dtype of the model's own code whose error is doubled. See the top of the file."""
    assert error(got, want) <= 2 * error(logits_of(family, rough), logits_of(family))


# ------------------------------------------------------------------------------------- training, logits


def trained(model, weights):
    """Logits, and gradients of all parameters."""
    logits = model.train()(ids_of().to(model.device), use_cache=False).logits
    loss = (logits * weights.to(model.device)).sum()
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    model.eval()
    return logits.detach().cpu(), [None if g is None else g.cpu() for g in grads]


def check_training(family, ours, theirs):
    """One model against the model's own fp64, by how far off the other is."""
    weights = torch.randn(3, N, 61, dtype=torch.float64)
    (exact, exact_grads), (logits, grads), (rough, rough_grads) = (
        trained(model, weights) for model in (own(family), ours, theirs)
    )
    assert error(logits, exact) <= 2 * error(rough, exact)
    names = [name for name, _ in own(family).named_parameters()]
    for name, got, their, want in zip(names, grads, rough_grads, exact_grads, strict=True):
        assert (got is None) == (want is None), name
        if want is not None and want.norm() > 0:
            # a gradient of a few elements can be right by luck: a quarter of the logits' error is allowed, too
            limit = 3 * error(their, want) + 0.25 * error(rough, exact)
            assert error(got, want) <= limit, (name, error(got, want), limit)


@pytest.mark.parametrize("family", passing("training"))
def test_logits_and_gradients(family):
    for dtype, rough in DTYPES:
        check_training(family, served(family, dtype)[0], own(family, rough))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "minimax", "granitemoehybrid"])
def test_on_a_gpu(family):
    """Logits and gradients in bf16, and the tokens of fp32, also with a static cache."""
    model = copy.deepcopy(own(family, torch.bfloat16)).cuda()
    ours.accelerate(model, verbose=False)
    check_training(family, model, copy.deepcopy(own(family, torch.bfloat16)).cuda())
    model = copy.deepcopy(own(family, torch.float32)).cuda()
    accelerated, ids = ours.accelerate(model, verbose=False), ids_of(2)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    want = own(family).generate(ids, use_cache=False, **options)
    options["attention_mask"] = options["attention_mask"].cuda()
    for cache in (accelerated.new_cache(), accelerated.new_cache(32)):
        assert torch.equal(model.generate(ids.cuda(), past_key_values=cache, **options).cpu(), want)


def test_gradient_checkpointing_and_packed_sequences():
    """The layers computed again know where sequences start, also if another batch came in between."""
    model = copy.deepcopy(own("minimax"))
    ours.accelerate(model, verbose=False)
    ids, positions = ids_of(1), torch.tensor([[*range(5), *range(7)]])
    plain = model.train()(ids, position_ids=positions, use_cache=False).logits
    want = torch.autograd.grad(plain.square().sum(), list(model.parameters()))
    model.gradient_checkpointing_enable()
    logits = model(ids, position_ids=positions, use_cache=False).logits
    model(ids_of(2))
    got = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
    torch.testing.assert_close(got, want)


# ----------------------------------------------------------------------------------------------- generate


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_generation(family, beams):
    """With caches, against the model's own code without: MiniMax's own cache is wrong for beams."""
    if ("generate" if beams == 1 else "beam search") in FAMILIES[family].limits:
        pytest.skip(FAMILIES[family].limits["beam search"])
    ids = ids_of(2)
    options = {
        "attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "eos_token_id": None,
        "num_beams": beams,
    }  # fmt: skip
    model, _ = served(family)
    want = own(family).generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, **options), want)


def in_parts(model, ids, mask, positions, cache, ends):
    """Logits of the tokens, given to the model part by part."""
    logits, start, name = [], 0, FAMILIES[model.config.model_type.removesuffix("_text")].cache
    for end in ends:
        options = {} if mask is None else {"attention_mask": mask[:, :end]}
        options |= {} if positions is None else {"position_ids": positions[:, start:end]}
        with torch.no_grad():
            logits.append(model(ids[:, start:end], **{name: cache}, **options).logits)
        start = end
    return torch.cat(logits, 1)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", passing("chunked prefill"))
def test_chunked_prefill_and_steps(family, static):
    positions = torch.arange(N)[None] if family == "bamba" else None  # which does not count the tokens in a cache
    for dtype, rough in DTYPES:
        model, accelerated = served(family, dtype)
        cache = accelerated.new_cache(16 if static else None)
        got = in_parts(model, ids_of(), None, positions, cache, (5, 9, 10, 11, 12))
        assert_close(got, logits_of(family), family, rough)


PADDING = {
    "left": [[0] * 4 + [1] * 8, [1] * 12, [0] * 8 + [1] * 4],
    "right": [[1] * 6 + [0] * 3 + [1] * 3, [1] * 12, [1] * 3 + [0] * 6 + [1] * 3],  # tokens go on behind the padding
}


@pytest.mark.parametrize("ends", [(12,), (9, 10, 11, 12), (5, 9, 12)], ids=["whole", "steps", "chunks"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", passing("left padding"))
def test_left_padded_rows_are_those_of_rows_alone(family, static, ends):
    model, accelerated = served(family)
    ids, mask = ids_of(), torch.tensor(PADDING["left"])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    got = in_parts(model, ids, mask, positions, accelerated.new_cache(16 if static else None), ends)
    assert_rows_alone(family, got, ids, mask)


def assert_rows_alone(family, got, ids, mask, rough=torch.float32):
    for row in range(ids.shape[0]):
        tokens = mask[row].bool()
        with torch.no_grad():
            want = own(family)(ids[row, tokens][None], use_cache=False).logits[0]
        assert_close(got[row, tokens], want, family, rough)


@pytest.mark.parametrize("cached", [False, True])
def test_minimax_padded_on_the_right(cached):
    model, accelerated = served("minimax")
    ids, mask = ids_of(), torch.tensor(PADDING["right"])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    if cached:
        got = in_parts(model, ids, mask, positions, accelerated.new_cache(), (9, 10, 11, 12))
    else:
        got = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert_rows_alone("minimax", got, ids, mask)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", passing("packed"))
def test_packed_sequences(family, rows):
    model, _ = served(family)
    ids = ids_of(rows)
    positions = torch.tensor([[*range(5), *range(7)], [*range(2), *range(9), 0]])[:rows]
    with torch.no_grad():
        got = model(ids, position_ids=positions, use_cache=False).logits
        again = model.train()(ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(again, got)
        model.eval()
        for row, start, end in ((0, 0, 5), (0, 5, 12), (1, 0, 2), (1, 2, 11), (1, 11, 12)):
            if row < rows:
                want = own(family)(ids[row : row + 1, start:end], use_cache=False).logits[0]
                assert_close(got[row, start:end], want, family)


def test_minimax_takes_transformers_offsets():
    model, _ = served("minimax")
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    positions = torch.tensor([[*range(5), *range(7)]])
    options = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 7, "max_length_k": 7}
    got = model(ids_of(1), position_ids=positions.clone(), use_cache=False, **options).logits
    want = model(ids_of(1), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="B must be 1"):
        model(ids_of(2), use_cache=False, **options)


# ------------------------------------------------------------------------------------------- static caches


@pytest.mark.parametrize("family", passing("torch.compile"))
def test_mixers_compile_whole_and_not_at_every_step(family):
    """Steps in a static cache, each mixer one graph; test_transformers.py has a whole model."""
    model = copy.deepcopy(own(family))
    accelerated, ids = ours.accelerate(model, verbose=False), ids_of()
    cache, name = accelerated.new_cache(16), FAMILIES[family].cache
    for mixer in (m for m in accelerated.mixers if m.reason is None):
        mixer.module.compile(backend="eager", fullgraph=True)
    logits = []
    for start, end in ((0, 6), *((i, i + 1) for i in range(6, N))):
        options = {name: cache}
        if family == "bamba":
            options["position_ids"] = torch.arange(start, end)[None]
        if start and name == "past_key_values":  # made ahead of the forward, as `generate` does
            options["attention_mask"] = masking_utils.create_masks_for_generate(
                config=model.config, inputs_embeds=torch.empty(3, 1, 0), attention_mask=None, past_key_values=cache
            )
        # in three steps dynamo learns that the lengths of transformers' sliding caches change
        stance = "force_eager" if start == 0 else "default" if start < 9 else "fail_on_recompile"
        with torch.no_grad(), torch.compiler.set_stance(stance):
            logits.append(model(ids[:, start:end], **options).logits)
    assert_close(torch.cat(logits, 1), logits_of(family), family)


@pytest.mark.parametrize("family", passing("torch.compile"))
def test_compiled_mixers_train_as_eager_ones(family):
    model, weights = copy.deepcopy(own(family)), torch.randn(3, N, 61, dtype=torch.float64)
    accelerated = ours.accelerate(model, verbose=False)
    want, want_grads = trained(model, weights)
    for mixer in (m for m in accelerated.mixers if m.reason is None):
        mixer.module.compile(backend="aot_eager", fullgraph=True)
    got, grads = trained(model, weights)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grads, want_grads, rtol=1e-6, atol=1e-9)


def test_a_static_cache_of_minimax_keeps_its_memory():
    model, accelerated = served("minimax")
    cache = accelerated.new_cache(16)
    in_parts(model, ids_of(), None, None, cache, (6, 7))
    places = [state.data_ptr() for state in cache.linear_cache if isinstance(state, torch.Tensor)]
    in_parts(model, ids_of()[:, 7:], None, None, cache, (1, 4, 5))
    assert [state.data_ptr() for state in cache.linear_cache if isinstance(state, torch.Tensor)] == places
    assert len(places) == 2
    assert int(cache.get_seq_length()) == 12
    with pytest.raises(NotImplementedError, match="number of rows"):
        cache.batch_select_indices(torch.tensor([0]))
    cache.reset()
    got = in_parts(model, ids_of(), None, None, cache, (6, 12))
    assert_close(got, logits_of("minimax"), "minimax")


def test_minimaxs_own_cache_object_is_taken():
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    model, _ = served("minimax")
    cache = MiniMaxCache()
    got = in_parts(model, ids_of(), None, None, cache, (6, 7, 12))
    assert_close(got, logits_of("minimax"), "minimax")
    assert cache.get_seq_length() == 12
    cache.batch_select_indices(torch.tensor([2]))
    again = model(ids_of()[2:, :1], past_key_values=copy.deepcopy(cache)).logits
    cache.batch_repeat_interleave(2)
    torch.testing.assert_close(model(ids_of()[[2, 2], :1], past_key_values=cache).logits[1:], again)
    with pytest.raises(ValueError, match=r"states of 2 rows .* this call has 3 rows"):
        model(ids_of()[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match="MiniMax uses cache of its own"):
        model(ids_of(), past_key_values=transformers.DynamicCache())


# --------------------------------------------------------------- where transformers' own MiniMax is wrong

WRONG = ("beam search", "packed", "right padding", "positions without position_ids")


@pytest.mark.parametrize("what", WRONG)
def test_transformers_own_minimax_is_wrong_there(what):
    """docs/models.md says so; a row that transformers mends is to go."""
    model, ids = own("minimax"), ids_of(2)
    with torch.no_grad():
        if what == "beam search":
            options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "num_beams": 3}
            got, want = (model.generate(ids, use_cache=use, eos_token_id=None, **options) for use in (True, False))
            assert not torch.equal(got, want)
            return
        want = model(ids[:1, 5:], use_cache=False).logits
        if what == "packed":
            positions = torch.tensor([[*range(5), *range(7)]])
            got = model(ids[:1], position_ids=positions, use_cache=False).logits[:, 5:]
        elif what == "right padding":
            gap = torch.cat([ids[:1, 5:9], ids[:1, :3], ids[:1, 9:]], 1)
            mask = torch.tensor([[1] * 4 + [0] * 3 + [1] * 3])
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            model.set_attn_implementation("sdpa")
            got = model(gap, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, mask[0].bool()]
            model.set_attn_implementation("eager")
        else:
            first = model(ids[:1, 5:8])
            rest = [model(ids[:1, i : i + 1], past_key_values=first.past_key_values).logits for i in range(8, N)]
            got = torch.cat([first.logits, *rest], 1)
    assert not error(got, want) <= 1000 * error(logits_of("minimax", torch.float32), logits_of("minimax"))


@pytest.mark.parametrize("family", ["nemotron_h", "zamba2"])
def test_transformers_own_steps_do_not_clamp(family):
    """A scan clamps dt, and a step forgets it; test_chunked_prefill_and_steps has ours."""
    model = own(family)
    got = in_parts(model, ids_of(), None, None, transformers.DynamicCache(config=model.config), range(6, N + 1))
    assert error(got, logits_of(family)) > 10 * error(logits_of(family, torch.float32), logits_of(family))


@pytest.mark.parametrize("family", ["bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2"])
def test_transformers_own_mamba2_mixes_packed_sequences(family):
    with torch.no_grad():
        packed = own(family)(ids_of(1), position_ids=torch.tensor([[*range(5), *range(7)]]), use_cache=False).logits
        alone = own(family)(ids_of(1)[:, 5:], use_cache=False).logits
    assert error(packed[:, 5:], alone) > 0.01


@pytest.mark.parametrize("family", ["mamba2", "granitemoehybrid"])
def test_mamba2_refuses_padding_between_tokens(family):
    """Padding on the right is no matter, until tokens follow."""
    (model, accelerated), ids, name = served(family), ids_of(), FAMILIES[family].cache
    mask = torch.tensor(PADDING["right"])
    with pytest.raises(NotImplementedError, match=r"padding between tokens.*pad on the left"):
        model(ids, attention_mask=mask, use_cache=False)
    with torch.no_grad():
        logits = model(ids[:, :9], attention_mask=mask[:, :9]).logits
        assert_close(logits[1], own(family)(ids[1:2, :9], use_cache=False).logits[0], family)
        cache = accelerated.new_cache()
        for _ in range(2):
            model(ids[:, :9], attention_mask=mask[:, :9], **{name: cache})
            with pytest.raises(NotImplementedError, match="pad on the left"):
                model(ids[:, 9:10], attention_mask=mask[:, :10], **{name: cache})
            cache.reset()


# --------------------------------------------------------------------------- tables, undo, what is refused


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_and_undo(family, capsys):
    model = copy.deepcopy(own(family))
    before = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    accelerated = ours.accelerate(model)
    assert {name: (p, p.data_ptr()) for name, p in model.named_parameters()} == before, "weights are not copied"
    printed = capsys.readouterr().out
    assert printed.strip() == str(accelerated)
    assert {mixer.verdict for mixer in accelerated.mixers if mixer.reason is None} == set(FAMILIES[family].served)
    rest = {type(mixer.module).__name__ for mixer in accelerated.mixers if mixer.reason is not None}
    assert rest == ({FAMILIES[family].remains} - {None})
    layers = model.config.num_hidden_layers - (family == "nemotron_h")  # one of which is an MLP
    assert len(accelerated.mixers) >= layers
    assert all(name in printed for name in rest)
    accelerated.undo()
    accelerated.undo()
    assert model.config._attn_implementation == "eager"
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    with torch.no_grad():
        assert torch.equal(model(ids_of(), use_cache=False).logits, logits_of(family))


def test_the_table_of_a_hybrid():
    kinds = ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"]
    config = FAMILIES["minimax"].config()
    config.layer_types, config.num_hidden_layers = kinds, 5
    table = str(ours.accelerate(transformers.AutoModelForCausalLM.from_config(config), "eager", verbose=False))
    assert table.splitlines() == [
        "mixers                          class                      served by (backend='eager')",
        "model.layers.{0-2,4}.self_attn  MiniMaxLightningAttention  lightning",
        "model.layers.3.self_attn        MiniMaxAttention           flash",
    ]


def test_a_copy_of_an_accelerated_model_is_its_own():
    model, _ = served("minimax")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].self_attn.out_proj.weight.zero_()
        assert_close(model(ids_of()).logits, logits_of("minimax"), "minimax")
        assert error(other(ids_of()).logits, logits_of("minimax")) > 0.01


def test_slopes_of_their_own_are_kept():
    model = copy.deepcopy(own("minimax"))
    with torch.no_grad():
        for layer in (model.model.layers[0].self_attn, model.model.layers[2].self_attn):
            layer.slope_rate.mul_(3)
            for name, x in zip(
                ("query_decay", "key_decay", "diagonal_decay"), layer.decay_factors(layer.slope_rate), strict=True
            ):
                getattr(layer, name).copy_(x)
        want = model(ids_of(), use_cache=False).logits
        ours.accelerate(model, verbose=False)
        assert_close(model(ids_of(), use_cache=False).logits, want, "minimax")


def test_what_accelerate_refuses():
    with pytest.raises(ValueError, match="Linear has no mixer that fulmen serves: none was found"):
        ours.accelerate(torch.nn.Linear(2, 2))
    model = copy.deepcopy(own("minimax"))
    with pytest.raises(ValueError, match="backend='nonsense'"):
        ours.accelerate(model, "nonsense")
    with pytest.raises(ValueError, match="backend='sdpa': lightning has"):
        ours.accelerate(model, "sdpa")
    assert not any("forward" in module.__dict__ for module in model.modules())
    accelerated = ours.accelerate(model, verbose=False)
    with pytest.raises(ValueError, match=r"accelerated already.*undo\(\)"):
        ours.accelerate(model)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(3, 9\), and this layer has \(3, 12\)"):
        accelerated.mixers[0].module(torch.zeros(3, 12, 32).double(), attention_mask=torch.ones(3, 9))
    config = FAMILIES["llama"].config()
    config.head_dim = 512
    with pytest.raises(ValueError, match="LlamaAttention: its head dim 512 is above 256"):
        ours.accelerate(transformers.AutoModelForCausalLM.from_config(config))


# ------------------------------------------------------------------ Ring and Ling, by what their code has


class RingAttention(torch.nn.Module):
    """The parts of the linear layer in Ring's and Ling's own code that matter: how it calls fla."""

    def __init__(self, functions):
        super().__init__()
        self.lightning_attn_ops = functions
        self.register_buffer("slope", -torch.tensor([0.5, 0.1]), persistent=False)

    def forward(self, x, state=None, slope=None):
        B, length = x.shape[:2]
        q, k, v = x.unflatten(2, (3, 2, -1)).unbind(2)
        g = (self.slope if slope is None else slope)[None, None].expand(B, length, 2)
        return self.lightning_attn_ops["chunk"](q=q, k=k, v=v, g=g, initial_state=state, output_final_state=True)


def recurrent(q, k, v, g, initial_state=None, output_final_state=False):
    """What fla's simple_gla computes, token by token."""
    state = torch.zeros(*q.shape[:1], q.shape[2], q.shape[3], v.shape[3], dtype=q.dtype)
    state = state if initial_state is None else initial_state
    o = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None]
        o.append(torch.einsum("bhd,bhde->bhe", q[:, t], state) * q.shape[3] ** -0.5)
    return torch.stack(o, 1), state


def chunk_simple_gla(q, k, v, g_gamma, scale, initial_state=None, output_final_state=False):
    o, state = recurrent(q, k, v, g_gamma.expand(*q.shape[:3]), initial_state)
    return o * scale * q.shape[3] ** 0.5, state


def fused_recurrent_simple_gla(*args, **kwargs):
    raise AssertionError("fla's own kernel")


class SalaAttention(torch.nn.Module):
    """The parts of MiniCPM-SALA's linear layer that matter: fla's functions, called by name in one of its methods."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (torch.nn.Linear(16, 16, bias=False) for _ in range(4))

    def attn_fn(self, q, k, v, decay, scale, initial_state=None):
        function = chunk_simple_gla if scale < 1 else fused_recurrent_simple_gla
        return function(q, k, v, g_gamma=decay, scale=scale, initial_state=initial_state, output_final_state=True)

    def forward(self, x, state=None, scale=0.5):
        q, k, v = (part(x).unflatten(2, (2, 8)) for part in (self.q_proj, self.k_proj, self.v_proj))
        o, state = self.attn_fn(q, k, v, torch.tensor([-0.5, -0.1]), scale, state)
        return self.o_proj(o.flatten(2)), state


def test_layers_of_minicpm_sala_are_found_by_what_they_call():
    torch.manual_seed(0)
    model = torch.nn.Sequential(SalaAttention(), SalaAttention()).double()
    x, layer = torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True), model[0]
    want = layer(x)
    want_grad = torch.autograd.grad(want[0].sum(), [x, *layer.parameters()])
    accelerated = ours.accelerate(model, verbose=False)
    assert str(accelerated).splitlines()[1] == "{0-1}   SalaAttention  lightning"
    got = layer(x)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    grads = torch.autograd.grad(got[0].sum(), [x, *layer.parameters()])
    torch.testing.assert_close(grads, want_grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(x, scale=2.0)[1], want[1], rtol=1e-6, atol=1e-6)  # the other function, too
    accelerated.undo()
    assert "attn_fn" not in vars(layer)
    with pytest.raises(AssertionError, match="fla's own kernel"):
        layer(x, scale=2.0)


def test_ring_layers_are_found_by_their_parts():
    functions = {"chunk": recurrent, "fused_recurrent": recurrent}
    model = torch.nn.Sequential(RingAttention(functions), RingAttention(functions)).double()
    x = torch.randn(2, 9, 3 * 2 * 8, dtype=torch.float64, requires_grad=True)
    (want, want_state), layer = model[0](x), model[0]
    want_grad = torch.autograd.grad(want.sum() + want_state.sum(), x)
    accelerated = ours.accelerate(model, verbose=False)
    assert str(accelerated).splitlines()[1] == "{0-1}   RingAttention  lightning"
    got, state = layer(x)
    torch.testing.assert_close((got, state), (want, want_state), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(got.sum() + state.sum(), x), want_grad, rtol=1e-6, atol=1e-6)
    first, middle = layer(x[:, :4])
    torch.testing.assert_close(torch.cat([first, layer(x[:, 4:], middle)[0]], 1), want, rtol=1e-6, atol=1e-6)
    accelerated.undo()
    assert layer.lightning_attn_ops is functions
    with pytest.raises(NotImplementedError, match="packs several sequences"):
        simple_gla.refuse_packed(model, (), {"position_ids": torch.tensor([[0, 1, 0, 1]]), "use_cache": False})
    layer.slope = torch.zeros(2, 2)
    model[1].slope = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="RingAttention: it has no buffer `slope`"):
        ours.accelerate(model)
