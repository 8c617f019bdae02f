"""The memory and FLOPs of a micro-batch: of a whole model, or of the stages of a pipeline over an optimizer step.

A rank of a pipeline plays its actions in torch's order. The traces of the passes release the output of a stage, its input and
the gradients of both when no operation needs them. In a step, some of them stay:

- A stage has a buffer for each input and for each gradient of an output. Between stages of one rank nothing is copied: what the
  one has computed takes the place of the other's buffer.
- With several stages on a rank, torch waits only at the end of the step for what it has sent, and gloo keeps it until then.
  NCCL lets it go when it has been sent.
- The gradient of an input that is computed before those of weights stays with its input to the end of the step.
"""

from __future__ import annotations

from dataclasses import replace

from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.plan.layout import NO_PIPELINE
from lit_llm.plan.passes import Passes, Step
from lit_llm.plan.pipeline_order import Task, micro_batches_to_play, orders
from lit_llm.plan.run_settings import RunSettings
from lit_llm.plan.segments import ACTIVATIONS, BUFFERS, GRADIENTS, KINDS, LOSS_HEAD, Bytes, MicroBatch
from lit_llm.plan.weights import OwnModel, cached_by_text

_RECOMPUTED = (
    "recomputation with schedule {}: torch recomputes a block for each of its weights, which may take twice the memory that is "
    "planned"
)


@cached_by_text
def micro_batch(step: Step) -> MicroBatch:
    """Memory and FLOPs of a micro-batch; in a pipeline of a whole step. The first call for a model takes tenths of a second."""
    if isinstance(step.settings.model, OwnModel):
        from lit_llm.plan.own_trace import micro_batch_of_own  # imports torch

        return micro_batch_of_own(step)
    return _of_whole_model(step) if step.pipeline is None else _of_pipeline(step, step.pipeline)


def one_micro_batch(settings: RunSettings, *, cuda: bool) -> MicroBatch:
    """The work of a micro-batch by itself, of eager blocks that are not sharded: its FLOPs and what it writes."""
    layout = replace(settings.layout, strategy="single", shards="nothing", pipeline=NO_PIPELINE)
    alone = replace(settings, layout=layout, compute=replace(settings.compute, compile=False))
    return micro_batch(Step(alone, settings.sequences, cuda=cuda))


def _of_whole_model(step: Step) -> MicroBatch:
    passes, made, (stage,) = Passes(step), MicroBatch(), step.stages
    made.live[ACTIVATIONS] = step.ids_bytes
    kind, held = passes.gradients((stage,))
    if step.gradients_exist or kind == GRADIENTS:
        made.live[kind] = held
    passes.forward_pass(made, stage)
    if not step.gradients_exist:  # zero_grad, between forward and backward
        made.live[GRADIENTS] -= held
    passes.backward_pass(made, stage)
    return made


def _of_pipeline(step: Step, layout: PipelineLayout) -> MicroBatch:
    """The peaks of a rank of a pipeline. A step of many micro-batches repeats its middle, so that fewer are played."""
    stages = {stage.number: stage for stage in step.stages}
    count = micro_batches_to_play(layout, step.micro_batches)
    order = [task for group in orders(layout, count)[step.rank] for task in group]
    order = [task for task in order if not (task.kind == "gradients of inputs" and stages[task.stage].first)]  # nothing to do
    split = {task[1:] for task in order if task.kind == "gradients of inputs"}
    passes = [Passes(replace(step, gradients_exist=exist)) for exist in (False, True)]
    settings = step.settings
    moved = step.tokens // settings.layout.tensor_parallel * settings.gpt.n_embd * settings.weight_bytes
    whole = {}  # weights that FSDP2 has gathered for all of the step
    for number, stage in stages.items():
        gathered = passes[1].gathered(stage)
        whole[number] = gathered.forward(0).own if gathered.already else 0

    def buffers_after(task: Task) -> int:
        """Buffers left by an action that the trace does not have."""
        stage = stages[task.stage]
        before_is_here, next_is_here = (task.stage + i in stages for i in (-1, 1))
        if task.kind == "forward":
            return -next_is_here
        if task.kind == "gradients of inputs":
            return -before_is_here
        kept_by_gloo = len(stages) > 1 and not step.cuda
        output = not stage.last and (next_is_here or kept_by_gloo)
        gradient = not stage.first and (task[1:] in split or (kept_by_gloo and not before_is_here))
        return output + gradient

    known: dict[tuple[str, int, bool], MicroBatch] = {}

    def played(kind: str, number: int, exist: bool) -> MicroBatch:
        """An action by itself."""
        key, stage = (kind, number, exist), stages[number]
        if key not in known:
            run = known[key] = MicroBatch()
            if kind == "forward":
                passes[exist].forward_pass(run, stage)
            elif kind == "gradients of inputs":
                passes[exist].inputs_pass(run, stage)
            else:
                received = 0 if stage.last else moved  # the trace releases it
                run.live[ACTIVATIONS] += received
                passes[exist].backward_pass(run, stage)
                run.live[ACTIVATIONS] -= received
                if stage.last:  # also a tied matrix's gradient, which the trace adds to the embedding's
                    run.live[LOSS_HEAD] = -played("forward", number, exist).live[LOSS_HEAD]
            if kind == "gradients of weights":  # releases all that is kept
                inputs = played("gradients of inputs", number, exist).live
                run.live = [a - b for a, b in zip(run.live, inputs, strict=True)]
                run.peaks = {"backward": {name: max(0, size) for name, size in zip(KINDS, run.live, strict=True)}}
                run.on_other_streams = {"backward": 0}
        return known[key]

    made, done = MicroBatch(), set[int]()
    made.live[ACTIVATIONS] = step.micro_batches * step.ids_bytes
    made.live[ACTIVATIONS] += step.micro_batches * moved * sum((not s.first) + (not s.last) for s in step.stages)
    of_one = sum(buffers_after(task) for task in order if task.micro_batch == 0)
    made.live[ACTIVATIONS] += (step.micro_batches - count) * moved * of_one
    for task in order:
        kind = "backward" if task.kind == "gradients of weights" and task[1:] not in split else task.kind
        action = played(kind, task.stage, task.stage in done)
        others = sum(whole.values()) - whole[task.stage]
        for phase, peak in action.peaks.items():
            live = [a + peak[name] for a, name in zip(made.live, KINDS, strict=True)]
            sent = action.on_other_streams[phase]  # a part of `peak`
            made.compare(phase, live, Bytes(others - sent, sent), action.flops)
        made.live = [a + b for a, b in zip(made.live, action.live, strict=True)]
        made.live[ACTIVATIONS] += moved * buffers_after(task)
        if kind in ("backward", "gradients of weights"):
            done.add(task.stage)
            made.live[GRADIENTS] = made.live[BUFFERS] = 0
            kept, held = passes[1].gradients([stages[number] for number in sorted(done)])
            made.live[kept] = held
    if split and settings.compute.activation_checkpointing != "none":
        made.notes = (_RECOMPUTED.format(layout.schedule),)
    return made
