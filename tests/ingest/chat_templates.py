"""Chat templates in the styles of thirteen families, and conversations for them.

[A] and [/A] surround what the assistant writes. `marked` makes {% generation %} of them, `unmarked` removes them.
"""

# ruff: noqa: E501 - a line end in a template is a character of the text

from __future__ import annotations

from pathlib import Path

import tokenizers
from ingest.tokenizer_kinds import write

TEMPLATES = {
    "chatml": """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}[A]{{ m.content }}<|im_end|>
[/A]{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "llama3": """{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}
{%- if m['role'] == 'assistant' %}[A]{{ m['content'] | trim + '<|eot_id|>' }}[/A]{% else %}{{ m['content'] | trim + '<|eot_id|>' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "gemma": """{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'assistant' %}{{ '<start_of_turn>model\\n' }}[A]{{ m.content | trim + '<end_of_turn>\\n' }}[/A]
{%- else %}{{ '<start_of_turn>user\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    # The system message goes into the first question, and there is no prompt for an answer.
    "mistral": """{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}
{%- if m.role == 'system' %}{% set ns.system = m.content + '\\n\\n' %}
{%- elif m.role == 'user' %}{{ '[INST] ' + ns.system + m.content + ' [/INST]' }}{% set ns.system = '' %}
{%- else %}[A]{{ ' ' + m.content + eos_token }}[/A]{% endif %}{% endfor %}""",
    "phi3": """{% for m in messages %}{{ '<|' + m.role + '|>\\n' }}{% if m.role == 'assistant' %}[A]{{ m.content + '<|end|>\\n' }}[/A]
{%- else %}{{ m.content + '<|end|>\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}""",
    "zephyr": """{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\\n' }}[A]{{ m.content + eos_token + '\\n' }}[/A]
{%- else %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}""",
    # Tools: calls are JSON, and several results in a row are one turn of the user.
    "qwen": """{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}{% for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}[A]{{ m.content or '' }}{% for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}[/A]
{%- elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    # The last answer is followed by nothing, others by a newline.
    "tulu": """{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\\n' }}[A]{{ m.content + eos_token }}[/A]
{%- if not loop.last %}{{ '\\n' }}{% endif %}{% else %}{{ '<|' + m.role + '|>\\n' + m.content + '\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}""",
    # Thoughts are cut out of an answer, and written after the last question only. A tool's response is no question.
    "qwen3": """{% set ns = namespace(question=0) %}{% for m in messages %}
{%- if m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
{%- set ns.question = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}[A]{% if loop.index0 > ns.question %}
{{- '<think>\\n' + (parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '') + '\\n</think>\\n\\n' }}{% endif %}
{{- parts[-1].lstrip('\\n') + '<|im_end|>\\n' }}[/A]{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    # The prompt opens a thought, which an earlier answer does not have.
    "qwen3.6": """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}
{%- set parts = m.content.split('</think>') %}{% if loop.last %}{{ '<think>\\n' }}[A]
{{- (parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '') + '\\n</think>\\n\\n' + parts[-1].strip('\\n') + '<|im_end|>\\n' }}[/A]
{%- else %}[A]{{ parts[-1].strip('\\n') + '<|im_end|>\\n' }}[/A]{% endif %}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{{ '\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking }}{% endif %}""",
    # The prompt opens a thought, or closes it if there is none.
    "nemotron": """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}
{%- if loop.last and parts | length > 1 %}{{ '<think>\\n' }}[A]{{ parts[0].split('<think>')[-1].strip('\\n') + '\\n</think>\\n' + parts[-1].strip('\\n') + '<|im_end|>\\n' }}[/A]
{%- else %}{{ '<think></think>' }}[A]{{ parts[-1].strip('\\n') + '<|im_end|>\\n' }}[/A]{% endif %}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>\\n' }}{% endif %}""",
    # Nothing ends a turn but the next.
    "glm": """{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}[A]{{ '\\n<think>' }}
{%- if loop.last and parts | length > 1 %}{{ parts[0].split('<think>')[-1].strip() }}{% endif %}{{ '</think>\\n' + parts[-1].strip() }}[/A]
{%- else %}{{ '\\n' + m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    # The last answer ends in another way than others.
    "gpt-oss": """{% for m in messages %}{{ '<|start|>' + m.role }}{% if m.role == 'assistant' %}{% set last = loop.last and not add_generation_prompt %}
{%- if last %}[A]{{ '<|channel|>final<|message|>' + m.content + '<|return|>' }}[/A]{% else %}[A]{{ '<|channel|>final<|message|>' + m.content }}[/A]{{ '<|end|>' }}{% endif %}
{%- else %}{{ '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}""",
}
SPECIAL = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "gemma": ["<bos>", "<start_of_turn>", "<end_of_turn>"],
    "mistral": ["[INST]", "[/INST]"],
    "phi3": ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
    "zephyr": ["</s>"],
    "qwen": ["<|im_start|>", "<|im_end|>"],
    "tulu": ["<s>", "</s>"],
    **{name: ["<|im_start|>", "<|im_end|>"] for name in ("qwen3", "qwen3.6", "nemotron")},
    "glm": ["<|system|>", "<|user|>", "<|assistant|>"],
    "gpt-oss": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"],
}
_THOUGHTS = ["<think>", "</think>", "<tool_response>", "</tool_response>"]
NOT_SPECIAL = {name: _THOUGHTS for name in ("qwen3", "qwen3.6", "nemotron", "glm")}
"""Tokens of their own that are not special, as those families have them."""
BOS = {"llama3": "<|begin_of_text|>", "gemma": "<bos>", "mistral": "<s>", "tulu": "<s>"}
EOS = {"mistral": "</s>", "zephyr": "</s>", "tulu": "</s>"}
KIND = {"mistral": "llama2", "zephyr": "llama2"}  # the others cut text like LLaMA-3

CONVERSATIONS = {
    "one turn": [("user", "What is 2 + 2?"), ("assistant", "It is 4.")],
    "several turns": [
        ("user", "Hello"),
        ("assistant", "Hello! How can I help?"),
        ("user", "Count to\nthree."),
        ("assistant", "one\ntwo\n\nthree"),
        ("user", "Thanks"),
        ("assistant", "You are welcome."),
    ],
    "system": [("system", "You answer in German."), ("user", "Hello"), ("assistant", "Guten Tag!")],
    "unicode": [
        ("user", "naïve 中文字符 🙂"),
        ("assistant", "日本語テキスト 🎉 Ελληνικά 👩‍👩‍👧"),
        ("user", "é"),
        ("assistant", "🙂"),
    ],
    "spaces": [("user", "  a  "), ("assistant", "\n\n b \n"), ("user", "\n"), ("assistant", " ")],
    "empty content": [("user", ""), ("assistant", ""), ("user", "more"), ("assistant", "now")],
    "thoughts": [
        ("user", "What is 2 + 2?"),
        ("assistant", "<think>\nadd them\n</think>\n\nIt is 4."),
        ("user", "Sure?"),
        ("assistant", "<think>\n\ncount\n</think>\nYes."),
        ("user", "<tool_response>\n4\n</tool_response>"),
        ("assistant", "<think>so</think>4, as said."),
    ],
}


def messages(name: str) -> list[dict]:
    return [{"role": role, "content": content} for role, content in CONVERSATIONS[name]]


def tool_conversation() -> list[dict]:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Åland", "days": 2}}}
    return [
        {"role": "user", "content": "What is the weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "20 °C"},
        {"role": "assistant", "content": "Sun, 20 °C."},
    ]


def marked(name: str) -> str:
    return TEMPLATES[name].replace("[A]", "{% generation %}").replace("[/A]", "{% endgeneration %}")


def unmarked(name: str) -> str:
    return TEMPLATES[name].replace("[A]", "").replace("[/A]", "")


def write_tokenizer(name: str, folder: Path) -> dict[str, str]:
    """A tokenizer.json with the special tokens of a template. Returns the names that the template can use."""
    write(KIND.get(name, "llama3"), folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(SPECIAL[name])
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in NOT_SPECIAL.get(name, [])])
    backend.save(str(folder / "tokenizer.json"))
    return {key: names[name] for key, names in (("bos_token", BOS), ("eos_token", EOS)) if name in names}
