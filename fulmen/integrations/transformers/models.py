"""`accelerate`: serves the mixers of a loaded transformers model with fulmen's kernels.

A mixer is what mixes tokens: softmax attention, lightning attention, a state-space layer. `KINDS` says how each kind is
recognised, why one cannot be served, and how it is replaced. Recognition is by parts and shapes, so models whose code
comes with a checkpoint are found, too. Weights stay where they are: a replaced mixer reads its module's parameters.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from fulmen.integrations.transformers import attention, cache, fused, lightning, mamba2, packing, simple_gla
from fulmen.integrations.transformers.forward import replaced_reason
from fulmen.layers.inputs import check_backend

__all__ = ["Accelerated", "accelerate"]

MARK = "fulmen_accelerated"
Undo = Callable[[], None]


class Kind(NamedTuple):
    """One kind of mixer that fulmen serves."""

    op: str  # whose backends serve it
    matches: Callable[[nn.Module], bool]
    unsupported_reason: Callable[[nn.Module], str | None]
    replace: Callable[[Any, str], list[Undo]] | None  # None: through the attention interface of its model
    hooks: tuple[Callable[..., Any], ...] = ()  # forward pre-hooks of its model


def refuse_weights(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook of the model: no kernel keeps the weights of attention."""
    wanted = packing.by_name(module, args, kwargs).get("output_attentions")
    if getattr(module.config, "output_attentions", False) if wanted is None else wanted:
        raise NotImplementedError(
            "output_attentions=True: fulmen's kernels do not keep attention weights. Call undo() of what "
            "accelerate(model) returned, and use attn_implementation='eager'"
        )


KINDS = (
    Kind("flash", attention.matches, attention.unsupported_reason, None, (refuse_weights, packing.announce)),
    Kind(
        "lightning", lightning.matches, lightning.unsupported_reason, lightning.replace,
        (refuse_weights, packing.check_mask, packing.tell_tokens, packing.leave_cache, packing.announce, cache.bring),
    ),
    Kind(
        "lightning", mamba2.matches, mamba2.unsupported_reason, mamba2.replace,
        (packing.check_mask, packing.tell_tokens, packing.leave_cache, packing.announce, mamba2.announce),
    ),
    Kind(
        "lightning", simple_gla.matches, simple_gla.unsupported_reason, simple_gla.replace, (simple_gla.refuse_packed,)
    ),
)  # fmt: skip

# classes that look like one
MIXER = re.compile(r"(Attention2?|Mixer|MambaLayer|DeltaNet|SSM|RecurrentBlock|Retention)$")
OTHERS = (
    (
        re.compile("^MiniMax(Text01|M1)"),
        "its code comes with the checkpoint: load the one whose name ends in -hf (MiniMaxAI/MiniMax-Text-01-hf), which "
        "transformers has code for",
    ),
    (re.compile("Delta"), "its update is the delta rule, which fulmen does not compute"),
    (re.compile("Mamba|SSM|Mixer"), "its state has a decay for each channel, which fulmen does not compute"),
    (
        re.compile(""),
        "its forward does not call transformers' attention interface, nor has it the parts of a known layer",
    ),
)


class Mark:
    """Stands on a mixer that is served. A copy of the model keeps it; pickling the model is refused."""

    def __deepcopy__(self, memo: Any) -> Mark:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "an accelerated model cannot be pickled as a whole: save model.state_dict() or use save_pretrained(), or "
            "call undo() of what accelerate(model) returned first"
        )


class Mixer(NamedTuple):
    """One row of the table."""

    name: str
    module: nn.Module
    kind: Kind | None
    reason: str | None  # why it is not replaced

    @property
    def verdict(self) -> str:
        return f"not replaced: {self.reason}" if self.kind is None or self.reason else self.kind.op


