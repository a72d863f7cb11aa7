"""What the transport tests share."""

from __future__ import annotations

import numpy as np
import pytest
import zmq


@pytest.fixture(scope="session", autouse=True)
def pyzmq_collector() -> None:
    """Start pyzmq's collector thread, which the first zero-copy frame starts and which lives to the end."""
    zmq.Frame(np.zeros(zmq.COPY_THRESHOLD, np.uint8), copy=False)
