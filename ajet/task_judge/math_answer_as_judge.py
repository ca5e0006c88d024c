"""`MathAnswerAsJudge`, and `same_answer`, which decides whether two written answers are mathematically the same.

Our rules are exact: 0.333 is not 1/3, and nothing is evaluated. Numbers are compared as fractions, however they are
written: `1,234`, `\\frac{1}{2}`, `1 1/2`, `½`, `50\\%`, `1.2e3`, `3\\times10^{4}`, `$12`, `90^\\circ`. A unit, or the
variable in `x=5`, may be left out, but isn't another one: `5 km` is `5`, and not `5 m`. Other text is compared without
its LaTeX markup; lists, tuples and intervals part by part, sets in any order. What these rules can't decide goes to the
library math-verify, if it is installed (`ajet.task_judge.symbolic`).
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from ajet.schema.errors import JudgeFault
from ajet.schema.task import WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge
from ajet.task_judge.symbolic import symbolic_check

if TYPE_CHECKING:
    from ajet.config import Config

MAX_LENGTH = 2000
"""Longer answers are compared as text only, so that no reply can keep the judge busy."""

MAX_SYMBOLIC = 300
"""Longer answers are compared by our rules alone: a symbolic library may take arbitrarily long for them."""

MAX_EXPONENT = 400
"""Larger powers of ten are beyond float's range and count as text: `1e999999999` would fill the memory."""

