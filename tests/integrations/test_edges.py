"""Inputs and models at the edges of what `accelerate` serves: right, or refused with a reason; never silently wrong."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers
from torch import nn

from fulmen.integrations import transformers as ours
from fulmen.integrations.transformers import attention, packing, simple_gla
from tests.integrations.families import FAMILIES, TINY, WINDOWS
from tests.integrations.test_models import (
    PADDING,
    N,
    assert_close,
    assert_rows_alone,
    error,
    ids_of,
    in_parts,
    logits_of,
    own,
    passing,
    served,
)  # fmt: skip

SEQ2SEQ = {
    "vocab_size": 61, "d_model": 32, "decoder_layers": 1, "encoder_layers": 1, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "decoder_ffn_dim": 32, "encoder_ffn_dim": 32, "max_position_embeddings": 64,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def drawn(model):
    """The model with weights that make its attention matter."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(std=0.2)
    return model.double().eval()


# ------------------------------------------------------------------------------------------- the future


@pytest.fixture
def registered():
    ours.register()
    yield
    ours.unregister()


def test_a_mask_knows_that_it_is_causal_whatever_the_module_says():
    """Decoders of NLLB-MoE, Pegasus-X and BigBird-Pegasus have modules with is_causal=False."""
    q, k, v = (torch.randn(2, 2, 9, 8, dtype=torch.float64) for _ in range(3))
    module, causal = nn.Module(), transformers.masking_utils.causal_mask_function
    mask = attention.make_mask(2, 9, 9, 0, 0, causal)
    want = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    for module.is_causal in (False, True):
        got = attention.attend(module, q, k, v, mask, sliding_window=3)[0].transpose(1, 2)
        torch.testing.assert_close(got, want)


def test_decoders_with_modules_that_are_not_causal(registered):
    sparse = {"num_experts": 2, "encoder_sparse_step": 0, "decoder_sparse_step": 0}
    nllb = drawn(transformers.NllbMoeForConditionalGeneration(transformers.NllbMoeConfig(**SEQ2SEQ, **sparse)))
    nllb_fulmen = copy.deepcopy(nllb)
    for module in nllb_fulmen.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = "fulmen"
    config = transformers.PegasusXConfig(**SEQ2SEQ, block_size=4, num_global_tokens=2)
    pegasus = drawn(transformers.PegasusXForConditionalGeneration(config))
    pegasus_fulmen = copy.deepcopy(pegasus)
    table = str(ours.accelerate(pegasus_fulmen, verbose=False))
    assert "decoder.layers.0.self_attn" in table
    ids, given, padding = ids_of(2), ids_of(2)[:, :8], torch.ones(2, 12, dtype=torch.long)
    padding[0, 7:] = 0
    for theirs, fulmen in ((nllb, nllb_fulmen), (pegasus, pegasus_fulmen)):
        for mask in (None, padding):
            run = functools.partial(dict, input_ids=ids, attention_mask=mask, decoder_input_ids=given)
            with torch.no_grad():
                assert error(fulmen(**run()).logits, theirs(**run()).logits) < 1e-6


# ------------------------------------------------------------------------- models refused in the table


def test_models_that_take_no_other_attention_are_refused():
    def refused(model, said):
        with pytest.raises(ValueError, match=said):
            ours.accelerate(model)

    F, eager = transformers, "transformers says that {} works with eager attention alone"
    small = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    small |= {"intermediate_size": 32, "pad_token_id": 0}
    nllb = F.NllbMoeConfig(**SEQ2SEQ, num_experts=2, encoder_sparse_step=1, decoder_sparse_step=1)
    refused(F.NllbMoeForConditionalGeneration(nllb), eager.format("NllbMoeEncoder"))
    refused(
        F.BigBirdPegasusForConditionalGeneration(F.BigBirdPegasusConfig(**SEQ2SEQ)),
        eager.format("BigBirdPegasusDecoder"),
    )
    refused(F.MarkupLMModel(F.MarkupLMConfig(**small)), eager.format("MarkupLMModel"))
    refused(F.LayoutLMModel(F.LayoutLMConfig(**small)), "LayoutLMModel makes its masks itself")
    gemma = F.Gemma3TextConfig(**small, num_key_value_heads=2, head_dim=16, use_bidirectional_attention=True)
    refused(F.Gemma3TextModel(gemma), "its config has use_bidirectional_attention")


