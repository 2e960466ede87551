"""From docstrings as they are written to reStructuredText; what they are made of:

- paragraphs, in which `|`, `*` and a trailing `_` are mathematics or names, not markup;
- numbered lists, and `name: meaning` lists, whose continuation lines are indented;
- indented formulas;
- NumPy sections and `>>>` examples, which Sphinx reads itself.
"""

import re
from itertools import groupby

_NAME = r"`?[\w-]+`?(?: \([^)]*\))?"
_ENTRY = re.compile(rf"({_NAME}(?:, {_NAME})*(?:, [\w ]+)?): (.*)")
_NEXT = re.compile(rf"(?:\n|(?<=[.;])\s)(?={_NAME}(?:, {_NAME})*(?:, [\w ]+)?: )")
_SECTION = re.compile(r"-{3,}$")
_ARGUMENT = re.compile(r"([a-z_]\w*(?:, \w+)*)(?: : (.+))?$")
_SHAPE = re.compile(r"^\(([^()]*)\)$")
_EMPHASIS = re.compile(r"(?<![\w*])\*(\w[\w ]*)\*(?![\w*])")


def to_rst(lines: list[str]) -> list[str]:
    """Translate one docstring."""
    first_section = next((i - 1 for i, line in enumerate(lines) if _SECTION.match(line)), None)
    prose = lines[:first_section]
    sections = [] if first_section is None else lines[first_section:]
    translated: list[str] = []
    for is_blank, group in groupby(prose, key=lambda line: not line.strip()):
        block = list(group)
        if is_blank:
            translated += block
        else:
            translated += _paragraph(block, is_summary=not translated)
    return translated + [_escaped(line) for line in _described(sections)]


def _described(lines: list[str]) -> list[str]:
    """Give every name of a section its own entry; `name : what it is` goes below the name."""
    described: list[str] = []
    while lines:
        entry, end = _ARGUMENT.match(lines[0]), 1
        while end < len(lines) and lines[end].startswith(" "):
            end += 1
        said = entry[2] if entry else None
        if entry and said and end == 1:
            described += [line for name in entry[1].split(", ") for line in (name, f"    {said}")]
        elif entry:
            # Sphinx sets a type in parentheses of its own.
            kind = " : " + _SHAPE.sub(r"\1", said) if said else ""
            for name in entry[1].split(", "):
                described += [name + kind, *lines[1:end]]
        else:
            described += lines[:end]
        lines = lines[end:]
    return described


def _paragraph(lines: list[str], is_summary: bool) -> list[str]:
    if lines[0].startswith((">>>", ".. ", "- ")):
        return lines
    if re.match(r"\d+\. ", lines[0]):
        return [_escaped(line) for line in lines]
    if _ENTRY.match(lines[0]) and not is_summary:
        return _entries([_escaped(line) for line in lines])
    # An indented run is a formula, and stays as it is typed.
    translated: list[str] = []
    for is_formula, run in groupby(lines, key=lambda line: line.startswith(" ")):
        block = list(run)
        translated += ["", "::", "", *block, ""] if is_formula else map(_escaped, block)
    return translated


def _entries(lines: list[str]) -> list[str]:
    """Make definitions of `name: meaning` lists, of which a line may hold several."""
    definitions = []
    for entry in _NEXT.split("\n".join(lines)):
        name, meaning = " ".join(entry.split()).split(": ", 1)
        definitions += [f"``{name}``".replace("\\", ""), "    " + meaning.rstrip(";")]
    return definitions


def _escaped(line: str) -> str:
    """Escape what is markup to Sphinx, outside of code, emphasis and examples."""
    if line.lstrip().startswith((">>>", "...")):
        return line
    parts = line.split("`")
    for i in range(0, len(parts), 2):
        plain = _EMPHASIS.sub("\0\\1\0", parts[i])
        plain = re.sub(r"([|*]|(?<=\w)_(?!\w))", r"\\\1", plain)
        parts[i] = plain.replace("\0", "*")
    return re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", "`".join(parts))