MAX_BOXES = 20
"""How many boxes are tried, starting from the last: each unclosed one costs a pass over the rest of the text."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|[^\s{}\\])")
_ANSWER_IS = re.compile(
    r"(?:answer|result|答案)\**\s*(?:is|[=:：是为])\**\s*(?::\s*)?(?:(?:\$\$|\\\[)\s*)?(?=\S)", re.IGNORECASE
)
_NEXT_SENTENCE = re.compile(r"(?<=[\d)}\]%$*])(?:\. +(?=[A-Z])|。).*")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?![\d,])")
_TWO_NUMBERS = re.compile(r"[\d.] [\d.]")
_UNSIGNED = r"(?:\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(rf"([+-]?)({_UNSIGNED})(?:e([+-]?\d+))?")
_FRACTION = re.compile(rf"([+-]?)\(?([+-]?{_UNSIGNED})\)?/\(?([+-]?{_UNSIGNED})\)?")
_MIXED = re.compile(r"([+-]?)(\d+)[ +](\d+)/(\d+)")
_POWER = re.compile(rf"([+-]?)(?:({_UNSIGNED})\*)?10\^\(?([+-]?\d+)\)?")
_SUM = re.compile(r"[\d)] ?[-+*] ?[\d(.]")
"""Numbers that are still to be added or multiplied."""
COUNTED = "counted"
_UNIT_NAMES = {
    COUNTED: r"units?|people|points?|ways?|times|个|人",
    "°": r"degrees?|度",
    "＄": r"dollars?|usd",
    "¢": r"cents?",
    "€": r"euros?|eur",
    "£": r"pounds?",
    "¥": r"元|yuan",
    "am": "am",
    "pm": "pm",
    "second": r"seconds?|(?<=/)s|秒",
    "minute": r"minutes?|min|分钟",
    "hour": r"hours?|(?<=/)h|小时",
    "day": r"days?|天",
    "week": r"weeks?",
    "month": r"months?",
    "year": r"years?|岁|年",
    "inch": r"inch(?:es)?",
    "foot": r"feet|foot|ft",
    "mile": r"miles?",
    "km": r"km|kilomet(?:er|re)s?|公里|千米",
    "cm": r"cm|centimet(?:er|re)s?|厘米",
    "mm": r"mm|millimet(?:er|re)s?|毫米",
    "m": r"m|met(?:er|re)s?|米",
    "kg": r"kg|kilograms?|公斤|千克",
    "g": r"g|grams?|克",
    "litre": r"lit(?:er|re)s?|升",
    "ml": r"ml|毫升",
    "2": r"square",
    "3": r"cubic",
}
"""How units are written. What is counted has no unit: it may be called anything."""
_SPELLINGS = {name: re.compile(rf"(?<![^\W\d_])(?:{words})(?![^\W\d_])") for name, words in _UNIT_NAMES.items()}
_UNIT = rf"(?:(?:{'|'.join(_UNIT_NAMES.values())})(?![a-z])(?:\^\(?[23]\)?)?)"
_UNITS = re.compile(rf"(?<=[\d.)}}%])\s*{_UNIT}(?:(?:/| per | ){_UNIT}){{0,3}}$")
_SIGNS = "°¢€£¥＄"
"""Units of one character. The last is an escaped `$`: a plain one belongs to LaTeX."""
_LATEX = {
    "[\u2010-\u2015\u2212]": "-",
    "\u2044": "/",
    "、": ",",
    "×": r"\\times ",
    "·": r"\\cdot ",
    "±": r"\\pm ",
    "∞": r"\\infty ",
    "π": r"\\pi ",
    "∪": r"\\cup ",
    "≤": r"\\le ",
    "≥": r"\\ge ",
    "∅": r"\\emptyset ",
}
"""Characters, and what LaTeX writes instead."""
_BRACKETS = {"(": ")", "[": "]", "{": "}", "⦃": "⦄"}
_CLOSING = frozenset(_BRACKETS.values())
SET = "⦃⦄"
"""The braces of a set, which LaTeX writes as `\\{` and `\\}`."""
MAX_DEPTH = 20
"""Deeper nested lists count as text."""
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
_MATHS_WORDS = frozenset(
    re.findall(
        r"\w+",
        "and sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt pi frac mod gcd lcm max "
        "min inf infty union cap cup matrix pmatrix bmatrix vmatrix array cases",
    )
)
"""Words that mean the same in an answer for us and for a symbolic library; any other is prose."""


class MathAnswerAsJudge(BaseJudge):
    """1.0 if `workflow_output.metadata["final_answer"]` is the answer in `task.metadata["answer"]`, else 0.0.

    No answer (`None` or empty) is wrong, and so is an episode that the model ended before its workflow could report
    one. A workflow that doesn't report the key, or a task without a reference answer, is a configuration error and
    raises JudgeFault.
    """

    reads_output = ("final_answer",)
    reads_task = ("answer",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._symbolic = symbolic_check(config.ajet.task_judge.math_verify)

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        task = workflow_task.task
        output = workflow_output.metadata
        early = "ended_early" in output and "final_answer" not in output
        given = None if early else self._read(output, "final_answer", "the workflow's WorkflowOutput(metadata={…})")
        expected = self._read(task.metadata, "answer", f"the metadata of task {task.task_id!r}")
        right_answer = reference(expected, task.task_id)
        right = given is not None and self._same(str(given), right_answer)
        return (1.0 if right else 0.0), right

    def _same(self, given: str, expected: str) -> bool:
        surely = compare_answers(given, expected)
        if surely is None and self._symbolic is not None:
            return self._symbolic.same(_latex(final_answer(given)), _latex(final_answer(expected)))
        return bool(surely)

    @staticmethod
    def _read(metadata: dict[str, Any], key: str, owner: str) -> Any:
        if key not in metadata:
            present = ", ".join(map(repr, metadata)) or "nothing"
            raise JudgeFault(f"MathAnswerAsJudge needs {key!r} in {owner}; it holds {present}")
        return metadata[key]


def reference(answer: Any, task_id: str) -> str:
    """A task's right answer. Raises JudgeFault for one that no reply would equal, such as a list of texts."""
    if answer is None or not str(answer).strip():
        raise JudgeFault(f"task {task_id!r} has an empty reference answer")
    listed = isinstance(answer, list | tuple) and not all(isinstance(each, int | float) for each in answer)
    if listed or isinstance(answer, dict):
        raise JudgeFault(f"the reference answer of task {task_id!r} should be a text or a number, not {answer!r:.100}")
    return str(answer)


