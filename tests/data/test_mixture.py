"""Mixture: sources of shards, their checks, batches, validation and what a continued run may change."""

from __future__ import annotations

import numpy as np
import pytest
from prepared import prepared
from recorder import SaveAt, fit, write

from lit_llm.core.errors import UserError
from lit_llm.data import Bytes, Mixture, MixturePhase, MixtureSource, ShardWriter
from lit_llm.ingest.chat import ChatForm

T = 4


def source(folder, first: int, tokens: int, **settings) -> MixtureSource:
    """A source whose training token i is first + i, so that a batch shows where it was read."""
    folder.mkdir()
    write(folder, "train", first + np.arange(tokens))
    write(folder, "val", first + np.arange(30))
    return MixtureSource(train=f"{folder}/train_*.bin", val=f"{folder}/val_*.bin", **settings)


@pytest.fixture
def sources(tmp_path):
    return {"web": source(tmp_path / "web", 0, 121), "code": source(tmp_path / "code", 500, 62)}


def mixture(sources, *phases, max_steps=100, **settings) -> Mixture:
    defaults = {"block_size": T, "global_batch_size": 6, "vocab_size": 1000, "seed": 3}
    data = Mixture(sources=sources, phases=[MixturePhase(w, u) for u, w in phases], **(defaults | settings))
    data.find_run(max_steps=max_steps, max_epochs=-1, saved=None)
    return data


def test_rows_are_blocks_of_their_source(sources):
    data = mixture(sources, (0.5, {"web": 0.75, "code": 0.25}), (1.0, {"code": 100}), max_steps=10)
    data.setup()
    batches = list(zip(range(10), data.train_dataloader(), strict=False))
    rows = np.concatenate([batch["input_ids"].numpy() for _, batch in batches])
    targets = np.concatenate([batch["targets"].numpy() for _, batch in batches])
    numbers = np.concatenate([batch["sources"].numpy() for _, batch in batches])
    assert data.source_names == ["web", "code"]
    np.testing.assert_array_equal(targets, rows + 1)
    np.testing.assert_array_equal(numbers, (rows[:, 0] >= 500).astype(int))
    assert np.sum(numbers[:28] == 0) == 21  # seven periods of four
    assert np.all(numbers[30:] == 1)
    code = (rows[numbers == 1, 0] - 500) // T
    assert len(set(code[:15].tolist())) == 15  # 61 // 4 blocks, each once an epoch


def test_a_packed_source_is_read_block_after_block_of_its_plan(tmp_path):
    sources = {"web": source(tmp_path / "web", 0, 5), "code": source(tmp_path / "code", 500, 5)}
    for name, first in (("web", 0), ("code", 500)):  # documents of 8 tokens: a block of 4 pairs, and one of 3 with padding
        with ShardWriter(tmp_path / name, "train", vocab_size=1000, shard_tokens=1000) as writer:
            for start in range(first, first + 96, 8):
                writer.write(np.arange(start, start + 8))
                writer.end_document()
    data = mixture(sources, (1.0, {"web": 50, "code": 50}), packing="best_fit", max_steps=8)  # 48 samples
    assert data.draws()[0].sources["web"].epochs == 24 / 23  # before there is a plan: (96 - 1) // 4 blocks
    data.setup()
    assert data.draws()[0].sources["web"].epochs == 1
    batches = [batch for batch, _ in zip(data.train_dataloader(), range(8), strict=False)]
    starts = [start for first in (0, 500) for start in range(first, first + 96, 4)]
    assert sorted(int(row[0]) for batch in batches for row in batch["input_ids"]) == starts  # each block once


def test_validation_reads_every_held_out_token_of_every_source_once(sources):
    data = mixture(sources, (1.0, {"web": 1}))
    data.phases[0].weights["code"] = 0
    data.setup()
    batches = list(data.val_dataloader())
    targets = np.concatenate([batch["targets"].numpy() for batch in batches])
    numbers = np.concatenate([batch["sources"].numpy() for batch in batches])
    for number, first in ((0, 0), (1, 500)):
        of_source = targets[numbers == number]
        assert sorted(of_source[of_source != -100].tolist()) == list(range(first + 1, first + 30))


# ---- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phases", "sentence"),
    [
        ([], "A mixture needs weights"),
        ([(1.0, {"web": 1, "coed": 0})], "Phase 1 has a weight for coed, which is not a source: the sources are web, code"),
        ([(1.0, {"web": 1})], "Source code has no weight in any phase: give it one, or 0"),
        ([(0.9, {"web": 1, "code": 0})], "The last phase ends at 0.9, but the run goes on: set its until to 1"),
        ([(0.9, {"web": 1}), (0.5, {"code": 1})], "Phase 2 ends at 0.5, but the one before ends at 0.9: put them in order"),
    ],
)
def test_wrong_phases_are_refused(sources, phases, sentence):
    [found] = mixture(sources, *phases).problems()
    assert sentence in found


