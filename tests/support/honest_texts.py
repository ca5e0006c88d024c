"""Honest replies that look odd: code, data, markup, encodings, tables, mathematics and many languages.

`honest_texts()` gives more than 200 of them by name; no output check may take one for nonsense. `garbage()` gives what
a collapsed policy writes.
"""

from __future__ import annotations

import base64
import json
import random
import string

CODE_LINES = {
    "python statements": "    x = x + 1",
    "python pass": "    pass",
    "lua end": "end",
    "c braces": "    }",
    "asm nop": "    nop",
    "asm push": "    push rax",
    "shell done": "done",
    "return null": "    return null;",
    "sql insert": "INSERT INTO t VALUES (NULL, NULL, 0);",
    "case": "        break;",
    "css": "  margin: 0 auto;",
    "import": "from typing import Any",
    "comment": "# ----",
    "assert": "assert result is None",
    "logging": "INFO: request served",
    "go error": "if err != nil { return err }",
    "php": "<?php echo $x; ?>",
    "latex rows": r"0 & 0 & 1 \\",
    "latex hline": r"\hline",
    "makefile": "\t@echo ok",
}
MARKUP = {
    "divs in a row": "</div>",
    "divs with spaces": "</div> ",
    "divs by line": "</div>\n",
    "indented divs": "  </div>\n",
    "breaks": "<br/>",
    "cells": "<td>0</td>",
    "rows": "<tr><td>a</td><td>b</td></tr>\n",
    "list items": "<li>item</li>\n",
    "entities": "&nbsp;",
    "xml nil": '<value xsi:nil="true"/>\n',
    "svg": "M0 0L1 1",
    "latex quad": r"\quad ",
}
TABLE_ROWS = {
    "markdown yes": "| yes | yes | no |",
    "markdown empty": "|   |   |   |",
    "markdown n/a": "| n/a | n/a |",
    "csv": "apple,banana,cherry",
    "csv with spaces": "yes, no, yes, no",
    "tsv": "NaN\tNaN\tNaN",
    "pandas": "NaN NaN NaN NaN",
    "grid": "x o x o x",
    "booleans": "true true false",
    "none": "None None None",
    "board": ". . . Q . . . .",
    "units": "kg m s",
    "hex": "ff ff ff ff",
    "bars": "██████░░░░",
}
DATA = {
    "nulls indented": json.dumps({"rows": [None] * 24}, indent=1),
    "nulls compact": json.dumps([None] * 24),
    "nulls of a grid": json.dumps([[None] * 8] * 8, indent=2),
    "booleans": json.dumps([True] * 60),
    "strings": json.dumps(["ok"] * 50),
    "strings indented": json.dumps(["pending"] * 40, indent=2),
    "empty strings": json.dumps([""] * 50),
    "empty objects": json.dumps([{}] * 40, indent=1),
    "equal records": json.dumps([{"id": 0, "name": "a"}] * 30, indent=2),
    "closing brackets": "[" * 40 + "]" * 40,
    "yaml nulls": "values:\n" + "  - null\n" * 40,
    "yaml words": "values:\n" + "  - unknown\n" * 40,
    "toml": "flags = [" + "true, " * 40 + "]",
    "numpy": "array([" + "nan, " * 60 + "])",
    "numpy spaces": "[" + " nan" * 50 + "]",
    "genome": "ACGT" * 60,
    "unknown bases": "N" * 240 + "ACGTTGCA",
    "poly-A": "ACGTGCTA" + "A" * 90,
    "hex zeros": "0x" + "0" * 128,
    "hex ones": "0x" + "f" * 128,
    "hex words": "deadbeef" * 30,
    "colours": "#ffffff " * 40,
    "uuid": "00000000-0000-0000-0000-000000000000\n" * 20,
    "masked key": "sk-" + "x" * 64,
    "masked key, long": "X" * 128,
    "morse": "-.. --- .-. " * 30,
    "binary": "01010101 " * 60,
    "separator": "-=" * 200,
    "dots": "." * 300,
    "url": "https://example.com/" + "a/" * 60,
    "path": "/node_modules/pkg" * 30,
    "version list": "1.0.0 " * 60,
    "emoji row": "🟩" * 100,
    "wordle": "⬛⬛🟨⬛🟩\n" * 20,
    "regex": "(?:a|b)" * 30,
    "brainfuck": "+[->+<]" * 40,
    "lisp": "(cons 1 " * 30 + "nil" + ")" * 30,
    "chess": "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR",
    "moves": "U R U R " * 30,
    "key presses": "up up down down left right " * 10,
}
LANGUAGES = {
    "chinese": "首先，我们需要理解问题，然后逐步推导，最后得到答案：四十二。",
    "chinese with english": "我们使用Python编写代码，调用API接口，然后在GPU上训练模型，并用SGD优化。",
    "chinese laughter": "哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈，太好笑了！",
    "chinese with symbols": "设α为角度，则sinα≤1，其中Δx→0，μ为均值，σ²为方差。",
    "thai": "สวัสดีครับ วันนี้เราจะมาเรียนรู้วิธีการแก้สมการกำลังสองด้วยกัน ขั้นแรกให้ย้ายข้าง",
    "thai with english": "ใช้ Python เขียนโปรแกรม แล้วเรียก API จาก server เพื่อดึงข้อมูล JSON มาแสดงผล",
    "thai laughter": "55555555555555 ตลกมากกกกกกกกกกกกกกก",
    "lao": "ສະບາຍດີ ຂ້ອຍຮຽນພາສາລາວ ແລະ ຄະນິດສາດ",
    "japanese": "こんにちは、世界。これはテストです。カタカナと漢字も使います。APIを呼び出してください。",
    "korean": "안녕하세요, 오늘은 Python으로 모델을 학습시키는 방법을 배워 보겠습니다. ㅋㅋㅋㅋㅋㅋㅋㅋ",
    "korean with hanja": "대한민국(大韓民國)의 수도(首都)는 서울이다. 인간(人間)은 사회적(社會的) 동물이다.",
    "russian": "Сначала нужно понять задачу, затем решить её по шагам и проверить ответ: сорок два.",
    "russian with code": "Функция print выводит строку, а len возвращает длину списка; API отвечает JSON.",
    "ukrainian": "Спочатку зрозуміймо умову, потім розв'яжемо рівняння крок за кроком.",
    "arabic": "أولاً نحتاج إلى فهم المسألة ثم نحلها خطوة بخطوة حتى نصل إلى الجواب: اثنان وأربعون.",
    "arabic with english": "نستخدم لغة Python و مكتبة NumPy لتدريب model على GPU ثم نحفظ checkpoint",
    "hebrew": "ראשית עלינו להבין את השאלה, ואז לפתור אותה צעד אחר צעד עם Python ו־API.",
    "hindi": "पहले हमें प्रश्न को समझना होगा, फिर चरण दर चरण हल करना होगा। उत्तर बयालीस है।",
    "hindi with english": "Python में function लिखें और API को call करें, फिर JSON को parse करें।",
    "bengali": "প্রথমে আমাদের প্রশ্নটি বুঝতে হবে, তারপর ধাপে ধাপে সমাধান করতে হবে।",
    "tamil": "முதலில் கேள்வியைப் புரிந்து கொள்ள வேண்டும், பிறகு படிப்படியாகத் தீர்க்க வேண்டும்.",
    "greek": "Πρώτα πρέπει να καταλάβουμε το πρόβλημα και μετά να το λύσουμε βήμα βήμα με Python.",
    "armenian": "Նախ պետք է հասկանանք խնդիրը, ապա լուծենք այն քայլ առ քայլ։",
    "georgian": "ჯერ უნდა გავიგოთ ამოცანა, შემდეგ კი ნაბიჯ-ნაბიჯ ამოვხსნათ.",
    "amharic": "በመጀመሪያ ጥያቄውን መረዳት አለብን፤ ከዚያም ደረጃ በደረጃ እንፈታለን።",
    "vietnamese": "Trước tiên chúng ta cần hiểu đề bài, sau đó giải từng bước và kiểm tra kết quả.",
    "turkish": "Önce soruyu anlamalı, ardından adım adım çözmeli ve sonucu kontrol etmeliyiz.",
    "german": "Zuerst müssen wir die Aufgabe verstehen; dann lösen wir sie Schritt für Schritt. Übermäßig schön!",
    "french": "D'abord, il faut comprendre l'énoncé ; ensuite, on résout l'équation étape par étape.",
    "polish": "Najpierw musimy zrozumieć zadanie, a potem rozwiązać je krok po kroku: żółć, źdźbło.",
    "language list": "English, 中文, Русский, العربية, हिन्दी, 日本語, ภาษาไทย, 한국어, Ελληνικά, עברית, ქართული",
    "language list by line": "English\n中文\nРусский\nالعربية\nहिन्दी\n日本語\nภาษาไทย\n한국어\nΕλληνικά\nעברית",
    "greetings": "hello / привет / 你好 / สวัสดี / 안녕 / नमस्ते / مرحبا / שלום / γεια / ሰላም / გამარჯობა",
    "translation to thai": "In Thai, 'The answer is 42' is: คำตอบคือสี่สิบสอง และ 'thank you' is ขอบคุณครับ",
    "word list": "water вода 水\nfire огонь 火\nearth земля 土\nair воздух 气\nsun солнце 日\nmoon луна 月",
    "dictionary": "猫 (neko) — кошка; 犬 (inu) — собака; 鳥 (tori) — птица; 魚 (sakana) — рыба; 馬 (uma) — лошадь",
}
MATHS = {
    "sum": "∑_{i=1}^{n} i² = n(n+1)(2n+1)/6 ≤ ∞, where x ∈ ℝ, ∂f/∂x → 0 and √2 ≈ 1.41421356",
    "greek letters": "αβγδ + Δx·∂y/∂x = λμν; πr² = A, θ = ωt + φ, σ²(X) = E[X²] − μ²",
    "quantifiers": "∀ε>0 ∃δ>0: |x−a|<δ ⇒ |f(x)−f(a)|<ε ∎",
    "blackboard": "ℕ ⊂ ℤ ⊂ ℚ ⊂ ℝ ⊂ ℂ; 𝔼[X] = ∫ x dℙ, 𝒪(n log n), ℵ₀ < 2^ℵ₀",
    "latex matrix": r"\begin{pmatrix} " + r"0 & 0 & 0 \\ " * 24 + r"\end{pmatrix}",
    "latex align": "\\begin{align}\n" + "x &= x \\\\\n" * 24 + "\\end{align}",
    "repeating decimal": "1/7 = 0." + "142857" * 40 + "…",
    "long product": "2 × " * 60 + "2 = 2^61",
    "continued fraction": r"1+\cfrac{1}{" * 30 + "1" + "}" * 30,
    "nested roots": r"\sqrt{2+" * 30 + "2" + "}" * 30,
    "power of two": str(2**1000),
    "pi": "3." + "14159265358979323846264338327950288419716939937510" * 8,
    "truth table": "T F T F\nF T F T\n" * 8,
    "steps": "\n".join(f"Step {i}: {i} + {i} = {2 * i}" for i in range(80)),
    "sequence": ", ".join(str(i % 2) for i in range(300)),
    "modular": "a a a a b b b b a a a a b b b b " * 4,
    "arrows": "A → B → C → " * 12,
    "variables": "x + x + x + x + x + x + x + x + " * 8 + "x",
    "vectors": "(0, 0, 0), " * 60,
    "unicode fractions": "½ ⅓ ¼ ⅕ ⅙ ⅛ " * 20,
}
PROSE = {
    "song": "la la la la la la la la la la la la la la la la la la la la la la, hey Jude",
    "laughter": "hahahahahahahahahahahahahahahahahahahahahahahahahahahahahahahaha, noooooooooooooo!!!!!!!!",
    "scream": "A" * 60 + "h!",
    "counting": " ".join(f"{n} bottles of beer on the wall," for n in range(99, 0, -1)),
    "badgers": "badger badger badger badger badger badger badger badger mushroom mushroom " * 4,
    "alphabet": " ".join(string.ascii_lowercase) * 6,
    "yes": "yes yes yes yes yes yes yes yes yes yes yes yes yes yes yes yes yes yes yes yes yes",
    "letters by word": "b a n a n a s " * 8,
    "headings": "\n\n".join(f"## Section {n}\n\nText." for n in range(40)),
    "checklist": "\n".join("- [ ] to do" for _ in range(30)),
    "dialogue": "Yes.\nNo.\n" * 20,
    "todo": "TODO\n" * 20,
    "numbered": "\n".join(f"{n}. item" for n in range(60)),
    "ellipses": "… " * 60,
    "ansi": "C:\\Users\\me\r\n\tnext\r\n\x1b[31mred\x1b[0m",
    "cut emoji": "Great 🎉 \ufffd\ufffd",
}


