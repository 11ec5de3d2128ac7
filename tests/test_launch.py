"""Launches through the driver: what it is given, by native kernels and by Triton's."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from fulmen import launch as triton_launch
from fulmen.cuda import launch as native


class Driver:
    """Instead of libcuda: keeps what each call was given, read through its pointers as a GPU's driver does."""

    def __init__(self, sizes=(), wait=0.0, answers=()):
        self.sizes, self.wait, self.answers, self.calls = sizes, wait, list(answers), []

    def cuLaunchKernelEx(self, config, handle, pointers, extra):
        time.sleep(self.wait)
        given = [ctypes.string_at(at, size) for at, size in zip(pointers, self.sizes, strict=True)]
        self.calls.append((handle.value, config._obj, config._obj.stream, given))
        return self.answers.pop(0) if self.answers else 0


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(native, "library", lambda: made)
    monkeypatch.setattr(native, "raw_stream", lambda device: 70 + device)
    monkeypatch.setattr(native, "current_device", lambda: 0)
    return made


def repeatable(**options):
    front = struct.Struct("=2Q")
    return native.Repeatable("kernel", 5, 0, (3, 2, 1), 128, 64, front, bytes(16) + b"constant", **options)


def numbers(bytes_):
    return struct.unpack("=2Q", bytes_)


@pytest.mark.parametrize("early", [False, True])
def test_a_call_is_packed_in_front_of_what_stays(driver, early):
    driver.sizes = (24,)
    launch = repeatable(early=early)
    for pair in ((1, 2), (1 << 40, 4)):
        launch(*pair)
        handle, config, stream, (given,) = driver.calls[-1]
        assert (handle, stream, list(config.grid), list(config.block)) == (5, 70, [3, 2, 1], [128, 1, 1])
        assert (numbers(given[:16]), given[16:]) == (pair, b"constant")
        assert (config.shared, config.attribute_count) == (64, early)
    assert len(launch.slots) == 1


def test_arguments_are_packed_once_for_the_same_addresses(driver):
    driver.sizes, asked = (24,), []
    launch = repeatable()

    def front(at):
        asked.append(at)
        return at[1], at[0]

    for at in ((1, 2), (3, 4), (1, 2)):
        launch.at(at, front)
        assert numbers(driver.calls[-1][3][0][:16]) == at[::-1]
    assert asked == [(1, 2), (3, 4)]
    for i in range(2 * native.MAX_PACKED):
        launch.at((i, 0), front)
        assert numbers(driver.calls[-1][3][0][:16]) == (0, i)
    assert len(launch.packed) <= native.MAX_PACKED


@pytest.mark.parametrize("how", ["call", "at"])
def test_threads_do_not_share_arguments_or_streams(driver, monkeypatch, how):
    driver.sizes, driver.wait = (24,), 0.001
    launch, streams = repeatable(), {}
    monkeypatch.setattr(native, "raw_stream", lambda device: streams[threading.get_ident()])

    def work(name):
        streams[threading.get_ident()] = name
        for i in range(20):
            at = (name, i) if how == "call" else (7, i)  # the same addresses on every stream
            launch(*at) if how == "call" else launch.at(at, lambda at: at)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.calls) == 80
    if how == "call":
        assert sorted(numbers(given[0][:16]) for *_, given in driver.calls) == [
            (n, i) for n in range(1, 5) for i in range(20)
        ]
        assert all(numbers(given[0][:16])[0] == stream for _, _, stream, given in driver.calls)
    else:
        assert sorted((stream, *numbers(given[0][:16])) for _, _, stream, given in driver.calls) == [
            (n, 7, i) for n in range(1, 5) for i in range(20)
        ]


def test_no_blocks_no_call(driver):
    launch = native.Repeatable("kernel", 5, 0, (0, 1, 1), 128, 64, struct.Struct("=Q"), bytes(8))
    launch(1)
    launch.at((1,), lambda at: at)
    assert not driver.calls


