# `make demo` and `make test` do all set-up themselves. PYTHON: 3.11 to 3.13. TORCH_INDEX: an index, or a folder of wheels,
# that has torch's CPU build, where neither pip's own places nor PyTorch's index are to be asked. PIP_FLAGS: more flags for pip.
# THINKER=thinker-cuda on a machine with a GPU. BENCH, BENCH_DIT, BENCH_REALTIME, BENCH_SPEAK: flags of the benchmarks;
# of the first, thinker and talker are compiled, which takes minutes and halves their time a step on a CPU. FAMILY: of
# the first, a name that `quartet tiny` knows: qwen3-omni or qwen2.5-omni.
# TEST_COMPOSE, TEST_BARE: flags of scripts/test_compose.py and scripts/test_bare.py. TEST, TEST_LONG, TEST_WEEKLY: flags of pytest.
# WORKERS: of pytest, each with a system of its own.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c "" 2>/dev/null && command -v $$python && break; done)
PIP_FLAGS ?=
BENCH ?= --flag thinker.compile=on --flag talker.compile=on
FAMILY ?= qwen3-omni
BENCH_SPEAK ?= --flag talker.compile=on
BENCH_DIT ?=
BENCH_REALTIME ?=
TEST_COMPOSE ?=
TEST_BARE ?=
TEST ?=
TEST_LONG ?=
TEST_WEEKLY ?=
WORKERS ?= 2
THINKER ?= thinker-cpu
BIN := .venv/bin
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder
READY := .venv/ready

# As tests/conftest.py: what the tests import is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup lock demo test coverage chromium test-long test-weekly test-gpu first-gpu test-v2 hostile up lint types style format test-bare test-newest test-pythons environments test-environments protos bench bench-speak bench-realtime bench-dit test-compose docs sbom audit clean

setup: $(READY)  ## .venv with everything, and the quartet command in it

