"""How often answers are judged rightly: our exact rules, math-verify, and both as `MathAnswerAsJudge` uses them.

The pairs are made here, and what is right is known by construction: the answers of one class are the same answer
written differently, those of another class of the same family are another one. `python benchmarks/math_answers.py`
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import Counter

from common import write_result

from ajet.task_judge.math_answer_as_judge import compare_answers
from ajet.task_judge.symbolic import SymbolicCheck, symbolic_check

PER_FAMILY = 30
"""Most pairs of one family, equal and different ones each."""

FAMILIES: dict[str, list[list[str]]] = {
    "integers": [
        ["1234", "1,234", "1{,}234", "+1234", r"1\,234", r"\boxed{1234}", "1234.0"],
        ["1235", r"\boxed{1235}"],
        ["-1234", "−1234"],
        ["12340", "12,340"],
    ],
    "fractions": [
        [r"\frac{1}{2}", r"\dfrac12", "1/2", "0.5", ".5", r"\tfrac{2}{4}", r"\frac{-1}{-2}"],
        [r"-\frac{1}{2}", r"\frac{-1}{2}", "-0.5", r"\frac{1}{-2}"],
        [r"\frac{1}{3}", "1/3", r"\frac{2}{6}"],
        ["0.333"],
        ["0.3333333333"],
    ],
    "mixed numbers and percentages": [
        [r"1\frac{1}{2}", "1 1/2", "1.5", r"\frac{3}{2}"],
        [r"25\%", "25%", "25 percent"],
        [r"2.5\%", "2.5%"],
    ],
    "powers of ten": [
        [r"3\times10^{4}", "30000", "3e4", r"3 \cdot 10^4", "30,000"],
        [r"3\times10^{-4}", "0.0003", "3e-4"],
        [r"3\times10^{5}"],
    ],
    "units": [
        [r"12\text{ cm}", "12", r"12\,\mathrm{cm}", "12 cm"],
        [r"90^\circ", "90", r"90^{\circ}", "90 degrees"],
        [r"\$18", "18", "18 dollars", "18.00"],
        [r"6\text{ cm}^2", "6"],
    ],
    "roots": [
        [r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", r"\sqrt{\frac{1}{3}}", r"\frac{\sqrt3}{3}", r"3^{-1/2}"],
        [r"2\sqrt{2}", r"\sqrt{8}", r"\sqrt8", r"2^{3/2}", r"\frac{4}{\sqrt{2}}"],
        [r"3\sqrt{2}", r"\sqrt{18}"],
        [r"\sqrt[3]{16}", r"2\sqrt[3]{2}"],
        [r"\frac{1+\sqrt{5}}{2}", r"\frac{\sqrt{5}+1}{2}", r"\frac12+\frac{\sqrt5}{2}"],
        [r"\frac{1-\sqrt{5}}{2}"],
    ],
    "polynomials": [
        ["x^2+2x+1", "(x+1)^2", "1+2x+x^2", "x(x+2)+1"],
        ["x^2-2x+1", "(x-1)^2", "(1-x)^2"],
        ["x^2-1", "(x-1)(x+1)", "(x+1)(x-1)"],
        ["x^2+1"],
    ],
    "rational functions": [
        [r"\frac{x}{x+1}", r"1-\frac{1}{x+1}", r"\frac{2x}{2x+2}"],
        [r"\frac{1}{x+1}", r"(x+1)^{-1}"],
        [r"\frac{x+1}{x}", r"1+\frac{1}{x}"],
    ],
    "several letters": [
        ["2ab+3c", "3c+2ab", "2ba+3c"],
        ["2ac+3b"],
        [r"\frac{a+b}{2}", r"\frac{a}{2}+\frac{b}{2}", r"\frac12(a+b)"],
        [r"\frac{a-b}{2}", r"-\frac{b-a}{2}"],
        [r"\frac{a}{b}", r"\frac{2a}{2b}"],
        [r"\frac{b}{a}"],
    ],
    "pi and e": [
        [r"\frac{\pi}{4}", r"\pi/4", r"\frac{1}{4}\pi", r"0.25\pi"],
        [r"\frac{\pi}{3}", r"\pi/3"],
        [r"2\pi r", r"2 r \pi", r"\pi \cdot 2r"],
        [r"\pi r^2", r"r^2\pi"],
        ["e^2", r"e\cdot e"],
        ["2e"],
    ],
    "logarithms and trigonometry": [
        [r"\ln 8", r"3\ln 2", r"\ln(2^3)"],
        [r"\ln 6", r"\ln 2+\ln 3"],
        [r"\sin^2 x", r"(\sin x)^2", r"1-\cos^2 x"],
        [r"\sin x^2", r"\sin(x^2)"],
        [r"\cos^2 x"],
        [r"\log_2 8", "3"],
    ],
    "points and tuples": [
        ["(1,2)", "(1, 2)", r"\left(1,2\right)", r"(\frac{2}{2},2)", "(1.0,2)"],
        ["(2,1)", "(2, 1)"],
        ["(1,2,3)", "(1, 2, 3)"],
        [r"\left(\frac{1}{2},\sqrt{2}\right)", r"(0.5,\sqrt2)"],
    ],
    "sets": [
        [r"\{1,2,3\}", r"\{3,2,1\}", r"\{1, 2, 3\}", r"\left\{1,2,3\right\}"],
        [r"\{1,2\}", r"\{2,1\}"],
        [r"\{1,2,4\}"],
        [r"\left\{\frac12,\sqrt{2}\right\}", r"\{\sqrt2,0.5\}"],
    ],
    "intervals": [
        ["[1,2)", r"\left[1,2\right)", "[1, 2)", r"[1,\frac{4}{2})"],
        ["(1,2]", "(1, 2]"],
        ["[1,2]", "[1, 2]"],
        [r"(-\infty,2)", r"\left(-\infty,2\right)"],
        [r"(-\infty,2]"],
        [r"(-\infty,1)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,1)", r"(-\infty, 1) \cup (2, \infty)"],
        [r"(-\infty,1]\cup(2,\infty)"],
    ],
    "equations": [
        ["y=2x+1", "y = 2x + 1", "y=1+2x"],
        ["y=2x-1"],
        ["y=x+2"],
        ["x=5", "5"],
        ["x=-5", "-5"],
    ],
    "matrices": [
        [
            r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
            r"\begin{bmatrix}1&2\\3&4\end{bmatrix}",
        ],
        [r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&\frac{8}{2}\end{pmatrix}"],
        [r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"],
        [r"\begin{pmatrix}2\\1\end{pmatrix}"],
    ],
    "complex numbers": [
        ["1+2i", "2i+1", "1 + 2i"],
        ["1-2i"],
        ["2+i", "i+2"],
        ["-1", "i^2"],
    ],
    "words": [
        [r"\text{Yes}", "yes", "Yes"],
        ["no", r"\text{No}"],
        ["eat"],
        ["tea"],
        [r"\text{(B)}", "(B)", "(b)"],
        ["(C)"],
        ["Monday", "monday"],
        ["Sunday"],
    ],
    "answers within replies": [
        ["The answer is 7.", "7", "so we get #### 7", r"Hence \boxed{7}", r"I first thought \boxed{8}, but \boxed{7}"],
        ["The answer is 8.", "8", r"\boxed{8}"],
        ["7 or more"],
        ["at least 7"],
        ["7 million"],
    ],
    "almost the same": [
        ["0.1", "1/10"],
        ["0.10001"],
        ["3.14"],
        [r"\pi"],
        ["22/7"],
        [r"\sqrt{2}"],
        ["1.414"],
        ["1.41421356"],
    ],
}
"""Family → classes of the same answer. Every class of a family is another answer than the others."""


def pairs() -> list[tuple[str, str, str, bool]]:
    """(family, given, expected, whether they are the same answer)."""
    made = []
    for family, classes in FAMILIES.items():
        same = [(x, y) for members in classes for x, y in itertools.permutations(members, 2)]
        other = [(x, y) for one, two in itertools.permutations(classes, 2) for x in one for y in two[:1]]
        for answer, found in ((True, same), (False, other)):
            step = max(1, -(-len(found) // PER_FAMILY))
            made += [(family, given, expected, answer) for given, expected in found[::step]]
    return made


def judged(given: str, expected: str, check: SymbolicCheck) -> dict[str, bool]:
    """The verdict of each way."""
    ours = compare_answers(given, expected)
    theirs = check.same(given, expected)
    return {"ours": bool(ours), "math-verify": theirs, "both": theirs if ours is None else ours}


def main() -> None:
    check = symbolic_check(True)
    assert check is not None
    check.same("1", "1")  # the child starts
    table: dict[str, Counter[str]] = {}
    wrong: list[dict[str, object]] = []
    began = time.perf_counter()
    made = pairs()
    for family, given, expected, same in made:
        for way, verdict in judged(given, expected, check).items():
            row = table.setdefault(way, Counter())
            row["right" if verdict == same else "false positive" if verdict else "false negative"] += 1
            if verdict != same:
                wrong.append({"way": way, "family": family, "given": given, "expected": expected, "same": same})
    seconds = (time.perf_counter() - began) / len(made)
    check.close()
    result = {
        "pairs": len(made),
        "same": sum(same for *_, same in made),
        "ways": {way: dict(counts) for way, counts in table.items()},
        "seconds_per_pair": round(seconds, 4),
        "wrong": wrong,
    }
    write_result("math_answers", result)
    json.dump({name: value for name, value in result.items() if name != "wrong"}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
