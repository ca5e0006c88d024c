"""Which written answers are the same answer."""

from __future__ import annotations

import time

import pytest

from ajet.schema.errors import JudgeFault
from ajet.task_judge.math_answer_as_judge import compare_answers, final_answer, reference, same_answer

SAME = [
    ("42", "42"),
    (r"\boxed{42}", "42"),
    (r"so \boxed{\frac{1}{2}}.", "0.5"),
    (r"\frac12", ".5"),
    ("1,234", "1234"),
    ("1{,}234", "1234"),
    ("$1,234.50$", "1234.5"),
    (r"\$12", "12"),
    (r"50\%", "50"),
    ("50%", "0.5"),
    ("50%", "1/2"),
    ("1 1/2", "1.5"),
    (r"1\frac{1}{2}", "3/2"),
    (r"-\frac{3}{4}", "-0.75"),
    ("-1 1/2", "-1.5"),
    (r"\frac{-3}{4}", "-0.75"),
    ("1.2e3", "1200"),
    (r"3\times10^{4}", "30000"),
    ("3 × 10^4", "30000"),
    ("10^{3}", "1000"),
    (r"90^\circ", "90"),
    ("90°", "90"),
    ("x=5", "5"),
    ("The answer is 7.", "7"),
    ("blah #### 1,000", "1000"),
    ("(1, 2)", "(1,2)"),
    ("(0.5,1)", "(1/2, 1)"),
    (r"\text{Yes}", "yes"),
    (r"12 \text{ cm}", "12"),
    ("12 dollars", "12"),
    (r"\sqrt{2}", r"\sqrt {2}"),
    (r"\boxed{\sqrt{\frac{1}{2}}}", r"\sqrt{1/2}"),
    ("5.0", "5"),
    ("5.", "5"),
    ("+5", "5"),
    ("−5", "-5"),
    (r"\boxed5", "5"),
    ("{5}", "5"),
    ("1, 2, 3", "1,2,3"),
    ("**42**", "42"),
    ("50 percent", "50%"),
    (r"\dfrac{a}{b}", r"\frac{a}{b}"),
    ("A", "a"),
    (r"2\pi", r"2 \pi"),
    (r"\left(1,2\right)", "(1,2)"),
    ("12 cm^2", "12"),
    ("1000000", "1,000,000"),
    ("007", "7"),
    ("1 234 567", "1234567"),
    ("12cm", "12"),
    ("5 square meters", "5"),
    (r"I think \boxed{3}, no: \boxed{4}", "4"),
    (r"\boxed{4} or \boxed{", "4"),
    (r"\{1,2\}", r"\{2, 1\}"),
    (r"\left\{1, \frac12\right\}", "{0.5,1}"),
    ("(1,2),(3,4)", "(1, 2), (3, 4)"),
    (r"\{(1,2),(3,4)\}", r"\{(3,4),(1,2)\}"),
    ("5 km", "5 kilometers"),
    (r"5\text{ km}", "5"),
    ("5 square meters", "5 m²"),
    ("12 cm^{2}", "12 square centimeters"),
    ("20 km/h", "20 kilometers per hour"),
    ("$5", "5 dollars"),
    (r"\$5", "5"),
    ("90°", "90 degrees"),
    ("3 pm", "3 p.m."),
    ("3:30 pm", "3:30 PM"),
    ("12 people", "12 points"),
    ("5 厘米", "5 cm"),
    ("12个", "12"),
    ("5 cm, 6 cm", "5 cm, 6 cm"),
    ("x=1, y=2", "x = 1, y = 2"),
    ("½", "1/2"),
    ("1½", "1.5"),
    ("－５", "-5"),
    ("—5", "-5"),
    ("（1，2）", "(1,2)"),
    ("1、2", "1, 2"),
    ("1.2×10³", "1200"),
    ("1.2 x 10^3", "1200"),
    ("10⁻³", "0.001"),
    ("x²", "x^{2}"),
    ("x_{1}", "x_1"),
    ("√12", r"\sqrt{12}"),
    ("(−∞, 2π)", r"(-\infty,2\pi)"),
    ("100, 200", "100.0, 200"),
    (r"1,\!234", "1234"),
    ("A)", "(A)"),
    ("`5`", "5"),
    ("**Final Answer**: 5", "5"),
    ("The answer is 5. It was easy.", "5"),
    ("The answer is\n$$\n5\n$$", "5"),
    ("#### 5\n\nThanks!", "5"),
    ("#### Answer\nThe answer is 5", "5"),
    ("答案是 5。因为 2+3=5", "5"),
    ("答案：5", "5"),
]
DIFFERENT = [
    ("42", "43"),
    ("0.333", "1/3"),
    ("5x", "5"),
    ("(1,2)", "(2,1)"),
    ("[1,2]", "(1,2)"),
    ("5 million", "5"),
    ("", "0"),
    ("1/0", "0"),
    ("1e999999999", "5"),
    ("12", "1 2"),
    ("1,23", "123"),
    ("-5", "5"),
    ("5 or more", "5"),
    ("nan", "nan2"),
    (r"\boxed{", "5"),
    ("1e400000", "1"),
    ("1,2345", "12345"),
    ("12 c", "12"),
    (r"\boxed{3} then \boxed{4}", "3"),
    ("50%", "5"),
    ("50%", "5000"),
    ("5000", r"50\%"),
    ("1/3", "0.3333333333"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    (r"\{1,2,2\}", r"\{1,1,2\}"),
    (r"\{5\}", "5"),
    ("5 km", "5 m"),
    (r"5\,\text{cm}", r"5\,\text{mm}"),
    ("5 km, 6 m", "5 m, 6 km"),
    ("12 cm^2", "12 cm"),
    ("5 square meters", "5 cubic meters"),
    ("5 km per hour", "5 km"),
    ("3 hours", "3 minutes"),
    ("$5", "€5"),
    ("5 dollars", "5 cents"),
    ("90°", "90%"),
    ("3 am", "3 pm"),
    ("x=5", "y=5"),
    ("x=1, y=2", "y=1, x=2"),
    ("100, 200", "100200"),
    ("2^{1}0", "2^{10}"),
    ("2½", "21/2"),
    ("The answer is 5. No wait, the answer is 6.", "5"),
    ("答案不是5", "5"),
    ("(1,2),(3,4)", "(1,2),(4,3)"),
    ("(" * 900 + "1,2" + ")" * 900, "(" * 900 + "1,3" + ")" * 900),
]


@pytest.mark.parametrize(("given", "expected"), SAME)
def test_same(given: str, expected: str) -> None:
    assert same_answer(given, expected)
    assert same_answer(expected, given)


@pytest.mark.parametrize(("given", "expected"), DIFFERENT)
def test_different(given: str, expected: str) -> None:
    assert not same_answer(given, expected)
    assert not same_answer(expected, given)


@pytest.mark.parametrize("answer", [None, "", " ", ["72"], ["a", "b"], [1, "2"], {"value": 72}])
def test_what_no_reply_would_equal_is_no_reference(answer: object) -> None:
    with pytest.raises(JudgeFault, match=r"reference answer.*task 't'|task 't'.*reference answer"):
        reference(answer, "t")


@pytest.mark.parametrize(
    ("answer", "text"), [(72, "72"), (1.5, "1.5"), ([1, 2], "[1, 2]"), (False, "False"), ("a", "a")]
)
def test_references(answer: object, text: str) -> None:
    assert reference(answer, "t") == text


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"a \boxed{1} b \boxed{\frac{1}{2}} c", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("some steps\n#### 18", "18"),
        ("The answer is: 7\nbye", "7"),
        ("  7 ", "7"),
    ],
)
def test_where_the_answer_is(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "hostile",
    [
        "9" * 5000,
        "5 " + "m" * 1990,
        r"\boxed{" * 20000,
        "{" * 1999,
        "(" * 999 + ")" * 999,
        "5 " + "cm " * 600,
        r"\frac{" * 300,
        "answer is " * 5000,
        "1," * 900,
        " " * 1999 + "6",
        "1e999999999",
        "((" + "1," * 400,
        "answer is" + "\n" * 60000,
        "5 cm/" * 390,
    ],
)
def test_no_text_keeps_the_judge_busy(hostile: str) -> None:
    before = time.process_time()
    assert not same_answer(hostile, "5")
    assert time.process_time() - before < 2


