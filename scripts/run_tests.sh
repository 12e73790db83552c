#!/usr/bin/env bash
# Run the tests of a machine without a GPU, with these arguments for pytest.
#
# Many tests wait for processes, next to another worker's and whatever else the machine does. If
# tests of at most MOST files fail, they run once more, alone, and that decides. Both results are
# printed: a test that passes only alone has a fault, in its time limits or in what it shares. Files
# are counted, as one fixture that fails takes all tests of its file with it. After the crash
# of a worker all of them run again, once.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
MOST=3
FAILED=.pytest_cache/v/cache/lastfailed

log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
run() {
  rm -f "$FAILED"
  python -m pytest -m "not gpu" "$@" 2>&1 | tee "$log"
  status=${PIPESTATUS[0]}
}
run "$@"
# Nobody takes the work of a worker that is gone: what it had left did not run.
if grep -q "crashed while running" "$log"; then
  printf '\n---- a worker of the tests crashed (above); all tests once more ----\n'
  run "$@"
  ! grep -q "crashed while running" "$log" || exit 1
fi
[ "$status" -eq 1 ] && [ -f "$FAILED" ] || exit "$status"
count=$(python -c 'import json, sys; print(len({t.split("::")[0] for t in json.load(open(sys.argv[1]))}))' "$FAILED") || exit 1
[ "$count" -ge 1 ] && [ "$count" -le "$MOST" ] || exit 1
printf '\n---- tests of %s files failed next to the others (above); once more, alone ----\n' "$count"
python -m pytest -m "not gpu" --last-failed --last-failed-no-failures none
