"""Packing against a slow reference and a count by hand; the stored plan, and blocks read by it."""

import errno
import pickle
import re
import struct
from collections import Counter
from unittest.mock import Mock

import numpy as np
import pytest

from lit_llm.core.errors import UserError
from lit_llm.data import TokenShards
from lit_llm.data.document_ends import Documents
from lit_llm.data.pack_plan import PackPlan, write_plan
from lit_llm.data.packing import best_fit, consecutive, pack
from lit_llm.data.run_length import run_length
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.shards import ShardWriter

T = 8


def write(folder, documents, *, name="train", shard_tokens=1000, end_last=True):
    """Shards of the documents, lists of ids."""
    with ShardWriter(folder, name, vocab_size=1000, shard_tokens=shard_tokens) as writer:
        for i, document in enumerate(documents):
            writer.write(np.array(document))
            if end_last or i < len(documents) - 1:
                writer.end_document()
    return writer.paths


def random_documents(seed=0, number=60, longest=30):
    """Documents of unique ids but the last, 0, which ends each."""
    rng = np.random.default_rng(seed)
    ids = iter(range(1, 10_000))
    return [[*(next(ids) for _ in range(rng.integers(0, longest))), 0] for _ in range(number)]


def data(folder, **settings):
    files = {split: str(folder / f"{split}_*.bin") for split in ("train", "val")}
    defaults = {"vocab_size": 2000, "block_size": T, "global_batch_size": 2, "packing": "best_fit", "eos_id": 0}
    return TokenShards(**(files | defaults | settings))


@pytest.fixture
def documents(tmp_path):
    made = random_documents()
    write(tmp_path, made, shard_tokens=100)
    write(tmp_path, made[:5], name="val")
    return made


