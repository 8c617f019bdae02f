"""Exported tokenizers: AutoTokenizer gives the ids of training, and imported files are exported unchanged."""

import json
import shutil

import numpy as np
import pytest
from folders import ours, save, theirs
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_llm.commands.export import Source, export_folder
from lit_llm.commands.import_hf import import_folder
from lit_llm.ingest.chat import ChatForm
from lit_llm.runs.tokenizer_files import ExportedTokenizer, write_generation_config, write_taught_ids, write_tokenizer
from lit_llm.tokenizers import BPE, Bytes, TokenizerJSON, load_tokenizer

TEXTS = [
    "",
    " ",
    "plain words, and  two  spaces ; do n't",
    "\tdef f(x):\n\n        return x**2\r\n",
    "naïve Ünïcödé – “quotes” 漢字 🎉 \u200b\ufeff\x00\x7f",
    "the name <|endoftext|> in a text is text, <|endoftext|>",
    "café cafe\u0301",
]


def bpe() -> BPE:
    tokenizer = BPE(400)
    tokenizer.train(TEXTS * 3)
    return tokenizer


@pytest.mark.parametrize("make", [Bytes, bpe])
def test_auto_tokenizer_gives_our_ids_and_our_text(make, tmp_path):
    tokenizer = make()
    tokenizer.save(tmp_path)
    save(ours(vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id), tmp_path / "a.ckpt")
    export_folder(Source(tmp_path / "a.ckpt", tmp_path), tmp_path / "out", dtype=None, max_bytes=1e9)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert loaded(text)["input_ids"] == ids.tolist()
        assert loaded.decode(ids.tolist()) == tokenizer.decode(ids) == text
    ids = np.concatenate([tokenizer.encode(TEXTS[4]), [tokenizer.eos_id]])
    assert loaded.decode(ids.tolist()) == tokenizer.decode(ids)
    assert loaded.eos_token_id == loaded.bos_token_id == tokenizer.eos_id
    assert len(loaded) == tokenizer.vocab_size and loaded.model_max_length == 64
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.vocab_size == tokenizer.vocab_size
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_id


