"""README, docs and examples: Python blocks run as printed, public names are documented, examples run."""

from __future__ import annotations

import importlib
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from fulmen import decay
from fulmen.bench import cases
from fulmen.integrations.transformers import attention as ours
from fulmen.layers import lightning

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = {
    page.relative_to(ROOT).as_posix(): blocks
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    if (blocks := BLOCK.findall(page.read_text("utf-8")))
}
PUBLIC = (
    "fulmen", "fulmen.decay", "fulmen.layers", "fulmen.parallel", "fulmen.bench", "fulmen.integrations.transformers",
    "fulmen.integrations.sdpa", "fulmen.integrations.flash_attn", "fulmen.integrations.fla",
    "fulmen.integrations.mamba",
)  # fmt: skip
LONG = {ROOT / "examples" / f"{name}.py" for name in ("hybrid_lm", "serve", "finetune", "long_context", "speedup")}
EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - LONG)


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return str(one.getsockname()[1])


@pytest.fixture
def one_rank(monkeypatch):
    """What torchrun sets for a process alone; a registered attention and a process group do not outlive the test."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    if "fulmen" in ours._registered:
        ours.unregister()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 100


def test_there_are_blocks():
    assert len(BLOCKS["README.md"]) == 5
    assert len(BLOCKS["docs/integrations.md"]) == 6
    guide = ("index", "lightning", "linear", "flash", "layers", "decoding", "models", "parallel", "bench")
    assert {f"docs/{name}.md" for name in guide} <= set(BLOCKS)


@pytest.mark.parametrize(
    ("page", "block"),
    [
        pytest.param(page, b, id=f"{page}-{i}", marks=[pytest.mark.gpu] if 'torch.device("cuda")' in b else [])
        for page, blocks in BLOCKS.items()
        for i, b in enumerate(blocks)
    ],
)
def test_blocks_run_as_printed(page, block, one_rank):
    exec(compile(block, page, "exec"), {})


def test_contributing_names_what_is_there():
    """Names in the table of what to edit, and files."""
    table = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("## Where to change what")[1].split("## Rules")[0]
    files = [p for folder in ("fulmen", "tests", "tools", "docs") for p in (ROOT / folder).rglob("*.*")]
    files.append(ROOT / "mkdocs.yml")
    paths = "\n".join(p.relative_to(ROOT).as_posix() for p in files)
    code = "\n".join(p.read_text("utf-8") for p in files if p.suffix in (".py", ".toml", ".yml", ".cuh"))
    for name in re.findall(r"`([\w./-]+)`", table):
        where = paths if "/" in name or "." in name else code
        assert re.search(rf"\b{re.escape(name.rstrip('/'))}\b", where) or "<" in name or (ROOT / name).exists(), name


def test_tables_name_everything():
    named = {
        "docs/bench.md": cases.names(),
        "docs/layers.md": lightning.PRESETS,
        "docs/lightning.md": decay.__all__,
    }
    for page, names in named.items():
        text = (ROOT / page).read_text("utf-8")
        assert not [name for name in names if f"`{name}" not in text and f".{name}" not in text], page


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    """Strict: no broken link or anchor, no page outside the navigation."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "search" / "search_index.json").exists()


def test_public_names_are_on_the_api_pages():
    documented = set()
    for page in (ROOT / "docs" / "api").glob("*.md"):
        documented |= set(re.findall(r"^::: (\S+)", page.read_text("utf-8"), re.MULTILINE))
    modules = {name: importlib.import_module(name) for name in PUBLIC}
    public = {f"{name}.{one}" for name, module in modules.items() for one in module.__all__} - set(PUBLIC)
    assert public - documented == set()
    others = {name for name in documented - public if not name.startswith("fulmen.testing")}
    assert others == set(), "documented, but not public"


RANK = """
import os, runpy, torch
os.environ |= {environment}
torch.set_num_threads(1)
runpy.run_path({path}, run_name="__main__")
"""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path, one_rank, capfd, request):
    source = path.read_text("utf-8")
    assert len(source.splitlines()) <= 60
    if "torchrun" in source:  # which imports torch three times for two ranks
        start, port = request.getfixturevalue("fresh_process"), free_port()
        ranks = [{"RANK": str(i), "LOCAL_RANK": str(i), "WORLD_SIZE": "2", "MASTER_PORT": port} for i in range(2)]
        done = start.at_once(*(RANK.format(environment=rank, path=repr(str(path))) for rank in ranks))
        assert [one.returncode for one in done] == [0, 0], done
        assert done[0].stdout.strip()
    else:
        runpy.run_path(str(path), run_name="__main__")
        assert capfd.readouterr().out.strip()


def test_there_are_six_examples():
    assert len(EXAMPLES) == 6
