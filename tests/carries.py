"""Refuses a kernel that Triton compiles wrongly without a word: a loop that loses what a name holds.

Triton carries a name from one iteration to the next if its value differs after the body is visited once. So a name that
takes over another one's value is not carried if both began as the same value:

    a, b = zeros, zeros
    for i in range(n):
        a, b = b, load(i)        # b is carried; a stays zeros for ever

Triton's interpreter runs such a loop as Python does, so no test in it can fail.
"""

from __future__ import annotations

from typing import Any


def watch() -> None:
    """From now on such a kernel raises in this process, where the compiler and not the interpreter runs."""
    from triton.compiler import code_generator

    flat, generator = code_generator.flatten_values_to_ir, code_generator.CodeGenerator
    find, verify, before = generator._find_carries, generator._verify_loop_carried_variable, []

    def find_carries(self: Any, node: Any, liveins: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        before.append(liveins)
        try:
            return find(self, node, liveins, *args, **kwargs)
        finally:
            before.pop()

    def handles(value: Any) -> Any:
        return flat([value]) if code_generator._is_triton_value(value) else None

    def verify_variable(self: Any, name: str, loop_val: Any, live_val: Any) -> None:
        """Of each name that was there before the loop, after a visit of its body."""
        verify(self, name, loop_val, live_val)
        if name not in self.local_defs or handles(loop_val) != handles(live_val):
            return
        for other, value in before[-1].items():
            if handles(value) == handles(live_val) and handles(self.lscope[other]) != handles(value):
                raise AssertionError(
                    f"{self.jit_fn.__name__}: Triton does not carry {name}, which begins as the same value as {other}: "
                    "give each a value of its own"
                )

    generator._find_carries = find_carries
    generator._verify_loop_carried_variable = verify_variable
