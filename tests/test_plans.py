"""The fast path: where results get their memory, and what a repeated call goes through."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest
import torch

import fulmen
from fulmen import dispatch, plans
from fulmen.flash import plan as flash_plan
from fulmen.flash.spec import Residuals
from fulmen.testing import flash as flash_testing


def is_torchs(new) -> bool:
    return getattr(new, "func", None) is torch.empty_strided


def test_new_tensors_on_a_cpu_are_torchs():
    x = torch.zeros(2, 3).T
    assert is_torchs(plans.allocator(x))
    assert (plans.allocator(x)().shape, plans.allocator(x)().stride()) == (x.shape, x.stride())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_new_tensors_are_as_empty_like_makes_them(mode, order):
    x = torch.zeros(2, 3, 5, 8, device="cuda", dtype=torch.float16).permute(order)
    with mode():
        x = x.clone()
        new, usual = plans.allocator(x)(), torch.empty_like(x)
    if hasattr(torch._C._dynamo.guards, "_empty_strided_cuda"):
        assert not is_torchs(plans.allocator(x))
    for fact in (lambda t: t.shape, torch.Tensor.stride, torch.Tensor.is_inference):
        assert fact(new) == fact(usual)
    assert (new.dtype, new.device, new.requires_grad) == (usual.dtype, usual.device, usual.requires_grad)
    assert new.data_ptr() != usual.data_ptr()


@pytest.mark.gpu
def test_new_tensors_while_another_gpu_is_current(monkeypatch):
    x = torch.zeros(2, 3, device="cuda")
    with monkeypatch.context() as changed:
        changed.setattr(torch._C, "_cuda_getDevice", lambda: 1)
        new = plans.allocator(x)
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", None, raising=False)  # it has been kept
    assert new().device == x.device


@pytest.mark.gpu
def test_new_tensors_without_the_fast_way(monkeypatch):
    x = torch.zeros(2, 3, device="cuda")
    with monkeypatch.context() as changed:
        changed.delattr(torch._C._dynamo.guards, "_empty_strided_cuda", raising=False)
        assert is_torchs(plans.allocator(x))
    monkeypatch.setattr(
        torch._C._dynamo.guards, "_empty_strided_cuda", lambda size, *rest: torch.zeros(1), raising=False
    )
    assert is_torchs(plans.allocator(x))


# ------------------------------------------------------------------------------------- the path of a call


PACKAGE = str(Path(fulmen.__file__).parent)


def path_of(call) -> tuple[list[str], int]:
    """The files of fulmen that a call crosses on its thread, and the frames of ours on the way to the deepest."""
    files, depths = {}, [0]

    def look(frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            files[name.removeprefix(PACKAGE)] = None
            depth = 0
            while frame is not None:
                depth += frame.f_code.co_filename.startswith(PACKAGE)
                frame = frame.f_back
            depths.append(depth)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(files), max(depths)


MOST_FILES = {"lightning": 5, "flash": 6}


POSING = """
import os
os.environ.pop("TRITON_INTERPRET", None)
from tests import posing, test_plans
posing.install(90)
test_plans.tell_path("{op}")
"""


def tell_path(op: str) -> None:
    kept = functools.cache(torch._C._dynamo.guards._empty_strided_cuda)  # outputs get the same memory, as on a GPU
    torch._C._dynamo.guards._empty_strided_cuda = lambda *like: kept(*like).detach()
    q, k, v = torch.randn(3, 1, 2, 128, 64, device="cuda", dtype=torch.bfloat16).unbind()
    q.requires_grad_()
    slopes = fulmen.decay.alibi(2).cuda()

    def call() -> torch.Tensor:
        if op == "lightning":
            return fulmen.lightning_attention(q, k, v, slopes)
        return fulmen.flash_attention(q, k, v, causal=True, backend="cuda")

    for _ in range(3):
        call().backward(torch.randn_like(q))
    print(json.dumps(path_of(call)))


@pytest.mark.parametrize("op", MOST_FILES)
def test_a_repeated_call_crosses_few_files(op, fresh_process):
    """From the user's call, with gradients, to the launch: what a reader has to follow, on a GPU that is not here."""
    files, frames = json.loads(fresh_process(POSING.format(op=op)))
    assert len(files) <= MOST_FILES[op], files
    assert frames <= 8, (frames, files)


# ---------------------------------------------------------------------------------------------- alignment


@pytest.mark.parametrize("odd", ["q", "k", "v"])
def test_misaligned_calls_are_never_prepared_and_share_no_plan(monkeypatch, odd):
    """Prepared launches take addresses at multiples of 16 bytes for granted; Triton compiles for them."""
    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(plans, "_recent", {})
    prepared = []
    kernel = dispatch.kernels("flash")["eager"]
    spy = kernel._replace(prepare=lambda spec, x: prepared.append([t.data_ptr() % 16 for t in x[:3]]))
    monkeypatch.setitem(dispatch._kernels["flash"], "eager", spy)
    dispatch.pick.cache_clear()

    def rows(misaligned: bool) -> torch.Tensor:
        memory = torch.randn(2 * 20 * 16 + 8)
        begin = next(i for i in range(8) if (memory[i:].data_ptr() % 16 != 0) == misaligned)
        return memory[begin : begin + 2 * 20 * 16].view(1, 2, 20, 16)

    for name in (odd, None, odd):
        x = {n: rows(n == name) for n in "qkv"}
        want = fulmen.flash_attention(**x, backend="reference")
        for _ in range(3):
            torch.testing.assert_close(fulmen.flash_attention(**x, backend="eager"), want)
    dispatch.pick.cache_clear()
    assert prepared == [[0, 0, 0]]
    assert len(plans._plans) == 2


