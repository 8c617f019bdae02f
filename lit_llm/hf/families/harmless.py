"""The keys of config.json that do not change what a model of any family computes."""

_BY_REASON = {
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
HARMLESS = frozenset(key for keys in _BY_REASON.values() for key in keys.split())
