"""The one way from a chat request to a reply: begin, generate, parse, commit."""

from ajet.session.episode_session import ChatModel, EpisodeSession
from ajet.session.reply import OnDelta, ReplyDelta
from ajet.session.reply_parser import CallPiece
from ajet.session.settings import SeedKey, SessionSettings

__all__ = ["CallPiece", "ChatModel", "EpisodeSession", "OnDelta", "ReplyDelta", "SeedKey", "SessionSettings"]
