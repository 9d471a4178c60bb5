"""The client's address of a request that came through proxies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

__all__ = ["TrustedProxies"]

MAX_HOPS = 16
"""Entries of X-Forwarded-For that are read, from the right."""
_PORT = re.compile(r"(?:\[([^\]]*)\]|([0-9.]+))(?::[0-9]{1,5})?", re.ASCII)


# uvicorn's ProxyHeadersMiddleware takes text that is no address as the client, so each request could count as another
# client of any length.
class TrustedProxies:
    """The proxies whose header X-Forwarded-For is believed.

    Args:
        entries: Addresses and networks; "unix" means the peers of a Unix socket, which have no address.

    Raises:
        ValueError: An entry is neither.
    """

    def __init__(self, entries: Iterable[str] = ()) -> None:
        """Raises ValueError."""
        given = list(entries)
        self._unix = "unix" in given
        self._networks = [ip_network(one) for one in given if one != "unix"]

    def trusts(self, peer: str | None) -> bool:
        """Whether the other end of a connection is a trusted proxy. None: of a Unix socket."""
        if peer is None:
            return self._unix
        address = _address(peer)
        return address is not None and self._has(address)

    def client(self, peer: str | None, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """Return the client's address; "" where it is not known.

        It is the peer's, or, if the peer is a trusted proxy, the last one of X-Forwarded-For that is not a trusted
        proxy's: each proxy appends the address that it sees, and clients may have written what is left of it. Text
        that is no address ends the search: the proxy that passed it on counts as the client.

        Args:
            peer: Address of the other end of the connection; None: of a Unix socket.
            headers: Names in lower case, and values.
        """
        found = "" if peer is None else str(_address(peer) or "")
        if not self.trusts(peer):
            return found
        line = b",".join(value for name, value in headers if name == b"x-forwarded-for")
        for text in reversed(line.rsplit(b",", MAX_HOPS)[-MAX_HOPS:]):
            address = _address(text.decode("latin-1").strip())
            if address is None:
                break
            found = str(address)
            if not self._has(address):
                break
        return found

    def _has(self, address: IPv4Address | IPv6Address) -> bool:
        return any(address in network for network in self._networks)


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an address, which may have a port: 192.0.2.1, 192.0.2.1:80, 2001:db8::1, [2001:db8::1]:80."""
    if len(text) > 64:
        return None
    if match := _PORT.fullmatch(text):
        text = match[1] if match[1] is not None else match[2]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv4Address):
        return address
    if address.scope_id is not None:
        return None  # means something on one machine only, and may be any text
    return address.ipv4_mapped or address
