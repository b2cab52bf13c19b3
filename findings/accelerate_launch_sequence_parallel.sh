#!/usr/bin/env bash
# accelerate: `accelerate launch` refuses sequence parallelism beside DeepSpeed, its only backend, as options.
#
# `sp_backend` of ParallelismConfig can be "deepspeed" alone. With the options --use_deepspeed and
# --use_parallelism_config, the launcher asks for FSDP2 instead, which excludes DeepSpeed. The same run, written
# as a YAML file, is accepted: the check comes before the file is read.
#
# Seen on 2026-11-29 with accelerate 1.15.0 and torch 2.13.0:
#
#     options: You cannot use `--use_parallelism_config` without `--use_fsdp` and `--fsdp_version=2`.
#     file: accepted, sp_size 2, DeepSpeed True
#
# It exits with 0 if this is seen, and with 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0
"$folder/venv/bin/python" -m pip install --quiet accelerate==1.15.0
cd "$folder"
cat > run.yaml <<'YAML'
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 1
mixed_precision: bf16
num_machines: 1
num_processes: 2
use_cpu: false
parallelism_config:
  parallelism_config_sp_size: 2
  parallelism_config_sp_backend: deepspeed
YAML
cat > case.py <<'PYTHON'
import sys

import accelerate
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import ParallelismConfig

print("accelerate", accelerate.__version__, "torch", torch.__version__)
try:
    ParallelismConfig(sp_size=2, sp_backend="torch")
    backends = "others too"
except ValueError as error:
    backends = str(error)
print(f"backends: {backends}")
of_run = ["--num_processes", "2", "--mixed_precision", "bf16", "train.py"]
options = ["--use_deepspeed", "--use_parallelism_config", "--parallelism_config_sp_size", "2"]
outcomes = {}
for name, given in {"options": options, "file": ["--config_file", "run.yaml"]}.items():
    try:
        args, *_ = _validate_launch_command(launch_command_parser().parse_args([*given, *of_run]))
        size = args.parallelism_config_sp_size
        outcomes[name] = f"accepted, sp_size {size}, DeepSpeed {args.use_deepspeed}"
    except ValueError as error:
        outcomes[name] = str(error)
    print(f"{name}: {outcomes[name]}")
is_seen = "must be one of ['deepspeed']" in backends
is_seen &= "without `--use_fsdp`" in outcomes["options"]
is_seen &= outcomes["file"] == "accepted, sp_size 2, DeepSpeed True"
print("seen" if is_seen else "NOT SEEN: the behavior has changed")
sys.exit(not is_seen)
PYTHON
"$folder/venv/bin/python" case.py
