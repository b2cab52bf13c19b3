"""The doctor: whether this machine can train packed documents, how fast, and with which settings.

    settings.py    the options of a run                  → RunSettings
    versions.py    libraries
    machine.py     devices, disk, hub                    → Machine
    backends.py    each attention backend, tried         → Trials
    memory.py      a step of the model, computed         → RunMemory
    diagnose       all of it, judged                     → Diagnosis: text, JSON, page

Nothing is downloaded but the config of the model, and nothing is sent.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from trl_packing.tools.doctor.backends import Trial, Trials, advice, try_backends
from trl_packing.tools.doctor.findings import Diagnosis, Finding, Section, Status
from trl_packing.tools.doctor.machine import Device, Disk, Hub, Machine, read_machine
from trl_packing.tools.doctor.memory import RunMemory, memory_section, run_memory
from trl_packing.tools.doctor.settings import RunSettings, load_config
from trl_packing.tools.doctor.versions import installed_versions, versions_section
from trl_packing.tools.exactness.tiny_models import names


def diagnose(
    words: Sequence[str] = (),
    *,
    machine: Machine | None = None,
    trials: Trials | None = None,
) -> Diagnosis:
    """Return the diagnosis of this machine, and of a run on it.

    Args:
        words: options of a training command; without ``--model``, nothing that depends on one is
            diagnosed.
        machine: its facts; None reads them.
        trials: results of the attention backends; None tries them.

    Raises:
        ValueError: an option is unknown.
    """
    run = RunSettings.from_words(words)
    machine = machine or read_machine(run.output_dir, use_cpu=run.args.use_cpu)
    run = run.on(machine.device)
    versions = installed_versions()
    sections = [
        versions_section(versions, machine),
        _devices(machine),
        _precision(machine.device, run),
    ]
    config, meta, memory = None, None, None
    loading: list[Finding] = []
    if run.name is not None:
        online = machine.hub.state == "reachable"
        config, problem = load_config(run, online=online)
        loading = [Finding("fail", "model", problem)] if problem else []
    if config is not None:
        meta = _meta(config)
        memory, problem = _memory(config, run, machine.device)
        loading += [Finding("note", "memory", problem)] if problem else []
    trials = trials or _trials(machine.device, run, config, meta)
    sections.append(_attention(trials, machine.device))
    if loading:
        sections.append(Section("Model", tuple(loading)))
    if memory is not None:
        sections.append(memory_section(memory, run.args, machine.devices))
    sections.append(_disk_and_hub(machine, memory))
    facts = {
        "versions": versions,
        "machine": asdict(machine),
        "attention": asdict(trials),
        "memory": None if memory is None else memory.facts(),
        "command": list(words),
    }
    return Diagnosis(tuple(sections), facts)


def _meta(config: Any) -> Any:
    """Return the model on the meta device with its native attention; None without a text model."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, ImportError):
        return None


def _memory(config: Any, run: RunSettings, device: Device) -> tuple[RunMemory | None, str]:
    """Return the memory of the run and "", or None and why it is not computed."""
    if run.is_quantized:
        return None, "not computed for weights in 4 or 8 bits"
    try:
        return run_memory(config, run.args, device, lora=run.lora, dtype=run.dtype), ""
    except (ValueError, TypeError, ImportError) as error:
        return None, f"not computed: {str(error).splitlines()[0]}"


def _trials(device: Device, run: RunSettings, config: Any, meta: Any) -> Trials:
    kind = getattr(config, "model_type", None)
    return try_backends(
        device.kind,
        run.attention_dtype,
        architecture=kind if kind in names() else "llama",
        model=meta,
    )


# --- devices and precision ------------------------------------------------------------------------


def _devices(machine: Machine) -> Section:
    findings = []
    for device in machine.devices:
        parts = [device.name]
        if device.total_bytes is not None:
            parts.append(f"{device.total_bytes / 1e9:,.1f} GB")
        if device.free_bytes is not None:
            parts.append(f"{device.free_bytes / 1e9:,.1f} GB free")
        if device.capability is not None:
            parts.append("sm{}{}".format(*device.capability))
        findings.append(Finding("ok", device.kind, ", ".join(parts)))
    return Section("Devices", tuple(findings))


def _precision(device: Device, run: RunSettings) -> Section:
    if run.problem:
        return Section("Precision", (Finding("fail", "settings", run.problem),))
    findings = [Finding("ok", "this run", run.precision)]
    if device.milliseconds:
        speeds = ", ".join(f"{name} {ms:,.1f} ms" for name, ms in device.milliseconds.items())
        findings.append(Finding("ok", "measured", f"a product of 512×512 matrices: {speeds}"))
    findings += [Finding("note", "advice", text) for text in precision_advice(device, run)]
    return Section("Precision", tuple(findings))


