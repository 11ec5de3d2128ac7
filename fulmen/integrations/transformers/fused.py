"""What lies around softmax attention in its module: projections and RoPE, in fewer launches.

`attention.py` replaces what a module's forward calls for attention. All else of that forward stays the module's own
code; `replace` lets the same code find these in two places:

| in the forward | here |
|---|---|
| self.q_proj(x), self.k_proj(x), self.v_proj(x) | `project`: one launch in a decoding step, one sum of dx in training |
| self.o_proj(o) | the same, of one weight |
| apply_rotary_pos_emb(q, k, cos, sin) | one launch for q and k |

Which projections there are is read off the source of the forward (`projections_of`). How `apply_rotary_pos_emb` turns
is found out by calling it (`style_of`); a function that computes anything else is called as it is. At every call the
module's own parts are called wherever fused kernels do not serve, or somebody would notice: compilers, transforms,
autocast, fp64, hooks, adapters, quantised or parametrised weights.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulmen.boundary import is_plain_eager, needs_gradient
from fulmen.integrations.transformers.forward import replaced_reason, set_forward, with_names
from fulmen.layers.fused import are_readable, fused_call, kernels_for
from fulmen.layers.fused.projections import MAX_WEIGHTS, is_plain, project

ROTARY = "apply_rotary_pos_emb"


def replace(module: Any) -> list[Callable[[], None]]:
    """Serves what lies around the module's attention; returns what undoes it."""
    kind: Any = type(module)
    own = kind.forward
    if not isinstance(own, types.FunctionType) or hasattr(own, "__wrapped__") or replaced_reason(module) is not None:
        return []  # what decorators do is theirs
    forward = own
    rotary = own.__globals__.get(ROTARY) if ROTARY in own.__code__.co_names else None
    style = style_of(rotary) if isinstance(rotary, types.FunctionType) else None
    if style is not None:
        forward = with_names(own, {ROTARY: functools.partial(turned, rotary, style)})
    projections = projections_of(kind)
    if projections is not None:
        forward = with_projections(forward, projections)
    return [] if forward is own else [set_forward(module, types.MethodType(forward, module))]


# ---------------------------------------------------------------------------------------------- projections


class Projections(NamedTuple):
    """Names of parts that a forward calls once, with one argument, and uses for nothing else.

    together  with the hidden state, whatever the other arguments are; in order
    after     others that come after the first of these
    """

    together: tuple[str, ...]
    after: tuple[str, ...]


BRANCHES = (
    ast.If, ast.IfExp, ast.BoolOp, ast.For, ast.While, ast.With, ast.Try, ast.Lambda, ast.FunctionDef, ast.ListComp,
    ast.SetComp, ast.DictComp, ast.GeneratorExp,
)  # fmt: skip


