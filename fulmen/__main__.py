"""The command line: `python -m fulmen`, or `fulmen` once installed. Commands import what they need."""

from __future__ import annotations

import click

from fulmen import __version__
from fulmen.bench.cli import bench


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="fulmen %(version)s")
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
def tune(op: str, shapes: tuple[str, ...], dtype: str, everything: bool, seconds: float | None) -> None:
    """Time the tiles of our Triton kernels on this GPU and propose rows for the tables of OP."""
    from fulmen.bench.tune import CannotTune, tune

    try:
        tune(op, shapes, dtype, everything, seconds)
    except CannotTune as error:
        raise click.ClickException(str(error)) from None


main.add_command(bench)


if __name__ == "__main__":
    main(prog_name="fulmen")
