"""OpenAI's Responses API, stateless: its requests become chats, and the answers of chats its items."""