$(READY): requirements.lock pyproject.toml setup.py protos/generate.py $(wildcard protos/quartet/v1/*.proto) \
		scripts/set_up.py scripts/locked.py scripts/cpu_torch_env.py
	@$(or $(PYTHON),$(error no Python here: install 3.11, 3.12 or 3.13, with venv)) scripts/set_up.py --thinker $(THINKER) $(PIP_FLAGS)
	@touch $(READY)

lock: $(READY)  ## requirements.lock anew, after a change of requirements or to take newer versions
	$(BIN)/python scripts/lock.py

demo: $(READY)  ## the main job on the small models that come with Quartet: no GPU, no hub, no docker
	$(BIN)/quartet demo

test: $(READY)  ## what every change has to pass, in 8 minutes; with a GPU, the gpu-marked tests too
	$(PYTEST) -m "not long and not weekly" $(TEST)

coverage: override TEST += --cov --cov-report=term
coverage: test  ## which lines of the product `make test` runs, its processes included, and which it does not

chromium:  ## a browser for the tests of the page, on Debian as root; without one they are skipped
	@scripts/install_chromium.sh

test-long: $(READY)  ## what the gate runs too: CUDA paths on a fake GPU, other models, two hosts, video and sound, faults, compilation
	$(PYTEST) -m "long and not weekly" --durations 40 $(TEST_LONG)

test-weekly: $(READY)  ## before a release: benchmark commands, others' clients, every family as a whole system, hundreds of sessions
	$(PYTEST) -m weekly --durations 40 $(TEST_WEEKLY)

# Where the path or pyenv has them. What needs an engine is skipped there: torch's CPU builds may not be at hand.
OTHER_PYTHONS ?= 3.12 3.13
test-pythons:  ## tests/pure with the lock's versions on the other Pythons that are found here
	@$(PYTHON) scripts/test_environments.py pythons $(OTHER_PYTHONS)

test-newest:  ## tests/pure and tests/stage with the newest versions that pyproject.toml allows, but for vLLM, which fixes its own
	@$(PYTHON) scripts/test_environments.py newest

environments:  ## what `make test-environments` uses; beside `make lint`, which leaves a core idle
	@$(PYTHON) scripts/test_environments.py make

test-environments:  ## of the gate: tests/pure on each Python and, with tests/stage, with the newest versions
	@$(PYTHON) scripts/test_environments.py gate

test-gpu: $(READY)  ## what this machine is and what will not start on it, then all tests that need a CUDA device
	$(BIN)/quartet doctor
	$(BIN)/python -m pytest -m gpu

first-gpu: $(READY)  ## on a machine with a GPU: doctor, plan, GPU tests and benchmarks, packed in one file to send back
	$(BIN)/python scripts/first_gpu.py

test-v2: $(READY)  ## the thinker's engine on the model runner that vLLM takes on a GPU, its kernels interpreted: 3 minutes
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests/interpreted_triton TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/stage/test_thinker_engine.py

MINUTES ?= 60
SEED ?= 0
HOSTILE ?=
hostile: $(READY)  ## all attacks of tests/hostile by chance, on one running system beside honest clients; HOSTILE: its flags
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.hostile.at_random --minutes $(MINUTES) --seed $(SEED) $(HOSTILE)

up: $(READY)  ## serves MODEL (a directory or hub id) on this machine
	$(BIN)/quartet up --model "$(or $(MODEL),$(error say which: make up MODEL=directory-or-id))"

test-bare:  ## README's two commands in a bare Debian root: needs root, debootstrap and 20 minutes; TEST_BARE: its flags
	$(PYTHON) scripts/test_bare.py $(TEST_BARE)

docs: $(READY)  ## the documents as a site; a link to what is not there, or a page that no list names, is an error
	$(BIN)/python -m sphinx --builder html --conf-dir docs --fail-on-warning --keep-going --quiet . docs/_build/html
	@echo "open $(CURDIR)/docs/_build/html/index.html"

sbom: .venv-audit/ready  ## what the images are made of, as build/sbom/IMAGE.json (CycloneDX)
	@.venv-audit/bin/python -m scripts.supply_chain sbom

audit: .venv-audit/ready  ## looks for known faults of the images' packages; asks the package index
	@.venv-audit/bin/python -m scripts.supply_chain audit

.venv-audit/ready: requirements-audit.lock
	@$(PYTHON) -m venv --clear .venv-audit
	@.venv-audit/bin/python -m pip install --quiet $(PIP_FLAGS) --no-deps --require-hashes -r requirements-audit.lock
	@touch $@

lint: types docs style  ## what the gate checks besides the tests; two at a time with make -j 2

types: $(READY)
	$(BIN)/pyright

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/wrap_documents.py --check
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code protos
	@for image in protos/released/*.binpb; do $(BIN)/buf breaking --against $$image || exit 1; done

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python scripts/wrap_documents.py
	$(BIN)/buf format -w protos

protos: $(READY)  ## generates the stubs again
	$(BIN)/python protos/generate.py

bench: $(READY)  ## speech under load beside transformers, in one run; BENCH="--json figures.json" for other flags
	$(BIN)/python -c "import matplotlib" 2>/dev/null || $(BIN)/python -m pip install --quiet $(PIP_FLAGS) -e '.[bench]'
	$(BIN)/python -m benchmarks.speech $(BENCH) --arch $(FAMILY)

bench-speak: $(READY)  ## texts spoken beside the model's own library, in one run; BENCH_SPEAK: its flags
	$(BIN)/python -m benchmarks.speak $(BENCH_SPEAK)

bench-realtime: $(READY)  ## spoken conversations beside whole turns to chats, in one run; BENCH_REALTIME: its flags
	$(BIN)/python -m benchmarks.realtime $(BENCH_REALTIME)

bench-dit: $(READY)  ## pictures, videos and sound beside plain diffusers, in one run; BENCH_DIT: its flags
	$(BIN)/python -m benchmarks.dit $(BENCH_DIT)

test-compose: $(READY)  ## what a user of docker compose does, on this machine: builds images, needs docker and compose
	$(BIN)/python scripts/test_compose.py $(TEST_COMPOSE)

clean:
	rm -rf .venv .venv-audit .venv-3.* .venv-newest quartet/v1 build docs/_build *.egg-info
