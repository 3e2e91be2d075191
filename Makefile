# relight: `make help` lists what there is. Every target works on a fresh clone, and again.
PYTHON ?=
export PYTHON
VENV := .venv/bin/python
SAY := printf '\033[1m== %s\033[0m\n'
# What the installed package is made of; changed files lead to a new build, unchanged ones to none.
SOURCES := pyproject.toml Cargo.toml Cargo.lock README.md $(shell find rust python \( -name '*.rs' -o -name 'Cargo.toml' -o -name '*.py' -o -name '*.pyi' \) -not -name '.*')
OUT ?= demo-run
TESTS ?=
BENCH ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-rust test-types test-python bench lint clean

help: ## this list
	@echo "relight: PyTorch checkpoints that do not stop the training and are there after anything dies"
	@echo
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST) | expand -t 20

.venv/.relight-ready: scripts/environment.sh
	@scripts/environment.sh venv
	@touch $@

.venv/.relight-installed: .venv/.relight-ready $(SOURCES)
	@scripts/environment.sh package
	@touch $@

demo: .venv/.relight-installed ## train, kill, resume, compare, measure: the main job, about three minutes (OUT=folder)
	@scripts/environment.sh need 'rich>=13' 'matplotlib>=3.8'
	@$(VENV) examples/demo.py "$(OUT)"

test: .venv/.relight-installed test-rust test-types test-python ## all tests: Rust, types, Python (TESTS=path for some of the Python ones)

test-rust: .venv/.relight-ready ## unit, property and crash tests of the crates, and the loom models
	@$(SAY) "Rust: tests of the workspace"
	@if cargo nextest --version >/dev/null 2>&1; then cargo nextest run --workspace && cargo test --workspace --doc; else cargo test --workspace; fi
	@$(SAY) "Rust: loom models of the rings and the arena"
	@cargo test -p relight-io --features loom --test loom --release

test-types: .venv/.relight-installed ## mypy over the package, stubtest over the stubs of the extension
	@scripts/environment.sh need 'mypy>=1.10' 'rich>=13'
	@$(SAY) "Types: mypy (strict) and stubtest"
	@MYPYPATH=python $(VENV) -m mypy
	@$(VENV) -m mypy.stubtest relight._core

test-python: .venv/.relight-installed ## pytest
	@scripts/environment.sh need 'pytest>=8' 'hypothesis>=6.100' 'rich>=13' numpy
	@$(SAY) "Python: pytest"
	@$(VENV) -m pytest $(TESTS)

bench: .venv/.relight-installed ## against torch.save and torch.load: table, plot and JSON in bench/results (BENCH="--size-mib 2048")
	@scripts/environment.sh need 'rich>=13' 'matplotlib>=3.8' 'pytest>=8' 'pytest-benchmark>=5' 'psutil>=5.9'
	@$(VENV) bench/run.py $(BENCH)
	@$(VENV) -m pytest bench --benchmark-only --benchmark-disable-gc -q

lint: .venv/.relight-ready ## formatting and lints of both languages
	@scripts/environment.sh need ruff
	@cargo fmt --all --check
	@cargo clippy --workspace --all-targets -- -D warnings
	@$(VENV) -m ruff check python tests examples bench
	@$(VENV) -m ruff format --check python tests examples bench

clean: ## remove what was built and what the demo left
	@rm -rf target .venv build dist demo-run .pytest_cache .mypy_cache .hypothesis .benchmarks .ruff_cache
	@find python tests examples bench -name __pycache__ -type d -prune -exec rm -rf {} +
