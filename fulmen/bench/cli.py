"""The commands of `fulmen`. They import what they need when they run: asking for help must not wait for torch."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import rich.console
from rich.table import Table
from rich.text import Text

from fulmen import __version__
from fulmen.bench import Refused

RESULTS = click.Path(exists=True, dir_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)


class Commands(click.Group):
    """Says in a sentence what cannot be done, and which package of the extra `bench` is missing."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Refused as error:
            raise click.ClickException(str(error)) from None
        except ModuleNotFoundError as error:
            if error.name and error.name.partition(".")[0] == "fulmen":
                raise
            why = f'{error.name} is not installed, which this command needs: pip install "fulmen[bench]"'
            raise click.ClickException(why) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="fulmen %(version)s", prog_name="fulmen")
def main() -> None:
    """fulmen: lightning (linear) and softmax attention for PyTorch, and a benchmark tool."""


@main.command()
def doctor() -> None:
    """This machine's devices, and which backends run on them."""
    from fulmen.doctor import examine

    examine()


@main.command()
@click.argument("op", type=click.Choice(["lightning", "flash"]))
@click.option("--shape", "shapes", multiple=True, help="B=4,H=32,N=8192,D=64; the usual ones without it.")
@click.option("--dtype", default="bf16", show_default=True, help="bf16 or fp16.")
@click.option("--all", "everything", is_flag=True, help="Show every candidate, not only the three best.")
@click.option("--seconds", type=click.FloatRange(min=1), help="For all of it, about; nearest tiles first. All without.")
def tune(**options: Any) -> None:
    """Time the tiles of our Triton kernels on this GPU and propose rows for the tables of OP."""
    from fulmen.bench.tune import tune

    tune(**options)


@main.group()
def bench() -> None:
    """Measure attention kernels: proved right first, timed, and checked against physics."""


