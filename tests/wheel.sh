#!/bin/sh
# Builds the wheel, installs it into an empty environment and does the main job there.
# usage: tests/wheel.sh PYTHON     (run from the repository's root)
set -eu
python=$1
root=$(pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM

"$python" -m pip wheel -q --disable-pip-version-check --no-deps -w "$work/dist" .
ls "$work/dist" | grep -q -- '-cp310-abi3-' || { echo "not a stable-ABI wheel: $(ls "$work/dist")" >&2; exit 1; }

"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check "$work"/dist/*.whl
PATH="$work/venv/bin:$PATH"

cd "$work" # away from the source tree, which would shadow the wheel
python -c 'import colibri_tools.native, pathlib; p = pathlib.Path(colibri_tools.native.__file__); assert "site-packages" in p.parts, p'
colibri --version
colibri repack "$root/fixtures/tiny-moe" -o tiny.colibri -q
colibri verify tiny.colibri -q
colibri inspect tiny.colibri --json > inspect.json
python - <<'PY'
import json
seen = json.load(open("inspect.json"))
assert seen["kind"] == "container" and seen["n_layers"] == 4, seen
PY
colibri run tiny.colibri --prompt "The " --max-tokens 8 --json > run.json
ids=$(python -c 'import json; print(",".join(map(str, json.load(open("run.json"))["tokens"])))')
echo "wheel: ok, generated $ids"
colibri-run tiny.colibri --tokens 1,2,3 --max-tokens 4 > /dev/null
