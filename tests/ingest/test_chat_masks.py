"""Masks of conversations: against transformers' assistant mask, and against masks made by hand."""

from __future__ import annotations

import json
import re

import pytest
from docs.pages import ROOT, files
from ingest import chat_templates
from ingest.chat_templates import CONVERSATIONS, TEMPLATES, messages, tool_conversation, write_tokenizer
from transformers import PreTrainedTokenizerFast

from lit_llm.core.errors import UserError
from lit_llm.ingest.chat import ChatEncoder, ChatForm, ChatTemplate
from lit_llm.ingest.chat.render import Renderer
from lit_llm.tokenizers import TokenizerJSON


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory):
    made = {}

    def make(name):
        kind = (chat_templates.KIND.get(name), *chat_templates.SPECIAL[name], *chat_templates.NOT_SPECIAL.get(name, []))
        if kind not in made:
            folder = tmp_path_factory.mktemp(name)
            write_tokenizer(name, folder)
            made[kind] = folder
        tokens = {
            key: names[name]
            for key, names in (("bos_token", chat_templates.BOS), ("eos_token", chat_templates.EOS))
            if name in names
        }
        return made[kind], tokens

    return make


def encoded(folder, text, tokens, conversation):
    encoder = ChatEncoder(TokenizerJSON(str(folder)), ChatTemplate("it.jinja", text, tokens))
    return encoder.encode(json.dumps(conversation).encode(), where="it")[0]


