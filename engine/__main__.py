"""`python -m engine`: the command line, which a signal ends cleanly from its first moment on."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from engine.early_signals import ignore_asking_signals, leave_signals, take_signals


def main() -> NoReturn:
    """Run the command line; while its modules are imported there is nothing to stop: a signal ends it on the spot."""
    ignore_asking_signals()
    open_standard_streams()
    is_server = sys.argv[1:2] == ["serve"]  # for which stopping is the orderly end
    take_signals(0 if is_server else None)
    from engine import cli

    if not is_server:
        leave_signals()
    exit_code = cli.run()
    if is_server:
        import logging

        # All that was owned is closed. Taking Python apart as well would hold up a stop by half a second of work, and
        # give both signals their deadly meaning back.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def open_standard_streams() -> None:
    """Put the null device where a standard stream is closed: else the next file or socket would take its place."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest descriptor that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115


if __name__ == "__main__":
    main()