def same_answer(given: str, expected: str) -> bool:
    """Whether `given` (a reply or a bare answer) has the same answer as `expected`, by our exact rules alone."""
    return bool(compare_answers(given, expected))


def compare_answers(given: str, expected: str) -> bool | None:
    """Whether the answers are the same; None if that takes more than exact rules.

    Numbers, words and empty or very long answers are always decided here.
    """
    mine, theirs = _clean(final_answer(given)), _clean(final_answer(expected))
    if _same(mine, theirs):
        return True
    if not mine or not theirs or max(len(mine), len(theirs)) > MAX_SYMBOLIC:
        return False
    if _differ(_units(mine), _units(theirs)) or _BOX.search(mine) or _BOX.search(theirs):
        return False  # the library would leave out units, and take a box that is cut off
    mine, theirs = _bare(mine), _bare(theirs)
    if _number(mine) is not None and _number(theirs) is not None:
        return False
    if _number(theirs) is not None and _SUM.search(mine.rpartition("=")[2]):
        return False  # asked for 84, a model that writes 12*7 has left the work to the library
    one, other = (_listed(text) or _List("", [text]) for text in (mine, theirs))
    counts = {len(each.parts) for each in (one, other) if None not in map(_number, each.parts)}
    if _differ(one.brackets, other.brackets) or len(counts) > 1:
        return False  # for the library, 3,3 is 3
    if _is_prose(mine) or _is_prose(theirs):
        return False
    return None


def _is_prose(text: str) -> bool:
    """Whether it contains words that a symbolic library would read as products of variables."""
    if len(text) > 1 and text.replace(" ", "").isalpha():
        return True
    return any(word not in _MATHS_WORDS for word in _WORD.findall(text))


def final_answer(text: str) -> str:
    """The answer in a reply: the last `\\boxed{…}`, else what follows `####`, else `the answer is …`, else all."""
    if (boxed := last_boxed(text)) is not None:
        return boxed
    marked = "####" in text
    text = text.rsplit("####", 1)[-1].strip()
    if said := list(_ANSWER_IS.finditer(text)):
        return _NEXT_SENTENCE.sub("", text[said[-1].end() :].partition("\n")[0]).strip()
    return text.partition("\n")[0].strip() if marked else text


def last_boxed(text: str) -> str | None:
    """What the last `\\boxed{…}` that is closed holds."""
    for match in list(_BOX.finditer(text))[: -MAX_BOXES - 1 : -1]:
        if match[1] != "{":
            return match[1]
        if (end := _closing(text, match.end() - 1)) is not None:
            return text[match.end() : end].strip()
    return None


def _closing(text: str, start: int) -> int | None:
    """The position of the brace that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "{" and text[index - 1 : index] != "\\":
            depth += 1
        elif text[index] == "}" and text[index - 1 : index] != "\\":
            depth -= 1
            if depth == 0:
                return index
    return None


def _latex(text: str) -> str:
    """The text with LaTeX's spelling of characters that have one: `½`, `x²`, `√2`, `∞`, and full-width ones."""
    if len(text) > MAX_LENGTH or text.isascii():
        return text
    text = re.sub("[⁰¹²³⁴-⁹⁺⁻]+", lambda match: f"^{{{match[0]}}}", text)
    text = re.sub("[₀-₉]+", lambda match: f"_{{{match[0]}}}", text)
    text = re.sub("(\\d?)([¼-¾⅐-⅞])", lambda match: f"{match[1]} {match[2]}", text)
    text = unicodedata.normalize("NFKC", text)
    text = re.sub(r"√\s*(?:(\d+|\w)|\(([^()]*)\))", r"\\sqrt{\1\2}", text)
    for old, new in _LATEX.items():
        text = re.sub(old, new, text)
    return text


