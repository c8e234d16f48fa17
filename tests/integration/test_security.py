"""TLS, client certificates and tokens, with real shards and the certificates of `weightserver certs`."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import pickle
import re
import shlex
import shutil
import socket
import ssl
import stat
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.helpers import commands
from tests.helpers.operations import Weightserver
from tests.helpers.secure_shards import Served, served
from tests.helpers.watching import metric, page, wait_until
from weightserver import (
    AuthenticationError,
    LocalCluster,
    ShardUnavailableError,
    TableSpec,
    WeightClient,
    WeightServerError,
)
from weightserver.client.security import ClientSecurity
from weightserver.common.atomic_files import atomic_write
from weightserver.common.security import TOKEN_VARIABLE, Followed, read_pair, read_token, validity
from weightserver.operations.certificates import renew_certificates, write_certificates
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.server.config import ServerConfig
from weightserver.server.security import ServerTls

SPEC = TableSpec(num_rows=1000, dim=8)
CONTRACT = pb.DESCRIPTOR.services_by_name["WeightServer"]
LATER = timedelta(hours=1, seconds=5)
"""From when a certificate is made for some seconds from now: its period begins an hour early."""
SECONDS = 40.0
"""Calls that cannot succeed fail long before the time for retrying a shard that is down."""


@dataclass(frozen=True)
class Place:
    """Shards with different security, and folders of certificates, each with its own CA."""

    shards: dict[str, Served]
    own: Path
    """Certificates of the shards "tls" and "mutual" and of their clients."""
    other: Path
    """Certificates of another CA."""
    expired: Path
    elsewhere: Path

    def client(self, shard: str, security: ClientSecurity, **more: Any) -> WeightClient:
        return WeightClient([self.shards[shard].address], **security.client_arguments(), **more)

    def assert_no_secret(self, text: str) -> None:
        for directory in (self.own, self.other, self.expired, self.elsewhere):
            assert (directory / "token").read_text().strip() not in text


def tls(directory: Path, **more: Path) -> ClientSecurity:
    return ClientSecurity(**{"tls_ca": directory / "ca.pem", "token_file": directory / "token"} | more)  # type: ignore[arg-type]


def everything(directory: Path, **more: Path) -> ClientSecurity:
    own = {"tls_cert": directory / "client.pem", "tls_key": directory / "client-key.pem"}
    return tls(directory, **own | more)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    base = tmp_path_factory.mktemp("certificates")
    own, other, expired, elsewhere = (base / name for name in ("own", "other", "expired", "elsewhere"))
    status, said, errors = commands.weightserver("certs", own, "--host", "127.0.0.1", "localhost", "--days", "30")
    assert (status, errors) == (0, "")
    assert f"are valid until {datetime.now(UTC) + timedelta(days=30):%Y-%m-%d}" in said
    write_certificates(other, ["127.0.0.1"])
    write_certificates(expired, ["127.0.0.1"], days=1, start=datetime.now(UTC) - timedelta(days=2))
    write_certificates(elsewhere, ["ws0.example", "10.0.0.7"])

    def with_tls(directory: Path) -> list[str]:
        return ["--tls-cert", f"{directory}/server.pem", "--tls-key", f"{directory}/server-key.pem"]

    options = {
        "tls": [*with_tls(own), "--token-file", f"{own}/token"],
        "mutual": [*with_tls(own), "--token-file", f"{own}/token", "--tls-client-ca", f"{own}/ca.pem"],
        "expired": with_tls(expired),
        "elsewhere": with_tls(elsewhere),
        "plain": ["--metrics-host", "127.0.0.2"],
    }
    token = (own / "token").read_text().strip()
    with served(options, os.environ | {TOKEN_VARIABLE: token}) as shards:
        place = Place(shards, own, other, expired, elsewhere)
        yield place
        for shard in shards.values():
            assert "Traceback" not in shard.log.read_text()
            arguments = psutil.Process(shard.process.pid).cmdline()  # which every user of a machine can list
            for text in (shard.log.read_text(), page(shard.metrics_address), *arguments):
                place.assert_no_secret(text)


@pytest.mark.parametrize("kind", ["tls", "mutual", "plain"])
def test_authorised_clients_can_call(place: Place, kind: str) -> None:
    own = place.own
    security = {"tls": tls(own), "mutual": everything(own), "plain": ClientSecurity(token_file=own / "token")}[kind]
    rows = np.arange(200)
    with place.client(kind, security) as client:
        client.create_table(SPEC)
        client.extend_schedule(0, np.full(5, 0.1))
        client.open_session("secure")
        before = client.fetch(rows, step=0)
        client.push_gradients(rows, np.ones((200, 8), np.float32), step=0)
        np.testing.assert_allclose(client.fetch(rows, step=1), before * (1 - 1e-5) - 0.1, atol=1e-6)


def test_two_authorities_are_trusted_while_certificates_are_renewed(place: Place, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes((place.other / "ca.pem").read_bytes() + (place.own / "ca.pem").read_bytes())
    with place.client("tls", tls(place.own, tls_ca=both)) as client:
        client.drop_table()


@pytest.fixture
def renewed(tmp_path: Path) -> Iterator[tuple[Served, Path]]:
    """A shard of its own, and its certificates, which expire in a minute."""
    own = tmp_path / "certs"
    write_certificates(own, ["127.0.0.1"], days=1, start=datetime.now(UTC) - timedelta(days=1, minutes=-1))
    files = [f"--tls-cert={own}/server.pem", f"--tls-key={own}/server-key.pem", f"--tls-client-ca={own}/ca.pem"]
    with served({"shard": [*files, f"--token-file={own}/token"]}) as shards:
        yield shards["shard"], own
        assert "Traceback" not in shards["shard"].log.read_text()


@pytest.mark.guard
def test_certificates_are_read_again_without_a_restart(renewed: tuple[Served, Path], tmp_path: Path) -> None:
    """By the shard for the next connection, by the client for its next one. Here the CA is another one afterwards, so
    that neither accepts the other's old certificate."""
    shard, own = renewed

    def refusals() -> int:
        assert page(shard.metrics_address)  # a scrape makes the shard look
        return shard.log.read_text().count("; what was read before is used")

    def days() -> float:
        expiry = metric(shard.metrics_address, "weightserver_certificate_expiry_timestamp_seconds")
        return (expiry - time.time()) / 86400

    with WeightClient([shard.address], **everything(own).client_arguments()) as client:
        client.create_table(SPEC)
        write_certificates(tmp_path / "new", ["127.0.0.1"], days=30)
        os.replace(tmp_path / "new/server-key.pem", own / "server-key.pem")
        wait_until(lambda: refusals() == 1)
        for name in ("server.pem", "client-key.pem", "client.pem", "ca.pem"):
            os.replace(tmp_path / "new" / name, own / name)
        wait_until(lambda: days() > 29)
        (channel,) = client._shards.connections()[0]._channels._all
        channel.is_useless = True  # as after a connection that is lost
        assert client.describe().spec == SPEC
    (own / "server.pem").write_text("damaged")
    wait_until(lambda: refusals() == 2)
    assert days() > 29
    with WeightClient([shard.address], **everything(own).client_arguments()) as client:
        assert client.describe().spec == SPEC
        # A handshake, not only a scrape, makes the shard look; a certificate for later waits for its time.
        write_certificates(tmp_path / "later", ["127.0.0.1"], days=60, start=datetime.now(UTC) + LATER)
        for name in ("server-key.pem", "server.pem"):
            os.replace(tmp_path / "later" / name, own / name)

        def calls() -> bool:
            with (
                contextlib.suppress(WeightServerError),
                WeightClient([shard.address], connect_seconds=1, **everything(own).client_arguments()) as other,
            ):
                return other.describe().spec == SPEC
            return False

        wait_until(lambda: calls() and shard.log.read_text().count("UTC on: give one that is valid now") == 1)
        (own / "ca.pem").write_bytes((own / "ca.pem").read_bytes() + (tmp_path / "later/ca.pem").read_bytes())
        wait_until(lambda: days() > 59)
        wait_until(calls)