class Accelerated:
    """What `accelerate` did to a model. Printed, it is a table: which operation serves each mixer, or why none does."""

    def __init__(self, model: Any, backend: str, mixers: list[Mixer], undo: list[Undo]) -> None:
        self.model, self.backend, self.mixers = model, backend, mixers
        self._undo = undo

    def undo(self) -> None:
        """Gives the model its own code back. A cache that was filled before is not to be used after.

        Raises if other code was put over a mixer's forward; all else is undone, and a later undo() does the rest.
        """
        steps, self._undo[:], failed = self._undo[::-1], [], None
        for step in steps:
            try:
                step()
            except RuntimeError as error:
                self._undo.insert(0, step)
                failed = failed or error
        if failed is not None:
            raise failed

    def new_cache(self, max_length: int | None = None) -> Any:
        """A cache for the model: one that grows, or a static one for `max_length` tokens."""
        if max_length is not None and not (isinstance(max_length, int) and max_length > 0):
            raise ValueError(f"max_length={max_length!r} must be a number of tokens, 1 or more, or None")
        owner = next((module for module in self.model.modules() if hasattr(module, "config")), self.model)
        config = owner.config.get_text_config(decoder=True)
        for mixer in self.mixers:
            if mixer.kind is not None and mixer.kind.replace is lightning.replace:
                return cache.cache_type(type(mixer.module).__module__)(max_length, config.num_hidden_layers)
        transformers = importlib.import_module("transformers")
        if max_length is None:
            return transformers.DynamicCache(config=config)
        return transformers.StaticCache(config=config, max_cache_len=max_length)

    def __str__(self) -> str:
        groups: dict[tuple[str, str, str], list[str]] = {}
        for mixer in self.mixers:
            number = re.search(r"\d+", mixer.name)
            pattern = re.sub(r"\d+", "{}", mixer.name, count=1)
            found = groups.setdefault((pattern, type(mixer.module).__name__, mixer.verdict), [])
            found.append(number.group() if number else "")
        rows = [("mixers", "class", f"served by (backend={self.backend!r})")]
        for (pattern, module, verdict), found in groups.items():
            rows.append((pattern.replace("{}", _ranges(found)), module, verdict))
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        return "\n".join(f"{a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in rows)


def accelerate(model: Any, backend: str = "auto", *, verbose: bool = True) -> Accelerated:
    """Serves the mixers of a loaded transformers model with fulmen's kernels, in training, prefill and decoding.

    model    a model of transformers with its weights, which are not copied; its code may come with the checkpoint.
    backend  of `flash_attention` and `lightning_attention`: "auto", or a name that works or raises.
    verbose  whether the table of what was replaced and what was not, and why, is printed.

    Returns an `Accelerated`, whose `undo()` takes it back. Raises if nothing can be served.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, must be a loaded model: from_pretrained(...) returns one")
    mixers = _found(model)
    if any(hasattr(mixer.module, MARK) for mixer in mixers):
        raise ValueError(
            f"{type(model).__name__} is accelerated already, as a whole or in part: call undo() of the first result. A "
            "copy of an accelerated model stays accelerated: copy it before accelerate(model), or after undo()"
        )
    served = [mixer for mixer in mixers if mixer.reason is None]
    if not served:
        rows = "; ".join(dict.fromkeys(f"{type(m.module).__name__}: {m.reason}" for m in mixers))
        raise ValueError(f"{type(model).__name__} has no mixer that fulmen serves: {rows or 'none was found'}")
    for op in {mixer.kind.op for mixer in served if mixer.kind is not None}:
        check_backend(op, backend)
    accelerated = Accelerated(model, backend, mixers, [])
    try:
        _replace(accelerated, served)
    except BaseException:
        accelerated.undo()
        raise
    if verbose:
        print(accelerated)
    return accelerated


def _found(model: Any) -> list[Mixer]:
    """Every mixer, in the model's order; one inside another is not listed by itself."""
    mixers: list[Mixer] = []
    for name, module in model.named_modules():
        kind = next((kind for kind in KINDS if kind.matches(module)), None)
        if kind is not None:
            reason = None if hasattr(module, MARK) or kind.replace is None else replaced_reason(module)
            reason = reason or kind.unsupported_reason(module)
            if kind.replace is None:
                reason = reason or attention.model_reason(_models(model, name)[0])
            mixers.append(Mixer(name, module, kind, reason))
        elif MIXER.search(type(module).__name__) and not hasattr(module, "get_input_embeddings"):
            reason = next(reason for pattern, reason in OTHERS if pattern.search(type(module).__name__))
            mixers.append(Mixer(name, module, None, reason))

    def inside(one: Mixer, other: Mixer) -> bool:
        return one.name.startswith(other.name + ".")

    return _alike([
        one for one in mixers
        if one.kind is not None
        or not any(inside(one, other) or (other.kind is not None and inside(other, one)) for other in mixers)
    ])  # fmt: skip


def _alike(mixers: list[Mixer]) -> list[Mixer]:
    """Attention modules with one config are switched together: all of them are served, or none is."""
    through = [mixer for mixer in mixers if mixer.kind is not None and mixer.kind.replace is None]
    unserved = {id(getattr(m.module, "config", None)): m for m in reversed(through) if m.reason is not None}
    found = []
    for mixer in mixers:
        other = unserved.get(id(getattr(mixer.module, "config", None))) if mixer in through else None
        if other is not None and mixer.reason is None:
            mixer = mixer._replace(
                reason=f"a model's attention modules are switched together, and {other.name} cannot be: {other.reason}"
            )
        found.append(mixer)
    return found


def _replace(accelerated: Accelerated, served: list[Mixer]) -> None:
    """Replaces the mixers; what undoes it is noted step by step."""
    model, backend, undo = accelerated.model, accelerated.backend, accelerated._undo
    hooked: set[tuple[int, Callable[..., Any]]] = set()
    for mixer in served:
        assert mixer.kind is not None
        undo.append(functools.partial(delattr, mixer.module, MARK))
        setattr(mixer.module, MARK, Mark())
        if mixer.kind.replace is not None:
            undo += mixer.kind.replace(mixer.module, backend)
        else:
            undo += fused.replace(mixer.module)
        owner, *around = _models(model, mixer.name)
        hooks = [(owner, hook) for hook in mixer.kind.hooks]
        if mixer.kind.replace is mamba2.replace and not packing.takes_positions(owner):
            hooks += [(outer, hook) for outer in around for hook in (packing.leave_cache, packing.leave)]
        for module, hook in hooks:
            if (id(module), hook) not in hooked:
                hooked.add((id(module), hook))
                undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
    if configs := _configs(accelerated):
        undo.append(attention.switch(configs, backend))


def _configs(accelerated: Accelerated) -> list[Any]:
    """The configs of the attention modules that are served, and of the models around them, which make masks."""
    found: dict[int, Any] = {}
    others: set[int] = set()
    for mixer in accelerated.mixers:
        if mixer.kind is None or mixer.kind.replace is not None:
            continue
        if mixer.reason is not None:
            others.add(id(getattr(mixer.module, "config", None)))
            continue
        parts = mixer.name.split(".")
        around = [accelerated.model.get_submodule(".".join(parts[:end])) for end in range(len(parts) + 1)]
        configs = (getattr(module, "config", None) for module in around)
        found |= {id(config): config for config in configs if hasattr(config, "_attn_implementation_internal")}
    return [config for key, config in found.items() if key not in others]


def _models(model: Any, name: str) -> list[Any]:
    """The models of transformers that the module is part of, the innermost first; `model` itself if there is none."""
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts) - 1, -1, -1)]
    return [module for module in around if hasattr(module, "get_input_embeddings")] or [model]


def _ranges(numbers: list[str]) -> str:
    """[0, 1, 2, 5] as {0-2,5}."""
    if len(numbers) == 1:
        return numbers[0]
    parts: list[list[int]] = []
    for number in map(int, numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return "{" + ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts) + "}"
