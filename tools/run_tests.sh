#!/usr/bin/env bash
# Runs the tests, installing what they need first:
#
#   bash tools/run_tests.sh                       # all but the slow ones
#   bash tools/run_tests.sh tests/ops -k inverse  # arguments are pytest's
#   bash tools/run_tests.sh --hosts original      # against the original hosts
set -euo pipefail
# shellcheck source=tools/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

bash tools/install.sh --hosts "$HOSTS"
use_device
step tests 'installing the test tools' pip install -r requirements/tests.txt
exec "$VENV/bin/python" -m pytest "$@"
