"""Attention kernels for the benchmark: `flash`, `flash_cache`, `latent`, `lightning` and `step`.

Over a cache (`flash_cache`, `latent`) N is its capacity. All rows of the timed shape are that long, so that baselines
of `flash` compute the same function at the fixed shape; those of the small shape have lengths of their own.

A `step` changes its states, and the benchmark repeats a call with the same arguments. So the timed states are a fixed
point: with keep = exp(-s) = 1 - 2^-j the step S <- keep S + k v^T maps 2^j k v^T to itself. k and v have four
significant bits, which makes this exact in fp32 and in bf16. So the plain step reads and writes every state, and no bit
changes. The small problem has random states and the slopes of `decay.alibi`. Its call works on a copy of the states,
which is compared, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fulmen import decay
from fulmen.bench.adapters import META, ODD_TOKENS, Attend, Call, Case, Operation, Source, dtype_of, problem_of, shapes
from fulmen.bench.gate import Problem
from fulmen.flash import spec as flash_spec
from fulmen.flash.op import flash_attention, flash_attention_with_lse
from fulmen.latent import spec as latent_spec
from fulmen.latent.op import latent_attention
from fulmen.lightning import spec as lightning_spec
from fulmen.lightning.op import lightning_attention, lightning_attention_with_state
from fulmen.step import spec as step_spec
from fulmen.step.op import lightning_step
from fulmen.testing import Expected
from fulmen.testing import flash as softmax
from fulmen.testing import latent as over_latents
from fulmen.testing import lightning as linear
from fulmen.testing import step as stepping


# -------------------------------------------------------------------------------------------------- softmax
class Flash(Operation):
    KEYS = Operation.SIZES | {"N_Q": None, "causal": True, "window": None, "softcap": None, "sinks": False}
    OPTIONS = ("window", "softcap", "sinks")  # window: keys before a query's position that it sees
    backends = "flash"
    LAST_QUERIES = 512  # what is checked of a timed shape whose attention matrix does not fit
    MATRICES = 16  # fp64 (N, N) alive at once while a gradient is checked

    def complete(self, case: Case) -> Case:
        """A case has N_Q only where it differs from N, the number of keys, and only the options it uses."""
        done = super().complete(case)
        unused = {"N_Q": (None, done["N"]), **dict.fromkeys(self.OPTIONS, (None, False))}
        return {key: value for key, value in done.items() if value not in unused.get(key, ())}

    def function(self, case: Case) -> str:
        options = [key if case[key] is True else f"{key} {case[key]}" for key in self.OPTIONS if key in case]
        plain = "causal softmax attention" if case["causal"] else "softmax attention"
        return ", ".join([plain, *options])

    def drawn(self, case: Case, source: Source, fully: bool = False) -> Problem:
        q, k, v, do = (source.normal(shape, dtype_of(case)) for shape in shapes(case))
        return self.problem_of(q, k, v, do, case, source, fully)

    def problem_of(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, case: Case, source: Source, fully: bool = False
    ) -> Problem:
        exact = torch.promote_types(q.dtype, torch.float32)
        dlse = source.normal(tuple(q.shape[:3]), exact) if fully else q.new_zeros(q.shape[:3], dtype=exact)
        window = (case["window"], None) if case.get("window") else None
        sinks = source.normal((q.shape[1],), exact) if case.get("sinks") else None
        x = softmax.Inputs(q, k, v, sinks, None, None, case["causal"], window, case.get("softcap"), None, do, dlse)
        heads, use = source.heads(q, k), ("o", "lse") if fully else ("o",)
        matrices = self.MATRICES * heads.group * q.shape[2] * k.shape[2] * 8
        if not source.whole and matrices > self.free_bytes(source.device) // 2:
            heads = heads._replace(last=self.LAST_QUERIES)

        def oracle(part: softmax.Inputs) -> dict[str, Expected]:
            found = softmax.expected(part, use)
            kept = {"o"} if heads.last else set(found) - (set() if fully else {"lse"})
            kept -= set() if heads.whole else {"dsinks"}  # a sum over all rows
            return {name: wanted for name, wanted in found.items() if name in kept}

        leaves = ("q", "k", "v") if sinks is None else ("q", "k", "v", "sinks")
        return problem_of(x, leaves, {"o": do, "lse": dlse} if fully else {"o": do}, oracle, heads)

    def free_bytes(self, device: torch.device) -> int:
        if device.type != "cuda":
            return 8 << 30
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's, and free
        return torch.cuda.mem_get_info(device)[0] + kept

    def attend(self, backend: str) -> Attend:
        return lambda x: flash_attention(x.q, x.k, x.v, **x.options(), backend=backend)

    def attend_fully(self, backend: str) -> Attend | None:
        if backend in ("sdpa", "flash_attn", "auto"):  # no gradient of lse; what auto takes is gated under its own name
            return None
        return lambda x: flash_attention_with_lse(x.q, x.k, x.v, **x.options(), backend=backend)

    def call(self, case: Case, fully: bool = False) -> Call:
        x = self.drawn(case, META, fully).x
        tensors = flash_spec.Residuals(x.q, x.k, x.v, x.sinks, kv_lengths=x.kv_lengths, page_table=x.page_table)
        spec = x.spec(with_lse=fully, needs_grad=bool(case.get("grad", True)))
        return spec, tensors, lambda o, lse: (o, lse, x.do, lse if fully else None)


def lengths_of(case: Case, source: Source) -> Tensor:
    """int32 (B,): the keys of each row of a cache of N; all of them at the timed shape."""
    return torch.randint(1 if source.whole else case["N"], case["N"] + 1, (case["B"],), **source.make).int()


class FlashCache(Flash):
    """With `page`, the cache lies in shuffled pages of so many keys, (pages, H_KV, page, D)."""

    KEYS = Operation.SIZES | {"B": 64, "H": 64, "H_KV": 8, "N": 4096, "N_Q": 1, "D": 128, "causal": True, "page": 0,
                              "grad": False}  # fmt: skip
    complete = Operation.complete
    attend_fully = Operation.attend_fully

    def faults(self, case: Case) -> Sequence[tuple[Any, str]]:
        why = f"page={case['page']}: must be a multiple of 16 up to 256, or 0 for a cache without pages"
        return [(case["page"] and not flash_spec.is_page(case["page"]), why)]

    def drawn(self, case: Case, source: Source, fully: bool = False) -> Problem:
        page, table = case["page"], None
        q, k, v, do = (source.normal(shape, dtype_of(case)) for shape in shapes(case))
        heads, lengths = source.heads(q, k)._replace(paged=bool(page)), lengths_of(case, source)
        if page:
            pages = torch.randperm(case["B"] * -(-case["N"] // page), **source.make)
            k, v = (in_pages(x, page, pages) for x in (k, v))
            table = pages.view(case["B"], -1).int()
        dlse = do.new_zeros(do.shape[:3], dtype=torch.float32)
        mask = (None, None, None, case["causal"], None, None, None)
        x = softmax.Inputs(q, k, v, *mask, do, dlse, lengths, None, table)
        return problem_of(x, (), {"o": do}, lambda part: {"o": softmax.expected(part)["o"]}, heads)


def in_pages(x: Tensor, page: int, pages: Tensor) -> Tensor:
    """x (B, heads, N, size) as (pages, heads, page, size), page i of all rows at pages[i]."""
    whole = F.pad(x, (0, 0, 0, -x.shape[2] % page)).unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)
    return torch.empty_like(whole, memory_format=torch.contiguous_format).index_copy_(0, pages, whole)


class Latent(Operation):
    KEYS = Operation.SIZES | {"B": 8, "H": 128, "H_KV": 1, "N": 8192, "N_Q": 1, "D": 576, "E": 512, "causal": True,
                              "grad": False}  # fmt: skip
    backends = "latent"

    def faults(self, case: Case) -> Sequence[tuple[Any, str]]:
        H_KV, D, E = (case[key] for key in ("H_KV", "D", "E"))
        return [(H_KV != 1, f"H_KV={H_KV}: all heads read one latent, so it must be 1"),
                (E > D, f"E={E}: values are the first columns of keys, at most D={D}")]  # fmt: skip

    def function(self, case: Case) -> str:
        return "softmax attention over a latent cache"

    def small_case(self, case: Case) -> Case:
        return case | {"B": 3, "N": min(ODD_TOKENS, case["N"] | 1)}

    def drawn(self, case: Case, source: Source, fully: bool = False) -> Problem:
        q_shape, k_shape, _, o_shape = shapes(case)
        q, k, o = (source.normal(shape, dtype_of(case)) for shape in (q_shape, k_shape, o_shape))
        x = over_latents.Inputs(q, k[:, 0], case["E"], lengths_of(case, source), None, None, case["causal"], None)

        def oracle(part: over_latents.Inputs) -> dict[str, Expected]:
            return {"o": Expected(over_latents.low_precision(part), over_latents.reference(part))}

        return problem_of(x, (), {"o": o}, oracle, source.heads(q, k))

    def attend(self, backend: str) -> Attend:
        return lambda x: latent_attention(x.q, x.kv, **x.options(), backend=backend)

    def call(self, case: Case, fully: bool = False) -> Call:
        x = self.drawn(case, META).x
        return x.spec(), latent_spec.Residuals(x.q, x.kv, x.kv_lengths), lambda o: ()


# --------------------------------------------------------------------------------------------------- linear
class Lightning(Operation):
    KEYS = Operation.SIZES | {"causal": True, "decay": True, "per_token": False, "groups": None}
    backends = "lightning"
    ROWS = 2048  # of the attention matrix that are written out at a time to check the timed shape
    STRONGEST = 0.2  # decay of a token

    def complete(self, case: Case) -> Case:
        """A case has per_token and groups only where they are used."""
        done = super().complete(case)
        return {key: value for key, value in done.items() if value or key not in ("per_token", "groups")}

    def faults(self, case: Case) -> Sequence[tuple[Any, str]]:
        H, groups = case["H"], case["groups"]
        odd = groups and (H % groups or case["H_KV"] != H)
        return [(not case["causal"], "lightning attention is causal"),
                (case["per_token"] and not case["decay"], "per_token: every token has a decay, so decay must be true"),
                (odd, f"groups={groups}: must divide H={H}, which v has")]  # fmt: skip

    def function(self, case: Case) -> str:
        if case.get("per_token"):
            return "causal linear attention with a decay for each token"
        return "causal linear attention with decay" if case["decay"] else "causal linear attention"

    def small_case(self, case: Case) -> Case:
        """Two groups, if there are any."""
        if "groups" not in case:
            return super().small_case(case)
        heads = 2 * (case["H"] // case["groups"])
        return super().small_case(case) | {"H": heads, "H_KV": heads, "groups": 2}

    def drawn(self, case: Case, source: Source, fully: bool = False) -> Problem:
        q_shape, k_shape, *rest = shapes(case)
        if "groups" in case:  # heads of q and k, where v has H
            q_shape, k_shape = ((shape[0], case["groups"], *shape[2:]) for shape in (q_shape, k_shape))
        q, k, v, do = (source.normal(shape, dtype_of(case)) for shape in (q_shape, k_shape, *rest))
        exact, state = torch.promote_types(q.dtype, torch.float32), (case["B"], case["H"], case["D"], case["E"])
        initial, dstate = (source.normal(state, exact) if fully else None for _ in range(2))
        slopes = decay.alibi(case["H"]).to(source.device) if case["decay"] else None
        if case.get("per_token"):
            slopes = torch.rand(case["B"], case["H"], case["N"], **source.make).mul_(self.STRONGEST).requires_grad_()
        x = linear.Inputs(q, k, v, slopes, 1.0, initial, None, do, q.new_zeros(0) if dstate is None else dstate)
        return self.problem_of(x, source)

    def problem_of(self, x: linear.Inputs, source: Source) -> Problem:
        """Of a call with an initial state the last one is a result, too; a decay that requires a gradient gets one."""
        fully, heads = x.initial_state is not None, source.heads(x.q, x.k)
        if x.q.shape[1] < x.v.shape[1]:  # groups
            heads = source.heads(x.v, x.k)._replace(shared=("q", "k", "dq", "dk"))

        def oracle(part: linear.Inputs) -> dict[str, Expected]:
            rows = None if heads.whole else self.ROWS
            found = linear.expected(part, ("o", "state") if fully else ("o",), rows=rows)
            return {"dinitial_state" if name == "dinitial" else name: wanted for name, wanted in found.items()}

        learnt = x.decay is not None and x.decay.requires_grad
        leaves = ("q", "k", "v", *(["initial_state"] if fully else []), *(["decay"] if learnt else []))
        return problem_of(x, leaves, {"o": x.do, "state": x.dstate} if fully else {"o": x.do}, oracle, heads)

    def attend(self, backend: str) -> Attend:
        return lambda x: lightning_attention(x.q, x.k, x.v, x.decay, **x.options(), backend=backend)

    def attend_fully(self, backend: str) -> Attend:
        return lambda x: lightning_attention_with_state(x.q, x.k, x.v, x.decay, **x.options(), backend=backend)

    def call(self, case: Case, fully: bool = False) -> Call:
        x = self.drawn(case, META, fully).x
        tensors = lightning_spec.Residuals(x.q, x.k, x.v, x.decay, x.initial_state, None)
        return lightning_spec.spec_of_residuals(tensors, x.scale, fully), tensors, lambda o, state: (x.do, state)


class StepInputs(NamedTuple):
    call: stepping.Inputs
    copied: bool  # the call works on a copy of the states and returns it


class Step(Operation):
    """N is the number of tokens of a step, `state_dtype` that of the pool."""

    KEYS = Operation.SIZES | {"B": 64, "H": 64, "N": 1, "D": 128, "state_dtype": "float32", "grad": False}
    backends = "step"

    def faults(self, case: Case) -> Sequence[tuple[Any, str]]:
        N, most, state = case["N"], step_spec.MAX_STEP_TOKENS, case["state_dtype"]
        return [(state not in ("float32", "bfloat16"), f"state_dtype={state}: must be fp32 or bf16"),
                (most < N, f"N={N}: a step takes 1 to {most} tokens")]  # fmt: skip

    def function(self, case: Case) -> str:
        return "a decoding step of linear attention with decay"

    def small_case(self, case: Case) -> Case:
        return case | {"B": 3, "H": 2 * (case["H"] // case["H_KV"]), "H_KV": 2}

    def drawn(self, case: Case, source: Source, fully: bool = False) -> Problem:
        q, k, v, o = (source.normal(shape, dtype_of(case)) for shape in shapes(case))
        if source.whole:
            slopes = decay.alibi(case["H"]).to(source.device)
            state = source.normal((case["B"], case["H"], case["D"], case["E"]), torch.float32)
        else:
            k, v, slopes, state = fixed_point(k, v, case["H"])
        state = state.to(getattr(torch, case["state_dtype"]))
        x = stepping.Inputs(q, k, v, slopes, state, None, None, None, 1.0)

        def oracle(part: stepping.Inputs) -> dict[str, Expected]:
            found = stepping.expected(part)
            return found if source.whole else {"o": found["o"]}

        douts = {"o": o, "state": torch.zeros_like(state)} if source.whole else {"o": o}
        problem = problem_of(x, (), douts, oracle, source.heads(q, k))
        problem.x = StepInputs(x, source.whole)
        return problem

    def attend(self, backend: str) -> Attend:
        def step(given: StepInputs) -> Any:
            x = given.call
            if given.copied:
                return stepping.evaluate(x, backend)[:2]
            return lightning_step(x.q, x.k, x.v, x.decay, x.state, backend=backend)

        return step

    def call(self, case: Case, fully: bool = False) -> Call:
        x = self.drawn(case, META).x.call
        tensors = step_spec.Tensors(x.q, x.k, x.v, x.decay, x.state, None, None, None, None)
        return step_spec.spec_of(tensors, 1.0), tensors, lambda o: ()


def fixed_point(k: Tensor, v: Tensor, H: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k and v (every token the first one), slopes and states that a step leaves as they are."""
    k, v = (x[:, :, :1].to(torch.float8_e4m3fn).to(x.dtype).repeat(1, 1, x.shape[2], 1) for x in (k, v))
    power = 2.0 ** (1 + torch.arange(H, device=k.device, dtype=torch.float64) % 8)
    keys, values = (x[:, :, 0].float().repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    state = (keys * power.float()[:, None])[:, :, :, None] * values[:, :, None, :]
    return k, v, -torch.log1p(-1 / power).float(), state


flash, flash_cache, latent, lightning, step = Flash(), FlashCache(), Latent(), Lightning(), Step()
