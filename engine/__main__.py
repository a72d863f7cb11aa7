"""`python -m engine`: the command line, which a signal ends cleanly from its first moment on."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line; while its modules are imported there is nothing to stop: a signal ends it on the spot."""
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, _exit)
    from engine import cli

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


def _exit(number: int, frame: object) -> None:
    """Exit with 0 where stopping is the orderly end, as for a server; else say that nothing was done."""
    os._exit(0 if sys.argv[1:2] == ["serve"] else 128 + number)


if __name__ == "__main__":
    main()
