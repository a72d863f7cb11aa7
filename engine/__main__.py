"""`python -m engine VERB`."""

from engine.cli import main

main()
