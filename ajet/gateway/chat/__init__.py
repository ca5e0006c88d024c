"""The one way from a chat request to a reply: begin, generate, parse, commit."""

from ajet.gateway.chat.episode_session import ChatModel, EpisodeSession
from ajet.gateway.chat.reply import OnDelta, ReplyDelta, SeedKey, SessionSettings, validation_temperature
from ajet.gateway.chat.reply_parser import CallPiece, ReplyParser
from ajet.gateway.chat.tool_call_parsers import pick_parser

__all__ = [
    "CallPiece",
    "ChatModel",
    "EpisodeSession",
    "OnDelta",
    "ReplyDelta",
    "ReplyParser",
    "SeedKey",
    "SessionSettings",
    "pick_parser",
    "validation_temperature",
]
