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
_SECTION = re.compile(r"-{3,}$")
_ARGUMENT = re.compile(r"(\w+(?:, \w+)*) : (.+)")
_SHAPE = re.compile(r"(\w[\w, ]*) : \((.*)\)$")
_EMPHASIS = re.compile(r"(?<![\w*])\*(\w[\w ]*)\*(?![\w*])")


def to_rst(lines: list[str]) -> list[str]:
    """Translate one docstring."""
    first_section = next((i - 1 for i, line in enumerate(lines) if _SECTION.match(line)), None)
    prose = lines[:first_section]
    sections = [] if first_section is None else lines[first_section:]
    translated: list[str] = []
    for is_blank, group in groupby(prose, key=lambda line: not line.strip()):
        block = list(group)
        translated += block if is_blank else _paragraph(block)
    return translated + [_escaped(line) for line in _described(sections)]


def _described(lines: list[str]) -> list[str]:
    """Set what a line of a section says of `name : ` below the name, unless that is its type."""
    described = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        entry = _ARGUMENT.match(line)
        if entry and not following.startswith(" "):
            described += [entry[1], f"    {entry[2]}"]
        else:
            # Sphinx sets a type in parentheses of its own.
            described.append(_SHAPE.sub(r"\1 : \2", line))
    return described


def _paragraph(lines: list[str]) -> list[str]:
    if lines[0].startswith((">>>", ".. ", "- ")):
        return lines
    if re.match(r"\d+\. ", lines[0]):
        return [_escaped(line) for line in lines]
    if _ENTRY.match(lines[0]):
        return _entries([_escaped(line) for line in lines])
    # An indented run is a formula, and stays as it is typed.
    translated: list[str] = []
    for is_formula, run in groupby(lines, key=lambda line: line.startswith(" ")):
        block = list(run)
        translated += ["", "::", "", *block, ""] if is_formula else map(_escaped, block)
    return translated


def _entries(lines: list[str]) -> list[str]:
    definitions = []
    for line in lines:
        entry = _ENTRY.match(line)
        if entry:
            definitions += [f"``{entry[1]}``".replace("\\", ""), "    " + entry[2].strip()]
        else:
            definitions.append("    " + line.strip())
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
