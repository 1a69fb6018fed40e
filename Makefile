# Two commands matter: `make run` (a cluster on this machine) and `make test`. Both set up what they need first.
#   make run ARGS="--decode 2 --transfer-backend mooncake"      all flags: .venv/bin/tandem up --help

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PYTHON ?=
GPU_JSON ?=
TESTS ?=
BASE ?=
CELLS ?=
JOBS ?= 2
LONG ?=
BACKENDS ?= nixl mooncake
# The transfer engines' wheels: of the CUDA that torch brings on a machine with a GPU.
WHEELS ?= $(if $(findstring cpu,$(TORCH_INDEX)),cpu,$(if $(wildcard /dev/nvidia[0-9]*),cu13,cpu))
EXTRAS ?= engine,nixl-$(WHEELS),mooncake-$(WHEELS),k8s,otel,chat,smollm2,dev
TORCH ?= torch==2.13.0
# The venv depends on these files: a change of them makes another stamp, and a new venv.
STAMP := $(VENV)/.ready-$(shell cat pyproject.toml deploy/make_venv.sh | sha256sum | cut -c1-12)
# Checked with mypy --strict.
TYPED := $(wildcard engine/*.py) $(addprefix engine/,assembly core device flags loop frontend text gguf grammar hicache lora parallel pdmux quant ranks speculative trainers) disagg \
	$(wildcard transfer_backends/*.py) $(addprefix transfer_backends/,prefill decode) bootstrap_server router deploy planner service tandem tools/house

export OMP_NUM_THREADS ?= 1
# Tests start some hundred processes: none should compile the product again.
unexport PYTHONDONTWRITEBYTECODE
export TORCH TORCH_INDEX EXTRAS

# The whole suite in four processes, of which some wait for clusters, which write the CPU seconds that tests/durations.toml limits.
WHOLE := -n 4 --dist loadscope --no-loadscope-reorder -p tools.cpu_seconds --cpu-seconds .build/cpu_seconds.json

# make sim SEED=7 NODES=8; without them both are random.
SEED ?=
NODES ?=
MINUTES ?= 10
SIM := $(BIN)/python -m tools.simulation $(if $(NODES),--nodes $(NODES)) $(if $(SEED),--seed $(SEED))

.PHONY: help setup run chat test quick slow-tests steady-tests fresh-check soak-core mutants sim sim-soak sim-stores sim-mutants scale-fleet bench bench-peers fuzz manifests image-pins pins triton-versions house house-tighten api-table flags-table model-table recall k8s-drill fault-matrix encoder-faults death-notice churn-soak store-faults rank-faults rank-shapes rank-soak goodput where agents plan-error gpu-check gpu-wheels gpu-profile lint format clean

help:
	@echo "make run [ARGS=...]    start a cluster on this machine; Ctrl-C ends it"
	@echo "make chat [ARGS=...]   start a cluster with SmolLM2 and talk to it; Ctrl-D ends both"
	@echo "make setup             install everything into $(VENV)"
	@echo "make test [TESTS=...]  run the tests (all of them: in four processes)"
	@echo "make quick [BASE=main] run the tests that your change touches, at most 90 seconds"
	@echo "make lint | format     check | mend style, types and imports"
	@echo "make clean             remove $(VENV) and caches"
	@echo
	@echo "Checks that write a report into docs/reports:"
	@echo "make bench [ARGS=...]  benchmarks.md: measure this machine (an hour); ARGS="--beside TREE": compare two checkouts"
	@echo "make bench-peers [PEERS=DIR]          peers.md: beside vLLM, transformers and llama.cpp on this kind of CPU (an hour; 6 GB)"
	@echo "make plan-error        plan_error.md: the same requests on real workers and in tandem plan"
	@echo "make gpu-check [PYTHON=python3]       gpu_check.json: kernels, steps and transfers on a GPU (13 minutes)"
	@echo "make gpu-wheels        .whl/: what gpu_check needs on a GPU machine that has torch and no network"
	@echo "make gpu-profile       planner/profiles/: what gpu_check.json says of a GPU, for tandem plan --gpu"
	@echo "make goodput [ARGS='--trace PATH']    goodput.md: requests a second within objectives, by cluster, on all cores (25 minutes)"
	@echo "make where TRACES=DIR  where.md: pairs, one worker for all, or the router's decision; virtual and real (DIR: Mooncake's traces)"
	@echo "make agents            agents.md: which pages of agents' sessions leave a prefix cache first"
	@echo "make encoder-faults    encoder_faults.json: real processes, every fault of an encoder worker"
	@echo "make fault-matrix [CELLS=kill:prefill:*] [JOBS=2]  reliability.md: real processes, every fault in every phase"
	@echo "                       (the rows unplug need root and iproute2: network namespaces)"
	@echo "make death-notice      reliability.md: how soon the router notices a frozen or cut worker"
	@echo "make churn-soak [MINUTES=10] [BACKENDS='nixl mooncake']  reliability.md: 20,000 requests while workers die and return"
	@echo "make store-faults      store.md: a Mooncake Store and its holders die, freeze and lie; rates"
	@echo "make rank-faults | rank-shapes | rank-soak [MINUTES=10]  rank_faults.json: every rank dies in every phase, workers of unlike ranks"
	@echo "                       share KV, ranks under requests, pauses, weights and adapters"
	@echo "make sim-soak [MINUTES=10]            simulation.md: simulate clusters with faults, from fresh seeds"
	@echo "make fuzz [ARGS=...]   fuzz.md: 100,000 fuzzed inputs at every door"
	@echo "make soak-core [STEPS=1000000] [SEED=...]  soak_core.json: drive the scheduler with fresh stories"
	@echo "make mutants           mutants.json, expert_, drafter_, state_, rewind_, way_, prefix_, store_, conversation_mutants.json: plant bugs in the core, in the"
	@echo "                       moves of experts, in drafters, in states and prefixes that cross or go back, in ways, stores, checksums;"
	@echo "                       stories and tests must find each"
	@echo "make slow-tests [ARGS]  slow_tests.json: the tests that make test leaves out"
	@echo "make steady-tests [ARGS='--conditions busy --runs 1']  steady_tests.json: the suite alone, beside busy loops, on one core, with late sleeps"
	@echo "make fresh-check [LONG=1]  README's commands on a bare Debian root (root, mmdebstrap); LONG: the whole suite, fresh_check.json"
	@echo "make k8s-drill         k8s_drill.json: upgrade the pods of deploy/kubernetes under load, as local processes"
	@echo "make pins              pins.json: pip resolves images and setups against the index, for CPUs and CUDA (5 minutes)"
	@echo "make triton-versions   triton_versions.json: registers and spills of each kernel with both versions of Triton"
	@echo "make house             house.md: sizes, lengths, and imports between rooms"
	@echo "make house-tighten     house.toml: budgets down to today's sizes, which make lint compares"
	@echo
	@echo "make sim [SEED=7 NODES=8]  simulate one cluster with faults"
	@echo "make sim-stores        simulate workers over one store that loses, delays and answers with stale values"
	@echo "make sim-mutants       plant bugs in whole clusters; fixed seeds and scenarios must find each; encoder_mutants.json"
	@echo "make manifests         render deploy/kubernetes for the tests (after a change there; needs kubectl)"
	@echo "make model-table       write the table of docs/models.md (after a change of what a model family works with)"
	@echo "make api-table         write docs/api.md (after a change of routes or fields)"
	@echo "make flags-table       write docs/flags.md (after a change of flags)"
	@echo "make recall            write the shipped checkpoints again (after a change of tools/recall)"
	@echo "make image-pins        pin what the images install to the versions of $(VENV)"

setup: $(STAMP)

$(STAMP):
	bash deploy/system_packages.sh
	bash deploy/make_venv.sh $(VENV)
	@rm -f $(VENV)/.ready-* && touch $@

run: $(STAMP)
	@exec $(BIN)/tandem up $(ARGS)

# ARGS: other flags of `tandem up`.
chat: $(STAMP)
	@exec $(BIN)/tandem chat --temperature 0.3 --up --model-path smollm2 $(ARGS)

test: $(STAMP)
	@bash deploy/system_packages.sh tests
	$(BIN)/python -m pytest -q $(if $(TESTS),$(TESTS),$(WHOLE))
	$(if $(TESTS),,$(BIN)/python -m tools.durations)

# The tests that a change touches. BASE: the revision that it starts from, else origin/main or main.
quick: $(STAMP)
	$(BIN)/python -m tools.quick $(if $(BASE),--base $(BASE))

slow-tests: $(STAMP)
	$(BIN)/python -m tools.slow $(ARGS)

# Hours: the whole suite twice under each condition. An interrupted run goes on.
steady-tests: $(STAMP)
	@bash deploy/system_packages.sh tests
	$(BIN)/python -m tools.steady $(ARGS)

# Needs root and Debian, but no $(VENV): the check makes its own.
fresh-check:
	python3 -m tools.fresh $(if $(LONG),--long --report docs/reports/fresh_check.json)

# A failure prints the line that replays it, and leaves no report.
soak-core: $(STAMP)
	$(BIN)/python -m tools.soak_core --steps $(or $(STEPS),1000000) $(if $(SEED),--seed $(SEED)) \
		$(if $(SEED),,--report docs/reports/soak_core.json)

mutants: $(STAMP)
	$(BIN)/python -m tools.mutants core --report docs/reports/mutants.json
	$(BIN)/python -m tools.mutants experts --report docs/reports/expert_mutants.json
	$(BIN)/python -m tools.mutants drafters --report docs/reports/drafter_mutants.json
	$(BIN)/python -m tools.mutants states --report docs/reports/state_mutants.json
	$(BIN)/python -m tools.mutants rewinds --report docs/reports/rewind_mutants.json
	$(BIN)/python -m tools.mutants ways --report docs/reports/way_mutants.json
	$(BIN)/python -m tools.mutants conversations --report docs/reports/conversation_mutants.json
	$(BIN)/python -m tools.mutants prefixes --report docs/reports/prefix_mutants.json
	$(BIN)/python -m tools.mutants checksums --report docs/reports/checksum_mutants.json
	$(BIN)/python -m tools.mutants stores --report docs/reports/store_mutants.json
	$(BIN)/python -m tools.mutants whole

# A fleet of ten thousand workers in virtual time, and how evenly its workers are loaded: some minutes.
scale-fleet: $(STAMP)
	$(BIN)/python -m benchmarks.scale_fleet $(ARGS)
	$(BIN)/python -m benchmarks.scale_balance

bench: $(STAMP)
	$(BIN)/python -m benchmarks.report $(ARGS)

# The peers are installed there if they are not: some gigabytes, and llama.cpp is compiled.
PEERS ?= .build/peers
bench-peers: $(STAMP)
	bash benchmarks/make_peers.sh $(PEERS)
	$(BIN)/python -m benchmarks.peers --peers $(PEERS) --keep $(ARGS)

# PYTHON: use another interpreter, which has torch with CUDA and what docs/gpu.md names; then no $(VENV) is made.
gpu-check: $(if $(PYTHON),,$(STAMP))
	$(or $(PYTHON),$(BIN)/python) -m benchmarks.gpu_check --output $(or $(GPU_JSON),docs/reports/gpu_check.json) $(ARGS)

gpu-wheels: $(STAMP)
	$(BIN)/python -m benchmarks.gpu.wheels $(ARGS)

gpu-profile: $(STAMP)
	$(BIN)/python -m benchmarks.gpu.profile

fault-matrix: $(STAMP)
	$(BIN)/python -m tools.faults.matrix --jobs $(JOBS) $(if $(CELLS),--again '$(CELLS)')

# A few minutes.
encoder-faults: $(STAMP)
	$(BIN)/python -m tools.faults.encoders $(ARGS)

# About three minutes. Run it alone on the machine.
death-notice: $(STAMP)
	$(BIN)/python -m tools.faults.death_notice $(ARGS)

churn-soak: $(STAMP)
	$(BIN)/python -m tools.faults.soak --minutes $(MINUTES) --backends $(BACKENDS)

# A few minutes.
store-faults: $(STAMP)
	$(BIN)/python -m tools.faults.stores

# Run them alone on the machine: up to 40 processes.
rank-faults: $(STAMP)
	$(if $(CELLS),,$(BIN)/python -m tools.faults.ranks.starts)
	$(BIN)/python -m tools.faults.ranks.matrix $(if $(CELLS),--cells '$(CELLS)')

rank-shapes: $(STAMP)
	$(BIN)/python -m tools.faults.ranks.shapes --backends $(BACKENDS)

rank-soak: $(STAMP)
	$(BIN)/python -m tools.faults.ranks.soak --minutes $(MINUTES)

# Run it alone on the machine; an interrupted run goes on.
goodput: $(STAMP)
	$(BIN)/python -m benchmarks.goodput $(ARGS)

# The folder of the traces.
TRACES ?= traces
where: $(STAMP)
	$(BIN)/python -m benchmarks.where planned --traces $(TRACES)
	$(BIN)/python -m benchmarks.where served --traces $(TRACES)

# Which pages of agents' sessions leave a prefix cache first; virtual time.
agents: $(STAMP)
	$(BIN)/python -m benchmarks.goodput.agents $(ARGS)

plan-error: $(STAMP)
	$(BIN)/python -m benchmarks.plan_error --report docs/reports/plan_error.json $(ARGS)

sim: $(STAMP)
	$(SIM)

sim-soak: $(STAMP)
	$(SIM) --soak $(MINUTES) --report docs/reports/simulation.md

# 1,000 seeds: twenty minutes.
sim-stores: $(STAMP)
	$(BIN)/python -m tools.simulation.stores $(ARGS)

sim-mutants: $(STAMP)
	$(BIN)/python -m tools.mutants cluster
	$(BIN)/python -m tools.mutants encoders --report docs/reports/encoder_mutants.json

# Schemathesis has a venv of its own, because of its pytest plugin and its versions.
FUZZ_VENV := .venv-fuzz
$(FUZZ_VENV)/bin/schemathesis:
	$(BIN)/python -m venv $(FUZZ_VENV)
	$(FUZZ_VENV)/bin/pip install -q "schemathesis>=4.32,<5"

fuzz: $(STAMP) $(FUZZ_VENV)/bin/schemathesis
	$(BIN)/python -m tools.fuzz.run --schemathesis $(FUZZ_VENV)/bin/schemathesis --report docs/reports/fuzz.md $(ARGS)

# Needs kubectl (or KUSTOMIZE="kustomize build"). The tests of deploy/kubernetes read the result.
manifests: $(STAMP)
	$(BIN)/python -m tools.kubernetes.render

# A rolling update under load, without a cluster. About a minute.
k8s-drill: $(STAMP)
	$(BIN)/python -m tools.kubernetes.drill --report docs/reports/k8s_drill.json

image-pins: $(STAMP)
	$(BIN)/python -m tools.image_pins

# A pip of its own: older ones fetch whole wheels to read their metadata. Some minutes, some hundred megabytes.
PINS_VENV := .venv-pins
$(PINS_VENV)/bin/pip: | $(STAMP)
	$(BIN)/python -m venv $(PINS_VENV)
	$@ install -q "pip>=26,<27"

pins: $(STAMP) $(PINS_VENV)/bin/pip
	$(BIN)/python -m tools.pins --pip $(PINS_VENV)/bin/pip

# Another Triton in front of all that $(VENV) has.
OLD_TRITON := 3.6.0
TRITON_VENV := .venv-triton-$(OLD_TRITON)
$(TRITON_VENV)/bin/python: | $(STAMP)
	$(BIN)/python -m venv $(TRITON_VENV)
	$(TRITON_VENV)/bin/pip install -q --no-deps triton==$(OLD_TRITON)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$($@ -c "import sysconfig; print(sysconfig.get_path('purelib'))")/behind.pth

triton-versions: $(STAMP) $(TRITON_VENV)/bin/python
	$(BIN)/python -m tools.triton_versions --python $(TRITON_VENV)/bin/python

# After a change of routes or bodies; a test compares the page.
api-table: $(STAMP)
	$(BIN)/python -m tools.api_table

flags-table: $(STAMP)
	$(BIN)/python -m tools.flags_table

model-table: $(STAMP)
	$(BIN)/python -m tests.e2e.models.zoo

recall: $(STAMP)
	$(BIN)/python -m tools.recall.build recall engine/models/recall/checkpoint
	$(BIN)/python -m tools.recall.build recall-wide engine/models/recall/wide

house: $(STAMP)
	$(BIN)/python -m tools.house --report docs/reports/house.md

# Lowers the rows of house.toml to today's sizes; never raises one.
house-tighten: $(STAMP)
	$(BIN)/python -m tools.house --tighten

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.house
	$(BIN)/mypy --follow-imports=silent $(TYPED)
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(FUZZ_VENV) $(PINS_VENV) .venv-triton-* .schemathesis .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
