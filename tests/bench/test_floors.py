from __future__ import annotations

import itertools

import pytest

from fulmen.bench import floors

CASE = {"B": 4, "H": 32, "N": 8192, "D": 64, "dtype": "bf16"}
U = 4 * 32 * 8192 * 64 * 2  # bytes of one (B, H, N, D) tensor of it


def test_pairs_are_counted_as_the_mask_says() -> None:
    for N_Q, N_KV in itertools.product(range(1, 12), repeat=2):
        seen = sum(j <= i + N_KV - N_Q for i in range(N_Q) for j in range(N_KV))
        assert floors.pairs(N_Q, N_KV, causal=True) == seen, (N_Q, N_KV)
        assert floors.pairs(N_Q, N_KV, causal=False) == N_Q * N_KV
        for window, causal in itertools.product((1, 2, 5, 100), (False, True)):
            at = [i + N_KV - N_Q for i in range(N_Q)]
            seen = sum(j >= p - window and (j <= p or not causal) for p in at for j in range(N_KV))
            assert floors.pairs(N_Q, N_KV, causal, window) == seen, (N_Q, N_KV, window, causal)


def test_a_window_hides_keys_of_few_queries() -> None:
    case = {"B": 2, "H": 8, "H_KV": 2, "N": 4096, "N_Q": 3, "D": 64, "dtype": "bf16", "window": 100}
    forward, backward, total = (floors.of_case("flash", "", case, p) for p in ("forward", "backward", "total"))
    assert forward is not None
    assert backward is not None
    assert total is not None
    q, seen, every = (2 * 2 * 64 * n for n in (8 * 3, 2 * 2 * 103, 2 * 2 * 4096))
    assert forward.flops == 2 * 2 * 8 * (3 * 101) * 128
    assert (forward.reads, forward.writes) == (q + seen, q)
    assert (backward.reads, backward.writes) == (2 * q + seen, q + every)
    assert (total.reads, total.writes) == (2 * q + seen, 2 * q + every)
    whole = floors.of_case("flash", "", case | {"window": 5000}, "forward")
    assert whole is not None
    assert whole.reads == q + every


def test_softmax_is_the_four_products_of_a_backward() -> None:
    full = {**CASE, "causal": False}
    forward = floors.of_case("flash", "", full, "forward")
    backward = floors.of_case("flash", "", full, "backward")
    total = floors.of_case("flash", "", full, "total")
    assert forward is not None
    assert backward is not None
    assert total is not None
    assert forward.flops == 4 * 4 * 32 * 8192**2 * 64
    assert backward.flops == 2 * forward.flops
    assert backward.usual_flops == 2.5 * forward.flops
    assert (forward.bytes, backward.bytes, total.bytes) == (4 * U, 7 * U, 8 * U)
    assert total.usual_bytes == 11 * U


