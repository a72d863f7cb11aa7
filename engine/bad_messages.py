"""What becomes of a message that cannot be decoded: whoever waits for what it held, or for its answer, learns of it.

A request or call is decoded by its engine, and a face that sent one waits until it is answered. So its id is read from
whatever came, which takes no more than its first bytes: messages are arrays of a tag, an id and the rest.

An engine's message holds outputs of many, and nobody can tell of whom: to skip it would leave tokens out of their texts
or ends out of their streams. So it is the end of the engine for its client. Progress of a start alone may be missed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.errors import Cause, EngineDeadError
from engine.outputs import FinishReason, RequestId
from engine.protocol import (
    AbortReason,
    AbortRequest,
    Configure,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    SessionPart,
    StartProgress,
    UtilityCall,
    UtilityResult,
)
from transport.codec import DecodeError

logger = logging.getLogger(__name__)

_LENGTH_BYTES = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""How many bytes hold an unsigned integer, or the length of a text, by msgpack's code for it."""


def refuse_bad_message(error: DecodeError) -> None:
    """Count an engine as dead that says what its client cannot read, unless that was only where its start is.

    Raises:
        EngineDeadError: Always but then.
    """
    tag, _ = read_head(bytes(error.payload))
    if tag != StartProgress.__name__:
        cause = Cause("ProtocolError", f"a message of the engine cannot be decoded: {error}")
        raise EngineDeadError(cause) from error
    _report(error)


def answer_bad_message(
    error: DecodeError, engine_index: int, send: Callable[[EngineCoreOutputs], None]
) -> AbortRequest | None:
    """Send the client the end of its request, or the failure of its call; what is neither is reported alone.

    A session of which a part is lost is to be aborted: that is returned.

    Raises:
        DecodeError: It is the configuration, which the engine can only wait for.
    """
    tag, asked = read_head(bytes(error.payload))
    if tag == EngineCoreRequest.__name__ and isinstance(asked, str):
        output = EngineCoreOutput(RequestId(asked), finish_reason=FinishReason.ERROR, error=Cause.of(error))
        answer = EngineCoreOutputs(engine_index, 0, outputs=[output])
    elif tag == UtilityCall.__name__ and isinstance(asked, int):
        answer = EngineCoreOutputs(engine_index, 0, utility_results=[UtilityResult(asked, failure=Cause.of(error))])
    elif tag == SessionPart.__name__ and isinstance(asked, str):
        logger.error("a part of session %s cannot be decoded, which is aborted: %s", asked, error)
        return AbortRequest([RequestId(asked)], AbortReason.CLIENT)
    elif tag == Configure.__name__:
        raise error
    else:
        _report(error)
        return None
    logger.error("refused %s %s, which cannot be decoded: %s", tag, asked, error)
    send(answer)
    return None


def _report(error: DecodeError) -> None:
    logger.error("skipped a message that is none: %s", error)


def read_head(payload: bytes) -> tuple[str | int | None, str | int | None]:
    """Return the first two values of a msgpack array, None where there is no text and no number; never raises."""
    at = 1 if payload[:1] and 0x90 <= payload[0] <= 0x9F else 3
    tag, at = _read_value(payload, at)
    asked, _ = _read_value(payload, at)
    return tag, asked


def _read_value(payload: bytes, at: int) -> tuple[str | int | None, int]:
    """Return the text or unsigned integer that begins at `at`, and where the next value does."""
    code = payload[at] if at < len(payload) else 0xC0
    if code < 0x80:
        return code, at + 1
    if 0xA0 <= code <= 0xBF:
        return _read_text(payload, at + 1, code & 0x1F)
    size = _LENGTH_BYTES.get(code, 0)
    if not size:
        return None, len(payload)
    number, at = int.from_bytes(payload[at + 1 : at + 1 + size]), at + 1 + size
    return (number, at) if code < 0xD9 else _read_text(payload, at, number)


def _read_text(payload: bytes, at: int, size: int) -> tuple[str | None, int]:
    text = payload[at : at + size]
    return (text.decode(errors="replace") if len(text) == size else None), at + size
