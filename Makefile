# Targets make their own virtual environments from Python >= 3.11; lint-js and onnxruntime need npm.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet
# Installs only files whose hash is in a lock, and only wheels: building an sdist would fetch build
# tools that no lock pins.
INSTALL := $(PIP) --require-hashes --only-binary :all:
# Keeps the versions that are in a lock already, where requirements*.txt allow it.
COMPILE := .venv/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock'
# With TORCH=cpu, PyTorch comes from here, without 4 GB of libraries for GPUs.
CPU_INDEX := https://download.pytorch.org/whl/cpu
WITHOUT_GPU := awk '/^[a-z]/ {kept = !/^(torch==|torchvision==|triton|cuda-|nvidia-)/} kept'
# Tests that start processes wait for them, so one worker more than there are cores.
WORKERS := $(shell $(PYTHON) -c 'import os; print(os.cpu_count() + 1)')
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

ONNXRUNTIME := vit/tensorboard_plugin/static/onnxruntime

.PHONY: help demo tensorboard check test coverage lint lint-js docs tour lock onnxruntime clean

help:
	@echo "make demo   train, evaluate and explain on synthetic shapes: no data set needed, into runs/demo, about 2 minutes;"
	@echo "            installs 5.6 GB of packages first, or 1.2 GB with TORCH=cpu, without libraries for GPUs"
	@echo "make tensorboard  start TensorBoard on runs/; the Attention tab is at http://localhost:6006/#attention"
	@echo "make check  lint and the fast tests, about 2 minutes: run it before every commit"
	@echo "make test   all tests, about 6 minutes on two cores"
	@echo "make coverage  all tests, and which lines of vit/ they run; fails below 95%"
	@echo "make lint   ruff, mypy and the import contract"
	@echo "make lint-js  biome on the JavaScript of the Attention tab; needs npx"
	@echo "make docs   the documentation site, into site/html; fails at broken links and missing pages"
	@echo "make tour   run docs/tour.ipynb and store what it shows"
	@echo "make lock   regenerate requirements*.lock after a change to requirements*.txt"
	@echo "make onnxruntime  fetch the files in $(ONNXRUNTIME) with npm, and verify them"
	@echo "make clean  delete .venv and caches; runs/ and data/ stay"

demo: .venv/installed
	$(BIN)/python train.py --config configs/shapes.yaml --out runs/demo --overwrite
	$(BIN)/python eval.py runs/demo export html
	@echo
	@echo "Open runs/demo/export/live.html in a browser and start the tour: see what the model looks at, mute a head,"
	@echo "hide a patch or drop a photo."
	@if [ -n "$$DISPLAY$$WAYLAND_DISPLAY" ]; then $(BIN)/python -m webbrowser runs/demo/export/live.html; fi

tensorboard: .venv/installed
	@echo "The Attention tab: http://localhost:6006/#attention"
	$(BIN)/tensorboard --logdir runs --samples_per_plugin images=1000

check: lint
	$(PYTEST) -m "not slow"

test: .venv/installed-dev
	$(PYTEST)

coverage: .venv/installed-dev
	$(PIP) coverage==7.17.4
	$(BIN)/python -m coverage erase
	$(subst -m pytest,-m coverage run -m pytest,$(PYTEST))
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --skip-covered --fail-under=95

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	@for folder in vit vit/*/ tests benchmarks; do \
		find $$folder -name '*.py' -exec cat {} + | awk -v folder=$$folder 'END {printf "%7d lines in %s\n", NR, folder}'; \
	done

lint-js:
	npx --yes @biomejs/biome@2.6.8 check --error-on-warnings

tour: .venv/installed-dev
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/test_tour.py

.venv/requirements: requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
ifeq ($(TORCH),cpu)
	$(PIP) --no-deps --index-url $(CPU_INDEX) $$(grep -oE '^torch(vision)?==[0-9.]+' requirements.lock) || { \
		echo "$(CPU_INDEX) has no torch: leave out TORCH=cpu, or set CPU_INDEX to a mirror"; exit 1; }
	$(WITHOUT_GPU) requirements.lock > .venv/cpu.lock
	$(INSTALL) --no-deps --requirement .venv/cpu.lock
else
	$(INSTALL) --requirement requirements.lock
endif
	touch $@

# The package itself is installed because TensorBoard finds plugins only through the entry points of
# installed packages. Editable: pyproject.toml is all that a reinstall could change.
.venv/installed: pyproject.toml .venv/requirements
	$(PIP) --no-index --no-deps --no-build-isolation --editable .
	touch $@

.venv/installed-dev: requirements-dev.lock .venv/installed
	test ! -f .venv/cpu.lock || $(WITHOUT_GPU) requirements-dev.lock > .venv/cpu.lock
	lock=$$(ls .venv/cpu.lock 2> /dev/null || echo requirements-dev.lock); \
	$(INSTALL) --no-deps --no-binary grad-cam --no-build-isolation --requirement $$lock
	touch $@

# REPO_URL is where links to files outside docs/ lead; by default to those here.
docs:
	$(PYTHON) -m venv .venv/docs
	.venv/docs/bin/pip install --disable-pip-version-check --quiet --requirement docs/requirements.txt
	.venv/docs/bin/python docs/write_site.py site/pages $(REPO_URL)
	NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs build --quiet

lock:
	$(PYTHON) -m venv .venv/lock
	.venv/lock/bin/pip install --disable-pip-version-check --quiet uv==0.13.9
	$(COMPILE) requirements.txt --output-file requirements.lock
	$(COMPILE) requirements-dev.txt --constraints requirements.lock --output-file requirements-dev.lock

onnxruntime:
	set -e; folder=$$(mktemp -d); trap 'rm -r "$$folder"' EXIT; \
	npm pack --silent --pack-destination "$$folder" onnxruntime-web@1.30.0; \
	tar -xzf "$$folder"/*.tgz -C "$$folder"; \
	cp "$$folder"/package/dist/ort.wasm.bundle.min.mjs "$$folder"/package/dist/ort.jspi.bundle.min.mjs $(ONNXRUNTIME); \
	for wasm in ort-wasm-simd-threaded.wasm ort-wasm-simd-threaded.jspi.wasm; do \
		gzip -n -9 < "$$folder/package/dist/$$wasm" > $(ONNXRUNTIME)/$$wasm.gz; \
	done
	cd $(ONNXRUNTIME) && grep -E '^ +[0-9a-f]{64} ' README.md | sha256sum --check

clean:
	rm -rf .venv site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
