"""A chat template is a program that comes with a downloaded folder: it ends, and takes little memory, or is refused."""

import os
import re
import resource
import time
from pathlib import Path

import pytest

from lit_llm.core.errors import UserError
from lit_llm.ingest.chat import limited_process
from lit_llm.ingest.chat.limited_process import LimitedProcess, Refused
from lit_llm.ingest.chat.render import Renderer
from lit_llm.ingest.chat.template import MOST_BYTES, ChatForm, ChatTemplate
from lit_llm.ingest.paths import dataset_files
from lit_llm.tokenizers import Bytes

GOOD = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
FOREVER = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ 9 ** 99999999 }}",
    "memory of a text": "{{ 'a' * 3000000000 }}",
    "memory of a list": "{{ ([0] * 10**9) | length }}",
    "a width": "{{ '%3000000000d' % 1 }}",
    "doubling": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "half a character": "{{ '\\ud800' }}",
    "a filter": "{{ 'a' | center(10**10) }}",
}


def renderer(text):
    return Renderer(ChatTemplate("it.jinja", text, {}), re.compile("(?!)"))


QUICK = ("a power", "memory of a text", "recursion", "half a character", "a filter")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in FOREVER])
def test_a_template_that_does_not_end_or_takes_all_memory_is_refused(kind, monkeypatch):
    monkeypatch.setattr(limited_process, "SECONDS", 2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=re.escape("it.jinja")):
        renderer(FOREVER[kind] + GOOD).check()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18, "kB: the memory is another process's"


@pytest.mark.slow
def test_after_a_refusal_the_next_conversation_has_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(limited_process, "SECONDS", 2)
    mixed = renderer("{% if messages[0].content == 'loop' %}{{ 9 ** (99999999 + messages | length) }}{% endif %}" + GOOD)
    for content, fine in (("a", True), ("loop", False), ("b", True)):
        chat = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]}
        if fine:
            assert mixed.conversation(chat, where="it").text == f"<|user|>{content}</s><|assistant|>yes</s>"
        else:
            with pytest.raises(UserError, match="more than"):
                mixed.conversation(chat, where="it")


def test_a_conversation_of_many_answers_or_megabytes_is_refused_at_once():
    pair = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "yes"}]
    for messages, words in ((pair * 2001, "2,001 answers"), ([pair[0] | {"content": "a" * 2**23}, pair[1]], "more than 8 MB")):
        with pytest.raises(UserError, match=words):
            renderer(GOOD).conversation({"messages": messages}, where="it")
    marked = GOOD.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    assert renderer(marked).conversation({"messages": pair * 2001}, where="it").text.count("yes") == 2001


def test_the_process_ends_with_its_owner_and_errors_come_back():
    def work(number):
        if number < 0:
            raise ValueError("negative")
        return [number, os.getpid()]

    limited = LimitedProcess(work)
    number, pid = limited(number=3)
    assert number == 3 and pid != os.getpid() and limited(number=4) == [4, pid]
    with pytest.raises(Refused, match="negative"):
        limited(number=-1)
    del limited
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


def test_a_template_is_an_ordinary_file_of_a_size(tmp_path):
    (tmp_path / "large.jinja").write_bytes(b"a" * (MOST_BYTES + 1))
    os.mkfifo(tmp_path / "pipe.jinja")
    for name in ("large.jinja", "pipe.jinja"):
        with pytest.raises(UserError, match=name):
            ChatTemplate.find(str(tmp_path / name), tmp_path, Bytes())


@pytest.mark.parametrize("content", ["null", "[" * 100_000, "3", "{}", '{"eos_token_id": "x"}', '{"eos_token_id": -1}', ""])
def test_the_form_of_conversations_is_a_sentence_where_it_is_damaged(content, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(GOOD)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match="generation_config"):
        ChatForm.read(tmp_path)


@pytest.mark.parametrize(
    "content", ["null", "[" * 100_000, "3", '{"splits": null}', '{"splits": [null, {}]}', '{"splits": "train"}']
)
def test_a_saved_dataset_is_a_sentence_where_it_is_damaged(content, tmp_path):
    (tmp_path / "dataset_dict.json").write_text(content)
    with pytest.raises(UserError):
        dataset_files(tmp_path)
