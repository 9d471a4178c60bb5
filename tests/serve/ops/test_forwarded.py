"""The client's address behind trusted proxies: X-Forwarded-For is believed as far as proxies have written it."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exl_serve.api.forwarded import MAX_HOPS, TrustedProxies
from exl_serve.config.load import ConfigError, parse

TRUSTED = ("10.0.0.0/8", "192.0.2.7", "2001:db8:1::/48", "::1")
PROXIES = TrustedProxies(TRUSTED)
NETWORKS = [ip_network(one) for one in TRUSTED]

Address = IPv4Address | IPv6Address


def trusted(address: Address) -> bool:
    return any(address in network for network in NETWORKS)


def plain(address: Address) -> Address:
    return address if isinstance(address, IPv4Address) else address.ipv4_mapped or address


proxies = st.sampled_from([ip_address(one) for one in ("10.1.2.3", "10.255.0.1", "192.0.2.7", "2001:db8:1::5", "::1")])
clients = st.ip_addresses().map(plain).filter(lambda one: not trusted(one))
junk = st.one_of(
    st.sampled_from(
        ["", "unknown", "_hidden", "10.1.2.3.4", "010.1.2.3", "[::1", "::1]:80", "1.2.3:4", "fe80::1%eth0"]
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters=",0123456789abcdefABCDEF:.[]%")),
)
written = st.lists(st.one_of(st.ip_addresses().map(str), junk), max_size=4)


@st.composite
def entry(draw: st.DrawFn, addresses: st.SearchStrategy[Address]) -> tuple[Address, str]:
    """(address, one of its spellings)."""
    address = draw(addresses)
    port = draw(st.sampled_from(["", ":1", ":65535"]))
    if isinstance(address, IPv4Address):
        text = draw(st.sampled_from([f"{address}{port}", f"::ffff:{address}"]))
    else:
        text = draw(st.sampled_from([str(address), address.exploded.upper(), f"[{address}]{port}"]))
    return address, draw(st.sampled_from(["", " ", "\t"])) + text + draw(st.sampled_from(["", " "]))


def headers(entries: list[str], cuts: list[bool]) -> list[tuple[bytes, bytes]]:
    """The entries as one or several headers, among others."""
    lines: list[list[str]] = [[]]
    for text, cut in zip(entries, [*cuts, *[False] * len(entries)], strict=False):
        if cut and lines[-1]:
            lines.append([])
        lines[-1].append(text)
    found = [(b"x-forwarded-for", ",".join(line).encode("latin-1")) for line in lines]
    return [(b"host", b"localhost"), *found, (b"x-real-ip", b"203.0.113.99")]


@given(written, entry(clients), st.lists(entry(proxies), max_size=4), proxies, st.lists(st.booleans(), max_size=10))
def test_the_address_of_a_client_is_found_in_any_header(
    spoofed: list[str],
    client: tuple[Address, str],
    passed: list[tuple[Address, str]],
    peer: Address,
    cuts: list[bool],
) -> None:
    """The first proxy appends the client's address, each further one that of the proxy before it."""
    found = PROXIES.client(str(peer), headers([*spoofed, client[1], *(text for _, text in passed)], cuts))
    assert found == str(client[0])


@given(written, st.ip_addresses().map(plain), st.lists(st.booleans(), max_size=10))
def test_others_are_not_believed(entries: list[str], peer: Address, cuts: list[bool]) -> None:
    for proxies in (TrustedProxies(), TrustedProxies(["unix"]), PROXIES):
        if not proxies.trusts(str(peer)):
            assert proxies.client(str(peer), headers(entries, cuts)) == str(peer)
    assert PROXIES.client(None, headers(entries, cuts)) == ""


@given(written, junk, st.lists(entry(proxies), max_size=3), proxies)
@example([], "203.0.113.5 10.0.0.1", [], ip_address("10.1.2.3"))
def test_text_that_is_no_address_ends_the_search(
    spoofed: list[str], text: str, passed: list[tuple[Address, str]], peer: Address
) -> None:
    found = PROXIES.client(str(peer), headers([*spoofed, text, *(one for _, one in passed)], []))
    assert found == str(passed[0][0] if passed else peer)


@given(st.lists(st.binary(max_size=100), max_size=5), st.one_of(st.none(), proxies.map(str), st.text(max_size=50)))
def test_any_bytes_give_an_address(lines: list[bytes], peer: str | None) -> None:
    found = TrustedProxies([*TRUSTED, "unix"]).client(peer, [(b"x-forwarded-for", line) for line in lines])
    if found not in ("", peer):
        assert str(ip_address(found)) == found


def test_a_list_of_proxies_alone_names_the_first_of_them() -> None:
    lines = [(b"x-forwarded-for", b"10.0.0.1, 10.0.0.2")]
    assert PROXIES.client("::ffff:192.0.2.7", lines) == "10.0.0.1"
    assert PROXIES.client("10.0.0.3", []) == "10.0.0.3"
    assert TrustedProxies(["unix"]).client(None, lines) == "10.0.0.2"
    assert TrustedProxies(["unix"]).client(None, []) == ""


def test_a_long_list_is_read_from_the_right_only() -> None:
    lines = [(b"x-forwarded-for", b"203.0.113.5, 10.9.9.9" + b", 10.0.0.1" * (MAX_HOPS - 1))]
    assert PROXIES.client("10.0.0.1", lines) == "10.9.9.9"


NO_NETWORKS = ["10.0.0.1/8", "proxy.example.com", "", "*", "0.0.0.0/0", "::/0", "10.0.0.0/33"]
MATCH_NOBODY = ["::ffff:127.0.0.1", "::ffff:10.0.0.0/104", "fe80::1", "fe80::/10"]


@pytest.mark.parametrize("entry", [*NO_NETWORKS, *MATCH_NOBODY])
def test_a_proxy_that_is_no_network_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"server": {"trusted_proxies": [entry]}})
    assert caught.value.path == "server.trusted_proxies"
    assert parse({"server": {"trusted_proxies": [*TRUSTED, "unix"]}}).server.trusted_proxies == (*TRUSTED, "unix")
