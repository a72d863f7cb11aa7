"""A model's tokenizer and chat template behind a few methods, without torch or transformers.

Gives the ids and texts that transformers gives for a Hugging Face folder; tokenizer_files.py reads it. Encoding
releases the interpreter lock and may run in a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine.client.chat_template import ChatTemplate
from engine.client.described_tools import speaks_of_tools, with_described_tools
from engine.client.tokenizer_files import read_files
from engine.errors import CheckpointError, InvalidRequest, UnsupportedModel

_NULL_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Tokenizer:
    """Text to token ids and back, for one model. Immutable but for a cache; safe to share between threads.

    Attributes:
        eos_token_ids: All that end a text, by generation_config.json, config.json and the tokenizer, in that order.
        special_token_ids: What `skip_special_tokens` leaves out.
        vocab_size: Number of tokens, added ones included.
        max_token_chars: Length of the longest token; a text of more characters than that many a token is longer.
        is_byte_level: Whether tokens are bytes in disguise, so that a text is the plain sum of its tokens' bytes.
        falls_back_to_bytes: Whether characters without a token are spelled as tokens like <0xE4>.
        sampling_defaults: Fields of `SamplingParams` as the model's generation_config.json wants them where a request
            says nothing.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        templates: dict[str, ChatTemplate],
        eos_token_ids: Iterable[int],
        sampling_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """Own `backend`; `templates` by name, of which `default` and `tool_use` are used."""
        self._backend = backend
        self._templates = templates
        self._bytes: dict[int, bytes] = {}
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.sampling_defaults = dict(sampling_defaults or {})
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.max_token_chars = max(map(len, backend.get_vocab()), default=1)
        self.is_byte_level, self.falls_back_to_bytes = _decoder_kind(backend)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""
        return "default" in self._templates

    @property
    def template_source(self) -> str:
        """The chat templates as text, one behind the other; empty where there are none."""
        return "\n".join(template.source for template in self._templates.values())

    @property
    def shows_tools(self) -> bool:
        """Whether a chat template shows tools to the model in a form of its own."""
        return any(template.shows_tools for template in self._templates.values())

    def template_reads(self, variable: str) -> bool:
        """Return whether a chat template reads that variable."""
        return any(variable in template.variables for template in self._templates.values())

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, None where it has none."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; special tokens written in it become their ids, as in transformers.

        Raises:
            InvalidRequest: The text holds lone surrogates, which are no characters.
        """
        try:
            # A batch of one: unlike `encode`, it gives the interpreter lock up while it works.
            (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError):
            shown = ascii(text[:40])
            raise InvalidRequest(f"text must be valid Unicode without lone surrogates, got {shown}") from None
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; ids outside the vocabulary have none.

        Raises:
            InvalidRequest: An id is negative or beyond 32 bits.
        """
        try:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except OverflowError:
            raise InvalidRequest(f"token ids must be from 0 to {self.vocab_size - 1}") from None

    def token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it, or None outside of it."""
        return self._backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token of a byte-level tokenizer adds to the text; none outside the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = _spelled_bytes(self.token(token_id) or "")
        return known

    def apply_chat_template(
        self,
        messages: Any,
        /,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt text of `messages`; see `ChatTemplate.render`.

        A template that shows no tools gets them described in the system message.

        Raises:
            InvalidRequest: The messages are malformed or refused by the template, or the model has none.
        """
        template = self._templates.get("tool_use") if tools is not None else None
        template = template or self._templates.get("default")
        if template is None:
            raise InvalidRequest(
                "this model has no chat template: use completions, or start the server with --chat-template"
            )
        if not template.shows_tools and (tools or speaks_of_tools(messages)):
            messages, tools = with_described_tools(messages, tools), None
        return template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables)

    def encode_chat(self, messages: Any, /, **options: Any) -> list[int]:
        """Return the token ids of `messages`; the template writes the special tokens, none are added.

        Options and errors are those of `apply_chat_template`.
        """
        return self.encode(self.apply_chat_template(messages, **options), add_special_tokens=False)


def load_tokenizer(model: str | Path, chat_template: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model folder, or of `"null"`, the integer model: bytes as ids 0 to 255.

    Args:
        model: What `store.resolve` gave, or `"null"`.
        chat_template: Jinja source to use in place of the model's own.

    Raises:
        CheckpointError: A file is missing or not what it should be.
        UnsupportedModel: The tokenizer decodes in a way that cannot be streamed correctly.
    """
    own = None if chat_template is None else {"default": chat_template}
    if str(model) == "null":
        template = ChatTemplate((own or {"default": _NULL_TEMPLATE})["default"], {})
        return Tokenizer(_bytes_backend(), {"default": template}, ())
    folder = Path(model)
    files = read_files(folder)
    sources = own or files.template_sources
    try:
        templates = {name: ChatTemplate(source, files.named_tokens) for name, source in sources.items()}
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return Tokenizer(files.backend, templates, files.eos_token_ids, files.sampling_defaults)


def _decoder_kind(backend: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """Return whether the decoder is byte-level, and whether it knows byte fallback."""
    if isinstance(backend.decoder, decoders.ByteLevel):
        return True, False
    parts = "" if backend.decoder is None else backend.decoder.__getstate__().decode()
    if "ByteLevel" in parts:
        raise UnsupportedModel(f"a tokenizer that decodes by {parts} cannot be streamed; ByteLevel must stand alone")
    return False, "ByteFallback" in parts


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable characters stand for themselves, the other bytes for U+0100 upwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _spelled_bytes(token: str) -> bytes:
    """Undo the byte alphabet; a token with other characters is added text and stands for itself."""
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode()


def _bytes_backend() -> tokenizers.Tokenizer:
    """The integer model's tokenizer: each byte is its own id, nothing is special."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=_BYTE_OF, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend
