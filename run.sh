#!/usr/bin/env bash
# The whole pipeline, from pinned prompts to a served draft and its acceptance.
#
#   ./run.sh          the embedded tiny pair, on a CPU
#   ./run.sh qwen3    Qwen3-1.7B for Qwen3-8B, on a GPU machine
#
# Stages whose result is already there, made with the same arguments from the same inputs, are not
# run again. WORKSPACE moves the workspace; PORT the server (default 8000, 0 for a free one).
set -euo pipefail
# A workspace that is named from where the user stands must stay there after the cd.
[ -z "${WORKSPACE:-}" ] || { mkdir -p "$WORKSPACE"; WORKSPACE="$(cd "$WORKSPACE" && pwd)"; export WORKSPACE; }
cd "$(dirname "$0")"

profile="${1:-tiny}"
case "$profile" in
  tiny) requirements=requirements-cpu.txt; evaluation=(--require-ratio 1.5) ;;
  qwen3) requirements=requirements.txt; evaluation=(--target-step-ms 5.4) ;;
  *) echo "usage: ./run.sh [tiny|qwen3]" >&2; exit 2 ;;
esac
port="${PORT:-8000}"

# In a log file a progress bar is a line every few seconds, not thousands.
[ -t 2 ] || export TQDM_MININTERVAL=20

source ./environment.sh
make_environment .venv "$requirements"
began=$SECONDS
python=.venv/bin/python
stage() { echo; echo "== $*"; "$python" "$@" --profile "$profile"; }

stage download_models.py
# Past this point nothing needs the Hub but the data sets of the real pair.
stage prepare_data.py
stage prepare_extended.py
stage generate_teacher.py
stage train.py
stage quantize.py
stage quantize.py --codec bf16
stage quantize.py --run base --codec bf16

echo; echo "== ./serve.sh --profile $profile --port $port"
log="$(mktemp)"
./serve.sh --profile "$profile" --port "$port" > "$log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; rm -f "$log"' EXIT
# Its own word, not any answer on that port: another server may be there.
for _ in $(seq 300); do
  grep -q "^serving on " "$log" && break
  kill -0 "$server" 2>/dev/null || break
  sleep 1
done
cat "$log"
url="$(sed -n 's/^serving on //p' "$log")"
[ -n "$url" ] || { echo "the server did not get ready; PORT=N takes another port" >&2; exit 1; }
stage evaluate.py --example --url "$url"
kill "$server" || true
wait "$server" 2>/dev/null || true

stage evaluate.py "${evaluation[@]}"
echo; echo "run.sh: $((SECONDS - began)) s after installation"