def test_a_failed_launch_is_named(driver, monkeypatch):
    driver.sizes, driver.answers = (24,), [700, 700]
    monkeypatch.setattr(torch.cuda, "device", lambda index: pytest.MonkeyPatch.context())
    with pytest.raises(RuntimeError, match="the launch of kernel fails: CUDA error 700"):
        repeatable()(1, 2)


# ----------------------------------------------------------------------------------------- Triton's kernels


TYPES = {
    "q": "*bf16", "k": "*bf16", "lse": "constexpr", "strides": (("i32", "constexpr", "i64"), ("i32", "i32", "i32")),
    "N": "i32", "scale": "fp32", "left": "constexpr", "flag": "i1", "D": "constexpr", "unused": "constexpr",
}  # fmt: skip
REST = (((64, 1, 1 << 40), (-5, 6, 7)), 113, 0.125, None, True, 64)
SIZES = (8, 8, 4, 8, 4, 4, 4, 4, 4, 1, 8, 8)


def compiled(types=None, **facts):
    metadata = {"num_warps": 4, "num_ctas": 1, "shared": 512, "global_scratch_size": 0, "launch_pdl": False} | facts
    source = SimpleNamespace(signature=TYPES if types is None else types)
    return SimpleNamespace(name="kernel", function=9, src=source, metadata=SimpleNamespace(**metadata))


def described(**options):
    q, k = torch.zeros(2, 1, 1, 4, 16).unbind()
    return triton_launch.Launch(None, 6, (q, k, None), REST, {}, **options)


def test_triton_kernels_get_their_parameters(driver, monkeypatch):
    driver.sizes = SIZES
    monkeypatch.setattr(triton_launch, "parameter_sizes", lambda handle: list(SIZES))
    made = compiled(launch_pdl=True)
    launch = triton_launch.past_triton(made, described(), 0)
    assert launch.owner is made
    for q, k in ((1 << 45, 3), (16, 32)):
        launch(q, k, 0)
        handle, config, stream, given = driver.calls[-1]
        assert (handle, stream, list(config.grid), config.block[0], config.shared) == (9, 70, [6, 1, 1], 128, 512)
        assert config.attribute_count == 1
        assert given == [struct.pack("=" + code, value) for code, value in zip(
            "QQiqiiiif?QQ", (q, k, 64, 1 << 40, -5, 6, 7, 113, 0.125, True, 0, 0), strict=True
        )]  # fmt: skip


@pytest.mark.parametrize(
    ("made", "sizes"),
    [
        (compiled(num_ctas=2), SIZES),
        (compiled(global_scratch_size=64), SIZES),
        (compiled(profile_scratch_size=64), SIZES),
        (compiled(launch_cooperative_grid=True), SIZES),
        (compiled(TYPES | {"scale": "bf16"}), SIZES),
        (compiled(TYPES | {"unused": "i32"}), SIZES),
        (compiled({"q": "*bf16"}), SIZES),
        (compiled(), SIZES[:-3]),
        (compiled(), (*SIZES, 4)),
        (compiled(), (4, *SIZES[1:])),
        (compiled(), None),
    ],
)
def test_what_we_do_not_know_triton_launches(driver, monkeypatch, made, sizes):
    monkeypatch.setattr(triton_launch, "parameter_sizes", lambda handle: sizes and list(sizes))
    assert triton_launch.past_triton(made, described(), 0) is None


def test_descriptors_are_tritons(driver, monkeypatch):
    monkeypatch.setattr(triton_launch, "parameter_sizes", lambda handle: list(SIZES))
    assert triton_launch.past_triton(compiled(), described(blocks={0: 64}), 0) is None