@bench.command()
@click.argument("suites", nargs=-1)
@click.option("--device", help="cpu, cuda or cuda:1; the GPU if there is one.")
@click.option("--dtype", help="bf16, fp16, fp32 or fp64, in place of the suite's.")
@click.option("--backend", "backends", multiple=True, help="Ours to measure; repeat for several, 'none' for none.")
@click.option("--baseline", "baselines", multiple=True, help="Others to measure; repeat for several, 'none' for none.")
@click.option("--pass", "passes", multiple=True, type=click.Choice(["forward", "backward", "total"]), help="Only this.")
@click.option("--shape", "shapes", multiple=True, help="Cases with N=2048,D=64; made where the suite has none.")
@click.option("--seconds", type=click.FloatRange(min=0), help="Sampling time of a cell, at most.")
@click.option("--seed", type=int, help="Of the random inputs; drawn anew without it.")
@click.option(
    "--kernels", is_flag=True, help="Record which kernels ran, and their own time; the profiler slows what comes after."
)
@click.option("--out", type=FILE, help="Results, JSON lines.")
@click.option("--resume", is_flag=True, help="Go on with the file --out.")
@click.option("--base", metavar="GITREF|FOLDER", help="Measure the kernels of that commit, interleaved with these.")
def run(suites: tuple[str, ...], out: Path | None, resume: bool, base: str | None, **options: Any) -> None:
    """Measure SUITES (quick, if none is named); see `fulmen bench list`."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its remarks would tear the table
    if "scaling" in suites:
        raise Refused("scaling takes several processes and has a command of its own: fulmen bench scaling")
    if resume and out is None:
        raise Refused("--resume needs --out, the file to go on with")
    if (seconds := options["seconds"]) is not None and not 0 <= seconds < float("inf"):
        raise Refused(f"--seconds {seconds}: must be a number of seconds")
    from fulmen.bench import comparing, runner, schema
    from fulmen.bench.base import started
    from fulmen.bench.screen import Screen

    selection, console = runner.Selection(suites or ("quick",), **options), rich.console.Console()
    out = out or runner.default_out(selection.suites)
    other = out.with_suffix(".base.jsonl")
    if base is not None:
        if other.exists() or resume:
            raise Refused(f"--base starts both files anew: {other} must not exist, and --resume does not go with it")
        selection = replace(selection, seed=1 if selection.seed is None else selection.seed)  # equal inputs for both
    try:
        with Screen(console) as screen, ExitStack() as stack:
            process = None
            if base is not None:
                screen.say(f"checking out {base}")
                process = stack.enter_context(started(base, selection, other))
            runner.run(selection, out, resume=resume, monitor=screen, other=process)
            if not any(cell.samples_ms for cell in schema.read([out]).cells):
                raise Refused(f"nothing was measured: {out} says why of each cell")
    except KeyboardInterrupt:
        console.print(f"interrupted; what is done is in {out}, and the same command with --resume goes on")
        raise SystemExit(130) from None
    console.print(f"results: {out}")
    if base is None:
        console.print(f"a report: fulmen bench report {out} --out report")
    else:
        comparing.render(comparing.compare(schema.read([other]), schema.read([out])), console)


@bench.command(name="list")
def list_() -> None:
    """The suites with their cases, our backends, and the baselines with what keeps them away."""
    import torch

    from fulmen import dispatch
    from fulmen.bench import adapters, cases
    from fulmen.bench.competitors import BASELINES

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    suites, who = Table("suite", "cases", "what it measures"), Table("name", "computes", f"on {device}")
    registered = set()
    for name in cases.names():
        lines = cases.read(name)
        suites.add_row(name, str(len(lines)), Text(cases.description(name)))
        registered |= {(line.op, adapters.backends_of(line.op, line.case)) for line in lines}
    ours = [(op, *backend) for op, kind in sorted(registered) for backend in dispatch.report(kind, device)]
    rows = [(f"fulmen {name}", op, reason) for op, name, reason in ours]
    for name, baseline in sorted(BASELINES.items()):
        case = adapters.of(baseline.op).complete({"dtype": "bfloat16"})
        rows.append((name, baseline.op, baseline.refusal(case, device)))
    computed: dict[tuple[str, str | None], set[str]] = {}
    for name, op, reason in rows:
        computed.setdefault((name, reason), set()).add(op)
    for (name, reason), ops in computed.items():
        found = "yes" if reason is None else Text(f"no: {reason}", style="yellow")
        who.add_row(name, ", ".join(sorted(ops)), found)
    rich.console.Console().print(suites, who)


@bench.command()
@click.option("--way", "ways", multiple=True, help="lightning, ring, zigzag or ulysses; repeat for several.")
@click.option("--ranks", default="1,2", show_default=True, help="Numbers of ranks, one among them.")
@click.option("--tokens", default="4096,16384", show_default=True, help="Lengths of the whole sequence.")
@click.option("--heads", "H", type=click.IntRange(1), default=8, show_default=True, help="H; B is 1.")
@click.option("--head-dim", "D", type=click.IntRange(1), default=64, show_default=True, help="D.")
@click.option("--samples", type=click.IntRange(1), default=15, show_default=True, help="Calls of each, interleaved.")
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]), help="gloo, a thread a rank; or NCCL.")
@click.option("--out", type=FILE, help="Results, JSON lines.")
def scaling(ways: tuple[str, ...], ranks: str, tokens: str, device: str, out: Path | None, **sizes: int) -> None:
    """One sequence on several ranks, forward and backward: time, bytes moved, speedup and efficiency."""
    from fulmen.bench import runner
    from fulmen.bench.scaling import Scaling, measure, render

    try:
        counts, lengths = (tuple(int(n) for n in text.split(",")) for text in (ranks, tokens))
    except ValueError:
        raise Refused(f"--ranks {ranks} --tokens {tokens}: must be numbers separated by commas") from None
    dtype = "float32" if device == "cpu" else "bfloat16"
    selection = Scaling(ways or Scaling.ways, counts, lengths, 1, device=device, dtype=dtype, **sizes)
    out = out or runner.default_out(("scaling",))
    render(measure(selection, out), rich.console.Console())
    click.echo(f"results: {out}")


def read(*paths: Path) -> Any:
    """The results of some files; says what was skipped in them."""
    from fulmen.bench import schema

    results = schema.read(paths)
    for note in results.notes:
        click.echo(f"Warning: {note}", err=True)
    return results


@bench.command()
@click.argument("results", nargs=-1, required=True, type=RESULTS)
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="A folder.")
def report(results: tuple[Path, ...], out: Path) -> None:
    """Write report.html, report.md, results.csv and plots from RESULTS."""
    from fulmen.bench.report import write

    try:
        for path in write(read(*results), out):
            click.echo(path)
    except OSError as error:
        raise Refused(str(error)) from None


@bench.command()
@click.argument("a", type=RESULTS)
@click.argument("b", type=RESULTS)
@click.option("--fail-on", metavar="slower:5%", help="Exit with 1 if B is slower by this, 'missing' or 'broken'.")
def compare(a: Path, b: Path, fail_on: str | None) -> None:
    """B against A, cell by cell: FASTER, SLOWER, SAME, INCONCLUSIVE or INCOMPARABLE."""
    from fulmen.bench import comparing

    rule = {} if fail_on is None else comparing.parse_fail_on(fail_on)
    verdicts = comparing.compare(read(a), read(b))
    comparing.render(verdicts, rich.console.Console())
    if failed := comparing.failures(verdicts, rule):
        raise Refused(f"{len(failed)} cells fail --fail-on {fail_on}")


@bench.command()
@click.argument("files", nargs=-1, required=True, type=RESULTS)
@click.option("--map", "map_path", type=RESULTS, help="TOML that says which columns are the GPU, the shape, the times.")
@click.option("--fail-on", type=click.Choice(["wrong", "doubtful"]), help="Exit with 1 if there is any; or worse.")
def audit(files: tuple[Path, ...], map_path: Path | None, fail_on: str | None) -> None:
    """Check published numbers (CSV, JSON lines or a Markdown table) against physics, and several files against each
    other."""
    from fulmen.bench import published

    console, flags = rich.console.Console(), {"wrong": published.BAD, "doubtful": (*published.BAD, *published.DOUBTFUL)}
    failed = 0
    for file in files:
        findings = published.audit_file(file, map_path, [other for other in files if other != file])
        if len(files) > 1:
            click.echo(f"{file}:")
        published.render(findings, console)
        failed += sum(f.flag in flags.get(fail_on or "", ()) for f in findings)
    if failed:
        raise Refused(f"{failed} numbers fail --fail-on {fail_on}")