def _clean(answer: str) -> str:
    """The answer without LaTeX markup, in one spelling. Keeps single spaces: `1 1/2` is a mixed number."""
    text = answer.strip().rstrip(".。").strip()
    if len(text) > MAX_LENGTH:
        return text
    text = _latex(text)
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf|operatorname|mbox)\s*\{([^{}]*)\}", r" \1", text)
    text = re.sub(r"\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\\limits", "", text)
    text = text.replace(r"\{", "⦃").replace(r"\}", "⦄")
    text = re.sub(r"\\[,;: ]|~", " ", text.replace(r"\!", ""))
    text = text.replace("{,}", ",")
    text = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree", "°", text)
    text = re.sub(r"\\(?:times|cdot)\s*", "*", text)
    text = re.sub(r"(?<=\d) ?x ?(?=10\^)", "*", text)
    text = text.replace(r"\$", "＄") if text.count("$") - text.count(r"\$") != 1 else text.replace("$", "＄")
    text = re.sub(r"\\\(|\\\)|\\\[|\\\]|\$|\*\*", "", text).replace(r"\%", "%")
    text = re.sub(r"\bpercent\b", "%", text, flags=re.IGNORECASE)
    text = _plain_fractions(text)
    text = re.sub(r"\^\{([^{}]*)\}", r"^(\1)", text)
    text = re.sub(r"\s+", " ", text).strip().lower()
    text = re.sub(r"\s*([=*/^%()\[\]{}<>⦃⦄])\s*|\s+(,)", r"\1\2", text)
    text = re.sub(r"(?<=[\d ])([ap])\.m\b", r"\1m", text)
    text = re.sub(r"([_^])[({](\w)[)}](?!\d)", r"\1\2", text)
    text = re.sub(r"^\(([a-z])\)$|^([a-z])\)$", r"\1\2", text)
    return text.strip("*`").rstrip(".")


def _bare(text: str) -> str:
    """The answer without units, and without the variable that it is the value of."""
    text = re.sub(f"[{_SIGNS}]", "", text)
    return _UNITS.sub("", re.sub(r"^[a-z]=(?=.)", "", text)).strip().rstrip(".")


def _variable(text: str) -> str:
    """The `x` of `x=5`."""
    return text[0] if re.match("[a-z]=.", text) else ""


def _units(text: str) -> set[str]:
    """The names of the units in a number, or in a list of numbers."""
    names = {sign for sign in f"{_SIGNS}%" if sign in text}
    for part in text.split(","):
        number = re.sub("^[a-z]=", "", part.rstrip(")]⦄"))
        found = _UNITS.search(number)
        if found and not re.search(r"(?<![\\a-z])[a-z]", number[: found.start()]):
            names.update(name for name, spelling in _SPELLINGS.items() if spelling.search(found[0]))
            names.update(re.findall("[23]", found[0]))
    return names - {COUNTED}


def _differ(one: Any, other: Any) -> bool:
    """Whether both are named, and not the same."""
    return bool(one and other) and one != other


def _plain_fractions(text: str) -> str:
    """`\\frac{a}{b}`, `\\dfrac12`, `3\\frac{1}{2}` → `(a)/(b)`, `(1)/(2)`, `3 1/2`."""
    for _ in range(20):  # nested ones from the inside out
        replaced = re.sub(
            r"(\d?)\s*\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))",
            lambda match: _one_fraction(match[1], match[2] or match[3] or "", match[4] or match[5] or ""),
            text,
        )
        if replaced == text:
            return text
        text = replaced
    return text


def _one_fraction(before: str, top: str, bottom: str) -> str:
    whole = f"{before} " if before else ""
    plain = top.strip().isdigit() and bottom.strip().isdigit()
    return f"{whole}{top.strip()}/{bottom.strip()}" if plain else f"{whole}({top.strip()})/({bottom.strip()})"


