# Two commands for a fresh machine: `make quickstart` and `make test`. Everything else is for developers.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
EVAL   := $(VENV)/.installed-eval
DOCS   := $(VENV)/.installed-docs
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

.PHONY: quickstart docs pictures test test-slow test-all soak certify lint clean install install-dev
.DEFAULT_GOAL := help

help:            ## show the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/'

install: $(STAMP) ## create .venv and install lit_llm with the pinned versions, as training needs it
install-dev: $(DEV) ## add what tests, linters and every format of text need

# torch is installed first and alone: a resolver that sees it beside other packages may fetch a CUDA build of several GB.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "lit_llm needs Python >= 3.10, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[gguf]' safetensors tiktoken
	@touch $@

$(DEV): $(STAMP)
	$(PIP) -e '.[dev]'
	@touch $@

# lm-eval and mkdocs, which only slow tests need: about 45 packages more.
$(EVAL): $(DEV)
	$(PIP) -e '.[dev,eval,docs]'
	@touch $@

$(DOCS): $(STAMP)
	$(PIP) -e '.[docs]'
	@touch $@

quickstart: install ## train a small GPT on this machine's own Python sources (minutes on two CPU cores)
	$(BIN)/python -m lit_llm fit --config recipes/quickstart.yaml --resume auto
	@echo && echo 'A sample, continuing "def ":' && echo
	@$(BIN)/python -m lit_llm generate --run runs/quickstart --prompt "def " --max_new_tokens 150
	@printf '%s\n' '' 'The run is in runs/quickstart: config.yaml, checkpoints/, tokenizer.json and the TensorBoard events.' '' 'Next:' \
	  '  watch the curves     $(BIN)/python -m tensorboard.main --logdir runs' \
	  '  let it write more    $(BIN)/python -m lit_llm generate --run runs/quickstart --prompt "class " --max_new_tokens 300' \
	  '  train on your text   $(BIN)/python -m lit_llm fit --config recipes/quickstart.yaml --run_dir runs/mine \' \
	  '                         --data TextFiles --data.paths my.txt'

# README's pictures, by Debian's chromium, after `make quickstart`.
pictures: install
	folder=$$(mktemp -d) && \
	$(BIN)/python -m lit_llm plan --config gpt2-1.5b --config strategy/fsdp2 --hardware h200 --devices 8 --html $$folder/plan.html >/dev/null && \
	$(BIN)/python -m lit_llm report --run runs/quickstart --out $$folder/run.html && \
	for page in plan run; do chromium --headless --no-sandbox --hide-scrollbars --window-size=1200,900 --screenshot=docs/$$page.png file://$$folder/$$page.html; done && rm -r $$folder

# OMP_NUM_THREADS=1: tests start several processes, which would compete for cores otherwise. PYTHONDONTWRITEBYTECODE would have
# each of them compile every module anew.
PYTEST  = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
WORKERS ?= 2

test: install-dev    ## unit tests and one case of each distributed or kill claim, in WORKERS=2 processes (minutes)
	$(PYTEST) -n $(WORKERS) -m "not slow and not soak"

test-slow: $(EVAL) ## what `make test` leaves out, without the soak tests
	$(PYTEST) -n $(WORKERS) -m "slow and not soak"

test-all: $(EVAL) ## every test except the soak tests
	$(PYTEST) -n $(WORKERS) -m "not soak"

certify: install-dev ## what the library promises, on two processes of this machine: what is required (a minute or two)
	folder=$$(mktemp -d) && $(BIN)/python -m lit_llm certify --devices 2 --only required --budget 30 --out $$folder/c.json; code=$$?; rm -r $$folder; exit $$code

soak: install-dev    ## the long tests
	$(PYTEST) -m soak

docs: $(DOCS)          ## build a searchable site from docs/ into build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: install-dev    ## ruff, mypy and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:           ## remove the virtual environment and caches (runs/ stays)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