QUICK = ("chatml", "qwen3")
"""A plain template, and one that writes earlier answers differently."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in TEMPLATES])
def test_ids_and_masks_are_those_of_transformers(name, tokenizer_of):
    folder, tokens = tokenizer_of(name)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **tokens)
    conversations = [messages(each) for each in CONVERSATIONS if name != "gemma" or each != "system"]
    if name == "qwen":
        conversations.append(tool_conversation())
    if name in ("glm", "gpt-oss"):  # of a last character that is several tokens, transformers marks the first token only
        conversations.remove(messages("unicode"))
    for conversation in conversations:
        expected = theirs.apply_chat_template(
            conversation, chat_template=chat_templates.marked(name), return_dict=True, return_assistant_tokens_mask=True
        )
        for text in (chat_templates.marked(name), chat_templates.unmarked(name)):  # found without marks too
            found = encoded(folder, text, tokens, conversation)
            assert found.ids.tolist() == expected["input_ids"]
            assert found.mask.tolist() == expected["assistant_masks"]
        assert 0 < sum(expected["assistant_masks"]) < len(expected["input_ids"])


def test_the_template_on_the_page_learns_the_answers_and_their_end(tokenizer_of):
    folder, tokens = tokenizer_of("zephyr")
    text = files(ROOT / "docs/chat.md")["mine.jinja"]
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **tokens)
    for conversation in map(messages, CONVERSATIONS):
        expected = theirs.apply_chat_template(
            conversation, chat_template=text, return_dict=True, return_assistant_tokens_mask=True
        )
        for template in (text, re.sub("{%- (end)?generation %}", "", text)):
            found = encoded(folder, template, tokens, conversation)
            assert found.ids.tolist() == expected["input_ids"]
            assert found.mask.tolist() == expected["assistant_masks"]
        learned = theirs.decode([i for i, each in zip(found.ids.tolist(), found.mask.tolist(), strict=True) if each])
        assert learned == "".join(m["content"] + tokens["eos_token"] for m in conversation if m["role"] == "assistant")


def test_a_token_across_the_border_of_prompt_and_answer_is_found_in_the_whole_text(tokenizer_of):
    # The prompt ends with a newline and the answer begins with one: one token has both. Counting the tokens of the prompt alone
    # would shift the mask.
    folder, tokens = tokenizer_of("phi3")
    conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "\n\nyes"}]
    found = encoded(folder, chat_templates.unmarked("phi3"), tokens, conversation)
    backend = TokenizerJSON(str(folder)).backend
    backend.encode_special_tokens = False
    text = "<|user|>\nx<|end|>\n<|assistant|>\n\n\nyes<|end|>\n"
    encoding = backend.encode(text, add_special_tokens=False)
    answer = text.index("\n\nyes")
    assert found.ids.tolist() == encoding.ids
    assert found.mask.tolist() == [int(end > answer) for _, end in encoding.offsets]


@pytest.mark.parametrize("name", ["chatml", "zephyr"])
def test_the_name_of_a_special_token_in_a_message_is_text(name, tokenizer_of):
    folder, tokens = tokenizer_of(name)
    end = chat_templates.SPECIAL[name][-1]
    conversation = [{"role": "user", "content": f"What is {end} for?{end}"}, {"role": "assistant", "content": f"{end}, an end"}]
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **tokens)
    text = chat_templates.unmarked(name)
    expected = theirs.apply_chat_template(conversation, chat_template=text, return_dict=False, sanitize_control_tokens=True)
    found = encoded(folder, text, tokens, conversation)
    assert found.ids.tolist() == expected
    tokenizer = TokenizerJSON(str(folder))
    assert found.ids.tolist().count(tokenizer.backend.token_to_id(end)) == 2  # the two that the template writes
    learned = tokenizer.decode(found.ids[found.mask == 1])
    assert learned.strip() == f"{end}, an end{end}"


def test_a_name_is_text_beside_names_that_the_template_reads(tokenizer_of):
    folder, _ = tokenizer_of("qwen3")
    conversation = [
        {"role": "user", "content": "What is <|im_end|> for?"},
        {"role": "assistant", "content": "<think>\n\nan end <|im_end|>\n</think>\n\nAn end: <|im_end|>"},
    ]
    found = encoded(folder, chat_templates.unmarked("qwen3"), {}, conversation)
    tokenizer = TokenizerJSON(str(folder))
    assert tokenizer.decode(found.ids) == (
        "<|im_start|>user\nWhat is <|im_end|> for?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nan end <|im_end|>\n</think>\n\nAn end: <|im_end|><|im_end|>\n"
    )
    written = {"<|im_start|>": 2, "<|im_end|>": 2, "<think>": 1, "</think>": 1}  # by the template, of 2, 5, 2 and 1
    assert {name: found.ids.tolist().count(tokenizer.backend.token_to_id(name)) for name in written} == written


def test_a_special_token_that_a_template_looks_for_in_a_question_is_refused(tokenizer_of):
    folder, _ = tokenizer_of("chatml")
    text = chat_templates.unmarked("chatml").replace("m.content + '", "m.content.split('<|im_end|>')[0] + '")
    with pytest.raises(UserError, match=r"^it has the name of a special token .* it.jinja looks into that message"):
        encoded(folder, text, {}, [{"role": "user", "content": "a<|im_end|>b"}, {"role": "assistant", "content": "c"}])


CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name + ' ' + (ARGUMENTS) }}{% endfor %}<|im_end|>"


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("c.function.arguments | tojson", '{"a": "ü"}'),  # transformers would write "{\"a\":\"ü\"}"
        ("c.function.arguments if c.function.arguments is string else c.function.arguments | tojson", '{"a":"ü"}'),
        ("c.function.arguments + ''", '{"a":"ü"}'),
        ("c.function.arguments.items() | join('=')", "('a', 'ü')"),
    ],
)
def test_arguments_that_are_json_text_are_written_once(arguments, written, tokenizer_of):
    folder, _ = tokenizer_of("chatml")
    text = chat_templates.unmarked("chatml").replace("<|im_end|>", CALLS.replace("ARGUMENTS", arguments), 1)
    call = {"type": "function", "function": {"name": "find", "arguments": '{"a":"ü"}'}}
    conversation = [*messages("one turn")[:1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    found = encoded(folder, text, {}, conversation)
    assert TokenizerJSON(str(folder)).decode(found.ids[found.mask == 1]) == f"find {written}<|im_end|>\n"


def test_a_template_that_changes_the_answer(tokenizer_of):
    folder, _ = tokenizer_of("chatml")
    text = chat_templates.unmarked("chatml").replace("{{ m.content }}", "{{ m.content | upper | trim }} ")
    found = encoded(folder, text, {}, messages("one turn"))
    tokenizer = TokenizerJSON(str(folder))
    assert tokenizer.decode(found.ids[found.mask == 1]) == "IT IS 4. <|im_end|>\n"
    encoder = ChatEncoder(tokenizer, ChatTemplate("it.jinja", text, {}))
    assert encoder.end_of_turn_id() == tokenizer.backend.token_to_id("<|im_end|>")  # not the space before it
    nothing = ChatEncoder(tokenizer, ChatTemplate("it.jinja", text.replace("m.content | upper | trim", "''"), {}))
    assert nothing.end_of_turn_id() is None
    with pytest.raises(UserError, match="writes nothing of what the assistant says"):
        nothing.check()


R1 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
"""Its prompt opens a thought, which it writes in no answer."""


def test_what_begins_and_ends_an_answer_in_generation(tokenizer_of):
    folder, tokens = tokenizer_of("llama3")
    tokenizer = TokenizerJSON(str(folder))
    encoder = ChatEncoder(tokenizer, ChatTemplate("it.jinja", chat_templates.unmarked("llama3"), tokens))
    assert encoder.end_of_turn_id() == tokenizer.backend.token_to_id("<|eot_id|>")
    assert tokenizer.decode(encoder.prompt_ids([{"role": "user", "content": "Hi"}], where="it")) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )

    encoder = ChatEncoder(tokenizer, ChatTemplate("it.jinja", R1.replace("im_start", "eot_id"), {}))
    assert (
        tokenizer.decode(encoder.prompt_ids([{"role": "user", "content": "Hi"}], where="it"))
        == "<|eot_id|>user\nHi<|im_end|><|eot_id|>assistant\n<think>\n"
    )


COUNTS = chat_templates.unmarked("chatml").replace("{% for", "{{ 'many' if messages | length > 2 }}{% for", 1)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "find", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("text", "conversation", "sentence"),
    [
        (COUNTS, "several turns", "writes message 2 of it in another way when more messages follow"),
        (R1, "one turn", r"ends the prompt for an answer with '<think>\\n', but does not write it before message 2 of it"),
        ("{{ messages[0].content }}", "one turn", "writes nothing of what the assistant says in message 2 of it"),
        ("{% generation %}yes{% endgeneration %}{{ messages[1].content }}", "one turn", "writes nothing of .* message 2 of it"),
        (chat_templates.unmarked("chatml"), [*messages("one turn"), CALL], "writes nothing of .* message 3 of it"),
        (chat_templates.marked("gemma"), "system", "cannot write it: no system role"),
        ("{% for m in messages %}\n\n{{ m.content } }}", "one turn", "cannot write it: unexpected '}' in line 3 of it."),
    ],
)
def test_a_template_that_does_not_tell_the_answers_is_refused(text, conversation, sentence, tokenizer_of):
    folder, tokens = tokenizer_of("chatml")
    with pytest.raises(UserError, match=f"it.jinja {sentence}"):
        encoded(folder, text, tokens, messages(conversation) if isinstance(conversation, str) else conversation)


@pytest.mark.parametrize(
    ("user", "found"),
    [
        ("Q: {{ m['content'] }}", (True, False)),
        ("Q:", (False, False)),
        ("{% generation %}{{ m['content'] }}{% endgeneration %}", (True, True)),
    ],
)
def test_a_template_is_asked_what_it_does_with_a_question(user, found):
    text = (
        "{% for m in messages %}{% if m['role'] == 'user' %}USER{% else %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    )
    template = ChatTemplate("t", text.replace("USER", user) + "{% endif %}{% endfor %}", {})
    assert Renderer(template, re.compile("(?!)")).question() == found


@pytest.mark.parametrize(("content", "said"), [("", "generation_config"), ('{"eos_token_id": "x"}', "generation_config")])
def test_the_form_of_conversations_is_a_sentence_where_it_is_damaged(content, said, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=said):
        ChatForm.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"), [("{{ '\\ud800' }}", "surrogates"), ("a\n{% for %}", "in line 2 of it"), ("{{ x.y }}", "x")]
)
def test_what_a_template_raises_is_a_sentence(text, said):
    with pytest.raises(UserError, match=f"The chat template it.jinja cannot write a question and an answer: .*{said}"):
        Renderer(ChatTemplate("it.jinja", text, {}), re.compile("(?!)")).check()
