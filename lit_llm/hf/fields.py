"""Reads keys of a parsed config.json. Each key is checked when it is read, and records show which keys no code has read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lit_llm.core.number_domain import Domain

LARGEST = 2**28
"""The largest accepted size. Real models have far smaller sizes, and the product of two sizes fits int64."""


_HARMLESS_BY_REASON = {
    "names and versions": """
        model_type architectures transformers_version _name_or_path name_or_path _commit_hash auto_map dtype torch_dtype
        tokenizer_class unsloth_version unsloth_fixed task_specific_params finetuning_task
    """,
    "ids of tokens: those of the tokenizer and of generation_config.json count": """
        bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id prefix
    """,
    "how transformers computes, not what": """
        use_cache pretraining_tp attn_implementation _attn_implementation _attn_implementation_autoset
        _experts_implementation cache_implementation chunk_size_feed_forward gradient_checkpointing torchscript use_bfloat16
        tf_legacy_loss return_dict return_dict_in_generate output_attentions output_hidden_states output_scores
    """,
    "classifiers": "id2label label2id num_labels problem_type classifier_dropout",
    "defaults of generation": """
        max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups num_return_sequences
        temperature top_k top_p typical_p epsilon_cutoff eta_cutoff diversity_penalty repetition_penalty length_penalty
        encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids remove_invalid_values
        suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty
        num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind
        target_lookbehind
    """,
}
HARMLESS = frozenset(key for keys in _HARMLESS_BY_REASON.values() for key in keys.split())
"""Keys of config.json that do not change what a model computes, in any family."""


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number of absolute value below 1e300: a larger integer may be too large for a float."""
    return type(value) in (int, float) and abs(value) < 1e300


def is_size(value: Any) -> bool:
    """Whether a JSON value is a whole number from 1 to `LARGEST`."""
    return type(value) is int and 1 <= value <= LARGEST


def is_empty(value: Any) -> bool:
    """Whether a JSON value is null, false, or an empty text, list or object. 0 is not empty, though 0 == False in Python."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def shown(value: Any) -> str:
    """Return the text of a value for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) < 60 else f"{text[:50]}…"


class Fields:
    """Reader of a config.json. If a key's value is wrong, a method adds a sentence (a problem) to `problems`, and returns a
    default."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self.read: set[str] = set()
        """The names of all keys that methods were asked for, also of keys that config.json lacks."""
        self._problems: dict[str, None] = {}

    @property
    def problems(self) -> list[str]:
        """A sentence for each wrong value read so far, without duplicates: two parts of a family may read the same key."""
        return list(self._problems)

    def refuse(self, problem: str) -> None:
        self._problems[problem] = None

    def size(self, name: str) -> int:
        """Return the value of a required key. If it is no whole number from 1 to `LARGEST`, return 1 and record a problem."""
        if self.raw(name) is None:
            self.refuse(f"'{name}' is missing")
            return 1
        return self.optional_size(name, 1)

    def optional_size(self, name: str, default: Any) -> Any:
        """Return a key's value, an int from 1 to `LARGEST`; `default` if missing or null or, with a problem, if wrong."""
        return self._checked(name, default, f"a whole number from 1 to {LARGEST:,}", is_size)

    def number(self, name: str, default: Any, domain: Domain | None = None) -> Any:
        """Return a key's value, a finite number in `domain`; `default` if missing or null or, with a problem, if wrong."""
        value = self._checked(name, default, "a finite number", is_number)
        if domain is None or domain.accepts(value):
            return value
        self.refuse(f"'{name}' is {shown(value)}, but must be {domain.rule(value)}")
        return default

    def flag(self, name: str, default: bool) -> bool:
        """Return a key's value, true or false; `default` if missing or null or, with a problem, if wrong."""
        value: bool = self._checked(name, default, "true or false", lambda value: isinstance(value, bool))
        return value

    def only(self, name: str, known: Iterable[Any], default: Any) -> Any:
        """Return a key's value if it is one of `known`, else `default`. Any other value is a problem; a missing key is none,
        and null is one only if `default` is True."""
        if default is True and self.content.get(name, True) is None:
            self.refuse(f"'{name}' is null, but lit_llm supports only true")
        return self._checked(
            name, default, " or ".join("null" if k is None else repr(k) for k in known), lambda value: value in known
        )

    def mapping(self, name: str) -> dict[str, Any]:
        """Return a key's value, an object, as a dict; {} if missing or null or, with a problem, if wrong."""
        value: dict[str, Any] = self._checked(name, {}, "an object", lambda value: isinstance(value, dict))
        return value

    def raw(self, name: str) -> Any:
        """Return the unchecked value of a key, None if it is missing, and note in `read` that the key was read."""
        self.read.add(name)
        return self.content.get(name)

    def has(self, name: str) -> bool:
        """Whether the key exists, even if its value is null. Notes in `read` that the key was read."""
        self.read.add(name)
        return name in self.content

    def _checked(self, name: str, default: Any, rule: str, accepts: Callable[[Any], bool]) -> Any:
        value = self.raw(name)
        if value is None:
            return default
        if not accepts(value):
            self.refuse(f"'{name}' is {shown(value)}, but lit_llm supports only {rule}")
            return default
        return value
