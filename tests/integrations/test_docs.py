"""The code blocks of README.md and docs/integrations.md run as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fulmen.integrations import transformers as ours

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("page", "count"), [("README.md", 5), ("docs/integrations.md", 3)])
def test_snippets(page, count):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    assert len(blocks) == count
    try:
        for block in blocks:
            exec(compile(block, page, "exec"), {})
    finally:
        if "fulmen" in ours._registered:
            ours.unregister()
