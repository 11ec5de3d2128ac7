"""Rotary position embedding (RoPE): pairs of a head's elements turn by an angle that grows with the token's position.

    angle = position * frequency_i,  frequency_i = base^(-2 i / dim), i < dim / 2, changed by `scaling`
    (a, b) -> (a cos - b sin, b cos + a sin)

A pair is (x_i, x_{i + dim/2}) in Llama's order (halves) and (x_2i, x_{2i+1}) in GPT-J's and DeepSeek's (interleaved).
The product of a query and a key turned so depends on the distance of their positions alone. Tables are fp32 and so is
the turning (fp64 for fp64 layers); the result has x's dtype.

Nothing here is a parameter or a buffer: casting a model to bf16 does not round the frequencies, a checkpoint does not
hold them, and a layer built on the meta device has them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fulmen.boundary import as_int, is_capturing, is_plain_eager, require_tensors
from fulmen.layers.fused import kernels_for
from fulmen.layers.inputs import choice, flag, number, whole

FIRST_TABLE = 2048  # positions

# rope_type -> the keys of `scaling` it must have, and those it may have
SCALINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("original_max_position_embeddings",),
        ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
MAY_BE_ZERO = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # as in Hugging Face's: the same as not given


class Rotary(nn.Module):
    """Tables of cosines and sines by position.

    dim            how many of a head's first elements turn; even
    base           frequencies are powers of it (Hugging Face's rope_theta)
    interleaved    a pair is two neighbours, not one of each half
    scaling        None, or a dict as in Hugging Face's configurations: rope_type "linear" (factor), "llama3" or "yarn"
    max_positions  positions from here on raise; values of tensors are checked on the CPU only

    `softmax_factor` multiplies the scale of the attention's logits: 1, or DeepSeek's YaRN factor, if `scaling` has
    mscale_all_dim. YaRN's other factor is in the tables, as in Hugging Face's.
    """

    softmax_factor: float

    def __init__(
        self,
        dim: int,
        *,
        base: float = 10000.0,
        interleaved: bool = False,
        scaling: Mapping[str, Any] | None = None,
        max_positions: int | None = None,
    ) -> None:
        super().__init__()
        self.dim = as_int(dim)
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"dim={dim!r}: RoPE turns pairs, so dim must be an even number of at least 2")
        self.base, self.interleaved = number("base", base), flag("interleaved", interleaved)
        self.max_positions = None if max_positions is None else whole("max_positions", max_positions)
        self.scaling = _checked_scaling(scaling, self.max_positions)
        self.table_factor, self.softmax_factor = _factors(self.scaling)
        cpu = torch.device("cpu")
        self._frequencies = {
            (cpu, dtype): _frequencies(self.dim, self.base, self.scaling, dtype)
            for dtype in (torch.float32, torch.float64)
        }
        self._tables: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}

    @classmethod
    def from_config(cls, config: Any, dim: int | None = None, *, interleaved: bool = False) -> Rotary:
        """The Rotary of a Hugging Face configuration, an object or a dict.

        dim  unless given, the rotary part of head_dim.
        """
        rope = config_value(config, "rope_parameters", None) or config_value(config, "rope_scaling", None) or {}
        rope = dict(_mapping("rope_parameters", rope))
        base = rope.pop("rope_theta", None) or config_value(config, "rope_theta", 10000.0)
        part = rope.pop("partial_rotary_factor", None) or config_value(config, "partial_rotary_factor", None) or 1.0
        positions = config_value(config, "max_position_embeddings", None)
        if dim is None:
            dim = int(config_head_dim(config) * number("config has partial_rotary_factor", part))
        return cls(dim, base=base, interleaved=interleaved, scaling=_checked_scaling(rope or None, positions))

    def forward(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """cos and sin (..., N, dim / 2) of positions (..., N), int64; fp32, or fp64 for a layer of that dtype."""
        if not isinstance(positions, Tensor) or positions.dtype != torch.int64:
            given = positions.dtype if isinstance(positions, Tensor) else f"a {type(positions).__name__}"
            raise ValueError(f"positions is {given}, must be an int64 tensor")
        self._check_values(positions)
        frequencies = self.frequencies(positions.device, dtype)
        angles = positions[..., None].to(frequencies.dtype) * frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.table_factor != 1.0:
            cos, sin = cos * self.table_factor, sin * self.table_factor
        return cos, sin

    def span(
        self, start: int, N: int, device: torch.device | str, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """cos and sin (N, dim / 2) of the positions from `start` on; slices of a table that is kept.

        A longer table does not replace it: replays of a captured graph read the one they were captured with.
        """
        if not (type(start) is type(N) is int and start >= 0 and N >= 0):
            start, N = whole("start", start, 0), whole("N", N, 0)
        device, end = torch.device(device) if isinstance(device, str) else device, start + N
        if self.max_positions is not None and end > self.max_positions:
            raise ValueError(f"positions {start} to {end - 1} are out of range: max_positions={self.max_positions}")
        if not _keeps_tables(device):
            return self.forward(torch.arange(start, end, device=device), dtype)
        cos, sin = self.from_start(end, device, dtype)
        return cos[start:end], sin[start:end]

    def from_start(self, N: int, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """cos and sin of the positions from 0 on, N of them or more; a table that is kept."""
        if not _keeps_tables(device):
            return self.forward(torch.arange(N, device=device), dtype)
        tables = self._tables.setdefault((device, _table_dtype(dtype)), [])  # each longer than the one before
        if not tables or tables[-1][0].shape[0] < N:
            if is_capturing(device):
                return self.forward(torch.arange(N, device=device), dtype)
            size = max(FIRST_TABLE, 1 << (N - 1).bit_length())
            size = size if self.max_positions is None else min(size, self.max_positions)
            with torch.inference_mode(False), torch.no_grad():
                tables.append(self.forward(torch.arange(size, device=device), dtype))
        return tables[-1]

    def _check_values(self, positions: Tensor) -> None:
        if positions.device.type != "cpu" or not positions.numel() or not is_plain_eager(positions):
            return
        low, high = (int(x) for x in torch.aminmax(positions))
        if low < 0 or (self.max_positions is not None and high >= self.max_positions):
            limit = "" if self.max_positions is None else f" and below max_positions={self.max_positions}"
            raise ValueError(f"positions {low} to {high} are out of range: they must be at least 0{limit}")

    def frequencies(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """(dim / 2,) for a layer of this dtype on this device; kept there after the first eager call."""
        key = (device, _table_dtype(dtype))
        found = self._frequencies.get(key)
        if found is None:
            with torch.no_grad():
                found = self._frequencies[torch.device("cpu"), key[1]].to(device)
            if is_plain_eager() and not found.is_inference() and not is_capturing(device):
                self._frequencies[key] = found
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        """`.to(device)` moves the frequencies, too: a compiled first call could not keep them."""
        super()._apply(fn, recurse)
        like = fn(torch.empty(0, device="cpu"))
        if like.device.type != "meta" and not torch.is_inference_mode_enabled():
            self.frequencies(like.device, like.dtype)
        return self

    def extra_repr(self) -> str:
        parts = [f"dim={self.dim}, base={self.base:g}"]
        parts += ["interleaved"] if self.interleaved else []
        parts += [f"scaling={self.scaling}"] if self.scaling else []
        parts += [f"max_positions={self.max_positions}"] if self.max_positions is not None else []
        return ", ".join(parts)


def _keeps_tables(device: torch.device) -> bool:
    return not torch.compiler.is_compiling() and device.type != "meta" and is_plain_eager()


def _table_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def rotary_of(rope: Rotary | Mapping[str, Any] | None, head_dim: int, **usual: Any) -> Rotary | None:
    """A layer's argument `rope`: a Rotary, None, or a dict of a Rotary's arguments, to which `usual` is added."""
    if isinstance(rope, Mapping):
        keys = list(inspect.signature(Rotary).parameters)
        if strange := [key for key in rope if key not in keys]:
            raise ValueError(f"rope has {', '.join(map(repr, strange))}: a Rotary is made of {', '.join(keys)}")
        given = {"dim": head_dim, **usual, **rope}
        if "dim" not in rope and (given["dim"] < 2 or given["dim"] % 2):
            even = dict(rope) | {"dim": max(given["dim"] // 2 * 2, 2)}
            raise ValueError(
                f"head_dim={head_dim} (embed_dim / num_heads unless given): RoPE turns pairs, and would turn "
                f"{given['dim']} of its elements; pass another head_dim, or an even dim, as rope={even}"
            )
        rope = Rotary(**given)
    if rope is not None and not isinstance(rope, Rotary):
        raise ValueError(f"rope is a {type(rope).__name__}, must be None, a Rotary or a dict of its arguments")
    if rope is not None and rope.dim > head_dim:
        raise ValueError(f"rope turns dim={rope.dim} elements, and a head has head_dim={head_dim}")
    return rope


def rotary_kernels(cos: Tensor, sin: Tensor, *tensors: Tensor) -> Any:
    """The kernels that turn these tensors, or None."""
    if not (cos.is_contiguous() and sin.is_contiguous() and cos.dtype == sin.dtype == torch.float32):
        return None
    if not cos.device == sin.device == tensors[0].device:
        return None
    return kernels_for("rotary", *tensors)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x (B, H, N, D) with the first 2 * cos.shape[-1] elements of each head turned, the rest as it was.

    cos, sin  (N, dim / 2) or (B, N, dim / 2). The result is stored as (B, N, H, D), as a projection's output is.
    """
    are_tensors = isinstance(x, Tensor) and isinstance(cos, Tensor) and isinstance(sin, Tensor)
    if not are_tensors:
        require_tensors({"x": x, "cos": cos, "sin": sin}, {})
    if x.ndim != 4 or not x.is_floating_point():
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, must be a floating-point tensor (B, H, N, D)")
    dim = 2 * cos.shape[-1]
    if dim > x.shape[-1]:
        raise ValueError(f"RoPE turns {dim} elements of a head, and x {tuple(x.shape)} has D={x.shape[-1]}")
    if cos.ndim == 3 and cos.shape[0] == 1 < x.shape[0]:
        cos, sin = cos[0], sin[0]  # rows that share their positions
    _check_tables(x, cos, sin)
    kernels = rotary_kernels(cos, sin, x)
    if kernels is not None:
        return kernels.Rotated.apply(x.transpose(1, 2), cos, sin, interleaved).transpose(1, 2)
    x = x.transpose(1, 2)
    turned, rest = x[..., :dim], x[..., dim:]
    cos, sin = cos[..., None, :], sin[..., None, :]
    if interleaved:
        a, b = turned.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        a, b = turned.chunk(2, dim=-1)
    left, right = torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)
    turned = torch.stack([left, right], -1).flatten(-2) if interleaved else torch.cat([left, right], -1)
    turned = turned.to(x.dtype)
    return (torch.cat([turned, rest], -1) if rest.shape[-1] else turned).transpose(1, 2)


