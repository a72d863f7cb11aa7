"""`python -m fuzz TARGET --minutes M --seed S`: run drawn histories until the time is over or one breaks a promise."""

from __future__ import annotations

import argparse

from fuzz import http, kills, kv_cache, scheduler

TARGETS = {"http": http.run, "kills": kills.run, "kv_cache": kv_cache.run, "scheduler": scheduler.run}


def main() -> None:
    """Parse the command line and run the target."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to run (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the histories (default 0)")
    arguments = parser.parse_args()
    TARGETS[arguments.target](arguments.minutes, arguments.seed)


if __name__ == "__main__":
    main()
