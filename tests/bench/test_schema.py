from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fulmen.bench import schema

RUN = schema.Run("r1", "2026-01-01T00:00:00+00:00", "fulmen bench run quick", {"device": "x"}, {"sha": "0"})


def cell(**changes: Any) -> schema.Cell:
    values: dict[str, Any] = {
        "run_id": "r1", "suite": "quick", "op": "flash", "function": "softmax attention", "case": {"B": 1, "N": 8},
        "competitor": "sdpa", "pass_": "forward", "samples_ms": [1.0, 1.5],
    }  # fmt: skip
    return schema.Cell(**values | changes)


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join(r if isinstance(r, str) else schema.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    one = cell(audit={"flags": [{"flag": "NOISY", "why": "it is"}]}, kernels=["a", "b"])
    results = schema.read([written(tmp_path / "x.jsonl", RUN, one)])
    assert results.runs == {"r1": RUN}
    assert results.cells == [one]
    assert one.flags() == ["NOISY"]


def test_the_hash_names_the_work_and_not_the_outcome() -> None:
    assert cell().config_hash == cell(samples_ms=[9.0], status="failed", reason="x", suite="other").config_hash
    different = [cell(case={"B": 2, "N": 8}), cell(competitor="x"), cell(pass_="total"), cell(cache="hot")]
    assert len({c.config_hash for c in [cell(), *different]}) == 5
    assert cell(case={"N": 8, "B": 1}).config_hash == cell().config_hash


def test_a_cell_measured_again_replaces_the_first(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", RUN, cell(status="interrupted"), cell(samples_ms=[2.0]))
    assert [c.samples_ms for c in schema.read([path]).cells] == [[2.0]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{\n", "not JSON"),
        ("[]\n", "schema 'list'"),
        ('{"schema": "other/7"}\n', "other/7"),
        (json.dumps({"schema": schema.SCHEMA, "kind": "spoon"}) + "\n", "spoon"),
        (schema.dumps(cell()).replace('"forward"', '"sideways"') + "\n", "sideways"),
        (schema.dumps(cell()).replace('"ok"', '"fine"') + "\n", "fine"),
        (schema.dumps(cell()).replace("[1.0, 1.5]", '["1.0"]') + "\n", "samples_ms is list, must be list[float]"),
        (schema.dumps(cell()).replace('"case": {"B": 1, "N": 8}', '"case": 7') + "\n", "case is int"),
        (schema.dumps(cell()).replace('"competitor"', '"contender"') + "\n", "competitor"),
    ],
)
def test_a_foreign_line_is_named_with_its_place(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(schema.BadResults, match=r"x\.jsonl:2: ") as error:
        schema.read([written(tmp_path / "x.jsonl", RUN, line)])
    assert words in str(error.value)


def test_a_last_line_that_was_cut_off_is_skipped_and_told_of(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", RUN, cell(), schema.dumps(cell(pass_="total"))[:40])
    results = schema.read([path])
    assert [c.pass_ for c in results.cells] == ["forward"]
    (note,) = results.notes
    assert "x.jsonl:3: not JSON" in note
    assert note.endswith("was the file cut off? It is skipped.")
    assert schema.read([written(tmp_path / "y.jsonl", RUN, cell())]).notes == []
    with pytest.raises(schema.BadResults, match="cut off"):  # in the middle it is no accident of writing
        schema.read([written(tmp_path / "z.jsonl", RUN, schema.dumps(cell())[:40] + "\n", cell())])
    for text in (schema.dumps(RUN)[:40], "hello\n"):  # nothing is left without it
        with pytest.raises(schema.BadResults, match=r"first\.jsonl:1: not JSON"):
            schema.read([written(tmp_path / "first.jsonl", text)])


def test_errors_do_not_drive_the_terminal() -> None:
    assert str(schema.BadResults("a\x1b[2Jb\x07c\n")) == "a\\x1b[2Jb\\x07c\\n"


def test_fields_of_a_newer_version_are_ignored(tmp_path: Path) -> None:
    lines = [json.dumps(json.loads(schema.dumps(r)) | {"colour": "blue"}) + "\n" for r in (RUN, cell())]
    results = schema.read([written(tmp_path / "x.jsonl", *lines)])
    assert results.runs == {"r1": RUN}
    assert results.cells == [cell()]


def test_a_cell_without_its_run(tmp_path: Path) -> None:
    with pytest.raises(schema.BadResults, match="comes before that run's record"):
        schema.read([written(tmp_path / "x.jsonl", cell())])


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "x", tmp_path / "missing"):
        with pytest.raises(schema.BadResults, match="cannot be read"):
            schema.read([path])


def test_numbers_that_are_none_are_not_written() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        schema.dumps(cell(samples_ms=[float("nan")]))
    assert '"bound": null' in schema.dumps(cell(correctness={"o": {"bound": float("inf")}}))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_json_that_python_refuses_is_an_error_in_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(schema.BadResults, match="not JSON"):
        schema.read([str(path)])


def test_an_archive_knows_its_commit(tmp_path, monkeypatch) -> None:
    from fulmen.bench import environment

    monkeypatch.setattr(environment, "PACKAGE", tmp_path / "fulmen")
    (tmp_path / "fulmen").mkdir()
    assert environment.commit()["sha"] is None
    note = tmp_path / ".git_archival.txt"
    note.write_text("$Format:%H$\n")  # not made by git archive
    assert environment.commit()["sha"] is None
    note.write_text("0123456789abcdef0123456789abcdef01234567\n")
    assert environment.commit()["sha"] == "0123456789abcdef0123456789abcdef01234567"
