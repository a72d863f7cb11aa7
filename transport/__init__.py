"""Bytes between processes and threads under Trio; knows nothing of the engine."""
