"""The decoder's step as a program of operations in C, and the pages its attention reads.

The same layers as `Decoder`, whose loaded weights it takes over and packs; residuals stay in float32. What a row gets
depends on its request alone, bit for bit: every operation keeps one order of sums, whatever rows there are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from engine.attention.compiled import CompiledPages
from engine.errors import ConfigError
from engine.kernels.memory import Arena, pointer, zeros
from engine.kernels.operations import (
    ACTIVATIONS,
    DTYPES,
    INPUT_MULTIPLE,
    LANES,
    MAX_HEAD,
    ROW_MULTIPLE,
    Attend,
    Cap,
    Embed,
    Epilogue,
    Form,
    Greatest,
    Kind,
    Norm,
    Product,
    Program,
    Rotate,
    Step,
    Team,
    greatest,
)
from engine.kernels.weights import Int4, PackedWeight, interleaved
from engine.models.checkpoint import EMBEDDING, HEAD
from engine.models.decoder import NORM_NAMES, Layer, embedding_scale
from engine.models.decoder import Norm as DecoderNorm
from engine.models.decoder_config import DecoderConfig
from engine.models.linear import Linear
from engine.models.mlp import DenseMlp
from engine.models.rotary import RotaryEmbedding


def why_not(config: DecoderConfig, block_size: int, dtype: torch.dtype, *, is_quantized: bool) -> str | None:
    """Return what keeps this decoder from the operations in C; None: nothing."""
    if dtype == torch.float16 and not is_quantized:
        return "they have no float16: --dtype auto takes such a checkpoint for bfloat16"
    sizes = {"hidden size": config.hidden_size, "MLP size": config.intermediate_size, "head size": config.head_dim}
    for name, size in sizes.items():
        if size % LANES:
            return f"its {name} {size} is no multiple of {LANES}"
    if config.head_dim > MAX_HEAD:
        return f"its head size {config.head_dim} is above {MAX_HEAD}"
    if any(experts is not None for experts in config.experts):
        return "it has experts"
    if block_size % LANES:
        return f"--block-size {block_size} is no multiple of {LANES}"
    if any(rope is not None and rope.dim % 2 for rope in config.ropes):
        return "it rotates an odd number of dimensions"
    return None


PARTS = [*[kind.name.lower() for kind in Kind], "logits"]
"""Of a program's time: operations of the layers by their kind, and those of the head."""
T = TypeVar("T")
Fill = Callable[[Mapping[str, torch.Tensor]], None]


class Forms(NamedTuple):
    """What weights of the layers, the head's, and keys and values are stored as."""

    layers: Form
    head: Form
    pages: Form


class _HandedOn(NamedTuple):
    """Where rows are written, in what form and with what stride; what makes inputs of a product of them, and those."""

    out: torch.Tensor
    written: tuple[Form, int]
    prepared: list[Norm]
    rows: torch.Tensor


class _Rows:
    """Room for rows, of which a step uses the first; that cut is kept, for torch takes 50 us for one after a step."""

    def __init__(self, room: torch.Tensor) -> None:
        self.room = self._first = room
        self._num_rows = room.shape[0]

    def first(self, num_rows: int) -> torch.Tensor:
        if num_rows != self._num_rows:
            self._first, self._num_rows = self.room[:num_rows], num_rows
        return self._first


class _Head(NamedTuple):
    """What scores rows, which it is aimed at before each run; `operations` are those that this model has."""

    prepare: Norm
    product: Product
    cap: Cap
    greatest: Greatest
    operations: list[ctypes.Structure]
    program: Program