CHOOSES = "it chooses or compresses its keys"
BIASES = "it adds biases of positions"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("DeepseekV32", CHOOSES), ("DeepseekV4", CHOOSES), ("Doge", CHOOSES), ("GlmMoeDsa", CHOOSES), ("HYV4", CHOOSES),
        ("Swin", BIASES), ("Parakeet", BIASES),
    ],
)  # fmt: skip
def test_attention_with_masks_of_its_own_is_refused(name, said):
    name += "Encoder" if name == "Parakeet" else ""
    config = getattr(transformers, f"{name}Config")()
    with torch.device("meta"):
        model = getattr(transformers, name if name == "ParakeetEncoder" else f"{name}Model")(config)
    with pytest.raises(ValueError, match=said):
        ours.accelerate(model)


class MiniMaxText01LightningAttention(nn.Module):
    """Its name in the code that comes with the checkpoint."""


def test_minimax_with_the_code_of_its_checkpoint_is_told_which_to_load():
    with pytest.raises(ValueError, match=r"load the one whose name ends in -hf \(MiniMaxAI/MiniMax-Text-01-hf\)"):
        ours.accelerate(nn.Sequential(MiniMaxText01LightningAttention()))


# ------------------------------------------------------------------------------------------------ images


def test_gemma3_with_token_types_and_no_images():
    """token_type_ids of a processor are zeros for text. One query has nothing ahead, so steps read nothing."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**TINY, **WINDOWS, "vocab_size": 100},
        vision_config={**vision, "image_size": 16, "patch_size": 4}, mm_tokens_per_image=4, image_token_id=90,
        boi_token_index=91, eoi_token_index=92,
    )  # fmt: skip
    model = drawn(transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager"))
    fulmen, ids, types = copy.deepcopy(model), ids_of(2), torch.zeros(2, 12, dtype=torch.long)
    ours.accelerate(fulmen, verbose=False)
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    with torch.no_grad():
        assert error(fulmen(ids, token_type_ids=types).logits, model(ids, token_type_ids=types).logits) < 1e-6
        got = fulmen(ids, attention_mask=padding, token_type_ids=types).logits
        torch.testing.assert_close(got, fulmen(ids, attention_mask=padding).logits)
        types[:, 3:7] = 1
        with pytest.raises(NotImplementedError, match="blocks of tokens that see ahead, as images do"):
            fulmen(ids, token_type_ids=types)
    overlay = transformers.masking_utils.blockwise_overlay(types)  # of an image that is in the cache
    blocks = transformers.masking_utils.or_masks(transformers.masking_utils.causal_mask_function, overlay)
    assert attention.make_mask(2, 1, 12, 11, 0, blocks) is attention.PLAIN


# ------------------------------------------------------------------ rows that bring no token in a decoding step

HYBRIDS = ("bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2")
STATES = ("minimax", "mamba2", *HYBRIDS)
STEPS = (8, 9, 10, 11, 12, 14)  # where parts of the tokens end
IDLE = torch.ones(3, 14, dtype=torch.long)
IDLE[0, :3], IDLE[1, 9:11], IDLE[2, 11:] = 0, 0, 0  # padded on the left; two steps idle, then it goes on; ended


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", STATES)
def test_rows_without_a_token_keep_their_states(family, static, monkeypatch):
    """As in a batch of chats, of which some end earlier. Where a graph is made the mask is not read on the host."""
    (model, accelerated), ids = served(family), ids_of(3, 14)
    positions = (IDLE.cumsum(1) - 1).clamp(min=0)
    cache = accelerated.new_cache(16 if static else None)
    monkeypatch.setattr(packing, "_makes_graph", lambda x: static)
    for again in range(2):
        got = in_parts(model, ids, IDLE, positions, cache, STEPS)
        assert_rows_alone(family, got, ids, IDLE)
        if again == 0:
            cache.reset()


@pytest.mark.parametrize("family", STATES)
def test_a_prompt_of_one_token(family):
    (model, accelerated), ids = served(family), ids_of(2)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    got = in_parts(model, ids, mask, (mask.cumsum(1) - 1).clamp(min=0), accelerated.new_cache(), (1, 2, 3, 12))
    assert_rows_alone(family, got, ids, mask)


@pytest.mark.parametrize("family", ["mamba2", "granitemoehybrid"])
def test_padding_that_states_took_in_is_still_refused(family):
    """Idle steps of one row do not excuse the padding of a prompt of another."""
    (model, accelerated), ids = served(family), ids_of(2)
    mask = torch.ones_like(ids)
    mask[0, 5:7], mask[1, 8:10] = 0, 0
    with pytest.raises(NotImplementedError, match="padding between tokens"):
        in_parts(model, ids, mask, None, accelerated.new_cache(), (7, 8, 12))
    mask[0] = 1
    with pytest.raises(NotImplementedError, match="padding between tokens"):
        in_parts(model, ids, mask, None, accelerated.new_cache(), (7, 12))
    mask[1, 8:] = torch.tensor([0, 1, 0, 1])  # the first in a step, the second in a part of a prompt
    with pytest.raises(NotImplementedError, match="padding between tokens"):
        in_parts(model, ids, mask, None, accelerated.new_cache(), (8, 9, 12))


@pytest.mark.parametrize("brought", [False, True])
@pytest.mark.parametrize("family", ["mamba2", *HYBRIDS])
def test_a_prompt_padded_on_the_right_is_not_continued(family, brought):
    """Also if the call that continues it brings no mask, as in `generate` of Mamba-2."""
    (model, accelerated), ids, name = served(family), ids_of(), FAMILIES[family].cache
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    with pytest.raises(NotImplementedError, match="pad on the left"):
        model.generate(ids, attention_mask=mask, max_new_tokens=3, eos_token_id=None, do_sample=False)
    with torch.no_grad():
        given = {name: accelerated.new_cache()} if brought else {"use_cache": True}
        cache = model(ids, attention_mask=mask, **given)[name]
        assert cache is given.get(name, cache)
        for part, told in ((ids[:, :1], None), (ids[:, :1], mask[:, :1]), (ids[:, :2], None)):
            with pytest.raises(NotImplementedError, match=r"a row of the cache ends in padding.*pad on the left"):
                model(part, attention_mask=told, **{name: cache})
        longer = torch.nn.functional.pad(mask, (0, 2), value=1)
        longer[0, -2] = 0  # a step without a token does not excuse the prompt's padding
        model(ids[:, :1], attention_mask=longer[:, :-1], **{name: cache})
        with pytest.raises(NotImplementedError, match="padding between tokens"):
            model(ids[:, :1], attention_mask=longer, **{name: cache})
        cache.reset()
        positions = torch.arange(N)[None]
        got = in_parts(model, ids, None, positions if name == "past_key_values" else None, cache, (N - 1, N))
        assert_close(got, logits_of(family), family)


def test_a_mask_of_the_new_tokens_alone_does_not_hide_padding():
    (model, accelerated), ids = served("mamba2"), ids_of()
    cache, mask = accelerated.new_cache(), torch.ones(3, N - 5, dtype=torch.long)
    with torch.no_grad():
        first = model(ids[:, :5], cache_params=cache).logits
        again = copy.deepcopy(cache)
        rest = model(ids[:, 5:], cache_params=cache, attention_mask=mask).logits
        assert_close(torch.cat([first, rest], 1), logits_of("mamba2"), "mamba2")
        mask[0, :2] = 0
        with pytest.raises(NotImplementedError, match="padding between tokens"):
            model(ids[:, 5:], cache_params=again, attention_mask=mask)


@pytest.mark.parametrize("family", ["mamba2", "granitemoehybrid"])
def test_states_of_other_rows_are_refused(family):
    (model, accelerated), name = served(family), FAMILIES[family].cache
    cache = accelerated.new_cache()
    with torch.no_grad():
        model(ids_of(2), **{name: cache})
        for _ in range(2):
            for part in (ids_of()[:, :1], ids_of()):
                with pytest.raises(ValueError, match=r"states of 2 rows .* this call has 3 rows .* new cache"):
                    model(part, **{name: cache})
            cache.reset()


@pytest.mark.gpu
def test_rows_without_a_token_in_a_cuda_graph():
    model = copy.deepcopy(own("mamba2", torch.float32)).cuda()
    cache = ours.accelerate(model, verbose=False).new_cache(16)
    ids, mask = ids_of().cuda(), torch.ones(3, 9, dtype=torch.long, device="cuda")
    token = ids[:, 8:9].clone()
    with torch.no_grad():
        model(ids[:, :8], attention_mask=mask[:, :8], cache_params=cache)
        states = [state for layer in cache.layers for state in (layer.conv_states[0], layer.recurrent_states[0])]
        model(token, attention_mask=mask, cache_params=cache)  # compiles kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(token, attention_mask=mask, cache_params=cache).logits
        cache.reset()
        model(ids[:, :8], attention_mask=mask[:, :8], cache_params=cache)
        for column, idle in ((0, True), (8, False), (9, False)):
            before = [state.clone() for state in states]
            token.copy_(ids[:, column : column + 1])
            mask[1, -1] = not idle
            graph.replay()
            kept = [torch.equal(new[1], old[1]) for new, old in zip(states, before, strict=True)]
            assert all(kept) if idle else not any(kept)
            assert not any(torch.equal(new[0], old[0]) for new, old in zip(states, before, strict=True))
        want = own("mamba2")(ids_of()[1:2, :10], use_cache=False).logits[:, -1:]
        assert_close(logits[1:2].cpu(), want, "mamba2", torch.bfloat16)


# --------------------------------------------------------------------------------- packed sequences

POSITIONS = torch.tensor([[*range(5), *range(7)]])
OFFSETS = torch.tensor([0, 5, 12], dtype=torch.int32)
PACKED = {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "max_length_q": 7, "max_length_k": 7}


@functools.lru_cache
def alone(family):
    """Logits of each of the two sequences."""
    with torch.no_grad():
        return [own(family)(part, use_cache=False).logits for part in ids_of(1).split([5, 7], 1)]


def assert_packed(family, logits, rough=torch.float32):
    for got, want in zip(logits.split([5, 7], 1), alone(family), strict=True):
        assert_close(got, want, family, rough)


@pytest.mark.parametrize("family", passing("packed"))
def test_offsets_are_heeded_whether_or_not_the_model_would_make_a_cache(family):
    model, _ = served(family)
    with torch.no_grad():
        for training in (False, True):
            model.train(training)
            for positions in ({"position_ids": POSITIONS}, {}):
                assert_packed(family, model(ids_of(1), **PACKED, **positions).logits)
        model.eval()
        assert_packed(family, model(ids_of(1), cu_seq_lens_q=OFFSETS, position_ids=POSITIONS, use_cache=False).logits)


def test_offsets_go_before_a_packed_mask_of_one_sequence():
    """Which transformers makes of positions in a compiled model, where it cannot look at them."""
    q, k, v = (torch.randn(1, 2, 12, 8, dtype=torch.float64) for _ in range(3))
    packed = transformers.masking_utils.packed_sequence_mask_function(torch.zeros(1, 12, dtype=torch.long))
    function = transformers.masking_utils.and_masks(transformers.masking_utils.causal_mask_function, packed)
    mask = attention.make_mask(1, 12, 12, 0, 0, function)
    got = attention.attend(nn.Module(), q, k, v, mask, **PACKED)[0].transpose(1, 2)
    parts = zip(*(x.split([5, 7], 2) for x in (q, k, v)), strict=True)
    want = [nn.functional.scaled_dot_product_attention(*part, is_causal=True) for part in parts]
    torch.testing.assert_close(got, torch.cat(want, 2))


@pytest.mark.parametrize("family", STATES)
def test_packed_sequences_have_no_place_in_a_cache_of_states(family):
    model, accelerated = served(family)
    for cached in ({"use_cache": True}, {FAMILIES[family].cache: accelerated.new_cache()}):
        with pytest.raises(ValueError, match=r"cu_seq_lens_q packs 2 sequences .* pass use_cache=False"):
            model(ids_of(1), **PACKED, **cached)
    one = {name: x[[0, 2]] if name.startswith("cu") else N for name, x in PACKED.items()}
    got = model(ids_of(1), use_cache=True, **one)
    assert_close(got.logits, logits_of(family)[:1], family)
    assert got[FAMILIES[family].cache] is not None


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["gpt_oss", "minimax", "mamba2"])
def test_checkpointed_layers_know_their_sequences_if_another_forward_has_the_same_tensors(family, reentrant):
    """As a teacher that is given the student's batch."""
    student, teacher = copy.deepcopy(own(family)), served(family)[0]
    ours.accelerate(student, verbose=False)
    batch = {"input_ids": ids_of(1), "position_ids": POSITIONS.clone()}
    student.train().enable_input_require_grads()

    def grads(teach):
        student.zero_grad()
        logits = student(**batch).logits
        if teach:
            with torch.no_grad():
                teacher(**batch)  # which makes a cache, so nothing is packed
                student.eval()(**batch, use_cache=True)
                student.train()
        logits.square().sum().backward()
        return [None if p.grad is None else p.grad.clone() for p in student.parameters()]

    want = grads(teach=False)
    student.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.testing.assert_close(grads(teach=True), want)
    assert not vars(batch["position_ids"]), "nothing is left on the caller's tensor"


def test_ring_and_sala_refuse_packed_sequences():
    """With and without a cache, since their layers are never told."""
    model = nn.Linear(2, 2)
    model.config = transformers.LlamaConfig(**TINY)
    for cached in ({}, {"use_cache": True}, {"use_cache": False}):
        for given in ({"position_ids": POSITIONS}, {"cu_seq_lens_q": OFFSETS}, PACKED):
            for model.training in (False, True):
                with pytest.raises(NotImplementedError, match=r"pack.* several sequences in a row"):
                    simple_gla.refuse_packed(model, (), {**given, **cached})
    mask = torch.tensor([[0, 0, 1, 1]])
    one = {"position_ids": torch.tensor([[0, 0, 0, 1]]), "attention_mask": mask}  # padded on the left
    for given in (one, {"position_ids": torch.tensor([[3, 4, 5]])}, {"cu_seq_lens_q": OFFSETS[[0, 2]]}, {}):
        simple_gla.refuse_packed(model, (), given)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_matrix_says_no_to_is_wrong(family):
    """A limit that is gone is to go from families.py, too."""
    assert set(FAMILIES[family].limits) <= {"packed"}, "no other is tested here"
    if "packed" in FAMILIES[family].limits:
        with torch.no_grad():
            got = served(family)[0](ids_of(1), position_ids=POSITIONS, use_cache=False).logits[:, 5:]
        assert error(got, alone(family)[1]) > 0.01


