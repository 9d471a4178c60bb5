"""`exllamav2.server`: the WebSocket service (extra `server`)."""

from exllamav2.server.websocket import ExLlamaV2WebSocketServer

__all__ = ["ExLlamaV2WebSocketServer"]
