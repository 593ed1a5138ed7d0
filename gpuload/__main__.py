"""Run the ``gpuload`` command for ``python -m gpuload``."""

from __future__ import annotations

from gpuload.cli import main

if __name__ == "__main__":
    main()
