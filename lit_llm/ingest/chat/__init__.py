"""Conversations: a chat template writes a conversation as text, and a mask says which tokens the assistant wrote."""

from lit_llm.ingest.chat.encode import ChatEncoder
from lit_llm.ingest.chat.template import AUTO, CHAT_TEMPLATE_FILE, ChatForm, ChatTemplate, NoChatTemplate

__all__ = ["AUTO", "CHAT_TEMPLATE_FILE", "ChatEncoder", "ChatForm", "ChatTemplate", "NoChatTemplate"]