@functools.lru_cache
def projections_of(kind: Any) -> Projections | None:
    """Those of a class's forward; None if its source does not tell, or if it may set attributes of the module."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(tree, ast.FunctionDef) or len(tree.args.args) < 2:
        return None
    this, hidden = (argument.arg for argument in tree.args.args[:2])
    inner = [node for statement in tree.body for node in ast.walk(statement)]
    names = [node for node in inner if isinstance(node, ast.Name)]
    uses = [node for node in inner if isinstance(node, ast.Attribute) and _is(node.value, this)]
    methods = any(callable(getattr(kind, node.attr, None)) for node in uses)
    if methods or not all(map(_is_load, uses)) or any(name.id == "setattr" for name in names):
        return None
    changed = any(name.id == hidden and not _is_load(name) for name in names)
    maybe = set(itertools.chain.from_iterable(ast.walk(node) for node in inner if isinstance(node, BRANCHES)))
    counts, found = Counter(node.attr for node in uses), {}
    calls = (node for node in inner if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords)
    for node in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        part = node.func
        if isinstance(part, ast.Attribute) and _is(part.value, this) and counts[part.attr] == 1:
            found[part.attr] = _is(node.args[0], hidden) and not changed and node not in maybe
    together = tuple(name for name, first in found.items() if first)[:MAX_WEIGHTS]
    if not together:
        return None
    after = itertools.dropwhile(lambda name: name != together[0], found)
    return Projections(together, tuple(name for name in after if name not in together))


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_load(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Load)


def with_projections(forward: Any, projections: Projections) -> Any:
    """The forward, which finds fused projections in the places of plain ones."""

    @functools.wraps(forward)
    def projected(self: Any, *args: Any, **kwargs: Any) -> Any:
        parts = {} if torch.compiler.is_compiling() else _parts(self._modules, projections)
        return forward(_seen_with(self, parts) if parts else self, *args, **kwargs)

    return projected


def _parts(modules: dict[str, Any], projections: Projections) -> dict[str, Callable[[Tensor], Tensor]]:
    """What stands for the projections that are plain Linear modules."""
    names = [name for name in projections.together if is_plain(modules.get(name))]
    if not names:
        return {}
    shared = Together([modules[name] for name in names])
    parts: dict[str, Callable[[Tensor], Tensor]] = {
        name: functools.partial(shared.take, i) for i, name in enumerate(names)
    }
    for name in projections.after:
        if is_plain(modules.get(name)):
            parts[name] = functools.partial(_after, modules[name])
    return parts


class Together:
    """Projections of one x, all computed when the first of them is asked for."""

    def __init__(self, linears: list[Any]) -> None:
        self.linears = linears
        self.x: Tensor | None = None
        self.found: list[Any] = []

    def take(self, i: int, x: Tensor) -> Tensor:
        if self.x is None:
            self.x, self.found = x, list(project(x, *self.linears))
        y, self.found[i] = self.found[i], None  # so that its memory is free as soon as the forward is done with it
        return self.linears[i](x) if y is None or x is not self.x else y


def _after(linear: Any, x: Tensor) -> Tensor:
    """A projection that comes after others of the same call, so that its weights may be read early."""
    return project(x, linear, early=True)[0]


def _seen_with(module: Any, parts: dict[str, Any]) -> Any:
    """An object that shares all with the module, but whose attributes of these names are others."""
    view = object.__new__(type(module))
    view.__dict__ = module.__dict__ | parts  # found before the parts in `_modules`, which stay for all other purposes
    return view


# ----------------------------------------------------------------------------------------------------- RoPE


class Style(NamedTuple):
    """What an `apply_rotary_pos_emb` does; the first three as in `Pairs` of layers/fused/rotary.py.

    doubled      tables are as wide as what is turned, not half as wide
    partial      elements of a head beyond that stay as they are
    keeps_dtype  of q and k, if tables have another
    """

    interleaved: bool
    each_element: bool
    doubled: bool
    partial: bool = False
    keeps_dtype: bool = False


STYLES = (
    Style(False, True, True),  # Llama
    Style(True, True, True),  # Cohere
    Style(True, False, True),  # GLM
    Style(False, False, False),  # gpt-oss
    Style(True, False, False),
)


@functools.lru_cache
def style_of(function: Any) -> Style | None:
    """None if it turns in no known way, or cannot be called with four tensors on a CPU."""

    def drawn(*shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        return torch.arange(1, size + 1, dtype=torch.float64, device="cpu").mul(1.7 * size).sin().view(shape)

    q, k = drawn(2, 3, 5, 8), drawn(2, 1, 5, 8)

    def computes(style: Style, half: int) -> bool:
        cos, sin = drawn(1, 5, half * (1 + style.doubled)), drawn(1, 5, half * (1 + style.doubled) + 1)[..., 1:]
        want = tuple(_turned(x, cos, sin, style, half) for x in (q, k))
        got = function(q, k, cos, sin)
        return len(got) == 2 and all(
            a.shape == b.shape and torch.allclose(a, b) for a, b in zip(got, want, strict=True)
        )

    def holds(question: Callable[[], bool]) -> bool:
        try:
            return question()
        except Exception:  # somebody's code, with what it may not take
            return False

    def keeps(width: int) -> bool:
        tables = drawn(1, 5, width).float(), drawn(1, 5, width).float()
        return all(x.dtype == torch.bfloat16 for x in function(q.bfloat16(), k.bfloat16(), *tables))

    with torch.no_grad():
        for style in STYLES:
            if holds(functools.partial(computes, style, 4)):
                partial = holds(functools.partial(computes, style, 2))
                return style._replace(
                    partial=partial, keeps_dtype=holds(functools.partial(keeps, 4 * (1 + style.doubled)))
                )
    return None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, style: Style, half: int) -> Tensor:
    """x (B, heads, N, D) turned as the kernel does."""
    i = torch.arange(half, device="cpu")
    a, b = (2 * i, 2 * i + 1) if style.interleaved else (i, i + half)
    of_a, of_b = (a, b) if style.each_element else (i, i)
    cos, sin, y = cos[:, None], sin[:, None], x.clone()
    y[..., a] = x[..., a] * cos[..., of_a] - x[..., b] * sin[..., of_a]
    y[..., b] = x[..., b] * cos[..., of_b] + x[..., a] * sin[..., of_b]
    return y


def turned(own: Any, style: Style, q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
    """own(q, k, cos, sin, ...), in one launch where the kernel computes it."""
    found = None
    if not (torch.compiler.is_compiling() or args or kwargs) and _fits(style, q, k, cos, sin):
        found = _turn(style, q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    if found is None:
        return own(q, k, cos, sin, *args, **kwargs)
    return found[0].transpose(1, 2), found[1].transpose(1, 2)


def _fits(style: Style, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel takes these shapes and dtypes: q and k (B, heads, N, D), cos and sin (B or 1, N, width)."""
    if not (q.ndim == k.ndim == 4 and cos.ndim == 3 and cos.shape == sin.shape and cos.stride() == sin.stride()):
        return False
    (B, _, N, D), (rows, tokens, width) = q.shape, cos.shape
    dim = width if style.doubled else 2 * width
    return (
        (k.shape[0], k.shape[2], k.shape[3]) == (B, N, D)
        and rows in (1, B)
        and tokens == N
        and dim % 2 == 0
        and (dim == D or (dim < D and style.partial))
        and cos.stride(2) == 1
        and cos.dtype == sin.dtype
        and (cos.dtype == q.dtype or (cos.dtype == torch.float32 and style.keeps_dtype))
        and not (cos.requires_grad or sin.requires_grad)
        and not torch._C._is_any_autocast_enabled()
    )


def _turn(style: Style, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """q and k (B, N, heads, D), turned; None if the kernel does not serve."""
    half = cos.shape[2] // 2 if style.doubled else cos.shape[2]
    facts = (half, style.interleaved, style.each_element, False)
    if not needs_gradient((q, k)):
        return fused_call("rotary", "turned_both", facts, q, k, cos, sin, like=(q, k))
    if not (is_plain_eager(cos, sin) and are_readable(q, cos, sin)):
        return None
    kernels = kernels_for("rotary", q, k)
    return None if kernels is None else kernels.RotatedBoth.apply(kernels.Pairs(*facts), q, k, cos, sin)
