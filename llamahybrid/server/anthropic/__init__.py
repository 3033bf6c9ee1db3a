"""Anthropic's Messages API: its requests become chats, and the answers of chats its messages."""