def _same(given: str, expected: str, depth: int = 0) -> bool:
    if not given or not expected:
        return False
    if given == expected:
        return True
    if _differ(_units(given), _units(expected)) or _differ(_variable(given), _variable(expected)):
        return False
    given, expected = _bare(given), _bare(expected)
    mine, theirs = _number(given), _number(expected)
    if mine is not None and theirs is not None:
        if given.endswith("%") != expected.endswith("%"):
            percent, plain = (mine, theirs) if given.endswith("%") else (theirs, mine)
            return plain in (percent, percent / 100)  # 50 % is 0.5; but asked "what percentage", the reference is 50
        return mine == theirs
    listed, other = _listed(given), _listed(expected)
    if listed is not None and other is not None and depth < MAX_DEPTH:
        return listed.brackets == other.brackets and _same_parts(listed, other, depth + 1)
    return mine is None and theirs is None and _no_spaces(given) == _no_spaces(expected)


class _List(NamedTuple):
    """A list: the parts between commas, and the brackets around them."""

    brackets: str
    parts: list[str]


def _same_parts(one: _List, other: _List, depth: int) -> bool:
    if len(one.parts) != len(other.parts):
        return False
    if one.brackets != SET:
        return all(_same(mine, theirs, depth) for mine, theirs in zip(one.parts, other.parts, strict=True))
    left = list(other.parts)
    for mine in one.parts:
        match = next((theirs for theirs in left if _same(mine, theirs, depth)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _no_spaces(text: str) -> str:
    return text.replace(" ", "")


def _number(text: str) -> Fraction | None:
    """The number that this text represents, or None. For a percentage, it is the number before the sign."""
    if len(text) > MAX_LENGTH:
        return None
    text = text.removesuffix("%").strip()
    text = _GROUPED.sub(lambda match: re.sub("[, ]", "", match[0]), text)
    while len(text) > 2 and text[0] == "{" and text[-1] == "}":
        text = text[1:-1]
    if match := _MIXED.fullmatch(text):
        sign, whole, top, bottom = match.groups()
        if int(bottom) == 0:
            return None
        value = int(whole) + Fraction(int(top), int(bottom))
        return -value if sign == "-" else value
    if _TWO_NUMBERS.search(text):
        return None
    text = _no_spaces(text)
    if match := _NUMBER.fullmatch(text):
        return _scaled(match[1], match[2], match[3])
    if match := _POWER.fullmatch(text):
        return _scaled(match[1], match[2] or "1", match[3])
    if match := _FRACTION.fullmatch(text):
        bottom = Fraction(match[3])
        if not bottom:
            return None
        value = Fraction(match[2]) / bottom
        return -value if match[1] == "-" else value
    return None


def _scaled(sign: str, digits: str, exponent: str | None) -> Fraction | None:
    power = int(exponent) if exponent else 0
    if abs(power) > MAX_EXPONENT:
        return None
    value = Fraction(digits) * Fraction(10) ** power
    return -value if sign == "-" else value


def _listed(text: str) -> _List | None:
    """The elements of `(a,b)`, `[a,b)`, `\\{a,b\\}` or `a,b`."""
    brackets = ""
    if _is_enclosed(text):
        brackets, text = text[0] + text[-1], text[1:-1]
    elif _GROUPED.fullmatch(text):
        return None
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char in _BRACKETS) - (char in _CLOSING)
        if char == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    parts.append(text[start:].strip())
    if len(parts) < 2 and brackets != SET:
        return None
    return _List(SET if brackets == "{}" else brackets, parts)


def _is_enclosed(text: str) -> bool:
    """Whether the first bracket is closed by the last character."""
    if len(text) < 3 or text[0] not in _BRACKETS:
        return False
    depth = 0
    for index, char in enumerate(text):
        depth += (char in _BRACKETS) - (char in _CLOSING)
        if depth == 0:
            return index == len(text) - 1
    return False
