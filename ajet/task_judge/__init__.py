"""How an output becomes a reward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet.schema.install import lazily

if TYPE_CHECKING:
    from ajet.task_judge.base_judge import BaseJudge as BaseJudge

__getattr__ = lazily(__name__, {"BaseJudge": "base_judge"})
