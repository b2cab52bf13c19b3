"""The project's docstrings as mkdocstrings reads them: parameters and examples as sections.

    lengths: tokens of each document,      Args:
        one integer each.            ->        lengths: tokens of each document, one integer each.
    strategy, seed: as in `pack`.              strategy: as in `pack`.
                                               seed: as in `pack`.
    >>> pack([1], 2)                       Examples:
                                               >>> pack([1], 2)

Names that are no parameter stay text, so the strict build fails only for what looks like one.
"""

import re

import griffe

_ENTRY = re.compile(r"^(?P<names>\w+(?:, \w+)*): (?P<text>.*)$")


def sections(text: str, parameters: set[str], heading: str) -> str:
    """Return a docstring with its runs of `name: words` and its doctests as Google's sections."""
    blocks = [_block(b, parameters, heading) for b in re.split(r"\n{2,}", text)]
    return "\n\n".join(blocks)


def _block(block: str, parameters: set[str], heading: str) -> str:
    lines = block.splitlines()
    if lines and lines[0].startswith(">>>"):
        return "\n".join(["Examples:", *(f"    {line}" for line in lines)])
    entries: list[tuple[list[str], list[str]]] = []
    for line in lines:
        entry = _ENTRY.match(line)
        names = entry["names"].split(", ") if entry else []
        if entry and set(names) <= parameters:
            entries.append((names, [entry["text"]]))
        elif entries and line.startswith("    "):
            entries[-1][1].append(line.strip())
        else:
            return block
    section = [f"    {name}: {' '.join(words)}" for names, words in entries for name in names]
    return "\n".join([f"{heading}:", *section])


class ParameterSections(griffe.Extension):
    """Rewrite docstrings after a package is read."""

    def on_function(self, *, func, **kwargs):
        if func.docstring:
            names = {p.name for p in func.parameters} - {"self", "cls"}
            func.docstring.value = sections(func.docstring.value, names, "Args")

    def on_class(self, *, cls, **kwargs):
        if not cls.docstring:
            return
        init = cls.members.get("__init__")
        if init is not None and init.is_function:
            names, heading = {p.name for p in init.parameters}, "Args"
        else:
            names = {n for n, m in cls.members.items() if m.is_attribute}
            heading = "Attributes"
        cls.docstring.value = sections(cls.docstring.value, names, heading)