@pytest.mark.parametrize(
    ("given", "expected", "surely"),
    [
        ("0.5", r"\frac12", True),
        ("0.333", "1/3", False),
        ("eat", "tea", False),
        ("5 million", "5", False),
        ("5 or more", "5", False),
        ("5 km", "5 m", False),
        ("(5 km, 3)", "(5 m, 3)", False),
        ("(1,2)", r"\{1,2\}", False),
        (r"\boxed{5", "5", False),
        ("3,3", "3", False),
        ("1,2,2", "1,2", False),
        ("2,1", "1,2", None),
        ("y=2x+1", "x=(y-1)/2", None),
        ("3m^2+6m", "3m(m+2)", None),
        ("", "x", False),
        ("x" * 400, "x", False),
        ("(x+1)^2", "x^2+2x+1", None),
        (r"\sqrt{8}", r"2\sqrt{2}", None),
        ("3c+2ab", "2ab+3c", None),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}", None),
    ],
)
def test_what_exact_rules_decide(given: str, expected: str, surely: bool | None) -> None:
    assert compare_answers(given, expected) is surely


@pytest.mark.parametrize("given", ["12*7", r"\boxed{x = 100 - 16}", r"\boxed{12 \times (5+2)}"])
def test_a_number_that_is_still_to_be_computed_is_not_it(given: str) -> None:
    assert compare_answers(given, "84") is False
    assert compare_answers("12*7=84", "84") is None is compare_answers("12*7", r"2^2*3*7")
