"""Entry point of ``python -m quanterr``."""

from quanterr.cli import main

main()
