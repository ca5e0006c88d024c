"""The one way from a chat request to a reply: begin, generate, parse, commit."""

from ajet.gateway.chat.episode_session import ChatModel, EpisodeSession
from ajet.gateway.chat.reply import OnDelta, ReplyDelta
from ajet.gateway.chat.reply_parser import CallPiece
from ajet.gateway.chat.settings import SeedKey, SessionSettings

__all__ = ["CallPiece", "ChatModel", "EpisodeSession", "OnDelta", "ReplyDelta", "SeedKey", "SessionSettings"]
