#!/usr/bin/env bash
# Serve drafts over HTTP: ./serve.sh [--profile P] [--host H] [--port N] (python server.py --help
# lists the rest). Uses .venv if it is there. Nothing is fetched: the libraries are told so.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1
export HF_HUB_DISABLE_TELEMETRY=1 DO_NOT_TRACK=1
python="$here/.venv/bin/python"
[ -x "$python" ] || python=python3
exec "$python" "$here/server.py" "$@"