def test_a_shard_whose_certificate_has_expired_is_not_ready(place: Place, renewed: tuple[Served, Path]) -> None:
    """It lives: a restart would change nothing."""
    url = f"http://{place.shards['expired'].metrics_address}"
    with pytest.raises(urllib.error.HTTPError) as unready:
        urllib.request.urlopen(f"{url}/readyz")
    assert re.search(r"^NOT_READY: --tls-cert .*expired on .*: renew it$", unready.value.read().decode())
    unready.value.close()
    assert urllib.request.urlopen(f"{url}/healthz").read() == b"SERVING\n"
    assert urllib.request.urlopen(f"http://{renewed[0].metrics_address}/readyz").read() == b"SERVING\n"


def test_a_token_is_replaced_without_a_restart(renewed: tuple[Served, Path]) -> None:
    """Added as the second line, then the first, then alone: no call fails on the way, however long a client lives."""
    shard, own = renewed
    client_file = own / "client-token"
    old, new = (own / "token").read_text().strip(), "another-token-of-the-shard"
    client_file.write_text(old)
    before = unauthenticated(shard)
    with WeightClient([shard.address], **everything(own, token_file=client_file).client_arguments()) as client:
        client.create_table(SPEC)
        for shards, clients in ((f"{old}\n{new}\n", old), (f"{new}\n{old}\n", new), (f"{new}\n", new)):
            (own / "token").write_text(shards)
            client_file.write_text(clients)
            for _ in range(12):  # either side may look at its file first
                client.describe()
                time.sleep(0.1)
        assert unauthenticated(shard) == before
    with (
        WeightClient([shard.address], **everything(own).client_arguments() | {"token": old}) as client,
        pytest.raises(AuthenticationError, match="is not this shard's"),
    ):
        client.describe()
    assert unauthenticated(shard) == before + 1
    assert metric(shard.metrics_address, 'weightserver_unauthenticated_calls_total{reason="missing"}') == 0
    assert metric(shard.metrics_address, 'weightserver_requests_total{method="Describe",status="UNAUTHENTICATED"}') == 1
    wait_until(lambda: re.search(r"Describe refused for ipv[46]:\S+: wrong token", shard.log.read_text()) is not None)