@pytest.mark.parametrize(
    ("web", "sentence"),
    [
        (MixtureSource(), "Source web has no shards: give --data.sources.web.path"),
        (MixtureSource(path="nowhere"), "nowhere is not found: give a folder that prepare wrote (--data.sources.web.path)"),
        (MixtureSource(path="a", max_epochs=0), "max_epochs of web is 0, but must be above 0, or null"),
    ],
)
def test_wrong_sources_are_refused(sources, web, sentence):
    [found] = mixture(sources | {"web": web}, (1.0, {"web": 1, "code": 0})).problems()
    assert sentence in found


def test_a_run_that_would_read_a_source_more_often_than_allowed_is_refused(sources):
    sources["code"].max_epochs = 4  # 61 // 4 = 15 blocks: 60 samples, a fifth of 300
    phases = (1.0, {"web": 80, "code": 20})
    assert mixture(sources, phases, max_steps=50).problems() == []
    [found] = mixture(sources, phases, max_steps=55).problems()
    assert found.startswith("The run would read source code 4.4 times, but its max_epochs is 4:")
    assert found.endswith("--data.sources.code.max_epochs 4.4.")
    # A continued run counts what it has read: 100 samples of web alone came first.
    later = mixture(sources, phases)
    saved = {"consumed_samples": 100, "global_step": 10, "phases": [[330, {"web": 1}]]}
    later.find_run(max_steps=55, max_epochs=-1, saved=saved)
    assert later.problems() == []
    assert [phase.end for phase in later.draws()] == [100, 370]
    assert later.describe_phases() == ["phases: until step 55 web 4, code 1"]
    later.find_run(max_steps=10, max_epochs=-1, saved=saved | {"phases": [[100, {"web": 1}]]})
    assert later.describe_phases() == []  # the run is finished


def test_sources_that_do_not_fit_together_are_refused(sources, tmp_path):
    both = (1.0, {"web": 50, "code": 50})
    short = source(tmp_path / "short", 0, T)
    [found] = mixture({"web": short, "code": sources["code"]}, both).problems()
    assert "Source web has 4 training tokens, but a block needs 5" in found
    leak = MixtureSource(train=sources["code"].val, val=sources["code"].val.replace("code", "web"))
    [found] = mixture({"web": leak, "code": sources["code"]}, both).problems()
    assert "is training text of source web and val text of source code" in found
    for each in sources.values():
        each.val = None
    assert mixture(sources, both).problems() == [
        "No source has val shards: give one, such as --data.sources.NAME.val (--data.sources)."
    ]
    one = prepared(tmp_path / "one")
    other = prepared(tmp_path / "other", identity="another")
    [found] = mixture({"web": MixtureSource(str(one)), "code": MixtureSource(str(other))}, both, vocab_size=None).problems()
    assert found == "Sources code and web have different tokenizers: prepare them with one (--data.sources)."


def test_conversations_of_two_forms_are_refused(tmp_path):
    web, chat, other = (prepared(tmp_path / name) for name in ("web", "chat", "other"))
    sources = {folder.name: MixtureSource(str(folder)) for folder in (web, chat, other)}
    weights = {"web": 50, "chat": 25, "other": 25}
    ChatForm("{{ messages }}", 256).write(chat)
    form = ChatForm("{{ messages[0] }}", 256)
    form.write(other)
    [found] = mixture(sources, (1.0, weights), vocab_size=None).problems()
    assert found == (
        f"The conversations of {chat} and {other} have different chat templates: prepare them with one (--data.sources)."
    )
    data = mixture(sources, (1.0, {"web": 50, "other": 50, "chat": 0}), vocab_size=None)
    data.setup()
    assert data.chat_form == form  # not that of a source that is only validated


def test_folders_give_vocabulary_tokenizer_and_ids_and_a_source_may_lack_training_text(tmp_path):
    web, exam = prepared(tmp_path / "web"), prepared(tmp_path / "exam", {"val": np.arange(20)})
    sources = {"exam": MixtureSource(str(exam)), "web": MixtureSource(str(web))}
    data = mixture(sources, (1.0, {"web": 1, "exam": 0}), vocab_size=None)
    data.setup()
    assert (data.vocab_size, data.eos_id, data.bos_id, data.train_tokens, data.val_tokens) == (257, 256, None, 200, 50)
    assert data.tokenizer.identity() == Bytes().identity()
    assert data.corpus.token_bytes_of("val").equal(data.token_bytes)  # Bytes is exact
    assert set(next(iter(data.train_dataloader()))["sources"].tolist()) == {1}


