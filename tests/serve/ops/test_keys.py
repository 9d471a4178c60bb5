"""Keys: the file, who is let in, what is refused, the limits of a key."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl_serve.api.auth import Authenticator, check_bind, is_loopback
from exl_serve.api.keys import KeyFile, Usage, new_key, read_keys
from exl_serve.config.load import ConfigError, parse
from exl_serve.config.model import Auth
from exl_serve.errors import ServeError

KEY, OTHER, ADMIN = "exl-" + "a" * 43, "exl-" + "b" * 43, "exl-" + "c" * 43


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def entries(path: Path) -> Path:
    digest = hashlib.sha256(OTHER.encode()).hexdigest()
    return write(
        path,
        f'[[key]]\nname = "one"\nkey = "{KEY}"\nlimits = {{ requests_per_minute = 2, tokens_per_minute = 100 }}\n'
        f'[[key]]\nname = "two"\nsha256 = "{digest}"\nmodels = ["m"]\nexpires = 2030-01-01\n'
        f'[[key]]\nname = "boss"\nkey = "{ADMIN}"\nscopes = ["admin", "metrics"]\nlimits = {{ concurrent = 1 }}\n',
    )


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def scope(key: str | None = None, name: str = "authorization", address: str = "10.0.0.1") -> dict[str, Any]:
    headers = []
    if key is not None:
        headers = [(name.encode(), (f"Bearer {key}" if name == "authorization" else key).encode())]
    return {"client": (address, 1), "headers": headers}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def authenticate(tmp_path: Path, clock: Clock) -> Authenticator:
    return Authenticator(Auth(key_file=str(entries(tmp_path / "keys.toml"))), clock=clock, wall=clock)


def refused(authenticate: Authenticator, given: dict[str, Any], needed: str = "infer") -> ServeError:
    with pytest.raises(ServeError) as caught:
        authenticate(given, needed)
    return caught.value


def test_each_header_may_hold_the_key(authenticate: Authenticator) -> None:
    for name in ("authorization", "x-api-key", "api-key", "x-admin-key"):
        assert authenticate(scope(KEY, name), "infer").name == "one"
    assert authenticate(scope(OTHER), "infer").models == frozenset({"m"})
    assert authenticate(scope(), "open").scopes == frozenset()


def test_wrong_keys_and_scopes_are_refused(authenticate: Authenticator) -> None:
    assert refused(authenticate, scope()).status == 401
    assert refused(authenticate, scope(KEY + "x")).status == 401
    error = refused(authenticate, scope(ADMIN))
    assert (error.status, error.code) == (403, "insufficient_scope")
    assert ADMIN not in error.message
    assert authenticate(scope(ADMIN), "metrics").name == "boss"


def test_an_expired_key_is_not_known(authenticate: Authenticator, clock: Clock) -> None:
    clock.now = 1.9e9
    assert refused(authenticate, scope(OTHER)).status == 401


def test_failures_of_an_address_are_limited_and_forgotten(authenticate: Authenticator, clock: Clock) -> None:
    for i in range(20):
        assert refused(authenticate, scope(f"wrong-key-number-{i}")).status == 401
    for key in ("x" * 20, KEY[:-1], KEY + "a", "wrong-key-number-0"):
        error = refused(authenticate, scope(key))
        assert (error.status, error.code) == (429, "too_many_requests")
        assert error.retry_after is not None
        assert 0 < error.retry_after <= 60
    assert refused(authenticate, scope()).status == 401
    assert refused(authenticate, scope("x" * 20, address="10.0.0.2")).status == 401
    clock.now += 61
    assert refused(authenticate, scope("x" * 20)).status == 401


def test_a_right_key_is_taken_whatever_others_of_its_address_send(authenticate: Authenticator) -> None:
    for _ in range(30):
        assert refused(authenticate, scope("x" * 20)).status in (401, 429)
        assert authenticate(scope(KEY), "infer").name == "one"
    assert refused(authenticate, scope(ADMIN)).status == 403
    assert refused(authenticate, scope("x" * 20)).status == 429


def test_failures_count_for_the_client_behind_a_trusted_proxy(tmp_path: Path, clock: Clock) -> None:
    auth = Auth(key_file=str(entries(tmp_path / "keys.toml")), max_failures_per_minute=3)
    authenticate = Authenticator(auth, proxies=["10.0.0.0/24"], clock=clock, wall=clock)

    def by(client: str, proxy: str = "10.0.0.1") -> int:
        given = scope("x" * 20, address=proxy)
        given["headers"] = [*given["headers"], (b"x-forwarded-for", client.encode())]
        return refused(authenticate, given).status

    assert [by(f"198.51.100.{i}, 203.0.113.5") for i in range(4)] == [401, 401, 401, 429]  # written by the client
    assert by("203.0.113.5", "10.0.0.2") == 429
    assert by("203.0.113.6") == 401
    # No proxy: the header is not believed.
    assert [by(f"203.0.113.{i}", "10.1.0.1") for i in range(4)] == [401, 401, 401, 429]


def test_the_limits_of_a_key(authenticate: Authenticator, clock: Clock) -> None:
    caller = authenticate(scope(KEY), "infer")
    ticket = authenticate.admit(caller)
    assert ticket is not None
    assert ticket.headers["x-ratelimit-remaining-requests"] == "1"
    clock.now += 1
    assert authenticate.admit(caller) is not None
    with pytest.raises(ServeError) as caught:
        authenticate.admit(caller)
    assert (caught.value.status, caught.value.code, caught.value.retry_after) == (429, "rate_limit_exceeded", 59.0)
    assert caught.value.headers["x-ratelimit-remaining-requests"] == "0"
    assert caught.value.headers["x-ratelimit-reset-requests"] == "59.000s"
    clock.now += 59.5
    ticket.spend(100)
    with pytest.raises(ServeError, match="100 tokens"):
        authenticate.admit(caller)
    clock.now += 60.5
    assert authenticate.admit(caller) is not None
    boss = authenticate(scope(ADMIN), "admin")
    first = authenticate.admit(boss)
    assert first is not None
    with pytest.raises(ServeError, match="1 choices of this key's requests are open"):
        authenticate.admit(boss)
    first.release()
    first.release()
    assert authenticate.admit(boss) is not None


def test_each_choice_counts_as_a_request(tmp_path: Path, clock: Clock) -> None:
    path = write(tmp_path / "keys", f'[[key]]\nname = "a"\nkey = "{KEY}"\nlimits = {{ concurrent = 4 }}\n')
    authenticate = Authenticator(Auth(key_file=str(path)), clock=clock, wall=clock)
    caller = authenticate(scope(KEY), "infer")
    ticket = authenticate.admit(caller, 3)
    assert ticket is not None
    with pytest.raises(ServeError, match="3 choices of this key's requests are open, it may have 4"):
        authenticate.admit(caller, 2)
    last = authenticate.admit(caller, 1)
    ticket.release()
    assert last is not None
    assert authenticate.admit(caller, 3) is not None
    with pytest.raises(ServeError) as caught:
        authenticate.admit(caller, 5)
    assert (caught.value.status, caught.value.param) == (400, "n")  # to wait would not help


def test_a_worker_grants_a_request_that_the_whole_key_may_send(tmp_path: Path, clock: Clock) -> None:
    """Though its share of the limit is less."""
    path = write(tmp_path / "keys", f'[[key]]\nname = "a"\nkey = "{KEY}"\nlimits = {{ concurrent = 4 }}\n')
    authenticate = Authenticator(Auth(key_file=str(path)), workers=4, clock=clock, wall=clock)
    caller = authenticate(scope(KEY), "infer")
    assert authenticate.admit(caller, 4) is not None
    with pytest.raises(ServeError, match="open"):
        authenticate.admit(caller, 1)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), max_size=40), st.integers(1, 500))
def test_the_window_holds_what_the_last_minute_had(steps: list[tuple[float, int]], limit: int) -> None:
    usage, now, told = Usage(), 0.0, []
    for wait, tokens in steps:
        now += wait
        usage.spend(now, tokens)
        told.append((now, tokens))
        assert usage.sum == sum(count for at, count in told if at > now - 60)
    usage.trim(now)
    if usage.sum >= limit:
        after = now + usage.tokens_reset(now, limit) + 1e-6
        usage.trim(after)
        assert usage.sum < limit


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    for mode in (0o644, 0o640, 0o604, 0o700):
        with pytest.raises(ConfigError, match="chmod 600"):
            read_keys(write(tmp_path / "keys", f'[[key]]\nname = "a"\nkey = "{KEY}"\n', mode))
    assert read_keys(write(tmp_path / "keys", f'[[key]]\nname = "a"\nkey = "{KEY}"\n', 0o400))[0].name == "a"


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ('name = "a"\nkey = "short"', "at least 16"),
        (f'name = "a b"\nkey = "{KEY}"', "letters"),
        ('name = "a"', "either key or sha256"),
        ('name = "a"\nsha256 = "12"', "64 hexadecimal"),
        (f'name = "a"\nkey = "{KEY}"\nscopes = ["root"]', "scopes are"),
        (f'name = "a"\nkey = "{KEY}"\nlimits = {{ concurrent = 0 }}', "at least 1"),
        (f'name = "a"\nkey = "{KEY}"\nweight = 0', "weight"),
        (f'name = "a"\nkey = "{KEY}"\ncolour = 1', "unknown field"),
        (f'name = "a"\nkey = "{KEY}"\n[[key]]\nname = "a"\nkey = "{OTHER}"', "two entries"),
        ("name = ", "not TOML"),
    ],
)
def test_a_bad_entry_is_refused_without_its_key(tmp_path: Path, entry: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        read_keys(write(tmp_path / "keys", f"[[key]]\n{entry}\n"))
    assert KEY not in str(caught.value)
    assert f"the key file {tmp_path / 'keys'}" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path}/none cannot be read: No such file"):
        read_keys(tmp_path / "none")


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", f'[[key]]\nname = "a"\nkey = "{KEY}"\n')
    file = KeyFile(path)
    assert file.find(OTHER, 0) is None
    write(path, f'[[key]]\nname = "bee"\nkey = "{OTHER}"\n')
    os.utime(path, ns=(1, 1))
    file.refresh(1e12)
    assert file.find(KEY, 0) is None
    found = file.find(OTHER, 0)
    assert found is not None
    assert found.name == "bee"
    write(path, "[[key")
    file.refresh(2e12)
    assert file.find(OTHER, 0) is not None
    assert file.problem == f"the key file {path} is not TOML"


def test_new_keys_are_long_and_differ() -> None:
    assert len({new_key() for _ in range(100)}) == 100
    assert len(new_key()) >= 43


@pytest.mark.parametrize(
    ("server", "keys", "starts"),
    [
        ({"host": "127.0.0.1"}, False, True),
        ({"host": "::1"}, False, True),
        ({"host": "localhost"}, False, True),
        ({"uds": "/tmp/x"}, False, True),
        ({"host": "0.0.0.0"}, False, False),
        ({"host": "::"}, False, False),
        ({"host": "192.168.1.1"}, False, False),
        ({"host": "127.evil.example"}, False, False),
        ({"host": "0.0.0.0", "no_auth": True}, False, True),
        ({"host": "0.0.0.0"}, True, True),
    ],
)
def test_the_start_matrix(server: dict[str, Any], keys: bool, starts: bool) -> None:
    config = parse({"server": server} | ({"auth": {"key_file": "k"}} if keys else {}))
    if starts:
        check_bind(config)
    else:
        with pytest.raises(ConfigError, match="--key-file"):
            check_bind(config)
    assert is_loopback("127.0.0.53")
