# `make demo` and `make test` set everything up in .venv and run; a second call takes no time for what is there.
# `make test TORCH=2.15.0` does the same in .venv-2.15.0, with that torch in place of the pinned one.
PYTHON ?= python3
VENV := .venv$(addprefix -,$(TORCH))
BIN := $(VENV)/bin
# Tests and notebooks start Python dozens of times: it would compile this package each time.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install $(if $(TORCH),,-c constraints.txt)

.PHONY: demo test test-inductor test-kernels test-cpus test-models bench bench-compiled bench-physics bench-device bench-fronts bench-gpu evidence optimizers-study claims notebooks docs lint types check clean

demo: $(VENV)/.demo  ## train on two-digit images, under mean and under config
	@$(BIN)/python -m functional_jd

test: $(VENV)/.test  ## all tests but those of `make test-inductor` and `make test-models`
	@$(BIN)/python -m pytest -n 2 -q --ignore=tests/models -m "not inductor"

test-inductor: $(VENV)/.test  ## the tests that compile to machine code: it takes a C++ compiler, and its time
	@$(BIN)/python -m pytest -n 2 -q --ignore=tests/models -m inductor

test-kernels: $(VENV)/.test $(VENV)/.kernels  ## the kernels of Triton, by its interpreter: no GPU is needed
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 -q tests/kernels

# Another CPU adds up in another order. AVX2 is asked for only where the CPU has it; the others run on every CPU.
NUMERICAL := tests/exact tests/solvers tests/aggregators tests/core/test_rows.py tests/engines/gramian tests/engines/test_differential.py tests/test_laws.py
WITH_AVX2 := 'import torch; print("ATEN_CPU_CAPABILITY=avx2" * ("AVX" in torch.backends.cpu.get_cpu_capability()))'
test-cpus: $(VENV)/.test  ## the numerical tests, not compiled, as on CPUs with narrower registers than this one
	@set -e; for cpu in ATEN_CPU_CAPABILITY=default $$($(BIN)/python -c $(WITH_AVX2)) MKL_CBWR=COMPATIBLE; do \
		echo "$$cpu"; \
		env $$cpu HYPOTHESIS_PROFILE=few $(BIN)/python -m pytest -n 2 -q $(NUMERICAL) \
			-k "not compile and not inductor and not transform and not derivative"; \
	done

test-models: $(VENV)/.models  ## models of transformers, peft and timm, and many families, beside an ordinary loop; safetensors
	@$(BIN)/python -m pytest -n 2 -q tests/models tests/training/test_checkpoint.py

bench: $(VENV)/.bench  ## our time and memory beside the goal and the peer's; writes bench.json
	@$(BIN)/python tests/benchmarks --json bench.json
	@$(BIN)/python tests/benchmarks/shard_table.py

bench-compiled: $(VENV)/.bench  ## the same for whole steps in one graph in float32, and what that takes: an hour, to compile
	@$(BIN)/python tests/benchmarks --only compiled float32 --json bench-compiled.json
	@$(BIN)/python tests/benchmarks/first_call.py --page tests/benchmarks/REPORT.md

bench-physics: $(VENV)/.bench  ## errors of networks that solve equations, at equal CPU time: a quarter of an hour
	@$(BIN)/python tests/benchmarks/physics.py --root .

bench-device: $(VENV)/.bench  ## what a step launches on an accelerator, and where it waits, counted on a simulated one
	@$(BIN)/python tests/benchmarks/device_table.py --page tests/benchmarks/REPORT.md

# No network: the Python of that machine has torch, pytest and hypothesis; optree and torchjd come as wheels.
WHEELS ?= wheels
bench-gpu:  ## on one GPU, six minutes at most: tests/test_cuda.py, then a step of plain training, of TorchJD and of ours
	@if [ -d $(WHEELS) ]; then $(PYTHON) -m pip --quiet install --no-index --no-deps --upgrade --target build/gpu $(WHEELS)/*.whl; fi
	@PYTHONPATH=build/gpu:. timeout 150 $(PYTHON) -m pytest -q -p no:xdist -p no:benchmark tests/test_cuda.py || true
	@PYTHONPATH=build/gpu:. $(PYTHON) tests/benchmarks/gpu_table.py --seconds 200 --json bench-gpu.json

bench-fronts: $(VENV)/.bench  ## hypervolumes and times of fronts, beside LibMOON where its repository is on PYTHONPATH
	@$(BIN)/python tests/benchmarks/fronts_table.py --page tests/benchmarks/REPORT.md

evidence: $(VENV)/$(if $(QUICK),.test,.evidence)  ## rules beside plain and searched sums: hours, restartable; QUICK=1: one or two minutes
	@OMP_NUM_THREADS=1 $(BIN)/python tests/evidence $(if $(QUICK),--quick)

optimizers-study: $(VENV)/.test  ## does the optimizer hide the rule? half an hour; QUICK=1: seconds
	@OMP_NUM_THREADS=1 $(BIN)/python tests/evidence/study_optimizers.py $(if $(QUICK),--quick)

claims: $(VENV)/.bench  ## measure the comparison with peers in docs/coming_from.md again: a minute or two
	@OMP_NUM_THREADS=1 $(BIN)/python tests/claims

notebooks: $(VENV)/.test  ## run the notebooks and store what they show
	@$(BIN)/python tests/notebooks.py notebooks/*.ipynb

docs: $(VENV)/.docs  ## README, guides, notebooks and the reference as a site in build/docs; a broken link is an error
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env -c docs . build/docs
	@echo "build/docs/index.html"

lint: $(VENV)/.dev
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.dev
	@$(BIN)/pyright

check: test lint types

# torch comes first and by itself: a later requirement must find it, and not fetch a larger build of it.
$(VENV)/.torch: constraints.txt
	@echo "setting up $(VENV): torch, once (a few minutes at most)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "functional_jd needs Python 3.11 or newer: make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch$(addprefix ==,$(TORCH))
	@touch $@

# Without `compat`, Python started in the folder around a clone named functional_jd takes that for an empty package.
$(VENV)/.%: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "setting up $(VENV): functional_jd[$*]"
	@$(PIP) --config-settings editable_mode=compat -e '.[$*]'
	@touch $@

clean:
	rm -rf .venv .venv-*