def test_sizes_of_parameters(driver, monkeypatch):
    def ask(handle, index, at, size):
        if index.value >= 3:
            return 1
        size._obj.value = (8, 4, 128)[index.value]
        return 0

    assert native.parameter_sizes(5) is None  # a driver that cannot say
    monkeypatch.setattr(driver, "cuFuncGetParamInfo", ask, raising=False)
    assert native.parameter_sizes(5) == [8, 4, 128]


@pytest.mark.gpu
def test_small_kernels_go_past_triton():
    """Forward and backward of a small call; a profiler's hook still hears of every launch."""
    from fulmen.flash import triton as flash
    from fulmen.flash.spec import Residuals
    from fulmen.testing import flash as testing

    x = testing.inputs(1, 2, 128, 64, dtype=torch.bfloat16, device="cuda", causal=True)
    spec, y = x.spec(needs_grad=True), Residuals(x.q, x.k, x.v)
    o, lse = flash.forward(spec, y)
    results = flash.empty_gradients(spec, y, o, lse, x.do, None)
    tiles = flash.chosen(spec)
    launches = [flash.forward_launch(spec, tiles, y, o, lse), *flash.backward_launches(spec, tiles, y, results)]
    for launch in launches:
        ready = triton_launch.Ready(launch, x.q.device)
        assert ready.direct is not None
        heard = []
        triton_launch.runtime.launch_enter_hook.add(heard.append)
        try:
            ready(*launch.tensors)
        finally:
            triton_launch.runtime.launch_enter_hook.remove(heard.append)
        assert heard


# -------------------------------------------------------------------------------------------------- chains


class Posing:
    """A tensor on the CPU that says it is on a GPU."""

    def __init__(self, x):
        self.detach, self.data_ptr, self.device = x.detach, x.data_ptr, torch.device("cuda")


@pytest.fixture
def chained(monkeypatch):
    """A repeated chain of two launches, and the addresses it launches with."""
    calls, nobody = [], SimpleNamespace(interpret=False, launch_enter_hook=None, launch_exit_hook=None)
    monkeypatch.setattr(triton_launch, "runtime", nobody)
    monkeypatch.setattr(triton_launch, "Ready", lambda one, device: SimpleNamespace(direct=None, at=noted(one.kernel)))

    def noted(name):
        return lambda *addresses: calls.append((name, addresses))

    def describe(options, x, w, v, nothing):
        work, y = torch.empty(2, 3, 8), torch.empty(2, 8)
        middle, last = work.unbind(1)[1:]
        launches = (
            triton_launch.Launch("first", 1, (x, nothing, w, work), (), {}),
            triton_launch.Launch("second", 1, (middle, last, v, y), (), {}),
        )
        return (y.T,), triton_launch.Chain((work,), launches)

    return triton_launch.repeated(describe, None), calls


def test_a_chain_takes_the_addresses_of_its_call(chained):
    repeated, calls = chained
    x, w, v, other = torch.zeros(4, 2, 8).unbind()
    again = repeated.prepare(Posing(x), Posing(w), Posing(w), None)  # w twice, which no later call need do
    assert not calls
    (y,) = again(Posing(v), Posing(other), Posing(x), None)
    assert (y.shape, y.stride()) == ((8, 2), (1, 8))
    (_, first), (_, second) = calls
    work = first[3]
    assert first == (v.data_ptr(), 0, other.data_ptr(), work)
    assert second == (work + 32, work + 64, x.data_ptr(), y.data_ptr())


def test_a_chain_that_somebody_hears_of_goes_through_triton(chained, monkeypatch):
    repeated, calls = chained
    tensors = tuple(map(Posing, torch.zeros(3, 2, 8).unbind()))
    again, through = repeated.prepare(*tensors, None), []
    monkeypatch.setattr(triton_launch, "is_hooked", lambda: True)
    monkeypatch.setattr(triton_launch, "run_all", lambda launches, device: through.extend(launches))
    again(*tensors, None)
    assert [one.kernel for one in through] == ["first", "second"]
    assert not calls
