# `make demo` and `make test` do all the set-up. Both work as root or as a user, without Docker or a GPU.
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed
EXPERIMENTS = $(VENV)/.experiments

# Tests start hundreds of Python processes, each of which would compile our modules and, for pytest, rewrite its tests.
export PYTHONDONTWRITEBYTECODE =

FASHION_MNIST = /usr/share/datasets/fashion-mnist

.PHONY: install first-hour fashion-mnist demo tables tables-quick million extras test test-guard test-all test-gpu lint docs dashboards locks protos bench bench-quick bench-gpu clean

# Trains on real images, with weight servers of its own, beside the same run without correction. Optional: EPOCHS, DATA_DIR
# (Fashion-MNIST's files), OUTPUT, RESUME=1 (an interrupted demo: the one in OUTPUT, or the last one).
demo: $(INSTALLED) $(if $(DATA_DIR),,fashion-mnist)
	$(BIN)/python -m trainer.demo $(if $(EPOCHS),--epochs $(EPOCHS)) $(if $(DATA_DIR),--data-dir $(subst $() ,\ ,$(DATA_DIR))) $(if $(OUTPUT),--output $(subst $() ,\ ,$(OUTPUT))) $(if $(RESUME),--resume)

# Installs everything that training needs into .venv, and nothing else.
install: $(INSTALLED)

# Fashion-MNIST: the system's copy, else the trainer's download, else, as root on Debian, the package. If all fail, the
# command that needs the images says what to do.
fashion-mnist: $(INSTALLED)
	@test -e $(FASHION_MNIST) || $(BIN)/python -c 'from trainer.data import load_dataset; load_dataset("fashion-mnist")' 2> /dev/null \
	|| { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && $(INSTALL_FASHION_MNIST); } || true

INSTALL_FASHION_MNIST = { $(APT_INSTALL) || { apt-get update -q && $(APT_INSTALL); }; } > /dev/null 2>&1
APT_INSTALL = DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends dataset-fashion-mnist

# The paper's tables: runs the cells that have not finished, one a core, and writes docs/results.md. TABLES_FLAGS="--tables
# negatives,lengths --seeds 1" runs a part; the whole takes about two days of one core.
tables: $(EXPERIMENTS) fashion-mnist
	failed=0; $(BIN)/python -m experiments run $(TABLES_FLAGS) || failed=$$?; $(BIN)/python -m experiments page && exit $$failed

# The same with tiny cells, in build/tables-quick: shows in ten minutes of two cores that every table runs.
tables-quick: $(EXPERIMENTS) fashion-mnist
	rm -rf build/tables-quick
	$(BIN)/python -m experiments run --quick --seeds 1 $(TABLES_FLAGS)
	$(BIN)/python -m experiments page --quick

# A million glyphs of Debian's fonts, from rendering to nearest neighbours, in hours; repeat it to resume.
million: $(EXPERIMENTS)
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[ray]'
	$(BIN)/python -m experiments.million && $(BIN)/python -m experiments page

# Extras whose tests are skipped without them.
extras: $(INSTALLED)
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[heic,onnx,parquet]'

# Two tests at a time, with one thread each: most wait for a disk or a process longer than they compute.
test: $(INSTALLED) fashion-mnist
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal $(PYTEST_FLAGS)

# The longer tests of the guarantees; .ci/run runs them in addition to the quick ones.
test-guard: $(INSTALLED) fashion-mnist
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "guard and not (slow or docker or gpu)" $(PYTEST_FLAGS)

# Every test that this machine can run, with the coverage of this process's code; tests that need a missing GPU or Docker
# are skipped with the reason. Code that runs only in shard processes or other ranks counts as not covered.
test-all: lint fashion-mnist extras
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[wandb,faiss,s3,ray]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "" --cov --cov-report=term $(PYTEST_FLAGS)

# The tests that need GPUs, one at a time; each is skipped with the reason if its GPUs are missing.
test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -q -m gpu $(PYTEST_FLAGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# docs/first-hour.md: runs a new user's first commands in a fresh clone, in half an hour.
first-hour: $(INSTALLED)
	$(BIN)/python -m experiments.first_hour

# The documentation as a site, in build/site.
docs: $(INSTALLED)
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m docs.site_links build/site

# Generates alert rules and the runbook's sections from deploy/slo.yml, and Grafana's dashboards.
dashboards: $(INSTALLED)
	$(BIN)/python -m deploy.slo
	$(BIN)/python -m deploy.grafana.dashboards

# What the images install, with the hashes of all files: of pyproject.toml and constraints.txt.
COMPILE = echo setuptools | UV_CUSTOM_COMPILE_COMMAND="make locks" $(BIN)/uv pip compile -q --no-config --universal --generate-hashes --no-annotate -c constraints.txt pyproject.toml -
locks: $(INSTALLED)
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt uv
	$(COMPILE) --extra s3 --extra otel -o deploy/weightserver.lock
	$(COMPILE) --extra trainer --extra parquet --extra s3 --extra otel -o deploy/trainer.lock

protos: $(INSTALLED)
	$(BIN)/python protos/generate.py

# Measures fetches, pushes, steps and checkpoints beside what bounds them; writes the tables in benchmarks/results.
bench: $(INSTALLED) fashion-mnist
	for name in rows blocks rounding wire steps head scale checkpoints measuring; do $(BIN)/python -m benchmarks.$$name || exit 1; done

# Fetches and pushes in two minutes, beside the ratios of the last release, and marks what is slower; BENCH_FLAGS=--record
# keeps them, BENCH_FLAGS="--output FOLDER" compares with a record elsewhere.
bench-quick: $(INSTALLED)
	$(BIN)/python -m benchmarks.quick $(BENCH_FLAGS)

# Measures a machine with GPUs, in half an hour; BENCH_FLAGS="--quick" measures every section in 9 minutes.
bench-gpu: $(INSTALLED)
	$(BIN)/python -m benchmarks.gpu $(BENCH_FLAGS)

$(INSTALLED): pyproject.toml constraints.txt $(wildcard weightserver/core/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[trainer,dev]'
	@touch $@

$(EXPERIMENTS): $(INSTALLED)
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[experiments]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info weightserver/core/_kernel*.so
