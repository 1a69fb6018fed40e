# Two commands matter: `make run` (a cluster on this machine) and `make test`. Both set up what they need first.
#   make run ARGS="--decode 2 --transfer-backend mooncake"      all flags: .venv/bin/tandem up --help

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PYTHON ?=
GPU_JSON ?=
TESTS ?=
CELLS ?=
JOBS ?= 2
LONG ?=
BACKENDS ?= nixl mooncake
EXTRAS ?= engine,nixl,mooncake-cpu,xgrammar,k8s,otel,smollm2,dev
TORCH ?= torch==2.13.0
# What the venv depends on: another pyproject.toml makes another stamp, an equal one costs nothing.
STAMP := $(VENV)/.ready-$(shell cat pyproject.toml deploy/make_venv.sh | sha256sum | cut -c1-12)
# Parts that decide without I/O (and the command line): held to mypy --strict.
TYPED := $(wildcard engine/*.py) $(addprefix engine/,core loop frontend text gguf grammar hicache lora) disagg \
	$(wildcard transfer_backends/*.py) $(addprefix transfer_backends/,prefill decode) bootstrap_server router deploy service

export OMP_NUM_THREADS ?= 1
export TORCH TORCH_INDEX EXTRAS

# make sim SEED=7 NODES=8; make sim-soak MINUTES=10 (it writes docs/reports/simulation.md); both unset: drawn
SEED ?=
NODES ?=
MINUTES ?= 10
SIM := $(BIN)/python -m tests.simulation $(if $(NODES),--nodes $(NODES)) $(if $(SEED),--seed $(SEED))

.PHONY: help setup run test slow-tests fresh-check soak-core mutants sim sim-soak sim-mutants bench fuzz manifests image-pins house k8s-drill fault-matrix death-notice churn-soak plan-error gpu-check lint format clean

help:
	@echo "make run [ARGS=...]    start a cluster on this machine (Ctrl-C ends it)"
	@echo "make test [TESTS=...]  run the tests (all of them: in three processes)"
	@echo "make slow-tests        the tests that make test leaves out, with a report"
	@echo "make fresh-check [LONG=1]  README's commands on a bare Debian root (root, mmdebstrap); LONG: the whole suite, with a report"
	@echo "make setup             make $(VENV) with everything in it"
	@echo "make soak-core [STEPS=1000000] [SEED=...]  drive the core with fresh stories: docs/reports/soak_core.json"
	@echo "make mutants           plant bugs in the core, one by one, and see each found"
	@echo "make bench [ARGS=...]  measure and write docs/reports/benchmarks.md"
	@echo "make gpu-check [PYTHON=python3]  on a machine with a GPU: kernels, steps and transfers beside its limits, under 9 minutes"
	@echo "make fault-matrix [CELLS=kill:prefill:*] [JOBS=2]  real processes, every fault in every phase; docs/reports/reliability.md"
	@echo "                       (the rows unplug need root and iproute2: network namespaces)"
	@echo "make death-notice      how soon the router notices a frozen or cut worker; docs/reports/reliability.md"
	@echo "make churn-soak [MINUTES=10] [BACKENDS='nixl mooncake']  for each: 20,000 requests while workers and a router die and"
	@echo "                       come; docs/reports/reliability.md"
	@echo "make plan-error        the same requests on real workers and in tandem plan: docs/reports/plan_error.json"
	@echo "make sim [SEED=7 NODES=8] | sim-soak [MINUTES=10] | sim-mutants"
	@echo "                       simulate whole clusters with faults: one seed | fresh seeds | planted bugs"
	@echo "make fuzz [ARGS=...]   100,000 fuzzed inputs at every door; writes docs/reports/fuzz.md"
	@echo "make manifests         build deploy/kubernetes for the tests (after a change there; needs kubectl)"
	@echo "make k8s-drill         upgrade the pods of deploy/kubernetes under load, as processes of this machine"
	@echo "make image-pins        pin what the images install to the versions of $(VENV)"
	@echo "make house             sizes, arrows between parts, files of a plain request: docs/reports/house.md"
	@echo "make lint | format     check | mend style, types and import order"
	@echo "make clean             remove $(VENV) and caches"

setup: $(STAMP)

$(STAMP):
	bash deploy/system_packages.sh
	bash deploy/make_venv.sh $(VENV)
	@rm -f $(VENV)/.ready-* && touch $@

run: $(STAMP)
	@exec $(BIN)/tandem up $(ARGS)

test: $(STAMP)
	@bash deploy/system_packages.sh tests
	$(BIN)/python -m pytest -q $(if $(TESTS),$(TESTS),-n 3 --dist loadfile --no-loadscope-reorder)

slow-tests: $(STAMP)
	$(BIN)/python -m tools.slow

# Needs root and Debian, and no $(VENV): the check makes its own, on a machine where nothing is installed.
fresh-check:
	python3 -m tools.fresh $(if $(LONG),--long --report docs/reports/fresh_check.json)

# A failure prints the line that replays it, and leaves no report.
soak-core: $(STAMP)
	$(BIN)/python -m tools.soak_core --steps $(or $(STEPS),1000000) $(if $(SEED),--seed $(SEED)) \
		$(if $(SEED),,--report docs/reports/soak_core.json)

mutants: $(STAMP)
	$(BIN)/python -m tools.mutants core --report docs/reports/mutants.json

bench: $(STAMP)
	$(BIN)/python -m benchmarks.report $(ARGS)

# PYTHON: another interpreter that has torch with CUDA and what benchmarks/gpu_check.py names; no $(VENV) is made then.
gpu-check: $(if $(PYTHON),,$(STAMP))
	$(or $(PYTHON),$(BIN)/python) -m benchmarks.gpu_check --output $(or $(GPU_JSON),docs/reports/gpu_check.json) $(ARGS)

fault-matrix: $(STAMP)
	$(BIN)/python -m tools.faults.matrix --jobs $(JOBS) $(if $(CELLS),--again '$(CELLS)')

# About three minutes; alone on the machine, or its figures are the machine's.
death-notice: $(STAMP)
	$(BIN)/python -m tools.faults.death_notice $(ARGS)

churn-soak: $(STAMP)
	$(BIN)/python -m tools.faults.soak --minutes $(MINUTES) --backends $(BACKENDS)

plan-error: $(STAMP)
	$(BIN)/python -m benchmarks.plan_error --report docs/reports/plan_error.json $(ARGS)

sim: $(STAMP)
	$(SIM)

sim-soak: $(STAMP)
	$(SIM) --soak $(MINUTES) --report docs/reports/simulation.md

sim-mutants: $(STAMP)
	$(BIN)/python -m tools.mutants cluster

# Schemathesis lives apart: its pytest plugin and its versions are no affair of ours.
FUZZ_VENV := .venv-fuzz
$(FUZZ_VENV)/bin/schemathesis:
	$(BIN)/python -m venv $(FUZZ_VENV)
	$(FUZZ_VENV)/bin/pip install -q "schemathesis>=4.32,<5"

fuzz: $(STAMP) $(FUZZ_VENV)/bin/schemathesis
	$(BIN)/python -m tools.fuzz.run --schemathesis $(FUZZ_VENV)/bin/schemathesis --report docs/reports/fuzz.md $(ARGS)

# Needs kubectl (or KUSTOMIZE="kustomize build"): what the tests of deploy/kubernetes read.
manifests: $(STAMP)
	$(BIN)/python -m tools.kubernetes.render

# A rolling update under load, without a cluster: about a minute.
k8s-drill: $(STAMP)
	$(BIN)/python -m tools.kubernetes.drill --report docs/reports/k8s_drill.json

image-pins: $(STAMP)
	$(BIN)/python -m deploy.docker.pin

house: $(STAMP)
	$(BIN)/python -m tools.house

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --follow-imports=silent $(TYPED)
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(FUZZ_VENV) .schemathesis .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