# ------------------------------------------------------------------------------------------------ bf16


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_and_packed_rows_in_bf16(family):
    (model, accelerated), ids = served(family, torch.bfloat16), ids_of()
    mask = torch.tensor(PADDING["left"])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    got = in_parts(model, ids, mask, positions, accelerated.new_cache(16), (9, 10, 12))
    assert_rows_alone(family, got, ids, mask, torch.bfloat16)
    if "packed" not in FAMILIES[family].limits:
        with torch.no_grad():
            got = model(ids[:1], position_ids=POSITIONS, use_cache=False).logits
        assert_packed(family, got, torch.bfloat16)


# --------------------------------------------------------------------------------- whole compiled models


@pytest.mark.parametrize(
    "family", ["llama", "mamba2", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("minimax", *HYBRIDS))]
)
def test_a_whole_compiled_model(family):
    """Packed, and in steps of a static cache with padding on the left and idle rows."""
    model = copy.deepcopy(own(family))
    accelerated, ids = ours.accelerate(model, verbose=False), ids_of(3, 14)
    torch.compiler.reset()
    model.compile(backend="aot_eager")
    with torch.no_grad():
        for given in (PACKED, {"position_ids": POSITIONS}, {"position_ids": POSITIONS, **PACKED}):
            assert_packed(family, model(ids_of(1), use_cache=False, **given).logits)
    positions = (IDLE.cumsum(1) - 1).clamp(min=0)
    got = in_parts(model, ids, IDLE, positions, accelerated.new_cache(16), (8, *range(9, 15)))
    assert_rows_alone(family, got, ids, IDLE)
