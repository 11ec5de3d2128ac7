"""The command line: `python -m fulmen`, or `fulmen` once installed. Commands import what they need."""

from __future__ import annotations

from pathlib import Path

import click

from fulmen import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="fulmen %(version)s")
def main() -> None:
    """fulmen: lightning (linear) attention for PyTorch."""


@main.command()
def doctor() -> None:
    """This machine's devices, and which backends run on them."""
    from fulmen.doctor import examine

    examine()


@main.command()
@click.option("-n", "--tokens", type=click.IntRange(min=1), multiple=True, help="A length; repeat for several.")
@click.option("--seconds", type=click.FloatRange(min=0), help="Sampling time of each length and pass.")
@click.option("--device", help="cpu, cuda or cuda:1; the GPU if there is one.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write all samples as JSON lines.",
)
def bench(tokens: tuple[int, ...], seconds: float | None, device: str | None, out: Path | None) -> None:
    """Lightning attention against causal SDPA, N = 512 to 8192, forward and backward."""
    import torch

    try:
        import scipy  # noqa: F401
    except ImportError:
        raise click.ClickException("the fit needs scipy: pip install 'fulmen[bench]'") from None
    from fulmen.bench import compare

    try:
        compare.run(
            tokens or compare.TOKENS,
            seconds=compare.SECONDS if seconds is None else seconds,
            device=torch.device(device) if device else None,
            out=out,
        )
    except compare.WrongResult as error:
        raise click.ClickException(f"wrong on this machine, so not timed: {error}") from None


if __name__ == "__main__":
    main(prog_name="fulmen")
