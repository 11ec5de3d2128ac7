"""Backend `cuda` of lightning attention on a GPU: what `test_backends.py` does not ask of every backend."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fulmen
from fulmen import dispatch
from fulmen.cuda import tensor_map
from fulmen.lightning import cuda
from fulmen.lightning.spec import Residuals, spec_of
from fulmen.testing import lightning as testing

needs_cuda = pytest.mark.gpu
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


def served(x: testing.Inputs, backend: str = "cuda") -> None:
    why = dispatch.reasons("lightning", spec_of(x.q, x.k, x.v, x.decay, **x.options()))[backend]
    if why is not None:
        pytest.skip(why)


def without_saving(x: testing.Inputs):
    """The operator, whose forward saves nothing unless it is told that a backward follows."""
    return torch.ops.fulmen.lightning_forward(
        x.q, x.k, x.v, x.decay, x.initial_state, x.cu_seqlens, x.scale, True, "cuda"
    )[:2]


def assert_right(x: testing.Inputs, actual: testing.Outputs, use=("o", "state")) -> None:
    for name, wanted in testing.expected(x, use).items():
        testing.assert_close(name, getattr(actual, name), *wanted)


GPU_CASES = {
    "one piece": {"H": 70, "N": 777, "decay": "mixed", "initial_state": True},
    "split": {"H": 3, "N": 4095, "decay": "mixed", "initial_state": True},
    "split, no decay": {"H": 3, "N": 2049, "layout": "bnhd"},
    "split what is left over": {"H": 135, "N": 1100, "decay": "mixed", "initial_state": True},
    "packed": {"H": 40, "lengths": [1, 0, 63, 64, 65, 300, 0, 513, 1], "decay": "steep", "initial_state": True},
    "packed, split": {"H": 2, "lengths": [1, 700, 0, 64, 513, 0, 3000, 1], "decay": "mixed", "initial_state": True},
}


def gpu_inputs(case: str, D: int, **more) -> testing.Inputs:
    x = testing.inputs(D=D, **GPU_CASES[case], **BF16, **more)
    served(x)
    return x


@needs_cuda
@pytest.mark.parametrize("case", GPU_CASES)
@pytest.mark.parametrize("D", [64, 128])
def test_cuts_on_this_gpu(D, case):
    """The cases are what they say."""
    x = gpu_inputs(case, D)
    call = spec_of(x.q, x.k, x.v, x.decay, **x.options())
    assert (cuda.tiles_of(call).forward_split.number > 1) == ("split" in case)


@needs_cuda
@pytest.mark.parametrize("case", GPU_CASES)
@pytest.mark.parametrize("D", [64, 128])
def test_backward_of_a_forward_that_saved_nothing(D, case):
    x = gpu_inputs(case, D)
    assert_right(x, testing.evaluate(without_saving, x))


@needs_cuda
@pytest.mark.parametrize("scale", [-64.0, 1e-3, 1e6])
@pytest.mark.parametrize("decay", ["steep", "strong"])
@pytest.mark.parametrize("D", [64, 128])
def test_large_scales_and_steep_decay(D, decay, scale):
    """lambda^-7 times the scale: a factor that is no number must not come of it."""
    x = testing.inputs(1, 3, 200, D, decay=decay, scale=scale, initial_state=True, **BF16)
    served(x)
    testing.check(x, "cuda")


@needs_cuda
@pytest.mark.parametrize("case", GPU_CASES)
@pytest.mark.parametrize("D", [64, 128])
def test_fifty_runs_are_one(D, case):
    torch.use_deterministic_algorithms(False)  # without help from PyTorch
    x = gpu_inputs(case, D)
    first = testing.evaluate(testing.backend("cuda"), x)
    for i in range(50):
        again = testing.evaluate(testing.backend("cuda"), x)
        for name, a, b in zip(first._fields, first, again, strict=True):
            assert a is None or torch.equal(a, b), f"{name} in run {i}"


def unaligned(x: testing.Inputs, name: str) -> testing.Inputs:
    """`x` with rows of one tensor that begin in the middle of 16 bytes."""
    y = getattr(x, name)
    wide = torch.full((*y.shape[:3], y.shape[3] + 3), float("nan"), dtype=y.dtype, device=y.device)
    wide[..., : y.shape[3]] = y
    return x._replace(**{name: wide[..., : y.shape[3]]})


@needs_cuda
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_the_copy_engine_does_not_take_is_refused_by_name_and_served_by_auto(name):
    x = unaligned(gpu_inputs("packed", 64), name)
    with pytest.raises(NotImplementedError, match="begin at multiples of 16 bytes"):
        testing.evaluate(testing.backend("cuda"), x)
    testing.check(x, "auto")


@needs_cuda
@pytest.mark.parametrize("case", ["one piece", "split", "packed"])
@pytest.mark.parametrize("D", [64, 128])
def test_a_gradient_that_must_be_copied(D, case):
    x = unaligned(gpu_inputs(case, D), "do")
    testing.check(x, "cuda")


@needs_cuda
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("case", ["one piece", "split"])
def test_saved_tensors_that_come_back_otherwise(case, D):
    """Kept on the host meanwhile, unaligned rows come back aligned: another kernel serves, and nothing was saved."""
    for x in (unaligned(gpu_inputs(case, D), "k"), gpu_inputs(case, D)):
        with torch.autograd.graph.save_on_cpu():
            actual = testing.evaluate(testing.backend("auto"), x)
        assert_right(x, actual)


@needs_cuda
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("case", ["packed", "packed, split"])
@pytest.mark.parametrize("saving", [True, False], ids=["saved", "unsaved"])
def test_no_numbers_stay_in_their_sequence(saving, case, D):
    """Sequences share chunks' rows in memory; what is not a number in one must not reach its neighbours."""
    x = gpu_inputs(case, D)
    attend = testing.backend("cuda") if saving else without_saving
    clean = testing.evaluate(attend, x)
    ends = x.cu_seqlens.tolist()
    for i in range(0, len(ends) - 1, 2):
        begin, end = ends[i : i + 2]
        spoilt = {name: getattr(x, name).clone() for name in ("q", "k", "v", "do", "initial_state", "dstate")}
        for name, y in spoilt.items():
            if name in ("initial_state", "dstate"):
                y[i] = float("nan")
            else:
                y[:, :, begin:end] = float("nan")
        dirty = testing.evaluate(attend, x._replace(**spoilt))
        others = [j for j in range(len(ends) - 1) if j != i]
        for name in ("state", "dinitial"):
            assert torch.equal(getattr(dirty, name)[others], getattr(clean, name)[others]), (name, i)
        for name in ("o", "dq", "dk", "dv"):
            a, b = getattr(dirty, name), getattr(clean, name)
            assert torch.equal(a[:, :, :begin], b[:, :, :begin]), (name, i)
            assert torch.equal(a[:, :, end:], b[:, :, end:]), (name, i)


