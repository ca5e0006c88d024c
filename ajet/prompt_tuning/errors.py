"""What can end a search before its last round."""

from __future__ import annotations

from ajet.schema.errors import AjetError, UserError


class ProposerError(AjetError):
    """The proposer could not be asked, or failed. Not raised for a proposal that is merely refused."""


class SearchFailedError(AjetError):
    """The search can't go on: no episode of a batch could be scored, or every question to the proposer failed."""


class UnusedTemplateError(UserError):
    """No episode asked for a template that is to be tuned: its text could not matter."""
