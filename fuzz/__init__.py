"""The fuzzing harness: `python -m fuzz TARGET`."""
