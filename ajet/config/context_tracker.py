"""`ajet.context_tracker`: how model calls are recorded and become training tokens."""

from __future__ import annotations

from typing import Literal

from ajet.config.section import Section


class MergingPolicyConfig(Section):
    """`ajet.context_tracker.timeline_merging_policy`: accepted for existing files; merging is always exact here."""

    timeline_compare_level: Literal["text", "token"] = "token"
    """Accepted for existing files: comparison is by token here."""
    ignore_tools: bool = False
    """Accepted for existing files: tools are part of the prompt's tokens here."""


class ContextTrackerConfig(Section):
    """`ajet.context_tracker`: how model calls are recorded and become training tokens."""

    shared_token_loss: Literal["once", "multiplicity"] = "once"
    """A sampled token that several conversations share is trained once, or once for each of them."""
    timeline_merging_policy: MergingPolicyConfig = MergingPolicyConfig()
    """Accepted for existing files; merging is always exact here."""
    fix_retokenization_drift: bool = True
    """Accepted for existing files: sampled ids are kept as sampled here, so there is no drift to fix."""
    log_tool_format_check: bool = False
    """Log whether tool calls are well formed."""
    log_tool_format_error_detail: bool = False
    """Log what was wrong with a malformed tool call."""
    detect_timeline_snap: bool = True
    """Explain each fork of a conversation: which message or template rule, and how many tokens it cost."""
