"""From the raw text of a reply to its message: reasoning, content and tool calls, per model family.

`pick_parser(chat_template)` chooses the family. Whatever can't be read stays in the content as text and is named in
`ParsedReply.malformed`; a parser never raises.
"""

from ajet.session.parsers.base import PLAIN, Delta, ParsedReply, ReplyParser, ReplyStream
from ajet.session.parsers.pick import pick_parser

__all__ = ["PLAIN", "Delta", "ParsedReply", "ReplyParser", "ReplyStream", "pick_parser"]