def row_bytes(config: DecoderConfig, forms: Forms) -> int:
    """Return the memory that a row of a step takes between the operations, its scores of tokens left out."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    handed_on = [queries, config.intermediate_size]
    numbers = [*[config.hidden_size] * 3, queries + 2 * keys]
    numbers += [] if forms.layers in DTYPES else handed_on
    inputs = [(size, forms.layers) for size in handed_on]
    inputs += [(config.hidden_size, form) for form in {forms.layers, forms.head}]
    return (
        4 * sum(numbers)
        + config.num_heads * forms.pages.query_bytes(config.head_dim)
        + sum(form.row_bytes(_padded(size)) for size, form in inputs)
    )


def _padded(size: int) -> int:
    return size + -size % INPUT_MULTIPLE


class CompiledDecoder:
    """A `Model` whose step is one call into C.

    Attributes:
        num_stored_int4: Tensors of the checkpoint that were taken in the 4 bits that it holds them in.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        fill: Fill,
        max_rows: int,
        max_model_len: int,
        team: Team,
        forms: Forms,
        int4: Mapping[str, Callable[[], Int4]] | None = None,
    ) -> None:
        """Load and pack the weights, layer by layer, so that little lies in memory twice.

        Args:
            config: Of the decoder; see `why_not`.
            dtype: Weights are read as.
            fill: Copies tensors of the checkpoint, by their names, into the given ones.
            max_rows: The most rows of a step.
            max_model_len: The positions that can be rotated.
            team: Runs the operations.
            forms: What weights, keys and values are stored as.
            int4: Reads a tensor that the checkpoint holds in 4 bits, by name: taken as it is where the form is INT4.

        Raises:
            UnsupportedModel: A rotary embedding cannot be had for so many positions.
        """
        self.config = config
        self._team = team
        self._forms = forms
        self._max_rows = -(-max_rows // ROW_MULTIPLE) * ROW_MULTIPLE
        self.num_stored_int4 = 0
        self._memory: list[Any] = []
        self._inputs: dict[tuple[int, Form], torch.Tensor] = {}
        self._arena = arena = Arena()
        self._hidden = self._room(config.hidden_size)
        self._normed = self._room(config.hidden_size)
        self._normed_rows = _Rows(self._normed.view(-1, config.hidden_size))
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._qkv = self._room(queries + 2 * keys)
        self._queries = self._room(config.num_heads * forms.pages.query_bytes(config.head_dim), torch.uint8)
        self._attended = self._handed_on(queries)
        self._gated = self._handed_on(config.intermediate_size)
        self._output = self._room(config.hidden_size)
        self._logits = self._values = self._token_ids = _Rows(torch.empty(0))
        self._scored: torch.Tensor | None = None
        self._found: torch.Tensor | None = None
        self._times_ns = (ctypes.c_int64 * len(PARTS))()
        self._rotations: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        for rope in {rope for rope in config.ropes if rope}:
            rotary = RotaryEmbedding(rope, max_model_len, torch.float32)
            self._rotations[rope] = self._keep(arena.copy(rotary.cos)), self._keep(arena.copy(rotary.sin))
        self._int4 = int4 or {}
        self._names: dict[int, tuple[str, int]] = {}
        embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
        self._fill_parts({EMBEDDING: embedding}, fill)
        form = forms.head if config.ties_embeddings else Form.of("none", dtype)
        self._embedding = head = self._packed(embedding, None, form)
        if not config.ties_embeddings:
            self._fill_parts({HEAD: embedding}, fill)
            head = self._packed(embedding, None, forms.head)
        del embedding
        self._embedding_scale = embedding_scale(config, dtype)
        self._head = self._describe_head(head)
        self._layers = [self._layer(index, dtype, fill) for index in range(config.num_layers)]
        norm = DecoderNorm(config.hidden_size, config, dtype)
        fill({"model.norm.weight": norm.weight})
        self._final_norm = self._norm(norm, self._hidden, self._normed, Form.FLOAT32)
        self._program: Program

    @property
    def operation_seconds(self) -> dict[str, float]:
        """See `Model.operation_seconds`."""
        return {part: time / 1e9 for part, time in zip(PARTS, self._times_ns, strict=True) if time}

    def use_attention(self, pages: CompiledPages) -> None:
        """See `Model.use_attention`."""
        config = self.config
        weight = self._embedding
        embed = Embed(Kind.EMBED, weight.form, config.hidden_size, weight.num_inputs, self._embedding_scale)
        embed.weight, embed.scales, embed.out = pointer(weight.data), pointer(weight.scales), pointer(self._hidden)
        operations: list[ctypes.Structure] = [embed]
        for index, layer in enumerate(self._layers):
            group, places = pages.places(index)
            for operation in layer:
                if isinstance(operation, Rotate | Attend):
                    operation.group, operation.places = group, places
            operations += layer
        operations.append(self._final_norm)
        head = self._head.operations
        self._program = Program(operations, [self._memory, pages])
        self._scoring_program = Program([*operations, *head], [self._memory, pages])
        self._num_operations = len(operations)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        """See `Model.forward`.

        Where each request has one row, as where all decode, all are scored in the same call: most often that is asked.
        """
        step: Step = batch
        step.token_ids, step.positions = pointer(token_ids), pointer(positions)
        step.head, step.times = self._num_operations, ctypes.addressof(self._times_ns)
        ctypes.memset(self._times_ns, 0, ctypes.sizeof(self._times_ns))
        are_scored = step.num_rows == step.num_requests
        if are_scored:
            self._make_room_for_scores(step.num_rows)
            self._aim_head(self._normed, 0)
        (self._scoring_program if are_scored else self._program).run(step, self._team)
        hidden = self._normed_rows.first(step.num_rows)
        self._scored = hidden if are_scored else None
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        num_rows = hidden.shape[0]
        are_scored, self._scored = hidden is self._scored, None  # once, for they may be changed
        if not are_scored:
            self._make_room_for_scores(num_rows)
            rows = hidden.contiguous()
            for first in range(0, num_rows, self._max_rows):
                self._aim_head(rows[first:], first)
                self._head.program.run(Step(num_rows=min(self._max_rows, num_rows - first)), self._team)
        self._found = self._logits.first(num_rows)
        return self._found

    def greatest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what `operations.greatest` does; of what `logits` gave last it was done in the same call.

        That holds once, for then they may be changed.
        """
        are_found, self._found = logits is self._found, None
        if are_found:
            return self._values.first(logits.shape[0]), self._token_ids.first(logits.shape[0])
        return greatest(self._team, logits)

    def _make_room_for_scores(self, num_rows: int) -> None:
        if num_rows > self._logits.room.shape[0]:
            num_rows *= 2
            self._logits = _Rows(zeros(num_rows * self.config.vocab_size, torch.float32).view(num_rows, -1))
            self._values = _Rows(torch.empty(num_rows))
            self._token_ids = _Rows(torch.empty(num_rows, dtype=torch.int64))

    def _aim_head(self, rows: torch.Tensor, first: int) -> None:
        """Have the head score `rows`, into the room for logits from row `first` on."""
        head, logits = self._head, self._logits.room.data_ptr() + 4 * first * self.config.vocab_size
        head.prepare.in_, head.product.out, head.cap.rows, head.greatest.rows = rows.data_ptr(), logits, logits, logits
        head.greatest.values = self._values.room.data_ptr() + 4 * first
        head.greatest.places = self._token_ids.room.data_ptr() + 8 * first

    # -- description -------------------------------------------------------------------------------------------------

    def _layer(self, index: int, dtype: torch.dtype, fill: Fill) -> list[ctypes.Structure]:
        config, form = self.config, self._forms.pages
        layer = Layer(config, index, dtype)
        tensors = {f"model.layers.{index}.{name}": tensor for name, tensor in layer.destinations().items()}
        self._fill_parts(tensors, fill)
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        width = queries + 2 * keys
        mlp = layer.mlp
        assert isinstance(mlp, DenseMlp)
        norms = [layer.norms.get(name) if name else None for name in NORM_NAMES[config.traits.norm_places]]
        operations = [
            self._prepared(norms[0], self._hidden, config.hidden_size),
            self._linear(layer.qkv, self._input(config.hidden_size), self._qkv, width),
        ]
        for name, first, size in (("q_norm", 0, queries), ("k_norm", queries, keys)):
            if name in layer.head_norms:
                part = self._qkv[first:]
                operations.append(self._norm(layer.head_norms[name], part, part, Form.FLOAT32, size, width))
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        rope = config.ropes[index]
        cosines, sines = self._rotations[rope] if rope else (None, None)
        operations += [
            Rotate(Kind.ROTATE, form, *heads, rope.dim if rope else 0),
            Attend(Kind.ATTEND, form, *heads, config.windows[index] or 0),
        ]
        rotate, attend = operations[-2:]
        attend.scale, attend.cap = config.attention_scale, config.attention_softcap or 0.0
        rotate.cosines, rotate.sines, rotate.qkv = pointer(cosines), pointer(sines), pointer(self._qkv)
        rotate.queries = attend.queries = pointer(self._queries)
        attend.out, attend.out_form, attend.out_stride = pointer(self._attended.out), *self._attended.written
        operations += self._attended.prepared
        operations += self._added(layer.output, self._attended.rows, norms[1])
        gate = self._linear(mlp.gate_up, self._input(config.hidden_size), self._gated.out, 0, Epilogue.GATE)
        gate.out_form, gate.out_stride = self._gated.written
        operations += [self._prepared(norms[2], self._hidden, config.hidden_size), gate, *self._gated.prepared]
        return operations + self._added(mlp.down, self._gated.rows, norms[3])

    def _added(self, linear: Linear, rows: torch.Tensor, norm: DecoderNorm | None) -> list[ctypes.Structure]:
        size, multiplier = self.config.hidden_size, self.config.residual_multiplier
        if norm is None:
            return [self._linear(linear, rows, self._hidden, size, Epilogue.ADD)]
        added = self._norm(norm, self._output, self._hidden, Form.FLOAT32)
        added.adds, added.multiplier = 1, multiplier
        return [self._linear(linear, rows, self._output, size), added]

    def _handed_on(self, size: int) -> _HandedOn:
        """Make room for rows that one operation writes and a product of the layers takes."""
        form = self._forms.layers
        rows = self._room(form.row_bytes(_padded(size)), torch.uint8)
        if form in DTYPES:
            return _HandedOn(rows, (form, _padded(size)), [], rows)
        out = self._room(size)
        return _HandedOn(out, (Form.FLOAT32, size), [self._changed(None, out, rows, form, size)], rows)

    def _prepared(self, norm: DecoderNorm | None, rows: torch.Tensor, size: int, form: Form | None = None) -> Norm:
        """Describe the change of rows into inputs of products with weights of `form`, that of layers by default."""
        form = form or self._forms.layers
        return self._changed(norm, rows, self._input(size, form), form, size)

    def _changed(self, norm: DecoderNorm | None, rows: torch.Tensor, out: torch.Tensor, form: Form, size: int) -> Norm:
        operation = self._norm(norm, rows, out, form, size, size)
        operation.out_stride = _padded(size)
        return operation

    def _norm(
        self,
        norm: DecoderNorm | None,
        rows: torch.Tensor,
        out: torch.Tensor,
        form: Form,
        size: int | None = None,
        stride: int | None = None,
    ) -> Norm:
        size = size or self.config.hidden_size
        stride = stride or size
        weight = None
        if norm is not None:
            weight = norm.weight.float() + (1 if self.config.traits.norm == "unit_offset" else 0)
            weight = self._keep(self._arena.copy(weight))
        part = size if weight is None else len(weight)
        operation = Norm(Kind.NORM, form, part, size // part, 0, self.config.norm_eps, 1.0)
        operation.weight, operation.in_, operation.out = pointer(weight), pointer(rows), pointer(out)
        operation.in_stride = operation.out_stride = stride
        return operation

    def _linear(
        self, linear: Linear, rows: torch.Tensor, out: torch.Tensor, stride: int, epilogue: Epilogue = Epilogue.STORE
    ) -> Product:
        """Describe a layer's product with `rows`, its weight packed."""
        packed = self._packed(linear.weight, linear.bias, self._forms.layers, is_interleaved=epilogue is Epilogue.GATE)
        return self._product(packed, rows, out, stride, epilogue)

    def _packed(
        self, weight: torch.Tensor, bias: torch.Tensor | None, form: Form, *, is_interleaved: bool = False
    ) -> PackedWeight:
        """Pack `weight`, of which the checkpoint's own 4 bits are taken as they are where the form is INT4."""
        int4 = self._stored_int4(weight) if form is Form.INT4 else None
        if is_interleaved:
            weight, bias = interleaved(weight), None if bias is None else interleaved(bias)
            int4 = None if int4 is None else Int4(*map(interleaved, int4))
        return self._keep(PackedWeight(weight, bias, form, int4, self._arena))

    def _product(
        self,
        packed: PackedWeight,
        rows: torch.Tensor,
        out: torch.Tensor,
        stride: int,
        epilogue: Epilogue = Epilogue.STORE,
    ) -> Product:
        activation = ACTIVATIONS[self.config.activation]
        operation = Product(Kind.LINEAR, packed.form, packed.num_outputs, packed.num_inputs, epilogue, activation)
        operation.multiplier = self.config.residual_multiplier
        operation.weight, operation.scales = pointer(packed.data), pointer(packed.scales)
        operation.bias, operation.in_ = pointer(packed.bias), pointer(rows)
        operation.out, operation.out_stride = pointer(out), stride
        return operation

    def _fill_parts(self, tensors: Mapping[str, torch.Tensor], fill: Fill) -> None:
        """Fill `tensors`, by the checkpoint's names, of which the weights that are packed next are made."""
        fill(tensors)
        self._names = {tensor.data_ptr(): (name, len(tensor)) for name, tensor in tensors.items() if tensor.dim() == 2}

    def _stored_int4(self, weight: torch.Tensor) -> Int4 | None:
        """Return `weight` in 4 bits, what the checkpoint holds so as it is; None where it holds nothing of it so.

        A weight may be several tensors of the checkpoint, one above the other.
        """
        parts: list[tuple[torch.Tensor, Callable[[], Int4] | None]] = []
        row = 0
        while row < len(weight):
            name, num_rows = self._names[weight[row].data_ptr()]
            parts.append((weight[row : row + num_rows], self._int4.get(name)))
            row += num_rows
        num_stored = sum(read is not None for _, read in parts)
        if not num_stored:
            return None
        self.num_stored_int4 += num_stored
        return Int4.joined(Int4.of(rows) if read is None else read() for rows, read in parts)

    def _describe_head(self, head: PackedWeight) -> _Head:
        hidden_size, vocab_size = self.config.hidden_size, self.config.vocab_size
        prepare = self._prepared(None, self._hidden, hidden_size, head.form)
        product = self._product(head, self._input(hidden_size, head.form), self._output, vocab_size)
        cap = Cap(Kind.CAP, self.config.vocab_size, self.config.logits_divisor, self.config.logits_softcap or 0.0)
        of_rows = Greatest(Kind.GREATEST, self.config.vocab_size)
        changes = self.config.logits_divisor != 1 or self.config.logits_softcap
        operations = [prepare, product, cap, of_rows] if changes else [prepare, product, of_rows]
        return _Head(prepare, product, cap, of_rows, operations, Program(operations, []))

    def _input(self, size: int, form: Form | None = None) -> torch.Tensor:
        """Return the room for `size` inputs of products with weights of `form`; what pads them stays zero."""
        form = form or self._forms.layers
        if (size, form) not in self._inputs:
            self._inputs[size, form] = self._room(form.row_bytes(_padded(size)), torch.uint8)
        return self._inputs[size, form]

    def _room(self, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        try:
            return self._keep(zeros(self._max_rows * size, dtype, is_huge=False))
        except OSError as error:
            raise ConfigError(
                f"there is no memory for {self._max_rows} rows of a step of {size * dtype.itemsize} bytes each "
                f"({error.strerror}): lower --max-num-batched-tokens"
            ) from None

    def _keep(self, memory: T) -> T:
        self._memory.append(memory)
        return memory