def _check_tables(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    B, _, N, _ = x.shape
    for name, t in (("cos", cos), ("sin", sin)):
        if t.shape != cos.shape or tuple(t.shape[:-1]) not in ((N,), (B, N)):
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}, must be (N, dim / 2) or (B, N, dim / 2) for x {tuple(x.shape)}, "
                f"as cos {tuple(cos.shape)}"
            )


def config_value(config: Any, name: str, *default: Any) -> Any:
    """A field of a Hugging Face configuration, an object or a dict."""
    if isinstance(config, Mapping):
        if name in config or default:
            return config.get(name, *default)
    elif hasattr(config, name) or default:
        return getattr(config, name, *default)
    raise ValueError(f"config has no {name!r}")


def config_size(config: Any, name: str, *default: int) -> int:
    """A field that counts something; null and 0 stand for the default, if there is one."""
    value = config_value(config, name, *default)
    return whole(f"config has {name}", default[0] if default and not value else value)


def unknown_model(config: Any, known: str, lacks: str | None = None) -> NotImplementedError:
    """The error for a configuration of a model that from_hf does not know."""
    family, more = config_value(config, "model_type", None), "" if lacks is None else f" and no {lacks!r}"
    return NotImplementedError(
        f"config has model_type={family!r}{more}: from_hf knows {known}; accelerate(model) serves others"
    )


