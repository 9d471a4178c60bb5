"""`exllamav2.server.websocket_actions`: the actions of the WebSocket service, which `ExLlamaV2WebSocketServer` has."""

from exllamav2._names import without_counterpart

__all__: list[str] = []

__getattr__ = without_counterpart(__name__)
