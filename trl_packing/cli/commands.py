"""The commands of `trl-packing`: a function for each, which returns the exit status.

Its docstring is the help. It imports libraries inside, so that `--help` is quick. Its options have

    words           the training command without its launcher, as the user wrote it
    command_line    the whole command, without the values of secrets
    say             print, or nothing with --json
    notes           sentences that follow the result on stderr
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from trl_packing.cli.output import print_json, quiet_libraries, uses_color

if TYPE_CHECKING:
    from trl_packing.run.run import Run


def inspect(arguments: argparse.Namespace) -> int:
    """Print documents with their trained tokens marked.

    examples:
      trl-packing inspect recipes/chat_data.py --config recipes/chat_data.yaml
      trl-packing inspect --config recipes/lora_8b.yaml --rows 0 17 --all
      trl-packing inspect --model M --data chat.jsonl --train_on assistant --json
      trl-packing inspect --config recipes/chat_data.yaml --html rows.html
      trl-packing inspect --config recipes/chat_data.yaml --against trl

    exit status:
      0  every row that was asked for is trained; with --against, nothing differs
      1  one of them is not; with --against, something differs
      2  the run cannot be shown; stderr has the reason in one line
    """
    if arguments.against:
        return _compare_rows(arguments)
    reads_all = arguments.all or arguments.html
    if not reads_all:  # a stream is read no further than needed
        arguments.stream_rows = max([0, *(arguments.rows or [2])]) + 1
    run = _previewed_run(arguments)
    if reads_all:
        run = replace(run, dataset=run.images.take(run.dataset, "train"))  # read headers once
    from trl_packing.pages.rows import rows_page
    from trl_packing.tools.preview import preview_losses, preview_rows
    from trl_packing.tools.rows import PackedEpoch

    rows = []
    color = not arguments.json and uses_color(arguments.color)
    for preview in preview_rows(run, arguments.rows, color=color):
        rows.append(preview)
        arguments.say(*preview.texts, sep="\n\n", end="\n\n")
    losses = preview_losses(run) if arguments.all else None
    if losses:
        arguments.say(losses, end="\n\n")
    if arguments.html:
        page = rows_page(
            PackedEpoch.of(run),
            title=f"Packed rows · {_name_of_data(arguments.words)}",
            note=f"max_length {run.args.max_length:,}" if run.args.max_length else "",
            command=arguments.command_line,
        )
        _write(page, arguments)
    if arguments.json:
        print_json({"rows": [row.to_dict() for row in rows], "losses": losses})
    return 0 if all(row.documents for row in rows) else 1


def _compare_rows(arguments: argparse.Namespace) -> int:
    """Print the differences of two preparations; return 1 if there are any."""
    from trl_packing.tools import compare_rows

    against = arguments.against
    if against != "trl" and not (against.endswith((".yaml", ".yml")) and Path(against).is_file()):
        raise ValueError(f"--against {against} is neither trl nor a .yaml file; name one")
    run = _previewed_run(arguments)
    other = compare_rows.other_side(against, run, arguments.words)
    found = compare_rows.compare(compare_rows.Side("this run", run), other)
    arguments.say(compare_rows.comparison_text(found))
    if arguments.json:
        print_json(found)
    return 1 if found["differences"] else 0


def plan(arguments: argparse.Namespace) -> int:
    """Print the bins and optimizer steps of an epoch.

    examples:
      trl-packing plan recipes/sft_packed.py --config recipes/sft_gsm8k.yaml
      trl-packing plan --config recipes/lora_8b.yaml --max_length 8192 --ranks 8
      trl-packing plan --model M --data chat.jsonl --train_on assistant --json
      trl-packing plan --config recipes/lora_8b.yaml --html plan.html
      trl-packing plan --config recipes/long.yaml --sp 8 --gpus 64

    exit status:
      0  the plan is printed
      2  the run cannot be planned; stderr has the reason in one line
    """
    run = _previewed_run(arguments)
    from trl_packing.run.what_if import plan_run, preview_epoch

    found = estimate = None
    if arguments.gpus is not None:
        from trl_packing.tools import devices

        machine = devices.Machine(arguments.gpus, arguments.memory, *arguments.speed)
        found, estimate = devices.estimate(run, machine)
    elif arguments.html:
        found = plan_run(run, ranks=arguments.ranks)
    report = found.report if found else preview_epoch(run, ranks=arguments.ranks)
    if found and arguments.html:
        from trl_packing.pages.plan import plan_page

        title = f"Plan · {_name_of_data(arguments.words)}"
        _write(plan_page(found, title=title, command=arguments.command_line), arguments)
    if run.is_stream:
        arguments.say(f"The first {run.num_rows:,} rows of a stream, as if they were all:")
    arguments.say(report)
    if estimate:
        arguments.say(f"\n{devices.as_text(estimate)}")
    if arguments.json:
        shown = json.loads(report.to_json())
        rows = {"rows": run.num_rows, "is_stream": run.is_stream}
        print_json(shown | rows | {"estimate": estimate})
    return 0


def prepare(arguments: argparse.Namespace) -> int:
    """Tokenize, label and cut the data of a run once, for many runs.

    examples:
      trl-packing prepare chat.jsonl prepared --model M --num_proc 16
      trl-packing prepare prepared --config recipes/lora_8b.yaml
      trl-packing prepare recipes/chat_data.py prepared --config chat.yaml
    Then train, plan or inspect with --dataset_name prepared and the same
    settings.

    The words before the options are [SCRIPT] [DATA] OUT: DATA is a hub id, a
    file or a folder, and OUT the folder to write, which appears only when it is
    complete. The data sets of a mixture are prepared one by one.

    exit status:
      0  OUT holds the prepared data
      2  the data cannot be prepared; stderr has the reason in one line
    """
    places = list(takewhile(lambda word: not word.startswith("--"), arguments.words))
    script = [word for word in places[:1] if word.endswith(".py")]
    *data, out = places[len(script) :] or [""]
    if not out or len(data) > 1:
        raise ValueError(
            "name the data and the folder to write first: trl-packing prepare DATA OUT --model NAME"
        )
    named = ["--dataset_name", *data] if data else []
    from trl_packing.tools.training_command import TrainingCommand

    words = [*script, *arguments.words[len(places) :], *named]
    folder = Path(out).expanduser()
    command = TrainingCommand.from_words(words)
    quiet_libraries()
    from trl_packing.tools import prepare as preparing

    preparing.check_place(folder)  # before the data are loaded
    made = preparing.prepare_run(command.call, folder, options=command.options)
    arguments.say(preparing.as_text(made))
    if arguments.json:
        print_json(made)
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Measure whether packed documents see each other.

    examples:
      trl-packing verify --model HuggingFaceTB/SmolLM2-135M-Instruct --gradients
      trl-packing verify --config recipes/lora_8b.yaml --device cuda
      trl-packing verify --model HuggingFaceTB/SmolLM2-135M-Instruct --prefixes

    exit status:
      0  training on packed documents is exact
      1  no backend is exact; with --prefixes: prefixes cannot be shared
      2  the model cannot be checked; stderr has the reason in one line
    """
    from trl_packing.tools.training_command import TrainingCommand

    command = TrainingCommand.from_words(arguments.words, needs_data=False)
    quiet_libraries()
    from trl_packing.tools import verify as verifying

    name_or_model, args = command.model_and_settings()
    model, attention, longest = verifying.load_model(
        name_or_model, args, dtype=arguments.dtype, device=arguments.device
    )
    kind = type(model).__name__
    dtype = str(model.dtype).removeprefix("torch.")
    name = name_or_model if isinstance(name_or_model, str) else kind
    arguments.say(f"{name}: {kind}, {dtype}, {model.device}\n")
    results = []
    gradients = arguments.gradients
    for result in verifying.verify(model, attention, longest, gradients=gradients):
        results.append(result)
        arguments.say(verifying.as_text(*result))
    exact = results[-1][0] if results[-1][1] else None
    text = f"Training on packed documents is exact with attention={exact!r}."
    if exact is None:
        text = "No attention backend keeps the documents of a packed row apart on this model."
    shared = None
    if arguments.prefixes and exact:
        shared = verifying.verify_prefixes(model, exact, longest, gradients=gradients)
        arguments.say(verifying.as_text("prefixes", shared))
    if verifying.reads_images(model):
        text += "\nText was checked; a run checks its own images."
    arguments.say(f"\n{text}")
    if arguments.json:
        found = {
            "model": name,
            "class": kind,
            "dtype": dtype,
            "device": model.device.type,
            "exact": exact,
            "backends": [verifying.as_json(*result) for result in results],
            "prefixes": None if shared is None else verifying.as_json("prefixes", shared),
        }
        print_json(found)
    return 0 if exact and (shared is None or shared) else 1


