"""Makes three small SQLite databases and questions about them, each with a query that answers it.

python tutorial/example_spider/make_databases.py
"""

from __future__ import annotations

import json
import random
import sqlite3
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ines", "Jon")
CITIES = ("Oslo", "Lima", "Kyoto", "Accra")

SCHEMAS = {
    "shop": """
        CREATE TABLE customer (id INTEGER PRIMARY KEY, name TEXT, city TEXT);
        CREATE TABLE purchase (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customer, item TEXT, price REAL);
    """,
    "school": """
        CREATE TABLE student (id INTEGER PRIMARY KEY, name TEXT, city TEXT, age INTEGER);
        CREATE TABLE grade (student_id INTEGER REFERENCES student, subject TEXT, points INTEGER);
    """,
    "library": """
        CREATE TABLE book (id INTEGER PRIMARY KEY, title TEXT, author TEXT, year INTEGER);
        CREATE TABLE loan (book_id INTEGER REFERENCES book, reader TEXT, days INTEGER);
    """,
}
ITEMS, SUBJECTS = ("lamp", "chair", "desk", "shelf"), ("maths", "music", "history")
QUESTIONS: dict[str, list[tuple[str, str, tuple[Any, ...]]]] = {
    "shop": [
        ("How many customers live in {0}?", "SELECT count(*) FROM customer WHERE city = '{0}'", CITIES),
        (
            "Who bought a {0}?",
            "SELECT DISTINCT name FROM customer JOIN purchase ON customer_id = customer.id WHERE item = '{0}'",
            ITEMS,
        ),
        ("What is the highest price of a {0}?", "SELECT max(price) FROM purchase WHERE item = '{0}'", ITEMS),
        (
            "How much did the customers from {0} spend altogether?",
            "SELECT sum(price) FROM purchase JOIN customer ON customer_id = customer.id WHERE city = '{0}'",
            CITIES,
        ),
    ],
    "school": [
        (
            "What is the average age of the students from {0}?",
            "SELECT avg(age) FROM student WHERE city = '{0}'",
            CITIES,
        ),
        (
            "Who has more than 10 points in {0}?",
            "SELECT name FROM student JOIN grade ON student_id = id WHERE subject = '{0}' AND points > 10",
            SUBJECTS,
        ),
        ("How many students are older than {0}?", "SELECT count(*) FROM student WHERE age > {0}", (11, 12, 13, 14)),
        (
            "Name the students in the order of their points in {0}, the best one first.",
            "SELECT name FROM student JOIN grade ON student_id = id WHERE subject = '{0}' ORDER BY points DESC, name",
            SUBJECTS,
        ),
    ],
    "library": [
        ("How many books are by {0}?", "SELECT count(*) FROM book WHERE author = '{0}'", NAMES[:4]),
        ("Which books are from after {0}?", "SELECT title FROM book WHERE year > {0}", (1950, 1970, 1990)),
        (
            "Which books has {0} borrowed?",
            "SELECT DISTINCT title FROM book JOIN loan ON book_id = id WHERE reader = '{0}'",
            NAMES[4:8],
        ),
        (
            "Which authors' books were borrowed for more than {0} days in total?",
            "SELECT author FROM book JOIN loan ON book_id = id GROUP BY author HAVING sum(days) > {0}",
            (20, 40, 60),
        ),
    ],
}


def rows(name: str, draw: random.Random) -> dict[str, list[tuple[Any, ...]]]:
    """What is in a database."""
    people = range(1, len(NAMES) + 1)
    if name == "shop":
        bought = [(n, draw.choice(people), draw.choice(ITEMS), draw.randint(5, 90) + 0.5) for n in range(1, 41)]
        return {"customer": [(n, NAMES[n - 1], draw.choice(CITIES)) for n in people], "purchase": bought}
    if name == "school":
        students = [(n, NAMES[n - 1], draw.choice(CITIES), draw.randint(10, 15)) for n in people]
        return {
            "student": students,
            "grade": [(n, subject, draw.randint(0, 20)) for n in people for subject in SUBJECTS],
        }
    books = [(n, f"Book {n}", draw.choice(NAMES[:4]), draw.randint(1930, 2020)) for n in range(1, 16)]
    return {
        "book": books,
        "loan": [(draw.randint(1, 15), draw.choice(NAMES[4:8]), draw.randint(1, 30)) for _ in range(40)],
    }


def main() -> None:
    DATA.mkdir(exist_ok=True)
    draw, tasks = random.Random(0), []
    for name, schema in SCHEMAS.items():
        file = DATA / f"{name}.sqlite"
        file.unlink(missing_ok=True)
        with sqlite3.connect(file) as database:
            database.executescript(schema)
            for table, values in rows(name, draw).items():
                database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values[0]))})", values)
        for question, gold, fillings in QUESTIONS[name]:
            for value in fillings:
                tasks.append({"question": question.format(value), "database": name, "gold": gold.format(value)})
    draw.shuffle(tasks)
    cut = len(tasks) * 3 // 4
    for split, part in (("train", tasks[:cut]), ("validation", tasks[cut:])):
        (DATA / f"{split}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in part))
    print(f"{len(SCHEMAS)} databases and {len(tasks)} questions in {DATA}")


if __name__ == "__main__":
    main()
