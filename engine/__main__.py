"""`python -m engine`: the command line, which a signal ends cleanly from its first moment on."""

from __future__ import annotations

import os
import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line; while its modules are imported there is nothing to stop, and a signal exits with 0."""
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, _exit)
    from engine import cli

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


def _exit(number: int, frame: object) -> None:
    os._exit(0)


if __name__ == "__main__":
    main()