def doctor(arguments: argparse.Namespace) -> int:
    """Test this machine: versions, devices, attention backends.

    examples:
      trl-packing doctor
      trl-packing doctor --json

    exit status:
      0  nothing here would stop a training run
      1  training would fail, for the reasons that are printed
      2  an option cannot be used; stderr has the reason in one line
    """
    from transformers.utils import logging as transformers_logging

    from trl_packing.tools.doctor import diagnose

    quiet_libraries()
    transformers_logging.set_verbosity_error()
    diagnosis = diagnose()
    arguments.say(diagnosis.text())
    if arguments.json:
        print_json(diagnosis.facts)
    return 1 if diagnosis.facts["failures"] else 0


COMMANDS = (inspect, plan, prepare, verify, doctor)  # in the order of the help


def _previewed_run(arguments: argparse.Namespace) -> "Run":
    """Return the run that `arguments` describe, with its rows and its tokenizer."""
    from trl_packing.tools.training_command import TrainingCommand

    command = TrainingCommand.from_words(arguments.words)
    quiet_libraries()
    from trl_packing.tools.preview import run_of_call

    run = run_of_call(command.call, stream_rows=arguments.stream_rows)
    if not command.is_named:
        arguments.notes.append("shown as sft_packed.py trains it; name another script first")
    if run.is_stream:
        arguments.notes.append(f"a stream: only its first {run.num_rows:,} rows (--stream_rows)")
    return run


def _name_of_data(words: Sequence[str]) -> str:
    """Return the data set of a run for a title: its name, or the file or script that names it."""
    given = dict(pairwise(words))
    options = ("--dataset_name", "--data", "--config")
    name = next((given[option] for option in options if option in given), words[0])
    return Path(name).name if Path(name).exists() else name


def _write(page: str, arguments: argparse.Namespace) -> None:
    Path(arguments.html).write_text(page, encoding="utf-8")
    arguments.notes.append(f"wrote {arguments.html}")
