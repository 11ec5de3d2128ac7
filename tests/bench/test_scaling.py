"""`fulmen bench scaling`: bytes are counted, one rank is the measure, and what cannot be measured is refused."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from fulmen.__main__ import main


def test_up_to_four_ranks(tmp_path):
    """States of ranks far away have decayed a lot, and are still proved right."""
    out = tmp_path / "scaling.jsonl"
    command = ["bench", "scaling", "--way", "lightning", "--way", "zigzag", "--tokens", "256", "--heads", "8"]
    command += ["--ranks", "1,2,4", "--head-dim", "16", "--samples", "2", "--out", str(out)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    head, *rows = map(json.loads, out.read_text().splitlines())
    assert head["record"] == "scaling"
    assert [(row["way"], row["ranks"]) for row in rows] == [
        (way, ranks) for way in ("lightning", "zigzag") for ranks in (1, 2, 4)
    ]  # fmt: skip
    states, keys = 2 * 8 * 16 * 16 * 4, 8 * 128 * (16 + 16) * 4
    assert [(row["bytes_forward"], row["bytes_backward"]) for row in rows if row["ranks"] < 4] == [
        (0, 0), (states, states), (0, 0), (keys, 2 * keys),
    ]  # fmt: skip
    assert all(len(row["samples_ms"]) == 2 and row["speedup"] > 0 for row in rows)
    again = CliRunner().invoke(main, command)
    assert again.exit_code == 1
    assert "never overwritten" in again.output


def test_it_is_no_ordinary_suite():
    done = CliRunner().invoke(main, ["bench", "run", "scaling"])
    assert done.exit_code == 1
    assert "fulmen bench scaling" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--way", "star"], "must be of lightning, ring"),
        (["--ranks", "2,4"], "one rank must be among them"),
        (["--tokens", "1001"], "cannot be cut for 1 ranks"),
        (["--tokens", "many"], "numbers separated by commas"),
        (["--way", "ulysses", "--ranks", "1,3", "--tokens", "600"], "8 heads cannot be shared out"),
    ],
)
def test_refusals(options, message, tmp_path):
    done = CliRunner().invoke(main, ["bench", "scaling", *options, "--out", str(tmp_path / "x.jsonl")])
    assert done.exit_code == 1
    assert message in done.output