def slow_best_fit(lengths, size):
    """The rooms that remain, by looking at every block for every piece."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
        else:
            rooms.append(size - length)
    return Counter(rooms)


@pytest.mark.parametrize("size", [7, 64, 1000])
def test_each_piece_goes_to_the_block_with_the_least_room_that_takes_it(size):
    lengths = np.random.default_rng(size).integers(1, size + 1, 700)
    blocks = best_fit(lengths, size)
    filled = np.bincount(blocks, weights=lengths)
    assert Counter((size - filled).astype(int).tolist()) == slow_best_fit(lengths.tolist(), size)


def test_long_documents_are_cut_from_their_start_and_counted():
    # T 8: 19 pairs are two blocks and a rest of 3, which shares a block with the document of 5.
    pieces, per_block, counts = pack(np.array([100, 200]), np.array([19, 5]), T)
    assert pieces.tolist() == [(100, 8), (108, 8), (200, 5), (116, 3)] and per_block.tolist() == [1, 1, 2]
    assert counts == (3, 2, 24, 1, 11, 0)
    # Consecutive: pairs 5...23 lie in blocks 0, 1 and 2, so 16 of 19 are apart; 24...28 lie in block 3.
    assert consecutive(np.array([5, 24]), np.array([19, 5]), T)[1:5] == (2, 24, 1, 16)


def test_an_epoch_predicts_every_token_but_the_first_once_in_its_document(tmp_path, documents):
    module = data(tmp_path)
    module.gives_documents = True
    module.setup("fit")
    blocks = module.blocks("train")
    rows = blocks.rows(np.arange(len(blocks)))
    tokens = [token for document in documents for token in document]
    assert Counter(rows.targets[rows.targets >= 0].tolist()) == Counter(tokens[1:])
    owner = {token: i for i, document in enumerate(documents) for token in document if token}
    for ids, targets, numbers in zip(*rows[:3], strict=True):
        counted = targets >= 0
        assert (ids[~counted] == 0).all() and len(set(numbers[~counted].tolist())) <= 1
        assert (np.diff(numbers) >= 0).all() and not set(numbers[counted]) & set(numbers[~counted])
        for number in set(numbers[counted].tolist()):
            inputs, follows = ids[numbers == number].tolist(), targets[numbers == number].tolist()
            assert inputs[1:] == follows[:-1]  # consecutive tokens
            of = {owner[token] for token in follows if token}
            # One document. Its first token is predicted from the end of the one before; a later part from the token before.
            assert len(of) <= 1 and inputs[0] in ({0} | set(documents[of.pop()]) if of else {0} | set(owner))
    assert not module.every_target_counts
    assert len(blocks) < sum(-(-len(document) // T) for document in documents) * 0.8  # documents share blocks


def test_documents_that_begin_with_an_id_are_read_from_it(tmp_path):
    write(tmp_path, [[1, 2, 3], [1, 4, 5, 6], [1], [1, 7, 8]])
    write(tmp_path, [[1, 2]], name="val")
    module = data(tmp_path, bos_id=1, eos_id=None)
    module.gives_documents = True
    module.setup("fit")
    [ids], [targets], [numbers] = module.blocks("train").rows(np.array([0]))[:3]
    assert ids.tolist() == [1, 4, 5, 1, 2, 1, 7, 0] and targets.tolist() == [4, 5, 6, 2, 3, 7, 8, -100]
    assert numbers.tolist() == [0, 0, 0, 1, 1, 2, 2, T]


@pytest.mark.parametrize("ends_open", [False, True])
def test_numbers_of_consecutive_rows_are_those_of_the_list_of_documents(tmp_path, ends_open):
    made = random_documents(1)
    paths = write(tmp_path, made, shard_tokens=37, end_last=False)
    stream = TokenStream(paths)
    owner = np.repeat(np.arange(len(made)), [len(document) for document in made])
    owner = owner[1:] if ends_open else owner  # that of the target
    found = pickle.loads(pickle.dumps(Documents(stream, ends_open=ends_open)))
    for start in range(0, len(stream) - 1, 5):
        length = min(23, len(stream) - 1 - start)
        assert found.numbers(start, length).tolist() == (owner[start : start + length] - owner[start]).tolist()


def test_validation_reads_consecutive_tokens_with_their_documents(tmp_path, documents):
    module = data(tmp_path)
    module.gives_documents = True
    module.setup("fit")
    tokens = np.array([token for document in documents[:5] for token in document])
    blocks = module.blocks("val")
    rows = blocks.rows(np.arange(len(blocks) + 1))  # one more than there is, as ranks may read
    kept = rows.targets.ravel() >= 0
    assert rows.targets.ravel()[kept].tolist() == tokens[1:].tolist()
    assert (rows.documents[rows.targets < 0] == T).all() and (rows.documents[rows.targets >= 0] < T).all()


def test_the_plan_depends_on_neither_shards_nor_who_makes_it(tmp_path, documents, monkeypatch):
    monkeypatch.setattr("lit_llm.data.pack_plan.POOL", 7)
    plans = []
    for name, shard_tokens in (("a", 90), ("b", 1000)):
        (tmp_path / name).mkdir()
        stream = TokenStream(write(tmp_path / name, documents, shard_tokens=shard_tokens))
        write_plan(tmp_path / name / "plan", Documents(stream, ends_open=True), size=T, key=bytes(16))
        plans.append((tmp_path / name / "plan").read_bytes())
    assert plans[0] == plans[1]
    plan = pickle.loads(pickle.dumps(PackPlan(tmp_path / "a" / "plan", size=T, key=bytes(16))))
    assert plan.counts.documents == sum(len(d) > (i == 0) for i, d in enumerate(documents))
    assert sum(len(plan.block(i)) for i in range(len(plan))) == plan.pieces


def test_a_plan_for_other_data_or_blocks_and_missing_documents_are_refused(tmp_path, documents, monkeypatch):
    data(tmp_path).setup("fit")
    path = tmp_path / "train_pack-T8.idx"
    made = path.read_bytes()
    path.rename(tmp_path / "train_pack-T16.idx")
    with pytest.raises(UserError, match="or for blocks of 8 tokens: delete it"):
        data(tmp_path, block_size=16).setup("fit")
    data(tmp_path).setup("fit")
    assert path.read_bytes() == made
    for damaged, message in (
        (b"x" * 200, "is not a plan of packing"),
        (made[:-8], "is damaged: delete it"),
        (made.replace(struct.pack("<Q", 1), struct.pack("<Q", 10**6)), "is damaged: delete it"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=message):
            module = data(tmp_path)
            module.setup("fit")
            module.blocks("train").rows(np.arange(len(module.blocks("train"))))
    path.write_bytes(made)
    with pytest.raises(UserError, match="is the plan of other shards, of another tokenizer's"):
        data(tmp_path, eos_id=None).setup("fit")  # documents would be read from elsewhere
    path.unlink()
    with monkeypatch.context() as patched:
        patched.setattr("os.replace", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
        with pytest.raises(UserError, match=r"cannot be written: Read-only file system\. Make its folder writable once"):
            data(tmp_path).setup("fit")
    assert not list(tmp_path.glob(".*"))  # nothing partial remains
    (tmp_path / "train_000003.docs").unlink()
    with pytest.raises(UserError, match=r"packing best_fit needs to know where documents end, and .*train_000003\.bin has no"):
        data(tmp_path).setup("fit")
    data(tmp_path, packing="concatenate").setup("fit")


def test_padding_is_no_part_of_an_epoch(tmp_path):
    for name in ("train", "val"):
        write(tmp_path, [[*range(10 * i + 1, 10 * i + 6), 0] for i in range(10)], name=name)
    made = data(tmp_path)
    made.setup("fit")
    # 10 documents of 6 tokens, each alone in a block of 8. Seven steps of two blocks read 1.4 times the documents.
    assert made.epochs_by_source(7) == {"": 1.4}
    # Three steps, of which the first one of the checkpoint had four blocks.
    made.load_state_dict({"consumed_samples": 4, "global_step": 1})
    assert run_length(made, 3) == f"3 steps = {(4 + 2 + 2) * T} tokens = 0.80 epochs"


def test_ranks_agree_on_the_plans_once_so_that_rank_0_may_set_up_alone_afterwards(tmp_path, documents):
    module, strategy = data(tmp_path), Mock(distributed_sampler_kwargs=None, broadcast=Mock(side_effect=lambda each: each))
    module.trainer = Mock(world_size=2, is_global_zero=True, global_rank=0, local_rank=0, strategy=strategy)
    module.prepare_data()
    module.setup()
    collectives = strategy.broadcast.call_count
    module.setup()
    assert collectives > 0 and strategy.broadcast.call_count == collectives and module.opened.plans


def test_the_plan_of_some_shards_stands_beside_that_of_all(tmp_path, documents):
    for pattern in ("train_*.bin", "train_00000[01].bin", "train_*.bin"):
        data(tmp_path, train=str(tmp_path / pattern)).setup("fit")
    of_all, of_some = sorted(tmp_path.glob("*.idx"), key=lambda path: -path.stat().st_size)
    assert of_all.name == "train_pack-T8.idx" and re.fullmatch(r"train_pack-T8-[0-9a-f]{8}\.idx", of_some.name)
