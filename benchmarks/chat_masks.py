"""How fast conversations are rendered, tokenised and masked, on one core.

    python benchmarks/chat_masks.py

Templates without {% generation %} are rendered twice more for each answer. Compare the columns: speeds depend on the machine.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from lit_llm.ingest.chat import ChatEncoder, ChatTemplate
from lit_llm.tokenizers import BPE

ROOT = Path(__file__).parents[1]
SECONDS = 3.0
WORDS_IN_A_MESSAGE = 60
HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
BODY = "{{ m.content + '<|im_end|>\n' }}"
END = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
MARKED = (
    f"{HEAD}{{% if m.role == 'assistant' %}}{{% generation %}}{BODY}{{% endgeneration %}}{{% else %}}{BODY}{{% endif %}}{END}"
)
UNMARKED = f"{HEAD}{BODY}{END}"


def main() -> None:
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    tokenizer = BPE(2048)
    tokenizer.train([text])
    words = text.split()
    print("answers   marked: conversations/s   tokens/s      unmarked: conversations/s   tokens/s   ratio")
    for answers in (1, 4, 16, 64):
        messages = [
            {
                "role": ("user", "assistant")[i % 2],
                "content": " ".join(words[i * WORDS_IN_A_MESSAGE % 4000 :][:WORDS_IN_A_MESSAGE]),
            }
            for i in range(2 * answers)
        ]
        content = json.dumps(messages).encode()
        speeds = []
        for template in (MARKED, UNMARKED):
            encoder = ChatEncoder(tokenizer, ChatTemplate("benchmark", template, {}))
            tokens = len(encoder.encode(content, where="it").ids)
            done, start = 0, time.process_time()
            while (seconds := time.process_time() - start) < SECONDS:
                encoder.encode(content, where="it")
                done += 1
            speeds.append((done / seconds, done * tokens / seconds))
        (marked, marked_tokens), (plain, plain_tokens) = speeds
        row = f"{answers:7}   {marked:23,.0f}   {marked_tokens:8,.0f}   {plain:28,.0f}   {plain_tokens:8,.0f}"
        print(f"{row}   {marked / plain:5.2f}")


if __name__ == "__main__":
    main()
