#!/usr/bin/env bash
# Checks inside an image that docker/standin/build.sh made; each prints one line with its seconds.
#
#   inside.sh commands           as the image's user: what needs no engine
#   inside.sh engines PACKAGE    as root: add CPU engines to the generators' environment
#   inside.sh doctor             as the image's user: with engines
#   inside.sh train              as the image's user: five steps of RL, two trainers, one generator
set -uo pipefail
failed=0

check() { # check SECONDS NAME COMMAND...: run a command with a time-out, print its last lines
  local limit=$1 name=$2 start=$SECONDS status=0 output
  shift 2
  echo "---- $name"
  output=$(timeout --kill-after 10 "$limit" "$@" 2>&1) || status=$?
  tail -n "${LINES_SHOWN:-60}" <<<"$output"
  if [ $status -eq 0 ]; then
    echo "check: $name: ok, $((SECONDS - start)) s"
  else
    echo "check: $name: FAILED with status $status after $((SECONDS - start)) s"
    failed=1
  fi
}

case ${1:-} in
engines)
  # --no-deps: all others that it needs are of the lock. Its own libraries of Intel it can do without.
  check 300 "CPU engines added" /usr/bin/env PYTHONPATH=/opt/uv UV_SYSTEM_CERTS=1 UV_NO_CACHE=1 \
    python3 -m uv pip install --python /opt/generator/bin/python --no-deps "$2"
  ;;
commands)
  check 10 "the user is 10001" test "$(id -u)" = 10001
  # -P: not a folder of sources
  check 60 "the installed package" python3 -P -c \
    'import megatron_rl as m; assert "/dist-packages/" in m.__file__, m.__file__'
  # The user cannot write it, so each process would compile again.
  check 10 "bytecode of the generators' packages" \
    test -e /opt/generator/lib/python3.12/site-packages/torch/__pycache__/__init__.cpython-312.pyc
  check 120 "megatron-rl plan" megatron-rl plan examples/scalerl_scout.yaml
  check 120 "bash examples/scalerl_scout.sh --dry-run" bash examples/scalerl_scout.sh --dry-run
  ;;
doctor) check 400 "megatron-rl doctor" megatron-rl doctor ;;
train)
  check 1200 "five steps of RL" megatron-rl train --config examples/scalerl_tiny.yaml \
    --output_dir runs/five --schedule.steps 5 --evaluation.first_step 5 --sft.steps 20
  check 30 "losses of five steps" python3 -c '
import json, math, pathlib
rows = [json.loads(line) for line in pathlib.Path("runs/five/metrics.jsonl").open()]
losses = {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}
print("loss by step:", losses)
assert len(losses) >= 5 and all(map(math.isfinite, losses.values())), rows[-1]'
  ;;
*)
  echo "$0: commands, engines, doctor or train, not '${1:-}'" >&2
  exit 2
  ;;
esac
exit $failed
