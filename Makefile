# Every target creates the virtual environment that it needs. docs/index.md shows the plain commands.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
ALL_READY := $(VENV)/.all
OLDEST := $(VENV)-oldest
MATRIX ?= --output docs/compatibility.md
# Tests in which other libraries do the work: each seam (tests/seams.py) runs in one of them.
# Full-size configurations are those that the newest transformers publishes.
TOUCH_LIBRARIES := $(filter-out %/test_full_size.py,$(wildcard tests/attention/test_*.py)) \
	$(addprefix tests/,drop_in $(addsuffix .py,test_seams test_versions architectures/test_tiny_models \
	data/test_tokenize_rows loss/test_evaluation test_oracle loss/test_lm_head \
	training/test_metrics plain_trainer/test_enable training/test_resuming run/test_stream_loader \
	run/test_stream_reader training/test_chunks training/test_dividing))

.PHONY: demo test test-all test-oldest chromium notebooks notebook-outputs matrix check lint types format docs samples bench \
	clean

demo: $(READY)  ## the main job: train a small model on packed data, before and after
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no recipes/sft_packed.py

test: $(READY)  ## all tests but the slow ones, at most 5 minutes on 2 idle cores
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal

test-all: $(ALL_READY) chromium  ## the slow tests: recipes, notebooks, several processes, real data, wheel, docs
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal

test-oldest: $(OLDEST)/.ready  ## what touches other libraries, on the oldest versions that are promised
	$(OLDEST)/bin/python -m pytest -m "not slow" -n 2 --dist worksteal $(TOUCH_LIBRARIES)

chromium:  ## the browser in which HTML pages are tested, from Debian; skipped where it cannot be
	@command -v chromium > /dev/null || { \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get -qq update && apt-get -qq install --yes --no-install-recommends chromium fonts-dejavu-core > /dev/null; \
	} || echo "Chromium cannot be installed here: the tests of HTML pages will be skipped"

notebooks: $(READY)  ## run them top to bottom, offline, about a minute
	$(BIN)/python -m pytest tests/test_notebooks.py -n 2

notebook-outputs: $(READY)  ## run the notebooks offline and store their outputs
	$(BIN)/python notebooks/execute.py

matrix: $(READY)  ## every architecture of the installed transformers, about 8 minutes
	PYTHONPATH=tests $(BIN)/python -m architectures $(MATRIX)

check: lint types test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS_READY)  ## the documentation into site/; a broken link stops it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

samples: $(READY)  ## the sample pages of the docs, about 3 minutes
	$(BIN)/trl-packing plan --model recipes/demo/tokenizer --data recipes/demo/data/train.jsonl \
		--max_length 1024 --per_device_train_batch_size 4 --ranks 2 --html docs/samples/plan.html
	$(BIN)/trl-packing inspect --model recipes/demo/tokenizer --data recipes/demo/data/test.jsonl \
		--max_length 512 --html docs/samples/rows.html
	$(BIN)/trl-packing inspect recipes/shared_prefixes.py --max_length 320 \
		--html docs/samples/shared_rows.html
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		recipes/sft_packed.py --max_steps 240 --warmup_steps 20 --logging_steps 4 --output_dir outputs/sample
	cp outputs/sample/run.html docs/samples/

bench: $(READY)  ## the tables of benchmarks/results, about 20 minutes on an idle machine
	$(BIN)/python benchmarks/pack.py --output benchmarks/results/pack.md
	$(BIN)/python benchmarks/balance.py --output benchmarks/results/balance.md
	$(BIN)/python benchmarks/fair_steps.py --output benchmarks/results/fair_steps.md
	$(BIN)/python benchmarks/step.py --output benchmarks/results/step.md
	$(BIN)/python benchmarks/dataloader.py --output benchmarks/results/dataloader.md
	$(BIN)/python benchmarks/compile.py --output benchmarks/results/compile.md

# torch first and pinned: on a CPU-only machine an unpinned torch brings several GB of CUDA packages.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "trl_packing needs Python >= 3.11, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	@echo "1 of 2: installing PyTorch into $(VENV), a large download"
	$(BIN)/python -m pip install --constraint constraints.txt torch
	@echo "2 of 2: installing trl_packing and what its demo and tests need"
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[dev]"
	touch $@

$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt torch
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable ".[dev]"
	touch $@

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

# What only slow tests need. gguf reads a real model. DeepSpeed's ops are compiled when they are used:
# without a compiler or without success, tests that need it are skipped, and say so. It builds with
# what is installed.
$(ALL_READY): $(DOCS_READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[qlora]" setuptools wheel ninja gguf
	-DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation --constraint constraints.txt deepspeed
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) outputs site .pytest_cache .mypy_cache .ruff_cache
