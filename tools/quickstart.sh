#!/usr/bin/env bash
# From nothing to pictures: installs soft_mm, draws a data set of shapes, trains
# a small Mask R-CNN on it, evaluates it and draws what it finds:
#
#   bash tools/quickstart.sh
#
# PYTHON=, VENV= and a leading --hosts mean what they mean to tools/install.sh;
# further arguments go to tools/train.py. A finished training is not repeated,
# unless RETRAIN=1.
set -euo pipefail
# shellcheck source=tools/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

CONFIG=configs/quickstart/mask-rcnn_soft-nano_fpn_shapes.py
WORK=work_dirs/quickstart
LOGS=$ROOT/$WORK/logs
mkdir -p "$LOGS"

say '[1/4] installing'
bash tools/install.sh --hosts "$HOSTS"
use_device

step data '[2/4] drawing the data set data/shapes, unless it is there' \
    python tools/dataset_converters/shapes.py data/shapes

# the file holds the arguments of the training that finished
if [[ -z ${RETRAIN-} && -e $WORK/finished && $(<"$WORK/finished") == "$*" ]]; then
    say "[3/4] trained already, in $WORK (to train again: RETRAIN=1 bash tools/quickstart.sh)"
else
    say "[3/4] training in $WORK"
    rm -f "$WORK/finished"
    touch "$WORK/started"
    # not a pipe, whose end would wait for workers that a killed training leaves
    python tools/train.py "$CONFIG" --work-dir "$WORK" "$@" > >(tee "$LOGS/train.log") 2>&1 ||
        failed '[3/4] training' "$LOGS/train.log"
    echo "$*" >"$WORK/finished"
fi

# the best checkpoint, unless it is left from an earlier training
checkpoint=$(find "$WORK" -maxdepth 1 -name 'best_*.pth' -newer "$WORK/started" | head -n 1)
[[ -n $checkpoint ]] || checkpoint=$WORK/$(basename "$(<"$WORK/last_checkpoint")")
# the configuration as trained, with the arguments above merged into it
step test "[4/4] evaluating $checkpoint and drawing its predictions" \
    python tools/test.py "$WORK/$(basename "$CONFIG")" "$checkpoint" \
    --work-dir "$WORK/test" --show-dir "$WORK/pictures"

# each run of the test writes its results to a folder named by its time
result=$(find "$WORK/test" -mindepth 2 -maxdepth 2 -name '2*.json' | sort | tail -n 1)
python -c 'import json, sys
ap = json.load(open(sys.argv[1]))
print("\nbox AP {coco/bbox_mAP:.2f}  mask AP {coco/segm_mAP:.2f}  pictures:".format(**ap), sys.argv[2])
' "$result" "$ROOT/$WORK/pictures"