def honest_texts() -> dict[str, str]:
    """Made the same each time."""
    rng = random.Random(0)
    found: dict[str, str] = {}
    for count in (20, 60):
        for name, line in CODE_LINES.items():
            found[f"code: {name} × {count}"] = "\n".join([line] * count)
    for count in (20, 45):
        for name, piece in MARKUP.items():
            found[f"markup: {name} × {count}"] = piece * count
    for count in (20, 50):
        for name, row in TABLE_ROWS.items():
            found[f"table: {name} × {count}"] = "\n".join([row] * count)
    for kind, texts in (("data", DATA), ("language", LANGUAGES), ("maths", MATHS), ("prose", PROSE)):
        found |= {f"{kind}: {name}": text for name, text in texts.items()}
    for size in (40, 200, 900):
        for name, content in {
            "zeros": bytes(size),
            "ones": b"\xff" * size,
            "random": rng.randbytes(size),
            "text": (b"hello world " * size)[:size],
            "letters": b"a" * size,
        }.items():
            found[f"base64: {name}, {size} bytes"] = base64.b64encode(content).decode()
            found[f"hex: {name}, {size} bytes"] = content.hex()
    for name, text in LANGUAGES.items():
        found[f"after english: {name}"] = f"The answer is 42. In other words:\n\n{text}\n\nI hope this helps."
    return found


