from __future__ import annotations

from pathlib import Path

import pytest

from fulmen.parallel.blocks import blocks
from fulmen.parallel.shards import Cut
from tools import parallel_plans as plans


def test_the_page_has_the_tables_the_code_makes() -> None:
    page = plans.PATH.read_text(encoding="utf-8")
    assert plans.render(page) == page


def test_check_fails_on_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = plans.PATH.read_text(encoding="utf-8")
    monkeypatch.setattr(plans, "PATH", tmp_path / "parallel.md")
    plans.PATH.write_text(page.replace("16.8 MB", "16.9 MB"), encoding="utf-8")
    assert plans.main(["--check"]) == 1
    assert plans.main([]) == 0
    assert plans.main(["--check"]) == 0
    assert plans.main(["--chekc"]) == 2
    with pytest.raises(ValueError, match="no <!-- begin bytes -->"):
        plans.render("")


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_every_pair_is_counted_once(kind: str) -> None:
    cut = Cut(kind, (6,) * 4)
    every = (b for rank in range(4) for source in range(4) for b in blocks(cut, plans.CAUSAL, rank, source))
    assert sum(map(plans.pairs, every)) == 24 * 25 // 2


def test_a_slow_link_is_what_a_ring_waits_for() -> None:
    cut = Cut("zigzag", (8,) * 4)
    fast, even = plans.ring_seconds(cut, 1.0, 1.0, 0.0)
    slow, same = plans.ring_seconds(cut, 1.0, 1.0, 1e6)
    assert (slow - fast, same) == (pytest.approx(3e6, rel=1e-3), even)
