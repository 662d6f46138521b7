# Sourced by run.sh and test.sh: virtual environments that are built once and kept while their pins
# are unchanged.

# make_environment DIRECTORY REQUIREMENTS...
make_environment() {
  local directory="$1"; shift
  local pins
  pins="$(cat "$@" | sha256sum | cut -d' ' -f1) $(python3 -c 'import sys; print(sys.version)')"
  if [ "$(cat "$directory/pins" 2>/dev/null)" = "$pins" ]; then
    return
  fi
  # Never a directory that somebody else made.
  if [ -e "$directory" ] && [ ! -e "$directory/pins" ] && [ ! -e "$directory/unfinished" ]; then
    echo "$directory was not made by this script: move it away, or run the stages in it by hand" >&2
    return 1
  fi
  echo "== installing $* into $directory"
  rm -rf "$directory"
  python3 -m venv "$directory"
  touch "$directory/unfinished"
  local file
  for file in "$@"; do
    "$directory/bin/python" -m pip install --quiet --disable-pip-version-check -r "$file"
  done
  echo "$pins" > "$directory/pins"
  rm "$directory/unfinished"
}