def test_a_token_is_refused_at_once(place: Place) -> None:
    for shard, security, message in (
        ("tls", ClientSecurity(tls_ca=place.own / "ca.pem"), r"has no token, .* give --token-file or set"),
        ("tls", tls(place.own, token_file=place.other / "token"), r"token is not this shard's: give the"),
        ("plain", ClientSecurity(), r"has no token"),
    ):
        started = time.monotonic()
        with (
            place.client(shard, security, retry_seconds=120, connect_seconds=120) as client,
            pytest.raises(AuthenticationError, match=message) as raised,
        ):
            client.describe()
        assert time.monotonic() - started < SECONDS
        assert str(raised.value).startswith(place.shards[shard].address)
        assert "\n" not in str(raised.value)
        place.assert_no_secret(str(raised.value))


UNTRUSTED: dict[str, tuple[str, Callable[[Place], ClientSecurity]]] = {
    "an expired certificate": ("expired", lambda p: tls(p.expired)),
    "another host's certificate": ("elsewhere", lambda p: tls(p.elsewhere)),
    "an unknown CA": ("tls", lambda p: tls(p.own, tls_ca=p.other / "ca.pem")),
    "no client certificate": ("mutual", lambda p: tls(p.own)),
    "another CA's client": (
        "mutual",
        lambda p: everything(p.own, tls_cert=p.other / "client.pem", tls_key=p.other / "client-key.pem"),
    ),
    "a client without TLS": ("tls", lambda p: ClientSecurity(token_file=p.own / "token")),
    "a shard without TLS": ("plain", lambda p: tls(p.own)),
}


def test_a_handshake_that_fails_ends_the_first_connection(place: Place) -> None:
    """gRPC reports it as UNAVAILABLE, like a shard that does not run: after `connect_seconds` its text is told."""

    def told(shard: str, security: ClientSecurity) -> str:
        with (
            place.client(shard, security, retry_seconds=120, connect_seconds=2) as client,
            pytest.raises(ShardUnavailableError) as raised,
        ):
            client.describe()
        return str(raised.value)

    with ThreadPoolExecutor(len(UNTRUSTED)) as callers:  # each waits
        calls = {name: callers.submit(told, shard, security(place)) for name, (shard, security) in UNTRUSTED.items()}
    for name, call in calls.items():
        start = re.escape(place.shards[UNTRUSTED[name][0]].address)
        assert re.fullmatch(rf"{start}.*UNAVAILABLE: .*\): check the address, .*TLS options.*", call.result()), name
        place.assert_no_secret(call.result())


def test_a_stopped_shard_is_retried_with_tls_too(place: Place) -> None:
    options = ["--tls-cert", f"{place.own}/server.pem", "--tls-key", f"{place.own}/server-key.pem"]
    with (
        served({"short": options}) as shards,
        WeightClient([shards["short"].address], retry_seconds=0.5, **tls(place.own).client_arguments()) as client,
    ):
        with pytest.raises(Exception, match="holds no table"):
            client.describe()
        shards["short"].process.kill()
        with pytest.raises(ShardUnavailableError, match="did not answer for"):
            client.describe()


# ---- the token


