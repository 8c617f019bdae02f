"""The memory of one micro-batch: `models/gpt.py` and `models/loss.py` replayed line by line on a tape of sizes.

The replay follows what autograd saves, as read from the log of the allocator (docs/plan.md):

- the input of a matrix product, for the gradient of its weight, and both factors of an elementwise product;
- the input of a norm, and on a CPU its normalised input, which the fused CUDA kernel recomputes;
- queries, keys, values, output and logsumexp of the attention kernel;
- under autocast, a copy of each weight and of each product's input in the compute dtype, one per product.

Symbols: B sequences, T positions, n = B·T tokens, d width, f hidden width, H heads, V vocabulary, P padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from lit_llm.buffer_sizes import SOFTMAX_NUMEL
from lit_llm.plan.parameters import ModelShape, block_matrices, local_parameters
from lit_llm.plan.tape import Tape, Tensor


@dataclass(frozen=True)
class Step:
    """The settings that determine the memory of a micro-batch on one rank.

    Attributes:
        sequences: B.
        parameter_bytes: bytes per element of the weights that the optimizer updates (4 = fp32 masters).
        compute_bytes: bytes per element in matrix products; below `parameter_bytes` under autocast.
        chunk_size: tokens whose logits exist at the same time. None: all.
        checkpointing: "none", "full", "attention", "cheap", or a number k as a string: every k-th block.
        cuda: use the kernels of a GPU, not of a CPU.
        tensor_parallel: ranks that split heads, hidden width and vocabulary, and the positions between the matrices.
        shard_gradients: ranks that share the gradients.
        gradients_exist: gradients of an earlier micro-batch exist, and this one is accumulated into them.
    """

    model: ModelShape
    sequences: int
    parameter_bytes: int = 4
    compute_bytes: int = 4
    chunk_size: int | None = None
    z_loss: bool = False
    checkpointing: str = "none"
    cuda: bool = False
    tensor_parallel: int = 1
    shard_gradients: int = 1
    gradients_exist: bool = False


@dataclass(frozen=True)
class MicroBatch:
    """Bytes of forward and backward of one micro-batch, without weights and optimizer state.

    Earlier gradients are included: those being accumulated, or those of the previous step, which Lightning frees only after
    the forward pass.

    Attributes:
        peaks: live bytes by kind at the peak of each phase ("forward, last block", "loss head", "backward, first block" …).
        written: all bytes that operations allocate, which is the write traffic to memory.
    """

    peaks: dict[str, dict[str, int]]
    written: int


@lru_cache(maxsize=4096)
def micro_batch(step: Step) -> MicroBatch:
    """Replay a micro-batch. All blocks are equal, so from three blocks on each peak is linear in their number."""
    layers = step.model.n_layer
    if layers <= 4 or step.checkpointing.isdigit():
        tape = _Replay(step).run()
        peaks, written = tape.peaks, tape.written
    else:
        three, four = (_Replay(replace(step, model=replace(step.model, n_layer=n))).run() for n in (3, 4))
        peaks = {
            phase: {kind: size + (layers - 4) * (size - three.peaks[phase][kind]) for kind, size in at_peak.items()}
            for phase, at_peak in four.peaks.items()
        }
        written = four.written + (layers - 4) * (four.written - three.written)
    return MicroBatch(peaks, written)


class _Linear:
    """y = x Wᵀ: saves its input, and under autocast its own copies of input and weight."""

    def __init__(self, replay: _Replay, x: Tensor, x_bytes: int, n_in: int, n_out: int, elements: int) -> None:
        self.replay, self.elements, self.x_bytes, self.n_in = replay, elements, x_bytes, n_in
        tape, step, n = replay.tape, replay.step, replay.tokens
        self.copies = step.compute_bytes < step.parameter_bytes
        self.weight: Tensor | None = None
        self.x, self.casts_x = x, x_bytes > step.compute_bytes
        if self.copies:
            self.weight = tape.save(tape.new(elements * step.compute_bytes, "weight copies"))
        if self.casts_x:
            self.x = tape.new(n * n_in * step.compute_bytes)
        self.y = tape.new(0 if replay.products_are_kept else n * n_out * step.compute_bytes)
        tape.save(self.x)
        if self.casts_x:
            tape.free(self.x)
        tape.free(self.weight)

    def backward(self, gradient: Tensor) -> Tensor:
        tape, step, n = self.replay.tape, self.replay.step, self.replay.tokens
        weight_gradient = tape.new(self.elements * step.compute_bytes, "gradients")
        x_gradient = tape.new(n * self.n_in * step.compute_bytes, "work")
        tape.free(gradient)
        tape.release(self.x, self.weight)
        if self.casts_x:
            x_gradient = self.replay.cast(x_gradient, n * self.n_in * self.x_bytes)
        if self.copies:
            weight_gradient = self.replay.cast(weight_gradient, self.elements * step.parameter_bytes, "gradients")
        self.replay.accumulate_grad(weight_gradient)
        return x_gradient


class _Norm:
    """RMSNorm or LayerNorm of `rows` rows. Saves its input; RMSNorm on a CPU also saves the normalised input in fp32."""

    def __init__(self, replay: _Replay, x: Tensor, x_bytes: int, rows: int, width: int, *, layernorm: bool) -> None:
        self.replay, self.size, self.x_bytes = replay, rows * width, x_bytes
        tape = replay.tape
        self.plain = layernorm or replay.step.cuda
        # CUDA's autocast runs norms in fp32; torch's own decomposition for the CPU does the same for narrow inputs.
        self.upcasts = x_bytes < 4 and not (layernorm and not replay.step.cuda)
        self.x = tape.new(self.size * 4) if self.upcasts else x
        self.statistics = tape.save(tape.new(rows * 4 * (2 if layernorm else 1)))
        tape.free(self.statistics)
        self.normalised: Tensor | None = None
        if not self.plain:
            tape.touch(self.size * 4)
            self.normalised = tape.save(tape.new(self.size * 4))
            tape.free(self.normalised)
        self.y = tape.new(self.size * (4 if self.upcasts else x_bytes))
        tape.save(self.x)
        if self.upcasts:
            tape.free(self.x)
            self.y = replay.cast(self.y, self.size * x_bytes, "activations")

    def backward(self, gradient: Tensor) -> Tensor:
        tape, size = self.replay.tape, self.size * (4 if self.upcasts else self.x_bytes)
        if self.upcasts:
            gradient = self.replay.cast(gradient, size)
        result = tape.new(size, "work")
        if self.normalised is not None:
            tape.touch(size)
            tape.free(gradient)
            tape.release(self.normalised)
            rest = tape.new(size, "work")
            tape.touch(3 * size)
            tape.free(rest)
        else:
            tape.free(gradient)
        tape.release(self.x, self.statistics)
        if self.upcasts:
            result = self.replay.cast(result, self.size * self.x_bytes)
        return result


class _Replay:
    def __init__(self, step: Step) -> None:
        self.step, self.model, self.tape = step, step.model, Tape()
        self.tokens = step.sequences * step.model.block_size  # n
        self.stream_tokens = self.tokens // step.tensor_parallel  # of the residual stream on this rank
        self.stream_bytes = step.parameter_bytes  # embeddings are not cast: the residual stream has the weights' dtype
        self.products_are_kept = False  # True while a "cheap" checkpoint recomputes what it did not save

    # -- the pass ---------------------------------------------------------------------------------------------------

    def run(self) -> Tape:
        tape, step, model = self.tape, self.step, self.model
        d, n = model.n_embd, self.stream_tokens
        held = local_parameters(model, step.tensor_parallel) * step.parameter_bytes // step.shard_gradients
        tape.live["gradients"], tape.total = held, held
        batch = tape.new(2 * self.tokens * 8)
        x = tape.new(n * d * self.stream_bytes)
        if model.position == "learned":
            x = self._swap(x, n * d * self.stream_bytes)
        x = self._dropout(x, n * d * self.stream_bytes)
        mask = self._mask()
        for i in range(model.n_layer):
            where = "first block" if i == 0 else "last block" if i == model.n_layer - 1 else "between"
            tape.enter(f"forward, {where}")
            x = self._checkpointed(self._block, x, whole=self._is_checkpointed(i))
            tape.record(partial(self._enter_block, where))
        tape.enter("forward")
        final = _Norm(self, x, self.stream_bytes, n, d, layernorm=model.norm == "layernorm")
        tape.free(x, mask)
        normed = self._gather(final.y)
        gradient_of = self._head(normed)
        tape.free(normed)

        tape.enter("backward")
        if not step.gradients_exist:  # zero_grad, between forward and backward
            tape.live["gradients"] -= held
            tape.total -= held
        tape.enter("loss head, backward")
        gradient = gradient_of()
        tape.enter("backward, last norm")
        gradient = final.backward(self._scatter(gradient))
        gradient = tape.play_back(gradient)
        tape.enter("backward, embedding")
        # The gradient of the look-up is a full matrix. With a tied head, the two gradients are added.
        table = tape.new(model.padded_vocab_size // step.tensor_parallel * d * step.parameter_bytes, "gradients")
        self.accumulate_grad(table, again=model.tie_embeddings)
        if model.position == "learned":
            self.accumulate_grad(tape.new(model.block_size * d * step.parameter_bytes, "gradients"))
        tape.free(gradient, batch)
        return tape

    def _enter_block(self, where: str, gradient: Tensor) -> Tensor:
        self.tape.enter(f"backward, {where}")
        return gradient

    def _block(self, x: Tensor) -> Tensor:
        return self._mlp_branch(self._attention_branch(x))

    def _checkpointed(self, forward: Callable[[Tensor], Tensor], x: Tensor, *, whole: bool) -> Tensor:
        """Run `forward` and save only its input (and what "cheap" saves); run it again in the backward pass."""
        tape, cheap = self.tape, forward == self._block and self.step.checkpointing == "cheap"
        if not (whole or cheap) or not tape.recording:
            return forward(x)
        tape.save(x)
        tape.recording = False
        y = forward(x)
        tape.recording = True
        kept = tape.new(self._product_bytes() if cheap else 0)
        first_record = len(tape.records)

        def backward(gradient: Tensor) -> Tensor:
            self.products_are_kept = cheap
            tape.free(forward(x))  # consumes the reference saved above
            self.products_are_kept = False
            gradient = tape.play_back(gradient, first_record)
            tape.free(kept)
            return gradient

        tape.record(backward)
        return y

    # -- the two branches of a block --------------------------------------------------------------------------------

    def _attention_branch(self, x: Tensor) -> Tensor:
        model = self.model
        norm = _Norm(self, x, self.stream_bytes, self.stream_tokens, model.n_embd, layernorm=model.norm == "layernorm")
        result = self._join(x, norm)
        y = self._checkpointed(self._attention, self._gather(norm.y), whole=self.step.checkpointing == "attention")
        return result(y)

    def _join(self, x: Tensor, norm: _Norm) -> Callable[[Tensor], Tensor]:
        """x + dropout(branch(norm(x))). Call this before the branch is computed, and the returned function after it."""
        streams: list[Tensor] = []

        def end_of_branch(gradient: Tensor) -> Tensor:
            return self._sum(norm.backward(self._scatter(gradient)), streams.pop(), in_place=True)

        self.tape.record(end_of_branch)

        def join(branch: Tensor) -> Tensor:
            size = self.stream_tokens * self.model.n_embd * self.step.compute_bytes
            branch, dropout_backward = self._dropout_with_backward(self._scatter(branch), size)

            def begin_of_branch(stream: Tensor) -> Tensor:
                streams.append(stream)
                return self._gather(dropout_backward(self._branch_gradient(stream)))

            self.tape.record(begin_of_branch)
            return self._add(x, branch)

        return join

    def _attention(self, x: Tensor) -> Tensor:
        """The attention module. It owns the reference to `x`, the normed stream."""
        model, tape, step, n = self.model, self.tape, self.step, self.tokens
        tp, c = step.tensor_parallel, step.compute_bytes
        d, q_width, kv_width = model.n_embd, model.query_width // tp, max(model.kv_width // tp, model.resolved_head_dim)
        matrices = block_matrices(model)

        def project(width: int, elements: int, normed: bool) -> tuple[_Linear, _Norm | None, Tensor]:
            linear = _Linear(self, x, self.stream_bytes, d, width, elements // tp)
            if not normed:
                return linear, None, linear.y
            heads = _Norm(self, linear.y, c, n * width // model.resolved_head_dim, model.resolved_head_dim, layernorm=False)
            tape.free(linear.y)
            return linear, heads, heads.y

        query, query_norm, q = project(q_width, matrices.query, model.qk_norm)
        key, key_norm, k = project(kv_width, matrices.key, model.qk_norm)
        value, _, v = project(kv_width, matrices.value, False)
        if model.position == "rope":
            before = q, k
            q, k = self._rotate(n * q_width), self._rotate(n * kv_width)
            tape.free(*before)
        attention = self._math_attention if model.dropout and not step.cuda else self._fused_attention
        y, attention_backward = attention(q, k, v)
        if model.position == "rope" and not step.cuda:  # a copy: the next product needs another order of heads and positions
            y = self._swap(y, n * q_width * c)
        out = _Linear(self, y, c, q_width, d, matrices.attention_project // tp)
        tape.free(x, q, k, v, y)

        def backward(gradient: Tensor) -> Tensor:
            gq, gk, gv = attention_backward(out.backward(gradient))
            if model.position == "rope":
                gk, gq = self._rotate_backward(gk), self._rotate_backward(gq)
            total = value.backward(gv)
            for linear, heads, g in ((key, key_norm, gk), (query, query_norm, gq)):
                if heads is not None:
                    g = heads.backward(g)
                    if model.position == "rope":
                        tape.touch(g.size)
                total = self._sum(total, linear.backward(g))
            return total

        tape.record(backward)
        return out.y

    def _mlp_branch(self, x: Tensor) -> Tensor:
        model = self.model
        norm = _Norm(self, x, self.stream_bytes, self.stream_tokens, model.n_embd, layernorm=model.norm == "layernorm")
        result = self._join(x, norm)
        return result(self._mlp(self._gather(norm.y)))

    def _mlp(self, x: Tensor) -> Tensor:
        """The MLP module. It owns the reference to `x`, the normed stream."""
        model, tape, step, n = self.model, self.tape, self.step, self.tokens
        d, f, c = model.n_embd, model.hidden_width // step.tensor_parallel, step.compute_bytes
        up = _Linear(self, x, self.stream_bytes, d, f, d * f)
        gate = _Linear(self, x, self.stream_bytes, d, f, d * f) if model.gated else None
        size = n * f * c
        if gate is not None:
            saved = [tape.save(gate.y), tape.save(up.y), tape.save(tape.new(size))]  # the input of silu and both factors
            hidden = tape.new(size)
            tape.free(gate.y, saved[2])
        elif model.mlp == "relu2":
            saved = [tape.save(tape.new(size))]  # the output of relu
            hidden = tape.new(size)
            tape.free(saved[0])
        else:
            saved = [tape.save(up.y)]
            hidden = tape.new(size)
        out = _Linear(self, hidden, c, f, d, d * f)
        tape.free(x, up.y, hidden)

        def backward(gradient: Tensor) -> Tensor:
            gradient = out.backward(gradient)
            if gate is not None:
                factors = [tape.new(size, "work"), tape.new(size, "work")]  # gradients of silu and of up
                tape.free(gradient)
                tape.release(*saved[1:])
                gate_gradient = self._swap(factors[0], size)
                tape.release(saved[0])
                return self._sum(gate.backward(gate_gradient), up.backward(factors[1]))
            if model.mlp == "relu2":
                tape.touch(3 * size)
                gradient = self._swap(gradient, size)
            gradient = self._swap(gradient, size)
            tape.release(*saved)
            return up.backward(gradient)

        tape.record(backward)
        return out.y

    def _fused_attention(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
        tape, step = self.tape, self.step
        kept = [q, k, v]
        if self._mask_size():
            bias = tape.new(self._mask_size() * step.compute_bytes)  # the kernel takes an additive mask
            kept.append(bias)
        y = tape.new(0 if self.products_are_kept else q.size)
        logsumexp = tape.new(self.tokens * self.model.n_head // step.tensor_parallel * 4)
        kept += [y, logsumexp]
        for tensor in kept:
            tape.save(tensor)
        tape.free(*kept[3:-2], logsumexp)

        def backward(gradient: Tensor) -> list[Tensor]:
            gradients = [tape.new(t.size, "work") for t in (q, k, v)]
            tape.free(gradient)
            tape.release(*kept)
            return gradients

        return y, backward

    def _math_attention(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
        """torch's CPU kernel with dropout on the attention weights: it saves all T² of them three times, in fp32."""
        tape, step, model = self.tape, self.step, self.model
        scores = step.sequences * model.n_head // step.tensor_parallel * model.block_size**2 * 4
        wide = q.size // step.compute_bytes * 4
        upcast = [tape.new(wide) for _ in range(3)] if step.compute_bytes < 4 else []
        scaled_q, scaled_k = tape.new(wide), tape.new(wide)
        raw = tape.new(scores)
        softmax = tape.new(scores)
        tape.touch(scores // 4)  # bools: which rows are fully masked
        tape.free(raw)
        drop, dropped = tape.new(scores), tape.new(scores)
        narrow = tape.new(scores // 2) if step.compute_bytes < 4 else None
        values, y = tape.new(wide), self.cast(tape.new(wide), q.size, "activations")
        tape.free(narrow, *upcast)
        kept = [scaled_q, scaled_k, softmax, drop, dropped, values]
        for tensor in kept:
            tape.save(tensor)
        tape.free(*kept)

        def backward(gradient: Tensor) -> list[Tensor]:
            v_gradient = tape.new(v.size, "work")
            weights = tape.new(scores, "work")
            tape.free(gradient)
            tape.release(dropped, values)
            weights = self._swap(weights, scores)
            tape.release(drop)
            tape.touch(scores)
            tape.release(softmax)
            gradients = [tape.new(wide, "work"), tape.new(wide, "work")]
            tape.free(weights)
            tape.release(scaled_q, scaled_k)
            gradients = [self.cast(g, t.size) for g, t in zip(gradients, (q, k), strict=True)]
            return [*gradients, v_gradient]

        return y, backward

    def _rotate(self, elements: int) -> Tensor:
        """Rotary embedding. It saves nothing: cosines and sines are constants."""
        self.tape.touch(elements * 4 * 2)  # the tables are fp32, and so are the products with them
        rotated = self.tape.new(elements * 4)
        return self.cast(rotated, elements * self.step.compute_bytes, "activations")

    def _rotate_backward(self, gradient: Tensor) -> Tensor:
        if self.step.compute_bytes < 4:
            gradient = self.cast(gradient, gradient.size * 2)
            gradient = self.cast(gradient, gradient.size // 2)
        self.tape.touch(2 * gradient.size)
        return self._swap(gradient, gradient.size)

    # -- the loss head ----------------------------------------------------------------------------------------------

    def _head(self, hidden: Tensor) -> Callable[[], Tensor]:
        """Logits and loss. Returns the backward pass, which returns the gradient of the normed stream."""
        # A split vocabulary always uses the chunked loss, with one chunk if no size is set.
        chunked = self.step.chunk_size or self.step.tensor_parallel > 1
        return self._chunked_head(hidden) if chunked else self._full_head(hidden)

    def _full_head(self, hidden: Tensor) -> Callable[[], Tensor]:
        tape, step, model, n = self.tape, self.step, self.model, self.tokens
        tape.enter("loss head")
        d, padded, real = model.n_embd, model.padded_vocab_size, model.vocab_size
        wide = n * real * 4
        linear = _Linear(self, hidden, self.stream_bytes, d, 0, padded * d)
        z = tape.new(n * padded * step.compute_bytes, "loss head")
        if step.compute_bytes < 4:
            z = self.cast(z, wide, "loss head")
        tanh: Tensor | None = None
        if model.logit_softcap is not None:
            divided = tape.new(wide, "loss head")
            tanh = tape.new(wide, "loss head")
            tape.free(divided)
            capped = tape.new(wide, "loss head")
            tape.free(z)
            z = capped
        log_p = tape.new(wide, "loss head")
        if padded > real and step.compute_bytes == 4 and model.logit_softcap is None:
            tape.touch(wide)  # a contiguous copy without the padding
        kept = z if step.z_loss else None  # by logsumexp
        if kept is not None:
            tape.touch(wide)
        else:
            tape.free(z)

        def backward() -> Tensor:
            of_z_loss: Tensor | None = None
            if kept is not None:
                of_z_loss = tape.new(wide, "loss head")
                tape.touch(2 * wide)
                tape.free(kept)
            gradient = tape.new(wide, "loss head")
            gradient = self._swap(gradient, wide, "loss head")
            tape.free(log_p, of_z_loss)
            if tanh is not None:
                gradient = self._swap(gradient, wide, "loss head")
                gradient = self._swap(gradient, wide, "loss head")
                tape.free(tanh)
                gradient = self._swap(gradient, wide, "loss head")
            if step.compute_bytes < 4:
                gradient = self.cast(gradient, n * real * step.compute_bytes, "loss head")
            if padded > real:
                gradient = self.cast(gradient, n * padded * step.compute_bytes, "loss head")
            return linear.backward(gradient)

        return backward

    def _chunked_head(self, hidden: Tensor) -> Callable[[], Tensor]:
        tape, step, model, n = self.tape, self.step, self.model, self.tokens
        tape.enter("loss head")
        d, c, padded = model.n_embd, step.compute_bytes, model.padded_vocab_size // step.tensor_parallel
        rows = min(step.chunk_size or n, n)
        casts = c < self.stream_bytes
        work = [tape.new((n + padded) * d * c, "loss head")] if casts else []  # hidden and weight in the compute dtype
        x_gradient = tape.new(n * d * c, "loss head")
        weight_gradient = tape.new(padded * d * 4, "gradients")
        softmax_rows = min(max(1, SOFTMAX_NUMEL // padded), rows)
        work.append(tape.new(rows * padded * c, "loss head"))
        work.append(tape.new(2 * softmax_rows * padded * 4, "loss head"))
        if c < 4:
            work.append(tape.new(padded * d * c, "loss head"))
            if not step.cuda:
                tape.touch(padded * d * 4)  # a CPU casts one chunk's product to fp32 before adding it
        tape.free(*work)

        def backward() -> Tensor:
            gradient, weight = x_gradient, weight_gradient
            if casts:
                gradient = self.cast(gradient, n * d * self.stream_bytes)
            if step.parameter_bytes < 4:
                weight = self.cast(weight, padded * d * step.parameter_bytes, "gradients")
            self.accumulate_grad(weight)
            return gradient

        return backward

    # -- small pieces -----------------------------------------------------------------------------------------------

    def cast(self, tensor: Tensor, size: int, kind: str = "work") -> Tensor:
        """Replace a tensor by a copy of another size; do nothing if the size is the same."""
        return tensor if size == tensor.size else self._swap(tensor, size, kind)

    def _swap(self, tensor: Tensor, size: int, kind: str | None = None) -> Tensor:
        made = self.tape.new(size, kind or tensor.kind)
        self.tape.free(tensor)
        return made

    def _sum(self, first: Tensor, second: Tensor, *, in_place: bool = False) -> Tensor:
        if not in_place:
            self.tape.touch(first.size)
        self.tape.free(second)
        return first

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        """x + branch, which may be narrower. Drops both references (norms keep their own reference to x)."""
        tape, size = self.tape, self.stream_tokens * self.model.n_embd * self.stream_bytes
        wide = tape.new(size) if branch.size < size else None
        result = tape.new(size)
        tape.free(wide, branch, x)
        return result

    def _branch_gradient(self, stream: Tensor) -> Tensor:
        """The gradient of a residual branch: the gradient of the stream, or a narrower copy of it."""
        size = self.stream_tokens * self.model.n_embd * self.step.compute_bytes
        if size < stream.size:
            return self.tape.new(size, "work")
        stream.references += 1
        return stream

    def _gather(self, part: Tensor) -> Tensor:
        """All-gather the positions of a stream that is split over the tensor-parallel ranks."""
        return self.cast(part, part.size * self.step.tensor_parallel, part.kind)

    def _scatter(self, whole: Tensor) -> Tensor:
        """This rank's positions of a stream (reduce-scatter)."""
        return self.cast(whole, whole.size // self.step.tensor_parallel, whole.kind)

    def _dropout(self, x: Tensor, size: int) -> Tensor:
        y, backward = self._dropout_with_backward(x, size)
        if self.model.dropout:
            self.tape.record(backward)
        return y

    def _dropout_with_backward(self, x: Tensor, size: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        if not self.model.dropout:
            return x, lambda gradient: gradient
        tape = self.tape
        mask = tape.save(tape.new(size // (4 if self.step.cuda else 1)))
        y = self._swap(x, size)
        tape.free(mask)

        def backward(gradient: Tensor) -> Tensor:
            gradient = self._swap(gradient, size)
            tape.release(mask)
            return gradient

        return y, backward

    def _mask_size(self) -> int:
        """Elements of the attention mask; 0 for plain causal attention, which needs none."""
        model = self.model
        windowed = model.window is not None and model.window < model.block_size
        if not windowed and not model.mask_documents:
            return 0
        return model.block_size**2 * (self.step.sequences if model.mask_documents else 1)

    def _mask(self) -> Tensor | None:
        size = self._mask_size()
        return self.tape.new(size) if size else None

    def _is_checkpointed(self, i: int) -> bool:
        mode = self.step.checkpointing
        return mode == "full" or (mode.isdigit() and i % int(mode) == 0)

    def _product_bytes(self) -> int:
        """Bytes of the outputs of the matrix products and the attention of one block."""
        model, tp = self.model, self.step.tensor_parallel
        widths = 2 * model.query_width // tp + 2 * model.kv_width // tp + 2 * model.n_embd
        widths += model.hidden_width // tp * (2 if model.gated else 1)
        return self.tokens * (widths * self.step.compute_bytes + model.n_head // tp * 4)

    def accumulate_grad(self, gradient: Tensor, *, again: bool = False) -> None:
        """Store the tensor as `.grad` (this rank's shard of it), or add it to an existing gradient and free it."""
        if self.step.gradients_exist or again:
            self.tape.free(gradient)
        elif self.step.shard_gradients > 1:
            self.tape.free(gradient)
            self.tape.new(gradient.size // self.step.shard_gradients, "gradients")
