# Every target makes its own virtual environment; nothing but Python >= 3.11 is needed.
PYTHON ?= python3
BIN := .venv/bin
# Only files whose hash a lock holds, and only wheels: building an sdist would fetch tools that none does.
INSTALL := $(BIN)/pip install --disable-pip-version-check --quiet --require-hashes --only-binary :all:
# Keeps the versions a lock holds already, where requirements*.txt allow it.
COMPILE := .venv/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock'

.PHONY: help demo test lint lock clean

help:
	@echo "make demo   train, evaluate and explain on drawn shapes: no download, about 2 minutes"
	@echo "make test   the whole test suite, about 12 minutes"
	@echo "make lint   ruff and mypy"
	@echo "make lock   write requirements*.lock anew, after a change in requirements*.txt"
	@echo "make clean  delete .venv and caches; runs/ and data/ stay"

demo: .venv/installed
	$(BIN)/python train.py --config configs/shapes.yaml --overwrite
	$(BIN)/python eval.py runs/shapes

test: .venv/installed-dev
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/installed: requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(INSTALL) --requirement requirements.lock
	touch $@

.venv/installed-dev: requirements-dev.lock .venv/installed
	$(INSTALL) --requirement requirements-dev.lock
	touch $@

lock:
	$(PYTHON) -m venv .venv/lock
	.venv/lock/bin/pip install --disable-pip-version-check --quiet uv==0.13.9
	$(COMPILE) requirements.txt --output-file requirements.lock
	$(COMPILE) requirements-dev.txt --constraints requirements.lock --output-file requirements-dev.lock

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
