# make help lists the targets. Two variables can be passed:
#   PYTHON    the interpreter to make .venv with:       make book PYTHON=python3.12
#   PIP_ARGS  extra options for every pip install, for example to choose the CPU or a CUDA build of torch:
#             make book PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
PIP_ARGS ?=
UV ?= uv

RUN := .venv/bin/python
INSTALLED := .venv/.installed
# Two processes of one thread each: torch's own threads would fight for the same cores.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile
NBVAL := --nbval-lax --nbval-current-env --nbval-cell-timeout 600

.DEFAULT_GOAL := help
.PHONY: book test execute bench lint docs-check lock clean help

book: $(INSTALLED) ## render the book from the chapters' committed outputs
	@$(RUN) -m helpers.rerun.execute --check
	.venv/bin/jupyter-book build --all -W --keep-going .
	@echo "$(CURDIR)/_build/html/index.html"

test: $(INSTALLED) ## run every test, then run every chapter again and compare its checked cells
	$(PYTEST) tests
	$(PYTEST) $(NBVAL) book/*.ipynb

execute: $(INSTALLED) ## run the stale chapters again, in place
	$(RUN) -m helpers.rerun.execute

bench: $(INSTALLED) ## measure speed
	@for file in benchmarks/bench_*.py; do echo "== $$file"; $(RUN) "$$file" || exit 1; done

lint: $(INSTALLED) ## check style and formatting, notebooks included
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

docs-check: $(INSTALLED) ## try every link out of the book (needs a network)
	.venv/bin/jupyter-book build --all --keep-going --builder linkcheck .

lock: ## resolve requirements.lock from pyproject.toml again (needs uv)
	$(UV) pip compile pyproject.toml --universal --python-version 3.11 --all-extras --no-header -q -o requirements.lock

clean: ## remove what was built; .venv and runs stay
	rm -rf _build .pytest_cache .ruff_cache .hypothesis
	find book helpers tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c "import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
	f'Python 3.11 or newer is needed, $(PYTHON) is {v[0]}.{v[1]}: pass PYTHON=python3.12, say')"
	@echo "Installing into .venv: this takes a few minutes, once"
	@$(PYTHON) -m venv .venv
	@$(RUN) -m pip install --quiet $(PIP_ARGS) -r requirements.lock
	@$(RUN) -m pip install --quiet $(PIP_ARGS) --no-deps --no-build-isolation -e .
	@touch $@