# ---- Runs that continue ---------------------------------------------------------------------------------------------


def read_in(module) -> list[tuple[int, int]]:
    """(source, first token) of every sample."""
    return [
        (int(number), int(row[0]))
        for batch in module.seen
        for number, row in zip(batch["sources"], batch["input_ids"], strict=True)
    ]


PHASES = ((0.5, {"web": 0.5, "code": 0.5}), (1.0, {"web": 0.75, "code": 0.25}))


def test_a_continued_run_reads_what_the_first_would_have(tmp_path, sources):
    whole, _ = fit(tmp_path, mixture(sources, *PHASES), max_steps=10, callbacks=[SaveAt(4, tmp_path / "4.ckpt")])
    rest, _ = fit(tmp_path, mixture(sources, *PHASES, micro_batch_size=2), tmp_path / "4.ckpt", max_steps=10)
    assert read_in(rest) == read_in(whole)[24:]


def test_changed_weights_apply_from_the_checkpoint_on_and_are_announced(tmp_path, sources, capsys):
    whole, _ = fit(tmp_path, mixture(sources, *PHASES), max_steps=10, callbacks=[SaveAt(4, tmp_path / "4.ckpt")])
    assert "data.phases" not in capsys.readouterr().out
    books = source(tmp_path / "books", 800, 41)
    changed = mixture(sources | {"books": books}, (1.0, {"books": 0.5, "code": 0.5, "web": 0}))
    rest, _ = fit(tmp_path, changed, tmp_path / "4.ckpt", max_steps=10, callbacks=[SaveAt(7, tmp_path / "7.ckpt")])
    assert "resume: data.phases from sample 24 on: until 60 books 1, code 1\n" in capsys.readouterr().out
    assert changed.state_dict()["phases"] == [[24, {"web": 1, "code": 1}], [60, {"books": 1, "code": 1}]]
    numbers = [number for number, _ in read_in(rest)]
    assert (numbers.count(2), numbers.count(1)) == (18, 18)
    # Source code goes on where it was: its first 15 samples are its 15 blocks, before and after the change.
    code = [token for number, token in read_in(whole)[:24] + read_in(rest) if number == 1]
    assert sorted(code[:15]) == [500 + T * block for block in range(15)]
    # It continues with the same settings, also without the source that no weight names any more.
    again = mixture({"code": sources["code"], "books": books}, (1.0, {"books": 0.5, "code": 0.5}))
    last, _ = fit(tmp_path, again, tmp_path / "7.ckpt", max_steps=10)
    assert [token for _, token in read_in(last)] == [token for _, token in read_in(rest)[18:]]
    assert "data.phases" not in capsys.readouterr().out


def test_other_text_is_a_change_and_another_source_is_none(tmp_path, sources):
    _, run = fit(tmp_path, mixture(sources, *PHASES), max_steps=2)
    checkpoint = {"Mixture": run.datamodule.state_dict()}
    more = mixture({"books": source(tmp_path / "books", 800, 41), **sources}, (1.0, {"books": 1, "web": 0, "code": 0}))
    more.setup()
    assert more.changes_since(checkpoint) == []
    other = mixture(sources | {"web": source(tmp_path / "other", 3, 121)}, *PHASES)
    other.setup()
    [found] = other.changes_since(checkpoint)
    assert found.startswith("the text of web is not the checkpoint's (--accept_changes")


@pytest.mark.parametrize(("max_epochs", "refused"), [(1.0, False), (0.9, True)])
def test_limits_of_packed_sources_count_their_real_blocks(max_epochs, refused, tmp_path):
    # Documents of 12 tokens have 11 pairs: a block of 10, and one more. Ten of these share a block.
    for name, count in (("train", 50), ("val", 2)):  # 55 blocks to train on
        with ShardWriter(tmp_path, name, vocab_size=1000, shard_tokens=1000) as shards:
            for _ in range(count):
                shards.write(np.arange(1, 13))
                shards.end_document()
    web = MixtureSource(**{name: f"{tmp_path}/{name}_*.bin" for name in ("train", "val")}, max_epochs=max_epochs)
    settings = {"block_size": 10, "global_batch_size": 5, "packing": "best_fit", "max_steps": 11}
    data = mixture({"web": web}, (1.0, {"web": 1}), **settings)
    assert data.problems() == []  # without a manifest, the blocks are counted in `setup`
    if refused:
        with pytest.raises(UserError, match=r"would read source web 1 times, but its max_epochs is 0\.9"):
            data.setup()
    else:
        data.setup()
        assert data.draws()[0].sources["web"].epochs == 1.0