def test_only_health_checks_need_no_token(place: Place) -> None:
    def tries(channel: grpc.Channel, method: str, metadata: list[tuple[str, str]]) -> grpc.StatusCode:
        try:
            channel.stream_stream(method)(iter([b""]), timeout=SECONDS, metadata=metadata).__next__()
        except StopIteration:
            return grpc.StatusCode.OK
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    token = read_token(place.own / "token")
    assert token is not None
    methods = [f"/{CONTRACT.full_name}/{method.name}" for method in CONTRACT.methods]
    address = place.shards["mutual"].address
    before = unauthenticated(place.shards["mutual"])
    refused = 0
    with grpc.secure_channel(address, everything(place.own).credentials()) as channel:
        for method in [*methods, "/no.such/Method"]:
            for wrong in ("", "Bearer", "Bearer ", f"Bearer {token}x", f"Bearer {token[:-1]}", f"Basic {token}", token):
                assert tries(channel, method, [("authorization", wrong)]) is grpc.StatusCode.UNAUTHENTICATED
                refused += 1
            assert tries(channel, method, [("authorization", f"Bearer {token}")]) is not grpc.StatusCode.UNAUTHENTICATED
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert unauthenticated(place.shards["mutual"]) == before + refused


def test_a_proxy_of_the_environment_does_not_get_the_token(place: Place) -> None:
    """gRPC would send it the calls, without TLS in clear; every command and client goes to the shards directly."""
    asked: list[bytes] = []

    def take(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                asked.append(connection.recv(65_536))
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=take, args=(listener,), daemon=True).start()
        proxy = f"http://127.0.0.1:{listener.getsockname()[1]}"
        environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        environment |= dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), proxy)
        environment[TOKEN_VARIABLE] = (place.own / "token").read_text()
        for command in ("checkpoints", "health"):
            status, _, errors = commands.weightserver(command, place.shards["plain"].address, environment=environment)
            assert status == 0, errors
        assert asked == []
        listener.shutdown(socket.SHUT_RDWR)


def test_a_secret_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "token"
    file.write_text("sixteen-letters-and-more")
    for mode, warned in ((0o600, False), (0o400, False), (0o440, False), (0o604, True), (0o620, True)):
        file.chmod(mode)
        caplog.clear()
        read_token(file)
        assert (f"--token-file {file} can be read or changed by others" in caplog.text) is warned
    write_certificates(tmp_path / "certs", ["a"])
    (tmp_path / "certs" / "server-key.pem").chmod(0o644)
    ServerTls(tmp_path / "certs" / "server.pem", tmp_path / "certs" / "server-key.pem", None)
    assert "server-key.pem can be read or changed by others" in caplog.text
    assert "server.pem can be" not in caplog.text


def unauthenticated(shard: Served) -> float:
    return metric(shard.metrics_address, "weightserver_unauthenticated_calls_total")


LETTERS = "sixteen-letters-and-more"
TOKENS = ["", "\n", "fifteen-letters", f"{LETTERS} and spaces", "sixteen-lëtters-", f"{LETTERS}\x07", f"{LETTERS}\nx"]


def test_invalid_tokens_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC refuses calls with metadata above 8 KiB as it refuses those of which there are too many."""
    for content in TOKENS:
        (tmp_path / "token").write_text(content)
        with pytest.raises(ValueError, match=r"--token-file .*token holds no valid token: give at least 16") as raised:
            read_token(tmp_path / "token")
        assert "lett" not in str(raised.value).replace(str(tmp_path), "")
        monkeypatch.setenv(TOKEN_VARIABLE, content)
        with pytest.raises(ValueError, match="WEIGHTSERVER_TOKEN holds no valid token"):
            read_token(None)
    with pytest.raises(ValueError, match="of at most 1024 characters"):
        WeightClient(["127.0.0.1:1"], token="x" * 1025)
    (tmp_path / "token").write_text("x" * 1024)
    assert read_token(tmp_path / "token") == "x" * 1024


def test_the_token_may_be_in_the_environment(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard "plain" reads it from there; those of a local cluster have one of their own, or none."""
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert read_token(None) is None
    token = (place.own / "token").read_text()
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    assert read_token(None) == token.strip()
    assert read_token(place.other / "token") != token.strip()
    with place.client("plain", ClientSecurity()) as client:
        client.drop_table()
    with LocalCluster() as cluster, WeightClient(cluster.addresses) as client:
        client.drop_table()


# ---- the commands


def test_the_commands_take_the_same_options(place: Place, weightserver: Weightserver) -> None:
    address, own = place.shards["mutual"].address, place.own
    names = {"--tls-ca": "ca.pem", "--tls-cert": "client.pem", "--tls-key": "client-key.pem"}
    certificate = [argument for option, name in names.items() for argument in (option, own / name)]
    assert weightserver("health", address, *certificate) == (0, "SERVING\n", "")
    for arguments, message in (
        (["health", address], "does not answer .* the TLS options of both sides, .*"),
        (["health", address, *certificate[:2]], "does not answer .* the TLS options of both sides, .*"),
        (["checkpoints", address, "--wait-for-servers", "1"], "did not answer for 1.* the TLS options of both .*"),
        (["checkpoints", address, *certificate], "the call has no token, .*"),
        (["drop", address, *certificate[:4]], "--tls-cert and --tls-key belong together: give both or none"),
    ):
        status, _, errors = weightserver(*arguments)
        assert status == 1
        assert re.fullmatch(rf"weightserver {arguments[0]}: ({address}:? )?{message}\n", errors), errors
    assert weightserver("checkpoints", address, *certificate, "--token-file", own / "token") == (0, "", "none yet\n")
    # What gRPC itself would log of a handshake that fails is no line of ours.
    status, _, errors = commands.weightserver("health", address, "--tls-ca", place.other / "ca.pem")
    assert status == 1
    assert re.fullmatch(rf"weightserver health: {address} does not answer .*CERTIFICATE_VERIFY_FAILED.*\n", errors)


