# Every target makes its own virtual environment; nothing but Python >= 3.11 is needed.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test lint clean

help:
	@echo "make demo   train, evaluate and explain on drawn shapes: no download, about 2 minutes"
	@echo "make test   the whole test suite, about 8 minutes"
	@echo "make lint   ruff and mypy"
	@echo "make clean  delete .venv and caches; runs/ and data/ stay"

demo: .venv/installed
	$(BIN)/python train.py --config configs/shapes.yaml --overwrite
	$(BIN)/python eval.py runs/shapes

test: .venv/installed-dev
	$(BIN)/python -m pytest

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/installed: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check --quiet --requirement requirements.txt
	touch $@

.venv/installed-dev: requirements-dev.txt .venv/installed
	$(BIN)/pip install --disable-pip-version-check --quiet --requirement requirements-dev.txt
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
