"""The snippets of docs/integrations.md run."""

from __future__ import annotations

import re
from pathlib import Path

from fulmen.integrations import transformers as ours


def test_snippets():
    page = Path(__file__).parents[2] / "docs" / "integrations.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) == 3
    try:
        for block in blocks:
            exec(compile(block, str(page), "exec"), {})
    finally:
        if "fulmen" in ours._registered:
            ours.unregister()
