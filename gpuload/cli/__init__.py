"""The ``gpuload`` command, which needs the packages of the `cli` extra."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line on `sys.argv`, and exit."""
    try:
        from gpuload.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        print(
            f"gpuload's command line needs {error.name}, which is not installed. Install the `cli` extra:\n\n"
            "    pip install 'gpuload[cli,demo]'",
            file=sys.stderr,
        )
        sys.exit(2)
    app()
