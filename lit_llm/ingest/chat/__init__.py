"""Conversations: a chat template writes them as text, and a mask says which of its tokens the assistant wrote."""

from lit_llm.ingest.chat.encode import ChatEncoder
from lit_llm.ingest.chat.template import AUTO, CHAT_TEMPLATE_FILE, ChatForm, ChatTemplate, NoChatTemplate

__all__ = ["AUTO", "CHAT_TEMPLATE_FILE", "ChatEncoder", "ChatForm", "ChatTemplate", "NoChatTemplate"]