def test_causal_is_exact_and_the_default() -> None:
    work = floors.of_case("flash", "", CASE, "forward")
    assert work is not None
    assert work.flops == 2 * 4 * 32 * (8192 * 8193 // 2) * 128


def test_heads_of_k_and_v_count_once_and_e_may_differ() -> None:
    case = {"B": 2, "H": 8, "H_KV": 2, "N": 512, "D": 64, "E": 128, "dtype": "fp16", "causal": False}
    work = floors.of_case("flash", "", case, "forward")
    assert work is not None
    assert work.flops == 2 * 2 * 8 * 512 * 512 * (64 + 128)
    assert work.reads == 2 * 2 * 512 * (8 * 64 + 2 * (64 + 128))
    assert work.writes == 2 * 2 * 512 * 8 * 128


def test_linear_is_the_recurrence_or_the_short_quadratic_form() -> None:
    long, short = (floors.of_case("lightning", "", {**CASE, "N": n}, "forward") for n in (8192, 32))
    assert long is not None
    assert short is not None
    assert long.flops == 4 * 4 * 32 * 8192 * 64 * 64
    assert short.flops == 2 * 4 * 32 * (32 * 33 // 2) * 128
    backward = floors.of_case("lightning", "", CASE, "backward")
    assert backward is not None
    assert backward.flops == 2 * long.flops
    assert backward.bytes == 7 * U


def test_words_for_the_function_come_before_the_name_of_the_suite() -> None:
    assert floors.family("lightning", "causal softmax attention") == "softmax"
    assert floors.family("flash", "") == "softmax"
    assert floors.family("layer", "linear attention with decay") == "linear"
    assert floors.family("matmul", "product") is None


def test_layer_counts_its_projections() -> None:
    case = {"B": 1, "H": 32, "H_KV": 8, "N": 4096, "D": 128, "dtype": "bf16", "causal": True}
    work = floors.of_case("layer", "softmax attention", case, "forward")
    attention = floors.of_case("flash", "", case, "forward")
    assert work is not None
    assert attention is not None
    width = 32 * 128
    assert work.flops - attention.flops == 2 * 4096 * width * (width + 2 * 8 * 128 + width)
    backward = floors.of_case("layer", "softmax attention", case, "backward")
    assert backward is not None
    assert backward.usual_flops == 2.5 * attention.flops + 2 * (work.flops - attention.flops)


def test_memory_of_a_call() -> None:
    least = floors.memory("linear", CASE)
    assert least is not None
    assert least["gradients"] == 3 * U
    assert least["peak"] == 7 * U
    assert floors.memory("linear", CASE, "forward")["peak"] == 4 * U  # type: ignore[index]


@pytest.mark.parametrize(
    "case",
    [
        {}, {"N": 8}, {**CASE, "dtype": "int3"}, {**CASE, "N": "many"}, {**CASE, "B": None}, {**CASE, "D": 0},
        {**CASE, "N": -5}, {**CASE, "H": True}, {**CASE, "N": 1e300}, {**CASE, "N": float("nan")},
    ],
)  # fmt: skip
def test_a_case_that_says_too_little_has_no_floor(case: dict[str, object]) -> None:
    for op in ("flash", "lightning", "layer"):
        assert floors.of_case(op, "softmax", case, "forward") is None
    assert floors.memory("softmax", case) is None


def test_caches_save_what_was_written_last_and_warm_ones_the_inputs() -> None:
    work = floors.Work(0, reads=100, writes=40, usual_flops=0, usual_bytes=140)
    assert work.on_dram(0, cold=True) == 140
    assert work.on_dram(30, cold=True) == 110
    assert work.on_dram(30, cold=False) == 80
    assert work.on_dram(1000, cold=False) == 0


@pytest.mark.parametrize(
    ("name", "tflops", "gb_s"),
    [
        ("NVIDIA A100-SXM4-40GB", 312, 1555),
        ("NVIDIA A100 80GB PCIe", 312, 1935),
        ("NVIDIA A100-SXM4-80GB", 312, 2039),
        ("NVIDIA H100 PCIe", 756, 2039),
        ("NVIDIA H100 80GB HBM3", 989, 3350),
        ("NVIDIA H200", 989, 4800),
        ("NVIDIA B200", 2250, 8000),
        ("NVIDIA L4", 121, 300),
        ("NVIDIA L40S", 366, 864),
        ("NVIDIA GeForce RTX 3090", 71, 936),
        ("NVIDIA GeForce RTX 4090", 165.2, 1008),
        ("RTX 5090", 209.5, 1792),
        ("NVIDIA RTX A6000", 154.8, 768),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 504, 1792),
    ],
)
def test_dense_peaks_of_the_data_sheets(name: str, tflops: float, gb_s: float) -> None:
    sheet = floors.gpu(name)
    assert sheet is not None
    found = floors.of_gpu(sheet, "bf16")
    assert found.flops_reached == pytest.approx(tflops * 1e12, rel=0.005)
    assert found.flops_hard is not None
    assert found.flops_hard >= found.flops_reached
    assert found.bytes_hard == gb_s * 1e9


def test_other_precisions() -> None:
    assert floors.rate(90, "tf32") == (2048, 2048)
    assert floors.rate(90, "fp32") == (2048, 256)
    assert floors.rate(89, "fp16", geforce=True) == (1024, 512)  # sums in fp16 run at the full rate
    assert floors.rate(89, "bf16", geforce=True) == (512, 512)
    assert floors.rate(80, "fp64") == (128, 128)
    assert floors.rate(75, "bf16") is None
    assert floors.rate(47, "bf16") is None
    assert floors.gpu("GeForce 256") is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("torch.bfloat16", "bf16"),
        ("FP16", "fp16"),
        ("float32", "fp32"),
        ("half", "fp16"),
        ("fp8_e4m3", "fp8"),
        ("?", None),
    ],
)
def test_names_of_dtypes(text: str, name: str | None) -> None:
    assert floors.dtype_name(text) == name
