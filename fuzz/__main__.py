"""`python -m fuzz TARGET --minutes M --seed S`: run drawn histories until the time is over or one breaks a promise."""

from __future__ import annotations

import argparse
import math
from functools import partial

from engine.scheduler.policy import POLICIES
from fuzz import driver, faults, http, kills, kv_cache, scheduler, transport

TARGETS = {
    "faults": faults.run,
    "http": http.run,
    "kills": kills.run,
    "kv_cache": partial(driver.run, kv_cache.TARGET),
    "scheduler": partial(driver.run, scheduler.TARGET),
    "transport": transport.run,
}


def main() -> None:
    """Parse the command line and run the target."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__, allow_abbrev=False)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to run (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the histories (default 0)")
    parser.add_argument("--policy", choices=sorted(POLICIES), help="scheduler: this policy only (default: any)")
    parser.add_argument("--record", action="store_true", help="faults: keep the histories that find them as tests")
    arguments = parser.parse_args()
    if not 0 < arguments.minutes < math.inf:
        parser.error(f"--minutes must be above 0 and finite, got {arguments.minutes}")
    if arguments.policy is not None and arguments.target != "scheduler":
        parser.error(f"--policy goes with the target scheduler, not with {arguments.target}")
    if arguments.record and arguments.target != "faults":
        parser.error(f"--record goes with the target faults, not with {arguments.target}")
    options = {"scheduling_policy": arguments.policy, "record": arguments.record or None}
    given = {name: value for name, value in options.items() if value is not None}
    TARGETS[arguments.target](arguments.minutes, arguments.seed, **given)


if __name__ == "__main__":
    main()
