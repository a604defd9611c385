# `make demo` and `make test` are all that a fresh machine needs; see README.md.

VENV ?= .venv
BIN := $(VENV)/bin
QUICKSTART := configs/quickstart.yaml
QUICKSTART_MODEL := runs/quickstart-sft/model

unexport PYTHONDONTWRITEBYTECODE  # a test starts many processes: they load what the first one has compiled

.PHONY: demo unit test nightly check docs venv vllm

demo: $(QUICKSTART_MODEL)/config.json  ## set up, warm-start a tiny model, train it, print the result
	$(BIN)/async-rl train $(QUICKSTART)

$(QUICKSTART_MODEL)/config.json: $(QUICKSTART) | venv
	$(BIN)/async-rl sft $(QUICKSTART)
	@touch $@

test: venv  ## every test that needs no GPU and is not nightly (what CI runs)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

unit: venv  ## the quick tests: they start no process and compute little
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m "not gpu and not nightly and not processes and not e2e"

nightly: venv vllm  ## the long tests
	$(BIN)/python -m pytest --hypothesis-profile default -m nightly
	$(BIN)/python -m pytest -q -n auto --dist loadfile --hypothesis-profile default -m "hypothesis and not gpu and not nightly"

check: venv  ## sizes, import direction, ruff, mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

docs: venv  ## serve the site of docs/ on localhost:8000, and follow its files
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict

venv:  ## make or update .venv: the CUDA set with an NVIDIA GPU, else the CPU set
	@ASYNC_RL_VENV=$(VENV) bash scripts/setup.sh

vllm:  ## make or update .venv-vllm, the environment of vLLM's servers (rollout.engine: vllm)
	@bash scripts/vllm.sh