def test_the_options_that_are_printed_can_be_pasted(tmp_path: Path) -> None:
    own = tmp_path / "my certificates"
    _, said, _ = commands.weightserver("certs", own, "--host", "a")
    named = [word.rstrip(")") for word in shlex.split(said) if word.startswith(f"{own}/")]
    assert len(named) == 8
    assert all(Path(word).is_file() for word in named)


def test_certificates_are_their_owners_and_stay(place: Place, tmp_path: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in place.own.iterdir()}
    assert modes == {
        **dict.fromkeys(("ca-key.pem", "server-key.pem", "client-key.pem", "token"), 0o600),
        **dict.fromkeys(("ca.pem", "server.pem", "client.pem"), 0o644),
    }
    before = {path: path.read_bytes() for path in place.own.iterdir()}
    status, _, errors = commands.weightserver("certs", place.own, "--host", "a")
    assert status == 1
    assert re.fullmatch(r"weightserver certs: .* is not empty: give another directory\n", errors)
    assert {path: path.read_bytes() for path in place.own.iterdir()} == before
    for hosts, days, message in (
        (["ws0:50051"], 1, "'ws0:50051' is not a host: give a name or an IP address without a port"),
        (["[::1]"], 1, "is not a host"),
        ([""], 1, "is not a host"),
        ([], 1, "give the hosts that clients connect to"),
        (["a"], 0, r"days must lie in 1\.\.3650, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            write_certificates(tmp_path / "none", hosts, days=days)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("file", ["server-key.pem", "server.pem", "client-key.pem", "client.pem"])
def test_a_renewal_that_was_interrupted_is_repeated(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "certs"
    write_certificates(own, ["127.0.0.1"], days=1)

    def write(path: Path, *arguments: Any, **options: Any) -> None:
        if path.name == file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        atomic_write(path, *arguments, **options)

    monkeypatch.setattr("weightserver.operations.certificates.atomic_write", write)
    with pytest.raises(OSError, match="No space left"):
        renew_certificates(own)
    assert commands.weightserver("certs", own, "--renew-within", "30")[0] == 0
    for name in ("server", "client"):
        _, pem = read_pair(own / f"{name}.pem", own / f"{name}-key.pem", "--tls-cert", "--tls-key")
        assert validity(pem)[1] > datetime.now(UTC) + timedelta(days=300), name


@pytest.mark.parametrize(
    ("key", "password", "message"),
    [
        (ec.generate_private_key(ec.SECP256R1()), b"secret", "ca-key.pem has a password: give a copy without one"),
        (ed25519.Ed25519PrivateKey.generate(), None, "has not made the files in"),
    ],
)
def test_a_renewal_by_another_key_is_refused(key: Any, password: bytes | None, message: str, tmp_path: Path) -> None:
    own, pem, pkcs8 = tmp_path / "certs", serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    write_certificates(own, ["127.0.0.1"], days=1)
    hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    (own / "ca-key.pem").write_bytes(key.private_bytes(pem, pkcs8, hidden))
    status, _, errors = commands.weightserver("certs", own, "--renew-within", "30")
    assert (status, errors.count("\n")) == (1, 1), errors
    assert message in errors


def test_a_renewal_is_by_the_authority_whose_key_is_there(tmp_path: Path) -> None:
    """Both sides trust an earlier one too, whose certificate comes first."""
    own, old = tmp_path / "certs", tmp_path / "old"
    for directory in (own, old):
        write_certificates(directory, ["127.0.0.1"], days=1)
    authority = x509.load_pem_x509_certificate((own / "ca.pem").read_bytes())
    (own / "ca.pem").write_bytes((old / "ca.pem").read_bytes() + (own / "ca.pem").read_bytes())
    renew_certificates(own)
    x509.load_pem_x509_certificate((own / "server.pem").read_bytes()).verify_directly_issued_by(authority)
    (own / "ca-key.pem").write_bytes((own / "server-key.pem").read_bytes())
    with pytest.raises(ValueError, match=r"ca-key\.pem is the key of no certificate in ca\.pem"):
        renew_certificates(own)


def test_certificates_are_renewed_until_their_authority_ends(tmp_path: Path) -> None:
    """In its last year, too, in which it ends before they would; then there is nothing left to renew."""
    own = tmp_path / "certs"
    write_certificates(own, ["127.0.0.1"], days=3475, start=datetime.now(UTC) - timedelta(days=3470))
    end = validity((own / "ca.pem").read_bytes())[1]
    assert renew_certificates(own) == end
    assert [validity((own / f"{name}.pem").read_bytes())[1] for name in ("server", "client")] == [end, end]
    status, _, errors = commands.weightserver("certs", own, "--renew-within", "365")
    assert (status, errors.count("\n")) == (1, 1), errors
    assert f"expires on {end:%Y-%m-%d}, and its certificates with it: make a new one" in errors


def test_two_renewals_at_once_mix_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one begins between a key of the first and its certificate."""
    own, refused = tmp_path / "certs", list[str]()
    write_certificates(own, ["127.0.0.1"], days=1)

    def write(path: Path, *arguments: Any, **options: Any) -> None:
        if path.name == "client.pem":
            monkeypatch.undo()
            refused.append(commands.weightserver("certs", own, "--renew-within", "30")[2])
        atomic_write(path, *arguments, **options)

    monkeypatch.setattr("weightserver.operations.certificates.atomic_write", write)
    renew_certificates(own)
    for name in ("server", "client"):
        read_pair(own / f"{name}.pem", own / f"{name}-key.pem", "--tls-cert", "--tls-key")
    assert "is being written by another process" in refused[0]


def test_certificates_are_renewed_by_their_own_authority(renewed: tuple[Served, Path]) -> None:
    """When they are due, and again without effect. The token stays, and clients that trust the CA notice nothing."""
    shard, own = renewed
    kept = {name: (own / name).read_bytes() for name in ("ca.pem", "ca-key.pem", "token")}
    before = metric(shard.metrics_address, "weightserver_certificate_expiry_timestamp_seconds")
    with WeightClient([shard.address], **everything(own).client_arguments()) as client:
        client.create_table(SPEC)
        for is_first in (True, False):
            status, said, errors = commands.weightserver("certs", own, "--renew-within", "30", "--days", "90")
            assert (status, errors) == (0, "")
            assert said.startswith(f"certificates in {own} were renewed, valid until ") is is_first
        renewed_files = {path.name: path.read_bytes() for path in own.iterdir()}
        assert kept.items() <= renewed_files.items()
        assert stat.S_IMODE((own / "server-key.pem").stat().st_mode) == 0o600

        def expiry() -> float:
            return metric(shard.metrics_address, "weightserver_certificate_expiry_timestamp_seconds")

        wait_until(lambda: expiry() > before + 80 * 86400)
        (channel,) = client._shards.connections()[0]._channels._all
        channel.is_useless = True  # as after a connection that is lost
        assert client.describe().spec == SPEC


def test_certificates_hold_before_a_strict_verifier(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["*.ws.example", "::1"])
    context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    answering = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    answering.load_cert_chain(tmp_path / "server.pem", tmp_path / "server-key.pem")
    for host, good in (("ws0.ws.example", True), ("::1", True), ("ws.example", False), ("127.0.0.1", False)):
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = context.wrap_bio(to_client, to_server, server_hostname=host)
        server = answering.wrap_bio(to_server, to_client, server_side=True)
        with pytest.raises(ssl.SSLWantReadError):
            client.do_handshake()
        with pytest.raises(ssl.SSLWantReadError):
            server.do_handshake()
        if good:
            client.do_handshake()
        else:
            with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
                client.do_handshake()


# ---- refusals before anything is served or called


FILES: dict[str, tuple[dict[str, str], str]] = {
    "no such file": ({"tls_ca": "nonexistent"}, r"--tls-ca .*/nonexistent cannot be read: No such file"),
    "not a CA": ({"tls_ca": "token"}, r"--tls-ca .*/token contains no CA certificate in PEM"),
    "another's key": ({"tls_key": "ca-key.pem"}, r"are not a certificate and its key in PEM: KEY_VALUES_MISMATCH"),
    "not a key": ({"tls_key": "token"}, r"--tls-key .*/token are not a certificate and its key in PEM"),
    "a key with a password": ({"tls_key": "locked.pem"}, r"locked\.pem is encrypted: give a key without a password"),
    "an expired certificate": (
        {"tls_cert": "../expired/client.pem", "tls_key": "../expired/client-key.pem"},
        r"--tls-cert .*client\.pem expired on 20\d\d-\d\d-\d\d \d\d:\d\d UTC: renew it",
    ),
}


@pytest.mark.parametrize(("changes", "message"), FILES.values(), ids=FILES.keys())
def test_the_client_rejects_invalid_files(place: Place, changes: dict[str, str], message: str) -> None:
    key = serialization.load_pem_private_key((place.own / "client-key.pem").read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"password")
    locked = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    (place.other / "locked.pem").write_bytes(locked)
    changes = {name: file.replace("locked", "../other/locked") for name, file in changes.items()}
    security = everything(place.own, **{name: place.own / file for name, file in changes.items()})
    with pytest.raises(ValueError, match=message) as raised:
        security.client_arguments()
    assert "\n" not in str(raised.value)


def test_a_pair_that_is_replaced_while_it_is_read_is_refused(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was tried would not be what is used."""
    cert, key = (Path(shutil.copy(place.own / name, tmp_path)) for name in ("client.pem", "client-key.pem"))
    load_cert_chain = ssl.SSLContext.load_cert_chain

    def replaced(context: ssl.SSLContext, *arguments: Any, **options: Any) -> None:
        for path in (cert, key):
            shutil.copy(place.own / path.name.replace("client", "server"), path)
        load_cert_chain(context, *arguments, **options)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", replaced)
    with pytest.raises(ValueError, match="is being replaced"):
        read_pair(cert, key, "--tls-cert", "--tls-key")
    read_pair(cert, key, "--tls-cert", "--tls-key")


def issued(directory: Path, key: Any) -> tuple[Path, Path]:
    """A certificate and its key, signed by itself."""
    name, now = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a")]), datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(7).not_valid_before(now).not_valid_after(now + timedelta(days=9))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    signed = builder.sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey) else HASH)
    encoding, no = serialization.Encoding.PEM, serialization.NoEncryption()
    cert, key_file = directory / "own.pem", directory / "own-key.pem"
    cert.write_bytes(signed.public_bytes(encoding))
    key_file.write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, no))
    return cert, key_file


HASH = hashes.SHA256()
KEYS: dict[str, tuple[Callable[[], Any], bool]] = {
    "P-256": (lambda: ec.generate_private_key(ec.SECP256R1()), True),
    "P-384": (lambda: ec.generate_private_key(ec.SECP384R1()), True),
    "RSA": (lambda: rsa.generate_private_key(65537, 2048), True),
    "Ed25519": (lambda: ed25519.Ed25519PrivateKey.generate(), False),
    "Ed448": (lambda: ed448.Ed448PrivateKey.generate(), False),
    "P-521": (lambda: ec.generate_private_key(ec.SECP521R1()), False),
    "secp256k1": (lambda: ec.generate_private_key(ec.SECP256K1()), False),
    "DSA": (lambda: dsa.generate_private_key(2048), False),
}


@pytest.mark.parametrize(("generate", "is_usable"), KEYS.values(), ids=KEYS.keys())
def test_keys_of_kinds_that_grpc_cannot_use_are_refused(
    tmp_path: Path, generate: Callable[[], Any], is_usable: bool
) -> None:
    """OpenSSL knows more: the shard would serve, and every handshake fail."""
    cert, key_file = issued(tmp_path, generate())
    client = ClientSecurity(tls_ca=cert, tls_cert=cert, tls_key=key_file)
    uses: list[Callable[[], object]] = [lambda: ServerTls(cert, key_file, None), client.credentials]
    refused = r"^gRPC cannot use the kind of key of --tls-cert .*own\.pem: give one of RSA, P-256 or P-384, .*creates$"
    for use in uses:
        with contextlib.nullcontext() if is_usable else pytest.raises(ValueError, match=refused):
            use()


def test_nobody_waits_for_files_that_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As gRPC's threads do when many clients connect: while one reads, however long, the others use what there is."""
    now, reads = [1000.0], 0
    monkeypatch.setattr("weightserver.common.security.time.monotonic", lambda: now[0])
    with ThreadPoolExecutor(8) as callers:

        def read() -> int:
            nonlocal reads
            reads += 1
            if reads == 1:
                return 1
            now[0] += 5
            assert [one.result(timeout=SECONDS) for one in [callers.submit(followed) for _ in range(8)]] == [1] * 8
            if reads < 4:
                raise ValueError("the file is damaged")
            return reads

        file = tmp_path / "file"
        followed = Followed(read, file)
        file.touch()
        for seconds, content, expected in ((0.9, 1, 1), (0.2, 1, 2), (0.9, 1, 2), (0.2, 1, 3), (1, 4, 4), (9, 4, 4)):
            now[0] += seconds
            assert [followed() for _ in range(3)] == [content] * 3
            assert reads == expected


def test_a_file_that_goes_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it does not change once more."""
    gone = FileNotFoundError(errno.ENOENT, "No such file or directory", "key.pem")
    now, contents = [1000.0], iter(list[int | OSError]([1, gone, 2]))
    monkeypatch.setattr("weightserver.common.security.time.monotonic", lambda: now[0])

    def read() -> int:
        found = next(contents)
        if isinstance(found, OSError):
            raise found
        return found

    file = tmp_path / "file"
    followed = Followed(read, file)
    file.touch()
    for expected in (1, 2, 2):
        now[0] += 1
        assert followed() == expected


def test_what_a_client_is_given_survives_a_copy(place: Place) -> None:
    """As `dataclasses.asdict` and a DataLoader's workers make them: the copy follows the files too."""
    given = tls(place.own).client_arguments()
    for copied in (copy.deepcopy(given), pickle.loads(pickle.dumps(given))):  # noqa: S301
        with WeightClient([place.shards["tls"].address], **copied) as client:
            client.drop_table()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"token": b"x" * 32}, TypeError, "token must be a text, or what returns one, got bytes"),
        ({"token": lambda: ["x" * 32]}, TypeError, "token must be a text, or what returns one, got list"),
        ({"token": lambda: "bad\ntoken" + "x" * 32}, ValueError, "token must be printable ASCII"),
        ({"credentials": "certs/ca.pem"}, TypeError, "credentials must be of gRPC's for a channel"),
        ({"timeout_seconds": np.True_}, TypeError, "timeout_seconds must be a number, got"),
        ({"connect_seconds": Decimal("nan")}, ValueError, "connect_seconds positive: got .*NaN"),
    ],
)
def test_a_client_says_which_argument_is_wrong(
    place: Place, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with (
        pytest.raises(error, match=message) as raised,
        WeightClient([place.shards["tls"].address], **tls(place.own).client_arguments() | given) as client,
    ):
        client.describe()
    assert "xxxx" not in str(raised.value)


TLS = {"tls_cert": Path("c"), "tls_key": Path("k")}
CREATES = r"\('weightserver certs' creates them\), or --insecure"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, rf"give --tls-cert and --tls-key and --token-file {CREATES}"),
        (TLS, r": give --token-file \("),
        (TLS | {"tls_client_ca": Path("a")}, r": give --token-file \("),
        ({"token_file": Path("t")}, r": give --tls-cert and --tls-key \("),
        ({"tls_cert": Path("c")}, "--tls-cert and --tls-key belong together"),
        ({"tls_client_ca": Path("a"), "insecure": True}, "--tls-client-ca is for TLS: give --tls-cert and --tls-key"),
        (TLS | {"token_file": Path("t")}, None),
        ({"insecure": True}, None),
    ],
)
@pytest.mark.parametrize("listen", ["0.0.0.0:50051", "[::]:50051", "ws0.example:50051"])
def test_only_a_secured_shard_is_served_beyond_loopback(
    listen: str, options: dict[str, Any], message: str | None
) -> None:
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        ServerConfig(data_dir=Path("unused"), shard=0, num_shards=1, listen=listen, **options)


