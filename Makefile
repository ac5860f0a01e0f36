# `make demo`, `make test` and `make lint` install what they need into .venv.
PYTHON ?= python3

.PHONY: demo test lint clean

demo: .venv/requirements
	.venv/bin/python generate.py

test: .venv/requirements-test
	.venv/bin/python -m pytest -n 2 --dist loadfile

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
