"""`attn_implementation="fulmen"` against transformers' own: its masks one by one, then tiny random models with padding,
windows, sinks, softcap, caches and gradients. Only positions that hold a token are compared."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import masking_utils

from fulmen.integrations.transformers import attention as ours

TINY = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
BOTH = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**TINY),
    "qwen3": lambda: transformers.Qwen3Config(**TINY, **BOTH, use_sliding_window=True),
    "gemma2": lambda: transformers.Gemma2Config(
        **TINY, **BOTH, query_pre_attn_scalar=16, attn_logit_softcapping=2.0, attention_dropout=0.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**TINY, **BOTH, query_pre_attn_scalar=16),
    "gpt_oss": lambda: transformers.GptOssConfig(**TINY, **BOTH, num_local_experts=2, num_experts_per_tok=1),
}
REFERENCE = {"gemma2": "eager", "gpt_oss": "eager"}  # transformers' sdpa has no softcap and no sinks
PADDING = {
    "none": [[1] * 11] * 3,
    "left": [[0] * 4 + [1] * 7, [1] * 11, [0] * 9 + [1] * 2],
    "right": [[1] * 7 + [0] * 4, [1] * 11, [1] * 2 + [0] * 9],
}
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


@pytest.fixture(autouse=True)
def registered():
    torch.manual_seed(0)
    ours.register()
    yield
    if "fulmen" in ours._registered:
        ours.unregister()


@functools.lru_cache
def model_of(kind):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation="eager")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1 or "sinks" in name:
                p.normal_(std=1.0 if "sinks" in name else 0.2)
    return model.eval()


def both(kind, run):
    """What `run(model)` gives with fulmen and with the reference, from the same weights."""
    model, results = model_of(kind), []
    for name in ("fulmen", REFERENCE.get(kind, "sdpa")):
        model.set_attn_implementation(name)
        results.append(run(model))
    return results


def tokens(padding, length=11):
    mask = torch.tensor(PADDING[padding])[:, :length]
    return torch.randint(3, 61, mask.shape), mask


# ------------------------------------------------------------------------------------------ masks alone

PATTERNS = {
    "causal": lambda: masking_utils.causal_mask_function,
    "window": lambda: masking_utils.sliding_window_causal_mask_function(4),
    "wide window": lambda: masking_utils.sliding_window_causal_mask_function(50),
    "one chunk": lambda: masking_utils.chunked_causal_mask_function(50, torch.zeros(3, dtype=torch.long)),
    "full": lambda: masking_utils.bidirectional_mask_function,
    "window on both sides": lambda: masking_utils.sliding_window_bidirectional_mask_function(3),
}
# q_length, kv_length, q_offset, kv_offset
SIZES = {
    "training": (9, 9, 0, 0),
    "decoding": (1, 9, 8, 0),
    "more of a prompt": (4, 9, 5, 0),
    "empty static cache": (5, 12, 0, 0),
    "static cache": (1, 12, torch.tensor(8), 0),
    "first token in a static cache": (1, 12, torch.tensor(0), 0),
    "more of a prompt in a static cache": (3, 12, torch.tensor(6), 0),
    "sliding cache": (1, 4, 8, 5),
    "more of a prompt in a sliding cache": (3, 6, 8, 5),
    "sliding static cache, not full": (1, 4, 2, 0),
}
ROWS = {
    "no mask": None,
    "no padding": [[1] * 13] * 3,
    "left": [[0] * 5 + [1] * 8, [1] * 13, [0] * 2 + [1] * 11],
    "left, with ones for tokens to come": [[0] * 5 + [1] * 8, [1] * 13, [0] * 2 + [1] * 11],
    "right": [[1] * 6 + [0] * 7, [1] * 13, [1] * 10 + [0] * 3],
    "both": [[0] * 2 + [1] * 5 + [0] * 6, [1] * 13, [0] * 13],
    "gaps": [[1, 1, 0, 0] + [1] * 9, [1] * 13, [0, 1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 1, 1]],
}


def attended(mask, q, k, v, **kwargs):
    module = torch.nn.Module()
    return ours.attend(module, q, k, v, mask, **kwargs)[0].transpose(1, 2)


def tokens_at(padding, length, offset):
    column = torch.arange(length) + offset
    return torch.ones(3, length, dtype=torch.bool) if padding is None else padding[:, column]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_mask_means_what_transformers_means(pattern, sizes, rows):
    N_Q, N_KV, q_offset, kv_offset = SIZES[sizes]
    end = int(q_offset) + N_Q
    padding = None if ROWS[rows] is None else torch.tensor(ROWS[rows], dtype=torch.bool)
    if padding is not None and "to come" not in rows:
        padding = padding[:, :end]
    function = PATTERNS[pattern]()
    arguments = {
        "batch_size": 3, "q_length": N_Q, "kv_length": N_KV, "q_offset": q_offset, "kv_offset": kv_offset,
        "mask_function": function, "attention_mask": padding,
    }  # fmt: skip
    if pattern == "window on both sides" and N_KV <= 4:
        pattern = "full"  # nothing is out of sight
    windowed = pattern in ("window", "window on both sides")
    gaps = padding is not None and rows == "gaps" and bool((padding[2].int().diff() < 0).any())
    tail = end - kv_offset < N_KV
    if (pattern == "window on both sides" and tail) or (windowed and gaps and (N_Q > 1 or "both" in pattern)):
        with pytest.raises(NotImplementedError, match="sdpa"):
            ours.make_mask(**arguments, device="cpu")
        return
    mask = ours.make_mask(**arguments, device="cpu")
    allowed = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    q, k, v = (torch.randn(3, h, n, 8, dtype=torch.float64) for h, n in ((4, N_Q), (2, N_KV), (2, N_KV)))
    got = attended(mask, q, k, v)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).nan_to_num()  # rows that see nothing
    if pattern != "full":  # there, whoever asks gets an answer
        asking = tokens_at(padding, N_Q, int(q_offset))[:, None, :, None]
        assert (got.masked_select(~asking) == 0).all(), "padding's output is zero"
        got, want = got * asking, want * asking
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_nothing_is_made_where_causal_says_it_all():
    causal = masking_utils.causal_mask_function
    everything = torch.ones(3, 9, dtype=torch.bool)
    for N_Q, attention_mask in ((9, None), (9, everything), (1, everything)):
        mask = ours.make_mask(3, N_Q, 9, 9 - N_Q, 0, causal, attention_mask)
        assert mask is ours.PLAIN
    mask = ours.make_mask(3, 4, 16, 0, 0, causal, everything[:, :4])  # an empty static cache
    assert mask == ours.Mask(causal=True, keys=4)
    padded = ours.make_mask(3, 9, 9, 0, 0, causal, everything.index_fill(1, torch.tensor([0]), False))
    assert ours.make_mask(3, 9, 9, 0, 0, causal, padded) is padded, "one made ahead of the forward is kept"


# ----------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_and_gradients_in_training(kind, padding):
    ids, mask = tokens(padding)
    weights = torch.randn(3, 11, 61) * mask[:, :, None]

    def step(model):
        model.train()
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        grads = torch.autograd.grad((logits * weights).sum(), list(model.parameters()), allow_unused=True)
        model.eval()
        return logits[mask.bool()], grads

    (logits, grads), (want, want_grads) = both(kind, step)
    torch.testing.assert_close(logits, want, **TOLERANCE)
    for (name, _), got, exact in zip(model_of(kind).named_parameters(), grads, want_grads, strict=True):
        if exact is not None:
            torch.testing.assert_close(
                got, exact, rtol=1e-3, atol=1e-5 * float(exact.abs().max()) + 1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_generation(kind, cache):
    ids, mask = tokens("left")

    def generate(model):
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=7, do_sample=False, eos_token_id=None, cache_implementation=cache,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip

    got, want = both(kind, generate)
    torch.testing.assert_close(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), **TOLERANCE)


def minimax(layer_types, sliding_window=None):
    """Its cache tells mask functions the length of the first layer, which is 0 for ever if that is a linear one."""
    config = transformers.MiniMaxConfig(
        **TINY, layer_types=layer_types, sliding_window=sliding_window, num_local_experts=2, num_experts_per_tok=1,
        block_size=8,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="fulmen").eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(std=0.2)
    return model


@pytest.mark.parametrize("sliding_window", [None, 5])
@pytest.mark.parametrize("first", ["linear_attention", "full_attention"])
def test_a_hybrid_models_padded_rows_are_those_of_rows_alone(first, sliding_window):
    model = minimax([first, "full_attention"], sliding_window)
    ids, mask = tokens("left")

    def steps(ids, mask, positions):
        past = None
        for end in range(11, 15):
            now = slice(0 if end == 11 else end - 1, end)
            out = model(
                ids[:, now], attention_mask=mask[:, :end], position_ids=positions[:, now], past_key_values=past,
                use_cache=True,
            )  # fmt: skip
            past = out.past_key_values
            yield out.logits

    ids, mask = torch.cat([ids, ids[:, :3]], 1), torch.nn.functional.pad(mask, (0, 3), value=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        got = torch.cat(list(steps(ids, mask, positions)), 1)
        for row in range(3):
            alone = ids[row, mask[row].bool()][None]
            model.set_attn_implementation("eager")
            want = model(alone, use_cache=False).logits[0]
            model.set_attn_implementation("fulmen")
            torch.testing.assert_close(got[row][mask[row].bool()], want, **TOLERANCE)


@pytest.mark.parametrize("rows", [name for name in ROWS if name != "no mask"])
@pytest.mark.parametrize("pattern", ["causal", "window", "wide window"])
def test_a_mask_measured_on_a_layer_without_keys_is_made_again(pattern, rows):
    padding = torch.tensor(ROWS[rows], dtype=torch.bool)[:, :9]
    q, k, v = (torch.randn(3, h, n, 8, dtype=torch.float64) for h, n in ((4, 1), (2, 9), (2, 9)))
    measured, there = (
        ours.make_mask(3, 1, N_KV, N_KV - 1, 0, PATTERNS[pattern](), padding, device="cpu") for N_KV in (1, 9)
    )
    torch.testing.assert_close(attended(measured, q, k, v), attended(there, q, k, v), rtol=0, atol=0)


def test_a_mask_made_for_other_keys_is_refused():
    padding = torch.tensor(ROWS["left"], dtype=torch.bool)[:, :9]
    q, k, v = (torch.randn(3, h, n, 8) for h, n in ((4, 1), (2, 12), (2, 12)))
    for arguments in ((1, 9, 8, 0), (1, 1, 0, 0)):
        mask = ours.make_mask(3, *arguments, masking_utils.causal_mask_function, padding)
        with pytest.raises(NotImplementedError, match=r"made for .*, and this layer has \(3, 1, 12\)"):
            attended(mask, q, k, v)
    window = masking_utils.sliding_window_causal_mask_function(4)
    with pytest.raises(NotImplementedError, match="this layer has"):
        attended(ours.make_mask(3, 1, 1, 0, 0, window, None), q, k, v)


TOKEN_BY_TOKEN = [(0, 11), *((i, i + 1) for i in range(11, 17))]
IN_PARTS = [(0, 6), (6, 11), (11, 12), (12, 15), (15, 16), (16, 17)]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("kind", "padding", "parts"),
    [
        ("llama", "left", IN_PARTS),
        ("llama", "right", IN_PARTS),  # which leaves gaps between the tokens
        ("llama", "none", IN_PARTS),
        ("gpt_oss", "left", IN_PARTS),
        ("gpt_oss", "none", IN_PARTS),
        ("gpt_oss", "right", TOKEN_BY_TOKEN),
        ("gemma2", "right", TOKEN_BY_TOKEN),
    ],
)
def test_a_sequence_in_parts(kind, padding, parts, cache):
    ids, mask = tokens(padding)
    ids, mask = torch.cat([ids, ids[:, :6]], 1), torch.cat([mask, torch.ones_like(mask[:, :6])], 1)

    @torch.no_grad()
    def run(model):
        if cache == "static":
            past = transformers.StaticCache(config=model.config, max_cache_len=32)
        else:
            past = transformers.DynamicCache(config=model.config)
        logits = [model(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=past).logits for a, b in parts]
        return torch.cat(logits, 1)[mask.bool()]

    got, want = both(kind, run)
    torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_packed_sequences(kind):
    ids = torch.randint(3, 61, (2, 12))
    positions = torch.tensor([[*range(5), *range(7)], [*range(2), *range(9), 0]])

    def run(model):
        return model(ids, position_ids=positions, use_cache=False).logits

    got, want = both(kind, run)
    torch.testing.assert_close(got, want, **TOLERANCE)
    model_of(kind).set_attn_implementation("fulmen")
    alone = model_of(kind)(ids[:1, 5:], use_cache=False).logits
    torch.testing.assert_close(got[:1, 5:], alone, **TOLERANCE)


def test_transformers_offsets_of_packed_sequences():
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64) for _ in range(3))
    offsets = torch.tensor([0, 4, 9])
    got = attended(None, q, k, v, is_causal=True, sliding_window=3, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)
    parts = [[x[:, :, a:b] for x in (q, k, v)] for a, b in ((0, 4), (4, 9))]
    want = torch.cat([attended(None, *part, is_causal=True, sliding_window=3) for part in parts], 2)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="B must be 1"):
        attended(None, *(x.repeat(2, 1, 1, 1) for x in (q, k, v)), cu_seq_lens_q=offsets)


def test_numbers_of_numpy():
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64) for _ in range(3))
    window = masking_utils.sliding_window_causal_mask_function
    for kind in (lambda n: n, np.int64):
        mask = ours.make_mask(1, 9, 9, 0, 0, window(kind(3)), torch.ones(1, 9))
        o = attended(mask, q, k, v, scaling=np.float32(0.5), softcap=np.float64(2.0))
        torch.testing.assert_close(o, attended(mask, q, k, v, scaling=0.5, softcap=2.0), rtol=0, atol=0)
        torch.testing.assert_close(
            attended(None, q, k, v, is_causal=True, sliding_window=kind(3)), attended(mask, q, k, v), rtol=0, atol=0
        )


def test_an_encoder_with_padding():
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.AutoModel.from_config(config, attn_implementation="fulmen").eval()
    for padding in PADDING:
        ids, mask = tokens(padding)
        got = model(ids, attention_mask=mask).last_hidden_state
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(got, model(ids, attention_mask=mask).last_hidden_state, **TOLERANCE)
        model.set_attn_implementation("fulmen")


def test_compiled_decoding_in_a_static_cache_compiles_once():
    model = model_of("gpt_oss")
    model.set_attn_implementation("fulmen")
    ids, mask = tokens("left")
    ids, mask = torch.cat([ids, ids], 1), torch.cat([mask, torch.ones_like(mask)], 1)
    results = []
    for compiled in (False, True):
        forward = torch.compile(model.forward, backend="eager") if compiled else model.forward
        past = transformers.StaticCache(config=model.config, max_cache_len=24)
        with torch.no_grad():
            logits = [model(ids[:, :8], attention_mask=mask[:, :8], past_key_values=past).logits[:, -1:]]
            for i in range(8, 13):  # the masks are made outside the graph, as `generate` does
                made = masking_utils.create_masks_for_generate(
                    config=model.config, inputs_embeds=torch.empty(3, 1, 0), attention_mask=mask[:, : i + 1],
                    past_key_values=past,
                )  # fmt: skip
                with torch.compiler.set_stance("default" if i < 10 else "fail_on_recompile"):
                    out = forward(ids[:, i : i + 1], attention_mask=made, past_key_values=past)
                logits.append(out.logits)
        results.append(torch.cat(logits, 1))
    torch.testing.assert_close(results[1], results[0], **TOLERANCE)


# --------------------------------------------------------------------------------------------- refusals


def test_register_and_unregister():
    tables = ours._interfaces()
    ours.register()  # a second time changes nothing
    ours.register("fulmen_reference", backend="reference")
    assert all("fulmen_reference" in table and "fulmen" in table for table in tables)
    ours.unregister("fulmen_reference")
    ours.unregister()
    assert not any("fulmen_reference" in table or "fulmen" in table for table in tables)
    with pytest.raises(ValueError, match="not registered"):
        ours.unregister()
    with pytest.raises((KeyError, ValueError), match="fulmen"):
        transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"](), attn_implementation="fulmen")
    for name in ("sdpa", "eager", "fulmen_flash"):
        with pytest.raises(ValueError, match=f"name='{name}'"):
            ours.register(name)
    for name in (3, None, ["sdpa"]):
        with pytest.raises(ValueError, match=rf"^name={re.escape(repr(name))}: must be a string"):
            ours.register(name=name)
    for backend in ("nonsense", ["eager"]):
        with pytest.raises(ValueError, match=re.escape(f"backend={backend!r}: flash has")):
            ours.register(backend=backend)


def test_a_model_can_be_made_with_it():
    ours.register("fulmen_reference", backend="reference")
    config = CONFIGS["llama"]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="fulmen")
    assert model.config._attn_implementation == "fulmen"
    ids, mask = tokens("left")
    got = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("fulmen_reference")
    torch.testing.assert_close(got, model(ids, attention_mask=mask).logits, **TOLERANCE)
    ours.unregister("fulmen_reference")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dropout": 0.1}, r"dropout=0\.1.*attention_dropout = 0"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, r"\(1, 1, 3, 3\).*sdpa"),
        ({"output_attentions": True}, "output_attentions.*eager"),
        ({"position_bias": torch.ones(1)}, "position_bias.*sdpa"),
        ({"cache": object()}, "cache.*sdpa"),
    ],
)
def test_what_cannot_be_said_raises(options, sentence):
    q = torch.randn(1, 2, 3, 8)
    arguments = {"attention_mask": None, "output_attentions": False, "position_bias": None} | options
    with pytest.raises(NotImplementedError, match=sentence):
        ours.attend(torch.nn.Module(), q, q, q, **arguments)


def test_masks_that_cannot_be_said_raise():
    model = model_of("llama")
    model.set_attn_implementation("fulmen")
    ids, mask = tokens("none")
    with pytest.raises(NotImplementedError, match=r"\(3, 1, 11, 11\)"):
        model(ids, attention_mask=torch.ones(3, 1, 11, 11, dtype=torch.bool))
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    with pytest.raises(NotImplementedError, match=r"dropout=0\.2"):
        model(ids, attention_mask=mask)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    model.eval()
    blocks = masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: q == k)
    with pytest.raises(NotImplementedError, match=r"or_masks.*sdpa"):
        ours.make_mask(3, 11, 11, 0, 0, blocks)
    chunks = masking_utils.chunked_causal_mask_function(4, torch.zeros(3, dtype=torch.long))
    with pytest.raises(NotImplementedError, match="chunks"):
        ours.make_mask(3, 11, 11, 0, 0, chunks)
    with pytest.raises(ValueError, match=r"\(3, 11, 1\)"):
        ours.make_mask(3, 11, 11, 0, 0, masking_utils.causal_mask_function, mask[:, :, None])
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="where the queries stand"):
        attended(None, q, k, k)


# -------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_padded_logits_on_the_gpu(kind):
    """In bf16 against fp32 on the CPU: at most twice the error of transformers' eager; layers do not synchronise."""
    ids, mask = tokens("left")
    model = model_of(kind)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        exact = model(ids, attention_mask=mask).logits[mask.bool()]
        model_16 = transformers.AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").eval()
        model_16.load_state_dict(model.state_dict())
        model_16.to("cuda", torch.bfloat16)
        errors = {}
        for name in ("eager", "fulmen"):
            model_16.set_attn_implementation(name)
            logits = model_16(ids.cuda(), attention_mask=mask.cuda()).logits[mask.bool().cuda()]
            errors[name] = (logits.float().cpu() - exact).norm()
    assert errors["fulmen"] <= 2 * errors["eager"]
    made = ours.make_mask(3, 11, 11, 0, 0, masking_utils.causal_mask_function, mask.cuda(), device="cuda")
    q = torch.randn(3, 4, 11, 16, device="cuda", dtype=torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attended(made, q, q, q)
    finally:
        torch.cuda.set_sync_debug_mode("default")
