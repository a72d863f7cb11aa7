"""What a GGUF file says below its architecture's name; what nobody reads of it is refused."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from engine.errors import UnsupportedModel
from engine.models.gguf import GgufFile

_Value = TypeVar("_Value", str, int, float, bool)

_WITHOUT_EFFECT = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "pooling_type")
"""Keys that say nothing new about a decoder."""


class Metadata:
    """The values of one architecture, by their keys without its name."""

    def __init__(self, gguf: GgufFile, architecture: str) -> None:
        """Read `gguf`, a file of that architecture."""
        self.gguf = gguf
        self._prefix = f"{architecture}."

    def value(self, key: str, kind: type[_Value], default: _Value | None = None) -> _Value:
        """Return a value; see `GgufFile.value`."""
        return self.gguf.value(self._prefix + key, kind, default)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a float32 of the file as the shortest decimal that gives it: 1e-05, not 9.99999975e-06."""
        return shortest(self.value(key, float, default))

    def has(self, key: str) -> bool:
        """Whether there is a value of `key`."""
        return self.gguf.has(self._prefix + key)

    def has_tensor(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self.gguf.tensors

    def refusal(self, what: str) -> UnsupportedModel:
        """Return the error that says `what` is not converted."""
        return UnsupportedModel(f"{self.gguf.path}: {what} is not converted")

    def refuse_unread(self) -> None:
        """Raise UnsupportedModel if there is something that nobody has asked for and that may have an effect."""
        without_effect = {self._prefix + key for key in _WITHOUT_EFFECT}
        unread = [key for key in self.gguf.unasked(self._prefix) if key not in without_effect]
        if unread:
            raise self.refusal(f"what the metadata {', '.join(unread[:5])} asks for")


def shortest(number: float) -> float:
    """Return the shortest decimal that is the same float32."""
    return float(str(np.float32(number)))
