"""Settings come from files and flags, never from environment variables."""

from lit_llm.config.parser import make_parser
from lit_llm.models.gpt import GPTConfig


def test_environment_variables_change_no_setting(monkeypatch):
    monkeypatch.setenv("JSONARGPARSE_DEFAULT_ENV", "true")
    monkeypatch.setenv("PL_MODEL__N_LAYER", "77")  # the prefix that Lightning's parser sets
    parser = make_parser("fit")
    assert parser.parse_args([]).model.n_layer == GPTConfig().n_layer != 77