def precision_advice(device: Device, run: RunSettings) -> list[str]:
    """Return how to set bf16, fp16 and tf32 on a device, where this differs from the run's."""
    times, found = device.milliseconds, []
    if run.needs:
        found.append(
            f"add {' '.join(run.needs)}: TRL's default, bf16 on a GPU, stops on this device"
        )
    if device.capability is not None:
        if device.capability < (8, 0) and not run.args.fp16:
            found.append("no bf16 before sm80: set --fp16 True --bf16 False")
        elif device.capability >= (8, 0) and run.args.fp16:
            found.append("bf16 is as fast as fp16 here and does not overflow: set --bf16 True")
        return found
    half, whole = times.get("bfloat16"), times.get("float32")
    if half and whole and half < 0.8 * whole and not run.args.bf16:
        found.append(f"products in bf16 are {whole / half:.1f}× as fast here: try --bf16 True")
    elif half and whole and whole < 0.8 * half and run.args.bf16:
        found.append(f"products in float32 are {half / whole:.1f}× as fast: set --bf16 False")
    return found


# --- attention ------------------------------------------------------------------------------------


def _attention(trials: Trials, device: Device) -> Section:
    findings = [_finding(trial, trials) for trial in trials.trials]
    if trials.prefixes is not None:
        findings.append(_shared_prefixes(trials.prefixes))
    if trials.chosen is None:
        text = "no backend keeps documents apart on this device; train on another one"
        findings.append(Finding("fail", "attention", text))
    else:
        findings.append(Finding("ok", "to be faster", advice(trials, device.capability)))
    note = f"a tiny {trials.architecture}, forward and backward, against each document alone"
    return Section("Attention", tuple(findings), note)


def _finding(trial: Trial, trials: Trials) -> Finding:
    if trial.difference is None:
        reason = f": {trial.reason}" if trial.reason else ""
        return Finding(
            "note" if trial.verdict == "error" else "-", trial.backend, trial.verdict + reason
        )
    text = f"{trial.verdict}, by {trial.difference:.0e} (a leak: {trial.leak:.1g})"
    if trial.verdict == "differs":
        return Finding("note", trial.backend, text)
    if trial.backend == trials.chosen:
        return Finding("ok", trial.backend, f"chosen: the fastest here; {text}")
    return Finding("-", trial.backend, f"{text}, but slower")


def _shared_prefixes(trial: Trial) -> Finding:
    """Return whether prefix_sharing is exact here; if not, a run trains without it."""
    name, without = "shared prefixes", "; a run computes them in every document"
    if trial.difference is None:
        status: Status = "note" if trial.verdict == "error" else "-"
        return Finding(status, name, f"{trial.verdict}: {trial.reason}{without}")
    text = f"{trial.verdict}, by {trial.difference:.0e} (a leak: {trial.leak:.1g})"
    if trial.verdict == "differs":
        return Finding("note", name, text + without)
    return Finding("ok", name, text)


# --- disk and hub ---------------------------------------------------------------------------------


def _disk_and_hub(machine: Machine, memory: RunMemory | None) -> Section:
    findings = [_disk(disk, memory) for disk in machine.disks]
    return Section("Disk and hub", (*findings, _hub(machine.hub)))


def _disk(disk: Disk, memory: RunMemory | None) -> Finding:
    free = f"{disk.free_bytes / 1e9:,.1f} GB free"
    where = f"{disk.path}: {free}"
    if not disk.writable:
        status: Any = "fail" if disk.purpose == "output_dir" else "note"
        return Finding(status, disk.purpose, f"{disk.path} cannot be written; name another folder")
    if disk.purpose == "output_dir" and memory is not None:
        # A checkpoint holds the trained weights and the states of the optimizer.
        checkpoint = memory.states.gradients + (memory.states.optimizer or 0)
        where += f"; a checkpoint has {checkpoint / 1e9:,.1f} GB"
        if checkpoint > disk.free_bytes:
            text = f"{where}: name another --output_dir, or set --save_strategy no"
            return Finding("fail", disk.purpose, text)
    return Finding("ok", disk.purpose, where)


def _hub(hub: Hub) -> Finding:
    token = "a token is set" if hub.token else "no token"
    if hub.state == "reachable":
        return Finding("ok", "hub", f"{hub.endpoint} answers, {token}")
    if hub.state == "offline":
        text = "HF_HUB_OFFLINE is set: models and data from folders and the cache only"
        return Finding("ok", "hub", text)
    return Finding(
        "note", "hub", f"{hub.endpoint} is not reachable: name folders, or cached models"
    )