def garbage() -> dict[str, str]:
    """Replies of a policy that has collapsed, or whose tail is drawn at random."""
    rng = random.Random(1)
    start = "Let me think about it step by step. First, I add the two numbers, then I divide by three. So the answer "
    scripts = {
        "cyrillic": (0x430, 0x44F),
        "thai": (0xE01, 0xE2E),
        "cjk": (0x4E00, 0x4FFF),
        "hangul": (0xAC00, 0xAD00),
        "arabic": (0x627, 0x63A),
        "hindi": (0x915, 0x939),
        "greek": (0x3B1, 0x3C9),
        "hebrew": (0x5D0, 0x5EA),
    }

    def token(script: str) -> str:
        return "".join(chr(rng.randint(*scripts[script])) for _ in range(rng.randint(1, 4)))

    def tail(gap: str, size: int) -> str:
        return gap.join(token(rng.choice(list(scripts))) for _ in range(size))

    made = {f"scripts within words {n}": start + tail("", 30) for n in range(10)}
    made |= {f"scripts from word to word {n}": start + tail(" ", 40) for n in range(10)}
    made["one word"] = start + "the " * 300
    made["one phrase"] = start + "go to the next page and " * 40
    made["one sentence"] = start + "Let me check the file again.\n" * 40
    made["two sentences"] = start + "Let me check the file.\nNow I look at it again.\n" * 40
    made["one letter"] = start + "a" * 400
    made["one symbol"] = start + "!" * 900
    made["closing tags"] = start + "</div>" * 500
    made["chinese phrase"] = "答案是" + "好的" * 100
    made["array that never ends"] = "[" + "null, " * 600
    made["undecodable"] = start + "\ufffd" * 20
    made["code that never ends"] = "x = 0\n" + "x = x + 1\n" * 400
    return made
