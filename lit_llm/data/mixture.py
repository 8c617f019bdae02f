"""Train on a mixture of token shards: named sources, weights, phases, and a limit of epochs for each source."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lit_llm.core.errors import UserError, refuse
from lit_llm.core.ranks import is_rank_zero
from lit_llm.data.corpus import Corpus, chat_forms
from lit_llm.data.mixture_order import MixtureOrder, Phase, PhaseDraws, SourceDraws, continued, phases_of, smallest_quotas
from lit_llm.data.mixture_settings import MixturePhase, MixtureSource, mixture_problems, with_names
from lit_llm.data.pack_plan import PackPlan
from lit_llm.data.shard_splits import ShardSplits, no_split_text, splits_of
from lit_llm.data.token_shards import ShardDataModule, streams_by_name
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.paths import MissingFiles, same_files

_NEEDS_LENGTH = "A mixture needs the length of the run, of which its phases are fractions: set --trainer.max_steps."


class Mixture(ShardDataModule):
    """The data module of several sources of token shards, mixed by weight. ``lit_llm.data.mixture_order`` orders the samples.

    All sources have the same tokenizer. Over every period of samples, whose length follows from the weights, the shares of the
    sources are exactly their weights. In each epoch of a source, each of its blocks is read once. Batches also have
    ``sources``: (B,) int64, the number of each row's source in ``source_names``. Validation reads the held-out text of every
    source.

    Args:
        sources: name of a source → its shards.
        phases: parts of the run, in order, each with its weights. A phase ends at a fraction of ``trainer.max_steps``.
        kwargs: the arguments of ``ShardDataModule``.
    """

    needs_max_steps = True

    def __init__(self, *, sources: dict[str, MixtureSource], phases: list[MixturePhase], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.sources, self.phases = with_names(sources), phases
        self.source_names = list(self.sources)
        self._length: tuple[int, int | None] | None = None  # max_steps and max_epochs of the Trainer
        self._past: list[Phase] = []  # the phases in the checkpoint from which the run continues
        self._made: MixtureOrder | None = None

    # ---- Checks -------------------------------------------------------------------------------------------------

    def source_problems(self) -> list[str]:
        return mixture_problems(self.sources, self.phases) or super().source_problems()

    def shard_problems(self, splits: Mapping[str, ShardSplits]) -> list[str]:
        problems = [problem for each in splits.values() for problem in each.problems]
        if not all(isinstance(problem, MissingFiles) for problem in problems):
            return problems
        return problems + self._found_problems(splits, complete=not problems)

    def _found_problems(self, splits: Mapping[str, ShardSplits], *, complete: bool) -> list[str]:
        """One sentence for each problem of the sources whose shards exist.

        ``complete``: whether the shards of all sources exist. False: missing validation text is no problem."""
        problems = self._vocabulary_problems(splits) if complete or self._manifests(splits) else []
        tokenizers = {manifest.tokenizer: name for name, each in splits.items() for _, manifest in each.manifests.values()}
        if len(tokenizers) > 1:
            names = " and ".join(sorted(tokenizers.values()))
            problems.append(f"Sources {names} have different tokenizers: prepare them with one (--data.sources).")
        if complete and not any("val" in each.streams for each in splits.values()):
            problems.append("No source has val shards: give one, such as --data.sources.NAME.val (--data.sources).")
        read = {name: each.streams["train"] for name, each in splits.items() if "train" in each.streams}
        trained = {name: stream for name, stream in read.items() if self._is_trained(name)}
        return problems + _chat_problems(trained) + _shared_files(splits)

    def problems(self, world_size: int = 1) -> list[str]:
        return super().problems(world_size) or self._run_problems()

    def _run_problems(self) -> list[str]:
        """One sentence for each problem that depends on the length of the run or the sizes of the sources.

        Before `setup`, only rank 0 knows the sizes of the sources, so other ranks do not check them.
        """
        if self._length is None:
            return []
        max_steps, max_epochs = self._length
        if max_epochs not in (None, -1):
            return [f"max_epochs is {max_epochs}, but a mixture has no epochs of its own: set --trainer.max_steps instead."]
        if max_steps == -1:
            return [_NEEDS_LENGTH]
        if self.block_size is None or not (self.is_open or is_rank_zero()):
            return []
        trained = self._training()
        problems = [
            f"Source {name} has {len(stream)} training tokens, but a block needs {self.block_size + 1} "
            f"({self.block_size} and the next one): give it more text, or lower --model.block_size."
            for name in self.sources
            if self._is_trained(name) and (stream := trained.get(name)) is not None and len(stream) <= self.block_size
        ]
        return problems or self._cap_problems()

    def _cap_problems(self) -> list[str]:
        """A sentence for each source that the run would read more than `max_epochs` times. Empty while sizes are estimates."""
        # Before `setup`, the numbers of packed blocks are only estimates without padding, so they are not checked.
        estimated = self.packing == "best_fit" and not self._plans
        if estimated or all(source.max_epochs is None for source in self.sources.values()):
            return []
        problems = []
        for name, draws in self.draws()[-1].sources.items():
            if (cap := draws.max_epochs) is not None and draws.epochs > cap:
                enough = math.ceil(round(draws.epochs * 100, 6)) / 100
                problems.append(
                    f"The run would read source {name} {draws.epochs:.4g} times, but its max_epochs is {cap:g}: lower its "
                    f"weight, give it more text, train less, or set --data.sources.{name}.max_epochs {enough:.12g}."
                )
        return problems

    def _is_trained(self, name: str) -> bool:
        return any(phase.weights.get(name) for phase in self.phases)

    def find_run(self, *, max_steps: int, max_epochs: int | None, saved: Mapping[str, Any] | None) -> None:
        self._length = max_steps, max_epochs
        if saved is not None:
            self._continue_from(saved)

    def setup(self, stage: str | None = None) -> None:
        if stage == "fit" and self.trainer is not None:
            self.find_run(max_steps=self.trainer.max_steps, max_epochs=self.trainer.max_epochs, saved=None)
        super().setup(stage)
        if self._plans:
            refuse(self._run_problems())  # now with the exact numbers of blocks

    # ---- The shards ---------------------------------------------------------------------------------------------

    def _find_splits(self) -> dict[str, ShardSplits]:
        return {
            name: splits_of(source, settings=f"--data.sources.{name}", required=["train"] if self._is_trained(name) else [])
            for name, source in self.sources.items()
        }

    def open_corpus(self) -> Corpus:
        corpus = super().open_corpus()
        trained = [name for name in corpus.of_split("train") if self._is_trained(name.rpartition("/")[0])]
        return replace(corpus, train_streams=tuple(trained), sources=tuple(self.source_names))

    def missing_text(self, split: str) -> str:
        if all(source.path is not None for source in self.sources.values()):
            return no_split_text(split, " in any source")
        return f"No {split} text in any source: give a source some, such as --data.sources.NAME.{split}."

    def _training(self) -> dict[str, TokenStream]:
        """Source → the stream of its training tokens, for the sources with training text. Can be called before `setup`."""
        streams = self.corpus.streams if self.is_open else streams_by_name(self._splits())
        return {name: streams[key] for name in self.sources if (key := f"{name}/train") in streams}

    @property
    def _plans(self) -> dict[str, PackPlan]:
        return {} if self._opened is None else self._opened.plans

    # ---- The order -----------------------------------------------------------------------------------------------

    def locate(self, g: np.ndarray) -> np.ndarray:
        return self._order().locate(g)

    def _order(self) -> MixtureOrder:
        phases, sizes = self._phases(), self._sizes()  # `setup` makes estimated sizes exact
        if self._made is None or (self._made.phases, self._made.sizes) != (phases, sizes):
            self._made = MixtureOrder(phases, sizes=sizes, seed=self.seed)
        return self._made

    def _sizes(self) -> dict[str, int]:
        """Source → the number of its training blocks; 0 without training text. With packing, estimates before `setup`."""
        if self._plans:  # packing is on, and `setup` has opened the plans
            sizes = {name.rpartition("/")[0]: len(plan) for name, plan in self._plans.items()}
        else:
            sizes = {name: (len(stream) - 1) // self._block_size for name, stream in self._training().items()}
        return dict.fromkeys(self.sources, 0) | sizes

    def _phases(self) -> list[Phase]:
        """The phases of the run, the checkpoint's past phases included. A phase's end is a number of samples.

        Raises:
            UserError: the length of the run is not known.
        """
        if (steps := self._steps()) == -1:
            raise UserError(_NEEDS_LENGTH)
        quotas = [smallest_quotas(phase.weights) for phase in self.phases]
        configured = phases_of([phase.until for phase in self.phases], quotas, self.samples.before(steps))
        return continued(self._past, configured, self._base[1])

    def _steps(self) -> int:
        """The number of optimizer steps of the whole run; -1: unknown."""
        if self.trainer is not None:
            return self.trainer.max_steps
        return -1 if self._length is None else self._length[0]

    def draws(self) -> list[PhaseDraws]:
        """A record for each phase of how much the phase reads of each source. The run's length must be known."""
        order, sizes, start, phase_draws = self._order(), self._sizes(), 0, []
        for phase in order.phases:
            before, after = order.drawn(start), order.drawn(phase.end)
            sources = {}
            for name in self.sources:
                samples = after.get(name, 0) - before.get(name, 0)
                epochs = after.get(name, 0) / sizes[name] if sizes[name] else 0.0
                sources[name] = SourceDraws(samples, samples * self._block_size, epochs, self.sources[name].max_epochs)
            phase_draws.append(PhaseDraws(phase.end, phase.period, phase.largest_deviation, sources))
            start = phase.end
        return phase_draws

    def epochs_by_source(self, steps: int) -> dict[str, float]:
        """Source → passes over it in the whole run, for sources that are read. Ignores ``steps``; the length must be known."""
        return {name: drawn.epochs for name, drawn in self.draws()[-1].sources.items() if drawn.epochs}

    def describe_phases(self) -> list[str]:
        """A list with one line about the phases that are not over: "phases: until step 54 code 6, docs 3; until step 60 …".

        The line has, for each phase, its last step and the samples of each source in a period. Empty if all phases are over.
        """
        to_come = [phase for phase in self._phases() if phase.end > self._base[1]]
        steps = range(self._base[0], self._steps() + 1)
        ends = [steps[bisect_left(steps, phase.end, key=self.samples.before)] for phase in to_come]
        shares = [f"until step {end:,} {_shares(phase)}" for end, phase in zip(ends, to_come, strict=True)]
        return [f"phases: {'; '.join(shares)}"] if shares else []

    # ---- State --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"phases": [[phase.end, phase.quotas] for phase in self._phases()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._continue_from(state_dict)
        if self.trainer is not None and self.trainer.state.fn == "fit" and self.trainer.is_global_zero:
            phases = self._phases()
            if phases != self._past:
                to_come = [phase for phase in phases if phase.end > self._base[1]]
                shares = "; ".join(f"until {phase.end:,} {_shares(phase)}" for phase in to_come)
                print(f"resume: data.phases from sample {self._base[1]:,} on: {shares}")

    def _continue_from(self, saved: Mapping[str, Any]) -> None:
        self._base = saved["global_step"], saved["consumed_samples"]
        self._past = [Phase(end, dict(quotas)) for end, quotas in saved["phases"]]


def _chat_problems(trained: Mapping[str, TokenStream]) -> list[str]:
    """A list with one sentence if the sources' conversations have different chat templates or end-of-turn ids, or the files
    with these are damaged; else an empty list. ``trained``: source → its training stream."""
    try:
        forms = chat_forms(trained.values())
    except UserError as error:
        return [str(error)]
    if len(forms) < 2:
        return []
    one, other, *_ = forms.values()
    return [f"The conversations of {one} and {other} have different chat templates: prepare them with one (--data.sources)."]


def _shared_files(splits: Mapping[str, ShardSplits]) -> list[str]:
    """A list with a sentence about one training file of a source that another source trains on or holds out; else empty."""
    names = list(splits)
    for name in names:
        training = splits[name].streams.get("train")
        for other in names:
            for split, stream in splits[other].streams.items():
                if training is None or other == name or (split == "train" and names.index(other) < names.index(name)):
                    continue
                for path, _ in same_files(training.paths, stream.paths):
                    return [
                        f"{path} is training text of source {name} and {split} text of source {other}: remove it from one "
                        "of them (--data.sources)."
                    ]
    return []


def _shares(phase: Phase) -> str:
    return ", ".join(f"{name} {quota}" for name, quota in phase.quotas.items())
