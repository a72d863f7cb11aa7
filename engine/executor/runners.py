"""Which runner runs a model. Torch is imported here, when a model needs it, and nowhere on the way to here."""

from __future__ import annotations

import os
from pathlib import Path

from engine.config import EngineConfig
from engine.executor.base import Runner
from engine.models import NULL_MODEL


def make_runner(config: EngineConfig) -> Runner:
    """Return a runner, not started, for a `config` whose model is a folder or null; torch is imported for a folder."""
    if config.model == NULL_MODEL:
        from engine.executor.null import NullModelRunner

        return NullModelRunner(config)
    # Spinning OpenMP teams collapse beside any busy neighbour; read once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if config.kernels == "torch" or config.model_impl == "transformers":
        from engine.model_runner.model_runner import ModelRunner
    else:
        from engine.kernels.library import compiling_beside

        with compiling_beside():  # importing torch takes as long
            from engine.model_runner.model_runner import ModelRunner

    return ModelRunner(config, Path(config.model))
