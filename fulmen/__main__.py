"""The command line: `python -m fulmen`, or `fulmen` once installed.

The commands are in `fulmen.bench.cli` and need the extra `bench`; without it there is `doctor`.
"""

from __future__ import annotations

import sys

try:
    from fulmen.bench.cli import main
except ModuleNotFoundError as error:
    if error.name not in ("click", "rich"):
        raise

    def main(prog_name: str = "fulmen") -> None:  # type: ignore[misc]
        if sys.argv[1:] == ["doctor"]:
            from fulmen.doctor import examine

            examine()
        else:
            sys.exit('Only `fulmen doctor` works without the extra "bench": pip install "fulmen[bench]"')


if __name__ == "__main__":
    main(prog_name="fulmen")