def test_an_imported_tokenizer_comes_out_as_it_came_in(tmp_path):
    """Special tokens, a beginning-of-text id, a chat template and the stop ids are all kept."""
    tokenizer = bpe()
    backend = tokenizer.backend
    backend.add_special_tokens(["<s>", "<|im_end|>"])
    begin, end = backend.token_to_id("<s>"), backend.token_to_id("<|im_end|>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    hf = tmp_path / "hf"
    theirs("qwen2").save_pretrained(hf)  # its vocabulary is too small: 101 rows
    tokenizer.save(hf)
    with pytest.raises(
        ValueError, match=rf"{hf}/tokenizer.json has {tokenizer.vocab_size} ids, but vocab_size in config.json is 101"
    ):
        import_folder(hf, tmp_path / "run")
    config = theirs("qwen2").config
    config.vocab_size, config.eos_token_id = tokenizer.vocab_size + 5, end  # room for more, as real ones have
    AutoModelForCausalLM.from_config(config).save_pretrained(hf)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>"}
    (hf / "tokenizer_config.json").write_text(json.dumps(settings))
    (hf / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    (hf / "generation_config.json").write_text(json.dumps({"bos_token_id": begin, "eos_token_id": [end, 0], "top_k": 20}))
    notes = import_folder(hf, tmp_path / "run")
    assert any("this model was trained with <s> before every text" in note and "--prefix_token_ids" in note for note in notes)
    assert (
        load_tokenizer(tmp_path / "run").prefix_token_ids == [begin]
        and bpe().prefix_token_ids == Bytes().prefix_token_ids == []
    )
    export_folder(Source(tmp_path / "run/checkpoints/last.ckpt", tmp_path / "run"), tmp_path / "out", dtype=None, max_bytes=1e9)
    before, after = AutoTokenizer.from_pretrained(hf), AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in [*TEXTS, "<s>x<|im_end|>"]:
        assert after(text)["input_ids"] == before(text)["input_ids"]
    assert after("x")["input_ids"][0] == begin
    messages = [{"role": "user", "content": "hello"}]
    assert after.apply_chat_template(messages, tokenize=False) == "<s>hello<|im_end|>"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.generation_config.eos_token_id == [end, 0] and exported.generation_config.top_k == 20
    # Ours reads the same text without adding or recognising anything.
    mine = load_tokenizer(tmp_path / "run").encode("hello")
    assert [begin, *mine.tolist()] == before("hello")["input_ids"]


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("taught", ["documents", "named documents", "conversations"])
def test_an_export_stops_at_the_end_that_was_taught(taught, older, tmp_path):
    """The files are those of a chat model, whose documents end with another token than its turns."""
    tokenizer, run, out = bpe(), tmp_path / "run", tmp_path / "out"
    tokenizer.backend.add_special_tokens(["<s>", "<|im_end|>", "<doc>"])
    eot, doc, turn = map(tokenizer.backend.token_to_id, ("<|endoftext|>", "<doc>", "<|im_end|>"))
    for folder in (run, out):
        folder.mkdir()
    tokenizer.save(run)
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (run / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    if older:  # without added_tokens_decoder in the first, the second counts
        (run / "special_tokens_map.json").write_text(json.dumps(names))
    (run / "generation_config.json").write_text(json.dumps({"bos_token_id": None, "eos_token_id": turn, "top_k": 20}))
    named = {"eos_token": "<doc>", "bos_token": "<s>"} if taught == "named documents" else {}
    chat = ChatForm("", turn) if taught == "conversations" else None
    for _ in range(2):  # a resumed run says it again
        write_taught_ids(run, TokenizerJSON(str(run), **named), chat)
    write_tokenizer(run, out, block_size=64)
    stops = {"documents": [eot, turn], "named documents": [doc, turn], "conversations": turn}[taught]
    assert write_generation_config(run, out, eos_id=eot)["eos_token_id"] == stops
    written = json.loads((out / "generation_config.json").read_text())
    assert (written["eos_token_id"], written["top_k"]) == (stops, 20)
    loaded = AutoTokenizer.from_pretrained(out)
    eos = {"documents": "<|endoftext|>", "named documents": "<doc>", "conversations": "<|im_end|>"}[taught]
    bos = "<s>" if taught == "named documents" else None
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == (bos, eos, "<|endoftext|>")
    exported = ExportedTokenizer(run, eos_id=eot)
    assert (exported.bos_id, exported.eos_id) == (loaded.bos_token_id, loaded.eos_token_id)
    assert exported.stop_ids == (stops if isinstance(stops, list) else [stops])
    for text in [*TEXTS, "<s>a<doc> <|im_end|>", "<|endoftext|>"]:
        assert exported.encode(text).tolist() == loaded(text)["input_ids"]


def test_a_template_added_to_an_exported_base_encodes_its_special_tokens(tmp_path):
    tokenizer, run, base, out = bpe(), tmp_path / "run", tmp_path / "base", tmp_path / "out"
    for folder in (run, base, out):
        folder.mkdir()
    tokenizer.save(run)
    write_tokenizer(run, base, block_size=64)
    end = tokenizer.backend.token_to_id("<|endoftext|>")
    assert AutoTokenizer.from_pretrained(base)("a<|endoftext|>")["input_ids"][-1] != end  # in plain text, the name is text
    shutil.copy(base / "tokenizer_config.json", run)  # as `import` does
    (run / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    write_tokenizer(run, out, block_size=128)
    loaded = AutoTokenizer.from_pretrained(out)
    text = loaded.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert loaded(text, add_special_tokens=False)["input_ids"] == [*tokenizer.encode("hello").tolist(), end]
    assert loaded.model_max_length == 128
