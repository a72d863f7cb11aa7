"""Model files to modules: where checkpoints come from and what runs them. Importing this package needs no torch."""

DEFAULT = "smollm2"
"""The model that is served when none is named: SmolLM2-135M-Instruct."""
NULL_MODEL = "null"
"""The integer model: no weights, no torch."""
