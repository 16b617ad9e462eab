# The two commands a newcomer needs are `make demo` and `make test`; both set up what they need first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# A hundred processes start in the tests, and each would compile torch's modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo check test test-slow test-gpu test-slurm test-nodes bench docs screenshots image clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/python examples/demo/demo.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache

test: check
	$(BIN)/pytest -n 2 --dist worksteal

test-slow: setup
	$(BIN)/pytest -m slow

test-gpu: setup
	$(BIN)/pytest -m gpu

test-slurm: setup
	$(BIN)/pytest -m slurm tests/launch/test_slurm.py

test-nodes: setup
	$(BIN)/pytest -m nodes tests/parallel/test_two_hosts.py

bench: setup
	$(BIN)/python benchmarks/cpu.py

docs: setup
	$(BIN)/python docs/generate.py

screenshots: setup
	$(BIN)/python tests/ui/screenshots.py

# A builder of containers, the first that is here; buildah builds and has another way to run.
BUILDER ?= $(firstword $(foreach one,podman docker buildah,$(if $(shell command -v $(one)),$(one))))
IMAGE ?= tunesmith:$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

image:
	@test -n "$(BUILDER)" || { echo "No podman, docker or buildah is here to build an image with."; exit 1; }
	$(BUILDER) build --file Containerfile --tag $(IMAGE) .
	if [ "$(BUILDER)" = buildah ]; then made=$$(buildah from $(IMAGE)) && buildah run $$made -- tunesmith doctor; \
	else $(BUILDER) run --rm $(IMAGE) doctor; fi

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