def test_a_token_leaves_this_machine_over_tls_alone(place: Place) -> None:
    token = read_token(place.own / "token")
    with pytest.raises(ValueError, match=r"give credentials \(--tls-ca\), or insecure=True \(--insecure\)") as raised:
        WeightClient(["10.0.0.7:50051"], token=token)
    assert str(token) not in str(raised.value)
    WeightClient(["10.0.0.7:50051"], token=token, insecure=True).close()
    WeightClient(["10.0.0.7:50051"], token=token, credentials=tls(place.own).credentials()).close()


# ---- metrics


def test_metrics_leave_loopback_only_if_requested_and_change_nothing(place: Place) -> None:
    for name, host in (("tls", "127.0.0.1"), ("plain", "127.0.0.2")):
        shard = place.shards[name]
        assert shard.metrics_address.startswith(f"{host}:")
        listening = {
            f"{connection.laddr.ip.removeprefix('::ffff:')}:{connection.laddr.port}"
            for connection in psutil.Process(shard.process.pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {shard.address, shard.metrics_address}
        assert "weightserver_build_info" in page(shard.metrics_address)
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            with pytest.raises(urllib.error.HTTPError, match=r"405|501") as refused:
                urllib.request.urlopen(urllib.request.Request(f"http://{shard.metrics_address}/metrics", method=method))
            refused.value.close()
    expiry = metric(place.shards["tls"].metrics_address, "weightserver_certificate_expiry_timestamp_seconds")
    assert 29 < (expiry - time.time()) / 86400 < 31