# ------------------------------------------------------------------------- calls that only look like others


@pytest.mark.parametrize("op", ["flash", "lightning"])
def test_batched_gradients(op):
    """Legacy vmap hands over tensors without storage."""
    q, k, v = torch.randn(3, 1, 2, 12, 16).unbind()
    q.requires_grad_()
    attend = fulmen.flash_attention if op == "flash" else fulmen.lightning_attention
    for _ in range(2):
        o = attend(q, k, v, backend="eager")
        grads = torch.randn(3, *o.shape)
        (batched,) = torch.autograd.grad(o, q, grads, is_grads_batched=True, retain_graph=True)
        for got, g in zip(batched, grads, strict=True):
            torch.testing.assert_close(got, torch.autograd.grad(o, q, g, retain_graph=True)[0])


@pytest.mark.parametrize("op", ["flash", "lightning"])
def test_gradients_with_the_negative_bit_or_a_stride(op):
    """Prepared backwards read memory as it lies: what lies otherwise must be told apart."""
    q, k, v = torch.randn(3, 1, 2, 12, 16).unbind()
    q.requires_grad_()
    attend = fulmen.flash_attention if op == "flash" else fulmen.lightning_attention
    g = torch.randn_like(q)
    strided = torch.stack([g, g], -1)[..., 0]
    (want,) = torch.autograd.grad(attend(q, k, v, backend="eager"), q, g)
    for do in (torch._neg_view(-g), strided, g, strided, torch._neg_view(-g)):
        for _ in range(3):
            torch.testing.assert_close(torch.autograd.grad(attend(q, k, v, backend="eager"), q, do)[0], want)


def test_an_operator_follows_deterministic_mode():
    q = torch.randn(1, 2, 12, 16)
    facts = flash_testing.operator_facts("flash_forward", needs_grad=True)
    given = (q, q.clone(), q.clone(), None, None, None)
    wanted = []
    for mode in (False, True, False):
        torch.use_deterministic_algorithms(mode)
        torch.ops.fulmen.flash_forward(*given, *facts)
        wanted.append(flash_plan.planned(("flash operator", *facts), Residuals(*given), facts).spec)
    assert [spec.deterministic for spec in wanted] == [False, True, False]


def test_a_gradient_that_is_an_input(monkeypatch):
    """A prepared backward keeps the strides of do: do that is q is no do that is k."""
    kernel = dispatch.kernels("flash")["eager"]

    def prepare_backward(spec, x, o, lse, do, dlse):
        strides = do.stride()

        def again(*t):
            return kernel.backward(spec, Residuals(*t[:6]), *t[6:8], t[8].as_strided(t[8].shape, strides), t[9])

        return again

    monkeypatch.setitem(dispatch._kernels["flash"], "eager", kernel._replace(prepare_backward=prepare_backward))
    dispatch.pick.cache_clear()
    plans.clear()
    q, v = torch.randn(2, 1, 2, 8, 16).unbind()
    k = torch.randn(1, 8, 2, 16).transpose(1, 2)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    for do in (q, k, q, k):
        want, got = (
            torch.autograd.grad(fulmen.flash_attention(*inputs, backend=name), inputs, do)
            for name in ("reference", "eager")
        )
        torch.testing.assert_close(got, want)
    plans.clear()
    dispatch.pick.cache_clear()


def test_packed_training_finds_its_backward_again():
    q, k, v = torch.randn(3, 1, 2, 12, 16).unbind()
    q.requires_grad_()
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    plans.clear()
    for _ in range(4):
        o = fulmen.flash_attention(q, k, v, cu_seqlens_q=ends, backend="eager")
        o.backward(torch.randn_like(o))
    (plan,) = plans._plans.values()
    assert len(plan.backwards) == plans.GUARDS_WORK


@pytest.mark.parametrize("attend", [fulmen.flash_attention, fulmen.lightning_attention])
def test_nothing_at_all_gets_a_clear_error(attend):
    with pytest.raises(ValueError, match="q is a NoneType"):
        attend(None, None, None)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("attend", [fulmen.flash_attention, fulmen.lightning_attention])
def test_nested_tensors_get_a_clear_error(attend, layout):
    x = torch.nested.nested_tensor([torch.randn(2, 5, 16), torch.randn(2, 5, 16)], layout=layout)
    with pytest.raises(ValueError, match="q is a nested tensor"):
        attend(x, x, x)
