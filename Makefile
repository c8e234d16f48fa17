# Two commands do all the set-up: `make demo` and `make test`. Both work as root or as a user, without Docker or a GPU.
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed

.PHONY: demo test test-guard test-all test-gpu lint docs dashboards protos benchmark bench-gpu clean

# The main job on real images, with embedded weight servers. EPOCHS, DATA_DIR (Fashion-MNIST's files) and OUTPUT may be given.
demo: $(INSTALLED)
	$(BIN)/python -m trainer.demo $(if $(EPOCHS),--epochs $(EPOCHS)) $(if $(DATA_DIR),--data-dir $(DATA_DIR)) $(if $(OUTPUT),--output $(OUTPUT))

# Two tests at a time, of one thread each: most wait for a disk or a process more than they compute.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal $(PYTEST_FLAGS)

# The longer tests that guard the promises, which .ci/run runs beside the quick ones.
test-guard: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "guard and not (slow or docker or gpu or soak)" $(PYTEST_FLAGS)

# Every test that this machine can run, the slow ones too; those that lack a GPU or Docker are skipped with the reason.
test-all: lint
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[wandb]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not soak" $(PYTEST_FLAGS)

# The tests that need GPUs, one at a time: each skips with what it needs where that is not there.
test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -q -m gpu $(PYTEST_FLAGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p weightserver -p trainer -p deploy

# The documentation as a site, in build/site.
docs: $(INSTALLED)
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict --quiet

# What Grafana shows, from its code.
dashboards: $(INSTALLED)
	$(BIN)/python -m deploy.grafana.dashboards

protos: $(INSTALLED)
	$(BIN)/python protos/generate.py

benchmark: $(INSTALLED)
	for name in rows wire steps head scale checkpoints checksums measuring augment; do $(BIN)/python -m benchmarks.$$name || exit 1; done

# What a machine with GPUs does, in half an hour; BENCH_FLAGS="--quick" measures every section in 9 minutes.
bench-gpu: $(INSTALLED)
	$(BIN)/python -m benchmarks.gpu $(BENCH_FLAGS)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[trainer,dev]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
