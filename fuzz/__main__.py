"""`python -m fuzz TARGET --minutes M --seed S`: run drawn histories until the time is over or one breaks a promise."""

from __future__ import annotations

import argparse
import math
from functools import partial

from engine.scheduler.policy import POLICIES
from fuzz import cancellations, driver, faults, http, kills, kv_cache, lifecycle, races, scheduler, text, transport

TARGETS = {
    "cancellations": cancellations.run,
    "faults": faults.run,
    "http": http.run,
    "kills": kills.run,
    "kv_cache": partial(driver.run, kv_cache.TARGET),
    "lifecycle": lifecycle.run,
    "races": races.run,
    "scheduler": partial(driver.run, scheduler.TARGET),
    "text": text.run,
    "transport": transport.run,
}

_OPTIONS = {
    "scheduling_policy": ("scheduler", "policy"),
    "record": ("faults", "record"),
    "model": ("lifecycle", "model"),
    "rounds": ("lifecycle", "rounds"),
}
"""For each option of a target: whose it is, and its flag."""


def main() -> None:
    """Parse the command line and run the target."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__, allow_abbrev=False)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to run (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the histories (default 0)")
    parser.add_argument("--policy", choices=sorted(POLICIES), help="scheduler: this policy only (default: any)")
    parser.add_argument("--record", action="store_true", help="faults: keep the histories that find them as tests")
    parser.add_argument("--model", help="lifecycle: serve this model (default null)")
    parser.add_argument("--rounds", type=int, help="lifecycle: most rounds (default: as many as the time allows)")
    arguments = parser.parse_args()
    if not 0 < arguments.minutes < math.inf:
        parser.error(f"--minutes must be above 0 and finite, got {arguments.minutes}")
    options = {name: getattr(arguments, attribute) or None for name, (_, attribute) in _OPTIONS.items()}
    for name, value in options.items():
        target, attribute = _OPTIONS[name]
        if value is not None and arguments.target != target:
            parser.error(f"--{attribute} goes with the target {target}, not with {arguments.target}")
    given = {name: value for name, value in options.items() if value is not None}
    TARGETS[arguments.target](arguments.minutes, arguments.seed, **given)


if __name__ == "__main__":
    main()