def check_model(config: Any, field: str, known: str) -> None:
    """Raises unless the configuration has the field by which from_hf tells the models it knows."""
    if not (field in config if isinstance(config, Mapping) else hasattr(config, field)):
        raise unknown_model(config, known, field)


def config_head_dim(config: Any) -> int:
    if config_value(config, "head_dim", None):
        return config_size(config, "head_dim")
    return config_size(config, "hidden_size") // config_size(config, "num_attention_heads")


# ------------------------------------------------------------------------------------------- frequencies


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r}: must be a dict, as {{'rope_type': 'linear', 'factor': 2.0}}")
    return value


def _checked_scaling(scaling: Mapping[str, Any] | None, max_positions: int | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    given = {key: value for key, value in _mapping("scaling", scaling).items() if value is not None}
    kind = given.pop("rope_type", None) or given.pop("type", None)
    given.pop("type", None)
    choice("scaling has rope_type", kind, *SCALINGS)
    needed, optional = SCALINGS[kind]
    missing, unknown = [k for k in needed if k not in given], [k for k in given if k not in needed + optional]
    if missing:
        raise ValueError(f"scaling of rope_type={kind!r} lacks {', '.join(missing)}")
    if unknown:
        raise ValueError(f"scaling of rope_type={kind!r} has {', '.join(unknown)}, which that type does not know")
    for key, value in given.items():
        named = f"scaling of rope_type={kind!r} has {key}"
        if key == "truncate":
            flag(named, value)
        else:
            number(named, value, zero=key in MAY_BE_ZERO)
    if kind == "llama3" and not given["low_freq_factor"] < given["high_freq_factor"]:
        raise ValueError(
            f"scaling of rope_type='llama3' has low_freq_factor={given['low_freq_factor']} and "
            f"high_freq_factor={given['high_freq_factor']}: the first must be below the second"
        )
    if kind == "yarn" and "factor" not in given:
        if max_positions is None:
            raise ValueError("scaling of rope_type='yarn' lacks factor, and there is no max_positions to tell it from")
        given["factor"] = max_positions / given["original_max_position_embeddings"]
    return None if kind == "default" else {"rope_type": kind, **given}


def _frequencies(dim: int, base: float, scaling: dict[str, Any] | None, dtype: torch.dtype) -> Tensor:
    """(dim / 2,) on the CPU, computed in `dtype`: in fp32 they are those models were trained with."""
    exponents = torch.arange(0, dim, 2, dtype=dtype, device="cpu") / dim
    plain = 1.0 / base**exponents
    if scaling is None:
        return plain
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return plain / factor
    length = scaling["original_max_position_embeddings"]
    if scaling["rope_type"] == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = length * plain / (2 * math.pi)  # over the length that was trained
        kept = ((turns - low) / (high - low)).clamp(0, 1)  # few turns: slowed down; many: as they were
        return plain * (kept + (1 - kept) / factor)
    return plain * _yarn_kept(dim, base, scaling, factor, dtype)


def _yarn_kept(dim: int, base: float, scaling: dict[str, Any], factor: float, dtype: torch.dtype) -> Tensor:
    """What YaRN multiplies frequencies by: 1 for fast ones, 1 / factor for slow ones, a ramp between."""
    length = scaling["original_max_position_embeddings"]
    if base <= 1:
        raise ValueError(f"base={base:g}: must be above 1 for scaling of rope_type='yarn'")

    def index(turns: float) -> float:
        """Which pair turns so often over the length that was trained."""
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = index(scaling.get("beta_fast") or 32), index(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=dtype, device="cpu") - low) / (high - low or 0.001)
    slow = ramp.clamp(0, 1)
    return slow / factor + (1 - slow)


def _factors(scaling: dict[str, Any] | None) -> tuple[float, float]:
    """(of the tables, of the softmax's scale): 1, but for YaRN."""
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0, 1.0
    factor = float(scaling["factor"])

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    ours, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    table = scaling.get("attention_factor")
    if table is None:
        table = mscale(ours) / mscale(all_dim) if ours and all_dim else mscale(1.0)
    return float(table), mscale(all_dim) ** 2 if all_dim else 1.0