@needs_cuda
def test_rows_of_no_sequence_are_not_written_over_others():
    """Offsets that end before N: what lies behind is undefined, but the sequences are not."""
    x = gpu_inputs("packed", 64)
    short = x._replace(cu_seqlens=x.cu_seqlens.clamp(max=int(x.cu_seqlens[-2])))
    a, b = (testing.evaluate(testing.backend("cuda"), y).o for y in (short, x))
    end = int(short.cu_seqlens[-1])
    assert torch.equal(a[:, :, :end], b[:, :, :end])


@needs_cuda
@pytest.mark.parametrize("case", ["split", "packed"])
@pytest.mark.parametrize("D", [64, 128])
def test_compiled_and_checkpointed(D, case):
    """The same bits: a compiled call saves states at D = 64, and at D = 128 its backward gathers them once more."""
    x = gpu_inputs(case, D)
    attend = testing.backend("cuda")
    plain = testing.evaluate(attend, x)
    compiled = testing.evaluate(torch.compile(attend, fullgraph=True, backend="aot_eager"), x)
    again = testing.evaluate(lambda y: checkpoint(attend, y, use_reentrant=False), x)
    assert_right(x, compiled)
    for name, a, b, c in zip(plain._fields, plain, compiled, again, strict=True):
        assert a is None or torch.equal(a, c), name
        assert a is None or torch.equal(a, b), name
    tensors = (x.q, x.k, x.v, x.decay, x.initial_state, x.cu_seqlens)
    saved = torch.ops.fulmen.lightning_forward(*tensors, x.scale, True, "cuda", True)[2]
    assert (saved.numel() > 0) == (D == 64)


@needs_cuda
@pytest.mark.parametrize("D", [64, 128])
def test_layout_follows_q(D):
    x = testing.inputs(2, 3, 700, D, layout="bnhd", **BF16)
    served(x)
    out = testing.check(x, "cuda")
    for name in ("o", "dq", "dk", "dv"):
        assert getattr(out, name).transpose(1, 2).is_contiguous(), name


@needs_cuda
@pytest.mark.parametrize(("D", "more"), [(64, 1 / 8), (128, 0.0)])
def test_what_a_training_step_takes(D, more):
    """q, k, v, o, dO, dq, dk, dv are 8u; the saved states of D = 64 an eighth of one."""
    x = testing.inputs(4, 32, 8192, D, decay="mixed", **BF16)
    served(x)
    u = x.q.numel() * x.q.element_size()
    q, k, v = (y.requires_grad_() for y in (x.q, x.k, x.v))
    torch.cuda.synchronize()
    others = torch.cuda.memory_allocated() - 4 * u
    torch.cuda.reset_peak_memory_stats()
    o = fulmen.lightning_attention(q, k, v, x.decay, backend="cuda")
    o.backward(x.do)
    peak = (torch.cuda.max_memory_allocated() - others) / u
    assert peak <= 8 + more + 0.1, f"{peak:.2f} u"


@needs_cuda
def test_a_thread_that_has_not_used_the_gpu():
    """As autograd's are: their first call may be a tensor map of ours, or a launch."""
    x = gpu_inputs("one piece", 64)
    clean = testing.evaluate(testing.backend("cuda"), x)
    residuals = Residuals(x.q, x.k, x.v, x.decay, x.initial_state, x.cu_seqlens)
    call = spec_of(x.q, x.k, x.v, x.decay, **x.options(), with_final_state=True)
    found: list[object] = []

    def work() -> None:
        try:
            tensor_map.encode.cache_clear()
            tensor_map.tensor_maps(x.q, 64)(x.q.data_ptr())
            found.append(cuda.OPERATIONS.forward(call, residuals)[0])
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert isinstance(found[0], torch.Tensor), found[0]
    assert torch.equal(found[0], clean.o)
