"""Versions of libraries: those that this package requires, and those that it was tested with."""

from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement

from trl_packing.tools.doctor.findings import Finding, Section
from trl_packing.tools.doctor.machine import Machine
from trl_packing.versions import TESTED, installed_version, is_tested

_OPTIONAL = ("peft", "bitsandbytes", "deepspeed", "flash-attn", "kernels", "triton")
_EXTRAS = 'extra == "'


def installed_versions() -> dict[str, str]:
    """Return the versions of this package, of its requirements, and of optional packages."""
    wanted = ["trl-packing", *(r.name for r in requirements()), *_OPTIONAL]
    found = {name: installed_version(name) for name in wanted}
    return {name: number for name, number in found.items() if number is not None}


def requirements() -> list[Requirement]:
    """Return the requirements of this package, without those of its extras."""
    try:
        lines = requires("trl-packing") or []
    except PackageNotFoundError:  # imported from a folder that is not installed
        return []
    return [Requirement(line) for line in lines if _EXTRAS not in line.replace("'", '"')]


def versions_section(versions: dict[str, str], machine: Machine) -> Section:
    """Return whether the versions are required, tested, or neither."""
    findings = [Finding("ok", "python", f"{machine.python} on {machine.system}")]
    for requirement in requirements():
        name, number = requirement.name, versions.get(requirement.name)
        if number is None or not requirement.specifier.contains(number, prereleases=True):
            text = f"{number or 'missing'}: pip install '{name}{requirement.specifier}'"
            findings.append(Finding("fail", name, text))
    for name, (oldest, newest) in TESTED.items():
        number = versions.get(name, "0")
        if is_tested(name, number):
            findings.append(Finding("ok", name, f"{number} (tested: {oldest} to {newest})"))
        elif name in versions:
            text = f"{number} is not among those tested: {oldest} to {newest}"
            findings.append(Finding("note", name, text))
    others = [name for name in versions if name not in TESTED]
    listed = ", ".join(f"{name} {versions[name]}" for name in others)
    return Section("Versions", (*findings, Finding("ok", "also", listed)))
